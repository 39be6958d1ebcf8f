"""One number for each image, as users give it: checked before it is used."""

from typing import Any

import numpy as np

from candid._support.errors import CandidError
from candid.trust.betting import Array


def numbers(what: str, values: Any) -> Array:
    """Return one number or (N,) as an array (N,)."""
    try:
        found = np.atleast_1d(np.asarray(values, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise CandidError(f"The {what} must be numbers, not {type(values).__name__}.") from error
    if found.ndim != 1:
        raise CandidError(f"The {what} must be one number an image, (N,), not of the shape {found.shape}.")
    if np.isnan(found).any():
        raise CandidError(f"{int(np.isnan(found).sum())} of {len(found)} {what} are NaN: find out why.")
    return found


def same_number(what: str, values: Any, n: int) -> Array:
    """Return them like :func:`numbers`, or raise an error unless there are ``n``."""
    found = numbers(what, values)
    if len(found) != n:
        raise CandidError(f"There are {len(found)} {what} and scores of {n} images.")
    return found
