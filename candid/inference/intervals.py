"""95 % intervals: how much a metric would vary from one set of images to another of their kind."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from scipy.stats import binomtest
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.randomness import generator

_AT_ONCE = 2**20  # numbers in one piece of work: bounds the memory, whatever the number of images


class Interval(NamedTuple):
    """A metric on these images, and the range in which it may lie on others of their kind."""

    value: float
    low: float
    high: float


def mean_interval(values: Tensor, resamples: int = 1000, seed: int = 0, level: float = 0.95) -> Interval:
    """Return the mean of one value per image (N,), with its bootstrap interval.

    >>> mean_interval(torch.tensor([3.0, 3.0]))
    Interval(value=3.0, low=3.0, high=3.0)
    """
    if values.ndim != 1 or not len(values):
        raise CandidError(f"One value per image is needed, (images,), not {tuple(values.shape)}.")
    if not values.isfinite().all():
        raise CandidError("Some values are NaN or infinite: they have no mean.")
    n = len(values)
    (interval,) = bootstrap_intervals(values.double()[:, None], lambda sums: sums / n, resamples, seed, level)
    assert interval is not None
    return interval


def share_interval(hits: Tensor, level: float = 0.95) -> Interval:
    """Return the share of images that are hits (N,), with its exact binomial interval.

    >>> value, low, high = share_interval(torch.tensor([True, True, True]))
    >>> value, round(low, 9), high
    (1.0, 0.292401774, 1.0)
    """
    if hits.ndim != 1 or not len(hits):
        raise CandidError(f"One value per image is needed, (images,), not {tuple(hits.shape)}.")
    return binomial_interval(int(hits.sum()), len(hits), level)


def binomial_interval(hits: int, n: int, level: float) -> Interval:
    """Return Clopper and Pearson's interval of a share."""
    low, high = binomtest(hits, n).proportion_ci(level, method="exact")
    return Interval(hits / n, float(low), float(high))


def bootstrap_intervals(
    per_image: Tensor, figures: Callable[[Tensor], Tensor], resamples: int, seed: int, level: float
) -> list[Interval | None]:
    """Return percentile intervals of metrics (..., F), functions of the sums (..., K) of ``per_image``.

    None for a figure that is NaN; resamples in which it is NaN are left out. Resampling adds noise, which
    moves a maximum or an absolute value up, so an interval is widened where it would miss the value.
    """
    if resamples < 1 or not 0 < level < 1:
        raise CandidError("A bootstrap needs at least one resample and a level between 0 and 1.")
    values = figures(per_image.sum(0))
    resampled = figures(_resampled_sums(per_image, resamples, seed))
    tails = resampled.new_tensor([(1 - level) / 2, (1 + level) / 2])
    lows, highs = resampled.nanquantile(tails, dim=0)
    lows, highs = lows.fmin(values), highs.fmax(values)
    rows = torch.stack((values, lows, highs), 1)
    return [None if row.isnan().any() else Interval(*row.tolist()) for row in rows]


def _resampled_sums(per_image: Tensor, resamples: int, seed: int) -> Tensor:
    """Return sums of ``per_image`` (N, K) over N images drawn with replacement, (R, K).

    How often each image is drawn, (R, N), times ``per_image``, for some resamples at a time.
    """
    n, random = len(per_image), generator(seed)
    sums = per_image.new_empty(resamples, per_image.shape[1])
    for part in sums.split(max(1, _AT_ONCE // n)):
        times = torch.empty(len(part), n, dtype=torch.float64)
        for row in times:
            row.copy_(torch.randint(n, (n,), generator=random).bincount(minlength=n))
        part.copy_(times.to(per_image) @ per_image)
    return sums
