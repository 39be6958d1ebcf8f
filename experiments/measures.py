"""What several experiments measure in the same way."""

import numpy as np

from candid._support.numbers import Array
from candid.trust.conformal import p_values


def share(flags: Array) -> float:
    """Return the share of flags that are true.

    >>> share(np.array([True, False]))
    0.5
    """
    return float(np.mean(flags))


def true_ratios(posterior: Array, labels: Array) -> Array:
    """Return the posteriors of the true classes divided by the largest ones, (N, M) to (N,)."""
    return np.take_along_axis(posterior, labels[:, None], 1)[:, 0] / posterior.max(1)


def missed(posterior: Array, labels: Array, held_out_ratios: Array, error: float) -> float:
    """Return the share of class sets without the true class.

    Args:
        posterior: of N images, (N, M).
        labels: their true classes, (N,).
        held_out_ratios: :func:`true_ratios` of held-out images, (n,).
        error: the level of the class sets.

    Example:
        >>> posterior = np.array([[0.9, 0.1], [0.55, 0.45]])
        >>> missed(posterior, np.array([1, 1]), np.linspace(0.2, 1, 99), error=0.1)
        0.5
    """
    return share(p_values(-true_ratios(posterior, labels), -held_out_ratios) <= error)
