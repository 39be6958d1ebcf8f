"""Arrays that users give: numpy, torch or anything like them, checked before anything is computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from candid._support.errors import CandidError

FEWEST_IMAGES = 20
ROUNDING = 1e-3
"""Probabilities add up to 1 but for this."""
SINGLE = "of a classifier with a single output s, (N,), give np.stack((0 * s, s), 1)."


@dataclass(frozen=True)
class Arrays:
    """What a classifier says of N images."""

    logits: Tensor
    """(N, M) in float64."""
    features: Tensor | None = None
    """(N, F) in float32."""

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def columns(self) -> dict[str, Tensor]:
        """The columns that scores need."""
        return {"logits": self.logits} | ({} if self.features is None else {"features": self.features})

    def __getitem__(self, rows: Tensor) -> "Arrays":
        return Arrays(self.logits[rows], None if self.features is None else self.features[rows])

    @classmethod
    def of(cls, logits: Any, features: Any = None) -> "Arrays":
        """Return the arrays, or raise an error that says what is wrong with them."""
        found = _numbers("logits", logits, torch.float64)
        if found.shape[1] < 2:
            raise CandidError(f"The logits must have one column for each of at least 2 classes: {SINGLE}")
        if len(found) >= FEWEST_IMAGES and _are_probabilities(found):  # logits of a few may look like it
            raise CandidError(
                "These are probabilities, not logits (each row lies between 0 and 1 and adds up to 1): give "
                "the numbers before the softmax, or np.log(probabilities + 1e-12)."
            )
        if features is None:
            return cls(found)
        columns = _numbers("features", features, torch.float32)
        if len(columns) != len(found):
            raise CandidError(
                f"There are features of {len(columns)} images and logits of {len(found)}: give both of the "
                "same images, in the same order."
            )
        return cls(found, columns)


def _numbers(name: str, values: Any, dtype: torch.dtype) -> Tensor:
    try:
        array = values.detach().cpu() if isinstance(values, Tensor) else torch.from_numpy(_float64(values))
        array = array.to(dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CandidError(f"The {name} must be an array of numbers: {error}.") from error
    if array.ndim != 2 or array.shape[1] == 0:
        columns = "classes" if name == "logits" else "features"
        hint = f": {SINGLE}" if name == "logits" and array.ndim == 1 else "."
        raise CandidError(
            f"The {name} must have the shape (images, {columns}), not {tuple(array.shape)}{hint}"
        )
    bad = ~array.isfinite().all(1)
    if bad.any():
        raise CandidError(
            f"The {name} of {int(bad.sum())} of {len(array)} images are NaN or infinite (the first is image "
            f"{int(bad.int().argmax())}): leave these images out, or find out why."
        )
    return array


def _float64(values: Any) -> "np.ndarray[Any, Any]":
    return np.array(values, dtype=np.float64)  # a copy: torch refuses arrays that can't be written


def _are_probabilities(logits: Tensor) -> bool:
    inside = bool(((logits >= 0) & (logits <= 1)).all())
    return inside and bool(((logits.sum(1) - 1).abs() < ROUNDING).all())


def checked_labels(labels: Any, arrays: Arrays, class_names: Sequence[str]) -> Tensor:
    """Return the true classes of held-out images as whole numbers; every class has an image."""
    found, classes = checked_classes(labels, arrays), arrays.logits.shape[1]
    if len(found) < FEWEST_IMAGES:
        raise CandidError(f"{len(found)} held-out images are too few: give at least {FEWEST_IMAGES}.")
    if (missing := found.bincount(minlength=classes) == 0).any():
        y = int(missing.int().argmax())
        more = f" and {int(missing.sum()) - 1} more classes" if missing.sum() > 1 else ""
        raise CandidError(
            f"There is no held-out image of class '{class_names[y]}'{more}: give at least one of each class, "
            "or leave the column out of the logits."
        )
    return found


def checked_classes(labels: Any, arrays: Arrays) -> Tensor:
    """Return the true classes of the images as whole numbers."""
    n, classes = arrays.logits.shape
    array = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    if array.shape != (n,):
        raise CandidError(f"There must be one label for each of the {n} images, not {array.shape}.")
    if array.dtype.kind not in "biuf" or (array != np.floor(array)).any():
        raise CandidError(
            "Labels must be whole numbers, the columns of the logits: of names, give "
            "np.searchsorted(classifier.classes_, labels) or the like."
        )
    if n and (array.min() < 0 or array.max() >= classes):
        raise CandidError(
            f"Labels must lie between 0 and {classes - 1}, the columns of the logits: these lie between "
            f"{int(array.min())} and {int(array.max())}."
        )
    return torch.from_numpy(array.astype(np.int64))


def checked_groups(by: Any, n: int) -> list[str]:
    """Return the name of the group of each image."""
    found = list(map(str, by.tolist() if hasattr(by, "tolist") else by))
    if len(found) != n:
        raise CandidError(f"'by' must name the group of each of the {n} images, not of {len(found)}.")
    return found
