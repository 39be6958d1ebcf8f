"""Conformal p-values and the detectors that give them: is this image like the held-out images?

Scalar detectors judge one statistic per image, (N,). One statistic has blind spots: an image can have a
typical log p(x) and an untypical norm of z. Density detectors take d statistics per image, (N, d), estimate
their density over held-out images and call images of a low density outliers: Morningstar et al. (2021),
https://arxiv.org/abs/2006.09273
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self, TypeVar

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array, logsumexp
from candid._support.randomness import draws

T = TypeVar("T")
ROUNDING = 1e-5
"""Scores that differ by less than this, or this share of them, count as equal: so neither batches nor threads
nor engines change a p-value. It can only grow."""
CHUNK = 2**18
"""Kernel values at a time: 2 MB."""
SMALLEST_VARIANCE = 1e-8
"""Of a direction in the space of standardised statistics."""
FARTHEST = 1e100
"""Standard deviations, and the largest statistic: its square is finite."""


def p_values(scores: Array, held_out: Array) -> Array:
    """Return the conformal p-values of outlier scores: ``(1 + #{held-out >= score}) / (n + 1)``.

    ``held_out`` are the scores of n images that the model was not trained on. If an image is exchangeable
    with them, its p-value is at most t with a probability of at most t.

    >>> p_values(np.array([0.5, 9.0]), np.array([0.1, 0.2, 0.9]))
    array([0.5 , 0.25])
    """
    return _ranked(np.asarray(scores, np.float64), np.sort(np.asarray(held_out, np.float64)))


def discoveries(p_values: Array, fdr: float) -> Array:
    """Return which of N images are novel, (N,), with at most a share ``fdr`` of false discoveries on average.

    Benjamini & Hochberg (1995): the k images with the smallest p-values, for the largest k with
    ``p_(k) <= fdr k / N``. It holds for conformal p-values of one fixed score (Bates et al., 2023,
    https://arxiv.org/abs/2104.08279).

    >>> discoveries(np.array([0.01, 0.04, 0.9, 0.5]), 0.1)
    array([ True,  True, False, False])
    """
    return p_values <= discovery_cut(p_values, fdr)


def discovery_cut(p_values: Array, fdr: float) -> float:
    """Return the largest p-value that is a discovery, see :func:`discoveries`; 0 if there is none."""
    checked_level("fdr", fdr)
    if p_values.ndim != 1 or not ((p_values > 0) & (p_values <= 1)).all():
        raise CandidError(
            "The p-values of N images must be N numbers above 0 and at most 1: give those of one batch."
        )
    ordered = np.sort(p_values)
    passed = np.flatnonzero(ordered <= fdr * np.arange(1, len(ordered) + 1) / len(ordered) + 1e-12)
    return float(ordered[passed[-1]]) if passed.size else 0.0


def rounding(scores: Array) -> Array:
    """Return by how much a score may differ from itself when it is computed in another way."""
    return ROUNDING * np.minimum(np.maximum(np.abs(scores), 1.0), FARTHEST)


def _ranked(scores: Array, ordered: Array) -> Array:
    return (1.0 + (len(ordered) - np.searchsorted(ordered, scores))) / (len(ordered) + 1)


class Detector(ABC):
    """A test of the hypothesis that an image comes from where the held-out images come from.

    `fit` takes a statistic of n held-out images that the model was not trained on: (n,) or (n, d).
    `score` takes that statistic of N images and rises with outlyingness, (N,) in float64.
    `p_value` takes it, too, and is conformal, (N,) in float64: if an image is exchangeable with the held-out
    ones, its p-value is at most t with a probability of at most t, for every t and any n, ties or not. The
    probability is over the draw of the image and of the held-out ones.

    `fixed_score` says whether the p-value falls with a score that is fixed before the images that rank it are
    seen: false discoveries are then bounded, see :func:`discoveries`.
    """

    fixed_score: ClassVar[bool] = False

    @abstractmethod
    def fit(self, held_out: Array) -> Self:
        """Learn from the statistic of held-out images."""

    @abstractmethod
    def score(self, statistic: Array) -> Array:
        """Return how far out images are, (N,); for ranking them."""

    @abstractmethod
    def p_value(self, statistic: Array) -> Array:
        """Return how often an image of the held-out kind is as far out, (N,)."""

    @property
    @abstractmethod
    def smallest_p_value(self) -> float:
        """The p-value of the most extreme image: the held-out images are too few for lower levels."""

    @property
    @abstractmethod
    def n_reference(self) -> int:
        """The number of held-out images that an image is ranked among; others may have been used to fit."""

    def ranking_rows(self, n: int) -> Array:
        """Return which of the n held-out images rank others: all, unless some shaped a density."""
        return np.arange(n)

    def ranking_count(self, n: int) -> int:
        """Return how many they are."""
        return n

    def among_others(self, held_out: Array) -> Array:
        """Fit to held-out images; return the p-values of :meth:`ranking_rows` among the others, (n,)."""
        n = self.fit(held_out).n_reference
        return (self.p_value(held_out[self.ranking_rows(len(held_out))]) * (n + 1) - 1) / n

    def state(self) -> dict[str, Array]:
        """Return what `fit` learned, to be saved; nothing if the detector has to be fitted again."""
        return {}

    def restored(self, state: Mapping[str, Array]) -> Self:
        """Take over what `state` returned, instead of fitting."""
        raise NotImplementedError


class ScalarDetector(Detector):
    """A detector of one statistic, (N,), such as log p(x), that is low for improbable images."""

    _ordered: Array | None = None

    def fit(self, held_out: Array) -> Self:
        """Store the held-out values, in order."""
        self._ordered = np.sort(checked_held_out(held_out, 1))
        return self

    @property
    def smallest_p_value(self) -> float:
        """The p-value of an infinitely improbable image."""
        return float(self.p_value(np.array([-math.inf]))[0])

    @property
    def ordered(self) -> Array:
        """The held-out values, in order."""
        return fitted(self._ordered)

    @property
    def n_reference(self) -> int:
        """All held-out images."""
        return len(self.ordered)

    def state(self) -> dict[str, Array]:
        """Return the held-out values."""
        return {"ordered": self.ordered}

    def restored(self, state: Mapping[str, Array]) -> Self:
        """Take over the held-out values."""
        self._ordered = state["ordered"]
        return self

    @abstractmethod
    def accepted(self, alpha: float) -> tuple[float, float]:
        """Return the range of values that are not called outliers at level ``alpha``, ends included.

        Those with ``p_value(...) > alpha``, up to rounding. An end is infinite where there is no limit.
        """


class OneTailed(ScalarDetector):
    """Improbable images are outliers: the score is ``-statistic``.

    >>> test = OneTailed().fit(np.linspace(0, 1, 99))
    >>> test.p_value(np.array([-9.0, 0.5, 9.0]))
    array([0.01, 0.51, 1.  ])
    >>> test.accepted(0.01)
    (0.0, inf)
    """

    fixed_score = True

    def score(self, statistic: Array) -> Array:
        """Return -statistic."""
        fitted(self._ordered)
        return -checked(statistic, 1)

    def p_value(self, statistic: Array) -> Array:
        """Return ``(1 + #{held-out <= value}) / (n + 1)``, up to rounding."""
        ordered, t = self.ordered, checked(statistic, 1)
        return (1.0 + np.searchsorted(ordered, t + rounding(t), "right")) / (len(ordered) + 1)

    def accepted(self, alpha: float) -> tuple[float, float]:
        """Return the values from a quantile upwards."""
        k = rejected_ranks(len(self.ordered), alpha)
        return (float(self.ordered[k - 1]) if k else -math.inf), math.inf


class Typicality(ScalarDetector):
    """Images far from the mean are outliers: the score is ``|statistic - mean of the held-out|``.

    Nalisnick et al. (2019), https://arxiv.org/abs/1906.02994, for single images. An estimated mean is nearer
    to the held-out values than to a new one, so the p-value of t is that of full conformal prediction: with
    m the mean of all n + 1 values, t included, it is ``(1 + #{i: |t_i - m| >= |t - m|}) / (n + 1)``. It falls
    with the score on either side of the mean.

    >>> test = Typicality().fit(np.linspace(0, 1, 99))
    >>> test.p_value(np.array([-9.0, 0.5, 9.0]))
    array([0.01, 1.  , 0.01])
    """

    def score(self, statistic: Array) -> Array:
        """Return the distance from the mean."""
        return np.abs(checked(statistic, 1) - self._total() / len(self.ordered))

    def p_value(self, statistic: Array) -> Array:
        """Return the share of all values that are as far from the common mean; rounding counts as a tie."""
        ordered, n = self.ordered, len(self.ordered)
        limits = np.finfo(np.float64)
        t = checked(statistic, 1).clip(limits.min, limits.max)
        mean = (t + self._total()) / (n + 1)
        exact = 8 * limits.eps * np.maximum(np.abs(t), np.abs(ordered).max())
        distance = (np.abs(t - mean) - np.maximum(rounding(t), exact)).clip(min=0)
        below = np.searchsorted(ordered, mean - distance, "right")
        above = n - np.searchsorted(ordered, mean + distance)
        return (1.0 + (below + above).clip(max=n)) / (n + 1)

    def accepted(self, alpha: float) -> tuple[float, float]:
        """Return the interval of statistics whose p-value is above ``alpha``, up to rounding.

        Above the mean, the i-th held-out value is as far out as t while t is at most t_i or at most
        mean + (n + 1) / (n - 1) (mean - t_i), where both are equally far from the common mean.
        """
        ordered, n = self.ordered, len(self.ordered)
        k = rejected_ranks(n, alpha)
        if k == 0 or n == 1:  # two values are equally far from their mean
            return -math.inf, math.inf
        mean = self._total() / n
        opposite = mean + (n + 1) / (n - 1) * (mean - ordered)
        low = np.sort(np.minimum(ordered, opposite))[k - 1]
        high = np.sort(np.maximum(ordered, opposite))[n - k]
        return float(low), float(high)

    def _total(self) -> float:
        return math.fsum(self.ordered.tolist())


class TwoTailed(ScalarDetector):
    """Images in either tail are outliers: the paper's two-tailed quantile test.

    Images that are simpler than the training images, such as blank ones, often have too high a density. The
    p-value is twice the smaller one of the two tails, at most 1: the smallest is 2 / (n + 1).
    The score is 1 - 2 min(F, 1 - F) inside the range of the held-out values, where F, the share of values
    below, rises linearly from 0 at the first through i / (n - 1) at the i-th; outside it is 1 plus the
    distance from that range in standard deviations. The p-value falls with it.

    >>> test = TwoTailed().fit(np.linspace(0, 1, 99))
    >>> test.p_value(np.array([-9.0, 0.4, 9.0]))
    array([0.02, 0.82, 0.02])
    >>> test.score(np.array([0.5, 0.75, 1.0])).round(9)
    array([0. , 0.5, 1. ])
    """

    def score(self, statistic: Array) -> Array:
        """Return 0 in the middle, 1 at the ends of the held-out values, more beyond."""
        ordered, t = self.ordered, checked(statistic, 1)
        inside = t.clip(ordered[0], ordered[-1])
        tail = np.minimum(ecdf(inside, ordered), ecdf(-inside, -ordered[::-1]))
        unit = ordered.std() if ordered[0] < ordered[-1] else 1
        return np.where(t == inside, (1 - 2 * tail).clip(min=0), 1 + np.abs(t - inside) / unit)

    def p_value(self, statistic: Array) -> Array:
        """Return ``min(1, 2 p_low, 2 p_high)`` of the one-tailed p-values."""
        t, ordered = checked(statistic, 1), self.ordered
        too_low = (1.0 + np.searchsorted(ordered, t + rounding(t), "right")) / (len(ordered) + 1)
        return (2 * np.minimum(too_low, _ranked(t - rounding(t), ordered))).clip(max=1)

    def accepted(self, alpha: float) -> tuple[float, float]:
        """Return the values between two quantiles, with alpha / 2 of the held-out values outside of each."""
        n = len(self.ordered)
        k = rejected_ranks(n, checked_level("alpha", alpha) / 2)
        return (float(self.ordered[k - 1]), float(self.ordered[n - k])) if k else (-math.inf, math.inf)


def shuffled_halves(n: int) -> tuple[Array, Array]:
    """Return which of ``n`` held-out images a density is fitted to, and which rank its scores."""
    order = draws(0).permutation(n)
    return order[: n // 2], order[n // 2 :]


class KernelDensity:
    """A density estimate from ``rows``, (n, d): a Gaussian around each, shaped as their covariance.

    The covariance of each Gaussian is that of the rows times n^(-2 / (d + 4)), Scott's rule. Where the rows
    do not vary, as in a constant column or in one that is the sum of others, a small variance is assumed.
    """

    PARTS = ("_mean", "_scale", "_whiten", "_centres", "_log_norm")

    def __init__(self, rows: Array) -> None:
        n, d = rows.shape
        self._mean = rows.mean(0)
        deviation = np.sqrt(np.square(rows - self._mean).sum(0) / max(n - 1, 1))
        self._scale = np.where(deviation > 1e-10 * np.abs(rows).max(0), deviation, 1)
        standard = (rows - self._mean) / self._scale
        variances, axes = np.linalg.eigh(standard.T @ standard / max(n - 1, 1))
        widths = np.sqrt(variances.clip(min=SMALLEST_VARIANCE)) * n ** (-1 / (d + 4))
        self._whiten = axes / widths
        self._centres = standard @ self._whiten
        log_norm = math.log(n) + d / 2 * math.log(2 * math.pi) + np.log(self._scale * widths).sum()
        self._log_norm = np.asarray(log_norm)

    def negative_log(self, rows: Array) -> Array:
        """Return -log density, (N,): finite, and rising with the square of the distance far away."""
        with np.errstate(over="ignore"):
            standard = ((rows - self._mean) / self._scale).clip(-FARTHEST, FARTHEST)
        # sums of products for one row at a time: the same row has the same distance in every batch
        points = (standard[:, :, None] * self._whiten).sum(1)
        log_sum = np.empty(len(points))
        size = max(1, CHUNK // len(self._centres))
        for start in range(0, len(points), size):
            chunk = points[start : start + size]
            # differences, not products of matrices: the same point has a distance of 0 to itself
            square = np.zeros((len(chunk), len(self._centres)))
            for new, centres in zip(chunk.T, self._centres.T, strict=True):
                square += np.square(new[:, None] - centres)
            log_sum[start : start + size] = logsumexp(-0.5 * square)
        return self._log_norm - log_sum


class DensityDetector(Detector):
    """The score is -log of a density, fitted to one half of the held-out images; the other half ranks it.

    The halves are a fixed shuffle: the density knows nothing of the images that rank it, so the p-values are
    valid, however bad the density is. n held-out images give p-values of 1 / (n / 2 + 1) and more.
    """

    fixed_score = True
    _columns: int = 0
    _densities: list[KernelDensity] | None = None
    _scores: Array

    @abstractmethod
    def _together(self, rows: Array) -> Sequence[Array]:
        """The groups of columns that have one density each."""

    def fit(self, held_out: Array) -> Self:
        """Estimate the density from one half, score the other half."""
        rows = checked_held_out(held_out, 2, at_least=2)
        shaping, ranking = (rows[half] for half in shuffled_halves(len(rows)))
        self._columns = rows.shape[1]
        self._densities = [KernelDensity(group) for group in self._together(shaping)]
        self._scores = np.sort(self.score(ranking))
        return self

    def score(self, statistic: Array) -> Array:
        """Return -log density."""
        densities, rows = fitted(self._densities), checked(statistic, 2)
        if rows.shape[1] != self._columns:
            raise CandidError(
                f"The detector was fitted to {self._columns} statistics per image, not to {rows.shape[1]}."
            )
        parts = zip(densities, self._together(rows), strict=True)
        return sum((density.negative_log(group) for density, group in parts), np.zeros(len(rows)))

    @property
    def smallest_p_value(self) -> float:
        """The p-value of an image that is farther out than the whole second half."""
        return 1 / (self.n_reference + 1)

    @property
    def n_reference(self) -> int:
        """The number of images in the second half."""
        fitted(self._densities)
        return len(self._scores)

    def ranking_rows(self, n: int) -> Array:
        """Return the second half; nothing of a single image, which can't shape a density, too."""
        return shuffled_halves(n)[1] if n > 1 else np.arange(0)

    def ranking_count(self, n: int) -> int:
        """Return the size of the second half."""
        return n - n // 2 if n > 1 else 0

    def state(self) -> dict[str, Array]:
        """Return the densities and the scores of the second half."""
        densities = enumerate(fitted(self._densities))
        parts = {f"{i}{name}": value for i, density in densities for name, value in vars(density).items()}
        return {"scores": self._scores, **parts}

    def restored(self, state: Mapping[str, Array]) -> Self:
        """Take over the densities and the scores."""
        self._scores, self._densities = np.sort(state["scores"]), []
        while f"{len(self._densities)}_mean" in state:
            density, i = KernelDensity.__new__(KernelDensity), len(self._densities)
            vars(density).update({name: state[f"{i}{name}"] for name in KernelDensity.PARTS})
            self._densities.append(density)
        self._columns = sum(len(density._mean) for density in self._densities)
        return self

    def p_value(self, statistic: Array) -> Array:
        """Return p-values among the second half; scores that differ by rounding count as equal."""
        score = self.score(statistic)
        return _ranked(score - rounding(score), self._scores)


class TypicalSet(DensityDetector):
    """Each statistic must be typical on its own: the sum over them of -log of a one-dimensional density.

    >>> rows = np.random.default_rng(0).normal(size=(2000, 2))
    >>> TypicalSet().fit(rows).p_value(np.array([[0.0, 0.0], [0.0, 9.0]])) <= 0.01
    array([False,  True])
    """

    def _together(self, rows: Array) -> Sequence[Array]:
        return np.split(rows, rows.shape[1], axis=1)


class DensityOfStates(DensityDetector):
    """The statistics must be typical together: -log of one d-dimensional density.

    >>> first, noise = np.random.default_rng(0).normal(size=(2, 2000))
    >>> rows = np.stack((first, first + 0.1 * noise), 1)
    >>> DensityOfStates().fit(rows).p_value(np.array([[1.0, 1.0], [1.0, -1.0]])) <= 0.01
    array([False,  True])
    """

    def _together(self, rows: Array) -> Sequence[Array]:
        return [rows]


def ecdf(t: Array, ordered: Array) -> Array:
    """Return the distribution function of ``ordered`` at ``t`` in its range, linear between values.

    >>> ecdf(np.array([0.0, 3.0, 4.0]), np.array([0.0, 2.0, 4.0]))
    array([0.  , 0.75, 1.  ])
    """
    last = len(ordered) - 1
    at = np.searchsorted(ordered, t, "right") - 1
    here, following = ordered[at], ordered[(at + 1).clip(max=last)]
    step = np.where(following > here, following - here, 1)
    return (at + np.where(following > here, (t - here) / step, 0)) / max(last, 1)


def rejected_ranks(n: int, alpha: float) -> int:
    """Return how many of the p-values 1 / (n + 1), 2 / (n + 1), ... are at most ``alpha``."""
    checked_level("alpha", alpha)
    return int((np.arange(1, n + 2) / (n + 1) <= alpha).sum())


def checked(statistic: Array, dimensions: int) -> Array:
    """Return a statistic of images in float64, one number per image, (N,), or several, (N, d)."""
    statistic = np.asarray(statistic, np.float64)
    if statistic.ndim != dimensions or 0 in statistic.shape[1:]:
        wanted = "(N,)" if dimensions == 1 else "(N, d)"
        raise CandidError(f"A statistic of N images must have the shape {wanted}, not {statistic.shape}.")
    if np.isnan(statistic).any():
        missing = np.isnan(statistic).any(1).sum() if dimensions == 2 else np.isnan(statistic).sum()
        raise CandidError(f"The statistic of {missing} of {len(statistic)} images is NaN: find out why.")
    return statistic


def checked_held_out(statistic: Array, dimensions: int, at_least: int = 1) -> Array:
    """Return the same for held-out images, which must be finite."""
    statistic = checked(statistic, dimensions)
    if len(statistic) < at_least:
        raise CandidError(f"The detector needs at least {at_least} held-out images, not {len(statistic)}.")
    if far := int((np.abs(statistic) > FARTHEST).sum()):
        raise CandidError(
            f"{far} statistics of held-out images are infinite or beyond {FARTHEST:g}: leave them out."
        )
    return statistic


def checked_level(name: str, level: float) -> float:
    """Return the level; raise an error unless it is a probability."""
    if not 0 < level < 1:
        raise CandidError(f"The level '{name}' must be above 0 and below 1, not {level}.")
    return level


def fitted(part: T | None) -> T:
    """Return what `fit` made; raise an error if it was not called."""
    if part is None:
        raise CandidError("The detector has seen no held-out images yet: call fit first.")
    return part
