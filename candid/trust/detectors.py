"""Detectors: is this image like the held-out images?

Scalar detectors judge one statistic per image, (N,). One statistic has blind spots: an image can have a
typical log p(x) and an untypical norm of z. Density detectors take d statistics per image, (N, d), estimate
their density over held-out images and call images of a low density outliers: Morningstar et al. (2021),
https://arxiv.org/abs/2006.09273
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Self, TypeVar

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.randomness import generator

T = TypeVar("T")
CHUNK = 2**18  # kernel values at a time: 2 MB
SMALLEST_VARIANCE = 1e-8  # of a direction in the space of standardised statistics
FARTHEST = 1e100  # standard deviations, and the largest statistic: its square is finite
ROUNDING = 1e-9


def p_values(scores: Tensor, held_out: Tensor) -> Tensor:
    """Return the conformal p-values of outlier scores: ``(1 + #{held-out >= score}) / (n + 1)``.

    ``held_out`` are the scores of n images that the model was not trained on. If an image is exchangeable
    with them, its p-value is at most t with a probability of at most t.

    >>> p_values(torch.tensor([0.5, 9.0]), torch.tensor([0.1, 0.2, 0.9]))
    tensor([0.5000, 0.2500], dtype=torch.float64)
    """
    ordered = held_out.double().contiguous().sort().values
    at_least = len(ordered) - torch.searchsorted(ordered, scores.double().contiguous())
    return (1 + at_least).double() / (len(ordered) + 1)


class Detector(ABC):
    """A test of the hypothesis that an image comes from where the held-out images come from.

    `fit` takes a statistic of n held-out images that the model was not trained on: (n,) or (n, d).
    `score` takes that statistic of N images and rises with outlyingness, (N,) in float64.
    `p_value` takes it, too, and is conformal, (N,) in float64: if an image is exchangeable with the held-out
    ones, its p-value is at most t with a probability of at most t, for every t and any n, ties or not. The
    probability is over the draw of the image and of the held-out ones.
    """

    @abstractmethod
    def fit(self, held_out: Tensor) -> Self:
        """Learn from the statistic of held-out images."""

    @abstractmethod
    def score(self, statistic: Tensor) -> Tensor:
        """Return how far out images are, (N,); for ranking them."""

    @abstractmethod
    def p_value(self, statistic: Tensor) -> Tensor:
        """Return how often an image of the held-out kind is as far out, (N,)."""

    @property
    @abstractmethod
    def smallest_p_value(self) -> float:
        """The p-value of the most extreme image: the held-out images are too few for lower levels."""

    @property
    @abstractmethod
    def n_reference(self) -> int:
        """The number of held-out images that an image is ranked among; others may have been used to fit."""

    def to_tensors(self) -> dict[str, Tensor]:
        """Return what `fit` learned, to be saved; nothing if the detector has to be fitted again."""
        return {}

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Take over what `to_tensors` returned, instead of fitting."""
        raise NotImplementedError


class ScalarDetector(Detector):
    """A detector of one statistic, (N,), such as log p(x), that is low for improbable images."""

    _ordered: Tensor | None = None

    def fit(self, held_out: Tensor) -> Self:
        """Store the held-out values, in order."""
        self._ordered = checked_held_out(held_out, 1).sort().values
        return self

    @property
    def smallest_p_value(self) -> float:
        """The p-value of an infinitely improbable image."""
        return self.p_value(torch.tensor([-math.inf])).item()

    @property
    def ordered(self) -> Tensor:
        """The held-out values, in order."""
        return fitted(self._ordered)

    @property
    def n_reference(self) -> int:
        """All held-out images."""
        return len(self.ordered)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the held-out values."""
        return {"ordered": self.ordered}

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Take over the held-out values."""
        self._ordered = tensors["ordered"]
        return self

    @abstractmethod
    def accepted(self, alpha: float) -> tuple[float, float]:
        """Return the range of values that are not called outliers at level ``alpha``, ends included.

        Exactly those with ``p_value(...) > alpha``. An end is infinite where there is no limit.
        """


class OneTailed(ScalarDetector):
    """Improbable images are outliers: the score is ``-statistic``.

    >>> test = OneTailed().fit(torch.linspace(0, 1, 99))
    >>> test.p_value(torch.tensor([-9.0, 0.5, 9.0]))
    tensor([0.0100, 0.5100, 1.0000], dtype=torch.float64)
    >>> test.accepted(0.01)
    (0.0, inf)
    """

    def score(self, statistic: Tensor) -> Tensor:
        """Return -statistic."""
        fitted(self._ordered)
        return -checked(statistic, 1)

    def p_value(self, statistic: Tensor) -> Tensor:
        """Return ``(1 + #{held-out <= value}) / (n + 1)``."""
        return p_values(-checked(statistic, 1), -self.ordered)

    def accepted(self, alpha: float) -> tuple[float, float]:
        """Return the values from a quantile upwards."""
        k = rejected_ranks(len(self.ordered), alpha)
        return (self.ordered[k - 1].item() if k else -math.inf), math.inf


class Typicality(ScalarDetector):
    """Images far from the mean are outliers: the score is ``|statistic - mean of the held-out|``.

    Nalisnick et al. (2019), https://arxiv.org/abs/1906.02994, for single images. An estimated mean is nearer
    to the held-out values than to a new one, so the p-value of t is that of full conformal prediction: with
    m the mean of all n + 1 values, t included, it is ``(1 + #{i: |t_i - m| >= |t - m|}) / (n + 1)``. It falls
    with the score on either side of the mean.

    >>> test = Typicality().fit(torch.linspace(0, 1, 99))
    >>> test.p_value(torch.tensor([-9.0, 0.5, 9.0]))
    tensor([0.0100, 1.0000, 0.0100], dtype=torch.float64)
    """

    def score(self, statistic: Tensor) -> Tensor:
        """Return the distance from the mean."""
        return (checked(statistic, 1) - self._total() / len(self.ordered)).abs()

    def p_value(self, statistic: Tensor) -> Tensor:
        """Return the share of all values that are as far from the common mean; rounding counts as a tie."""
        ordered, n = self.ordered, len(self.ordered)
        limits = torch.finfo(torch.float64)
        t = checked(statistic, 1).clamp(limits.min, limits.max)
        mean = (t + self._total()) / (n + 1)
        rounding = 8 * limits.eps * torch.maximum(t.abs(), ordered.abs().max())
        distance = ((t - mean).abs() - rounding).clamp(min=0)
        below = torch.searchsorted(ordered, mean - distance, right=True)
        above = n - torch.searchsorted(ordered, mean + distance)
        return (1 + (below + above).clamp(max=n)).double() / (n + 1)

    def accepted(self, alpha: float) -> tuple[float, float]:
        """Return the values around the mean, up to rounding.

        Above the mean, the i-th held-out value is as far out as t while t is at most t_i or at most
        mean + (n + 1) / (n - 1) (mean - t_i), where both are equally far from the common mean.
        """
        ordered, n = self.ordered, len(self.ordered)
        k = rejected_ranks(n, alpha)
        if k == 0 or n == 1:  # two values are equally far from their mean
            return -math.inf, math.inf
        mean = self._total() / n
        opposite = mean + (n + 1) / (n - 1) * (mean - ordered)
        low = torch.minimum(ordered, opposite).sort().values[k - 1]
        high = torch.maximum(ordered, opposite).sort().values[n - k]
        return low.item(), high.item()

    def _total(self) -> float:
        return math.fsum(self.ordered.tolist())


class TwoTailed(ScalarDetector):
    """Images in either tail are outliers: the paper's two-tailed quantile test.

    Images that are simpler than the training images, such as blank ones, often have too high a density. The
    p-value is twice the smaller one of the two tails, at most 1: the smallest is 2 / (n + 1).
    The score is 1 - 2 min(F, 1 - F) inside the range of the held-out values, where F, the share of values
    below, rises linearly from 0 at the first through i / (n - 1) at the i-th; outside it is 1 plus the
    distance from that range in standard deviations. The p-value falls with it.

    >>> test = TwoTailed().fit(torch.linspace(0, 1, 99))
    >>> test.p_value(torch.tensor([-9.0, 0.4, 9.0]))
    tensor([0.0200, 0.8200, 0.0200], dtype=torch.float64)
    >>> test.score(torch.tensor([0.5, 0.75, 1.0]))
    tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)
    """

    def score(self, statistic: Tensor) -> Tensor:
        """Return 0 in the middle, 1 at the ends of the held-out values, more beyond."""
        ordered, t = self.ordered, checked(statistic, 1)
        inside = t.clamp(ordered[0], ordered[-1])
        tail = torch.minimum(ecdf(inside, ordered), ecdf(-inside, -ordered.flip(0)))
        unit = ordered.std(correction=0) if ordered[0] < ordered[-1] else 1
        return torch.where(t == inside, (1 - 2 * tail).clamp(min=0), 1 + (t - inside).abs() / unit)

    def p_value(self, statistic: Tensor) -> Tensor:
        """Return ``min(1, 2 p_low, 2 p_high)`` of the one-tailed p-values."""
        t = checked(statistic, 1)
        too_low, too_high = p_values(-t, -self.ordered), p_values(t, self.ordered)
        return (2 * torch.minimum(too_low, too_high)).clamp(max=1)

    def accepted(self, alpha: float) -> tuple[float, float]:
        """Return the values between two quantiles, with alpha / 2 of the held-out values outside of each."""
        n = len(self.ordered)
        k = rejected_ranks(n, checked_level("alpha", alpha) / 2)
        return (self.ordered[k - 1].item(), self.ordered[n - k].item()) if k else (-math.inf, math.inf)


class KernelDensity:
    """A density estimate from ``rows``, (n, d): a Gaussian around each, shaped as their covariance.

    The covariance of each Gaussian is that of the rows times n^(-2 / (d + 4)), Scott's rule. Where the rows
    do not vary, as in a constant column or in one that is the sum of others, a small variance is assumed.
    """

    PARTS = ("_mean", "_scale", "_whiten", "_centres", "_log_norm")

    def __init__(self, rows: Tensor) -> None:
        n, d = rows.shape
        self._mean = rows.mean(0)
        deviation = ((rows - self._mean).square().sum(0) / max(n - 1, 1)).sqrt()
        self._scale = torch.where(deviation > 1e-10 * rows.abs().amax(0), deviation, 1)
        standard = (rows - self._mean) / self._scale
        variances, axes = torch.linalg.eigh(standard.T @ standard / max(n - 1, 1))
        widths = variances.clamp(min=SMALLEST_VARIANCE).sqrt() * n ** (-1 / (d + 4))
        self._whiten = axes / widths
        self._centres = standard @ self._whiten
        self._log_norm = math.log(n) + d / 2 * math.log(2 * math.pi) + (self._scale * widths).log().sum()

    def negative_log(self, rows: Tensor) -> Tensor:
        """Return -log density, (N,): finite, and rising with the square of the distance far away."""
        standard = ((rows - self._mean) / self._scale).clamp(-FARTHEST, FARTHEST)
        points = standard @ self._whiten
        log_sum = torch.empty_like(points[:, 0])
        size = max(1, CHUNK // len(self._centres))
        for chunk, part in zip(points.split(size), log_sum.split(size), strict=True):
            # differences, not products of matrices: the same point gives the same distance, and 0 to itself
            distance = torch.cdist(chunk, self._centres, compute_mode="donot_use_mm_for_euclid_dist")
            torch.logsumexp(distance.square_().mul_(-0.5), dim=1, out=part)
        return self._log_norm - log_sum


def shuffled_halves(n: int) -> tuple[Tensor, Tensor]:
    """Return which of ``n`` held-out images a density is fitted to, and which rank its scores."""
    order = torch.randperm(n, generator=generator(0))
    return order[: n // 2], order[n // 2 :]


class DensityDetector(Detector):
    """The score is -log of a density, fitted to one half of the held-out images; the other half ranks it.

    The halves are a fixed shuffle: the density knows nothing of the images that rank it, so the p-values are
    valid, however bad the density is. n held-out images give p-values of 1 / (n / 2 + 1) and more.
    """

    _columns: int = 0
    _densities: list[KernelDensity] | None = None

    @abstractmethod
    def _together(self, rows: Tensor) -> Sequence[Tensor]:
        """The groups of columns that have one density each."""

    def fit(self, held_out: Tensor) -> Self:
        """Estimate the density from one half, score the other half."""
        rows = checked_held_out(held_out, 2, at_least=2)
        shaping, ranking = (rows[half.to(rows.device)] for half in shuffled_halves(len(rows)))
        self._columns = rows.shape[1]
        self._densities = [KernelDensity(group) for group in self._together(shaping)]
        self._scores = self.score(ranking)
        return self

    def score(self, statistic: Tensor) -> Tensor:
        """Return -log density."""
        densities, rows = fitted(self._densities), checked(statistic, 2)
        if rows.shape[1] != self._columns:
            raise CandidError(
                f"The detector was fitted to {self._columns} statistics an image, not to {rows.shape[1]}."
            )
        groups = self._together(rows)
        return torch.stack(
            [density.negative_log(g) for density, g in zip(densities, groups, strict=True)]
        ).sum(0)

    @property
    def smallest_p_value(self) -> float:
        """The p-value of an image that is farther out than the whole second half."""
        return 1 / (self.n_reference + 1)

    @property
    def n_reference(self) -> int:
        """The number of images in the second half."""
        fitted(self._densities)
        return len(self._scores)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the densities and the scores of the second half."""
        densities = enumerate(fitted(self._densities))
        parts = {f"{i}{name}": value for i, density in densities for name, value in vars(density).items()}
        return {"scores": self._scores, **parts}

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Take over the densities and the scores."""
        self._scores, self._densities = tensors["scores"], []
        while f"{len(self._densities)}_mean" in tensors:
            density, i = KernelDensity.__new__(KernelDensity), len(self._densities)
            vars(density).update({name: tensors[f"{i}{name}"] for name in KernelDensity.PARTS})
            self._densities.append(density)
        self._columns = sum(len(density._mean) for density in self._densities)
        return self

    def p_value(self, statistic: Tensor) -> Tensor:
        """Return p-values among the second half; scores that differ by rounding count as equal."""
        score = self.score(statistic)
        return p_values(score - ROUNDING * (1 + score.abs()), self._scores)


class TypicalSet(DensityDetector):
    """Each statistic must be typical on its own: the sum over them of -log of a one-dimensional density.

    >>> rows = torch.randn(2000, 2, generator=generator(0))
    >>> TypicalSet().fit(rows).p_value(torch.tensor([[0.0, 0.0], [0.0, 9.0]])) <= 0.01
    tensor([False,  True])
    """

    def _together(self, rows: Tensor) -> Sequence[Tensor]:
        return rows.split(1, dim=1)


class DensityOfStates(DensityDetector):
    """The statistics must be typical together: -log of one d-dimensional density.

    >>> first, noise = torch.randn(2, 2000, generator=generator(0))
    >>> rows = torch.stack((first, first + 0.1 * noise), dim=1)
    >>> DensityOfStates().fit(rows).p_value(torch.tensor([[1.0, 1.0], [1.0, -1.0]])) <= 0.01
    tensor([False,  True])
    """

    def _together(self, rows: Tensor) -> Sequence[Tensor]:
        return [rows]


def ecdf(t: Tensor, ordered: Tensor) -> Tensor:
    """Return the distribution function of ``ordered`` at ``t`` in its range, linear between values.

    >>> ecdf(torch.tensor([0.0, 3.0, 4.0]), torch.tensor([0.0, 2.0, 4.0]))
    tensor([0.0000, 0.7500, 1.0000])
    """
    last = len(ordered) - 1
    at = torch.searchsorted(ordered, t, right=True) - 1
    here, next_one = ordered[at], ordered[(at + 1).clamp(max=last)]
    part = torch.where(next_one > here, (t - here) / (next_one - here), 0)
    return (at + part) / max(last, 1)


def rejected_ranks(n: int, alpha: float) -> int:
    """Return how many of the p-values 1 / (n + 1), 2 / (n + 1), ... are at most ``alpha``."""
    checked_level("alpha", alpha)
    return int((torch.arange(1, n + 2).double() / (n + 1) <= alpha).sum())


def checked(statistic: Tensor, dimensions: int) -> Tensor:
    """Return a statistic of images in float64, one number per image, (N,), or several, (N, d)."""
    if statistic.ndim != dimensions or 0 in statistic.shape[1:]:
        wanted = "(N,)" if dimensions == 1 else "(N, d)"
        raise CandidError(
            f"A statistic of N images must have the shape {wanted}, not {tuple(statistic.shape)}."
        )
    if missing := int(statistic.isnan().any(1).sum() if dimensions == 2 else statistic.isnan().sum()):
        raise CandidError(f"The statistic of {missing} of {len(statistic)} images is NaN: find out why.")
    return statistic.detach().double().contiguous()


def checked_held_out(statistic: Tensor, dimensions: int, at_least: int = 1) -> Tensor:
    """Return the same for held-out images, which must be finite."""
    statistic = checked(statistic, dimensions)
    if len(statistic) < at_least:
        raise CandidError(f"The detector needs at least {at_least} held-out images, not {len(statistic)}.")
    if far := int((statistic.abs() > FARTHEST).sum()):
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
