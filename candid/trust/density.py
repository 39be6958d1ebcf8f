"""Is this image like anything the model was trained on? Several statistics of it together.

One statistic has blind spots: an image can have a typical log p(x) and an untypical norm of z. These
detectors take d statistics an image, (N, d), estimate their density over held-out images and call images of a
low density outliers. Morningstar et al. (2021), https://arxiv.org/abs/2006.09273
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.randomness import generator
from candid.trust.detectors import Detector, checked, checked_held_out, fitted, p_values

CHUNK = 2**18  # kernel values at a time: 2 MB
SMALLEST_VARIANCE = 1e-8  # of a direction in the space of standardised statistics
FARTHEST = 1e100  # standard deviations: its square is finite
ROUNDING = 1e-9


class KernelDensity:
    """A density estimate from ``rows``, (n, d): a Gaussian around each, shaped as their covariance.

    The covariance of each Gaussian is that of the rows times n^(-2 / (d + 4)), Scott's rule. Where the rows
    do not vary, as in a constant column or in one that is the sum of others, a small variance is assumed.
    """

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
        """-log density, (N,): finite, and rising with the square of the distance far away."""
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
    """Which of ``n`` held-out images a density is fitted to, and which rank its scores."""
    order = torch.randperm(n, generator=generator(0))
    return order[: n // 2], order[n // 2 :]


class DensityDetector(Detector):
    """The score is -log of a density, fitted to a half of the held-out images; the other half ranks it.

    The halves are a fixed shuffle: the density knows nothing of the images that rank it, so the p-values are
    valid, however bad the density is. n held-out images give p-values of 1 / (n / 2 + 1) and more.
    """

    _columns: int = 0
    _densities: Sequence[KernelDensity] | None = None

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
        """-log density."""
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
        """That of an image that is farther out than the whole second half."""
        return 1 / (self.ranks + 1)

    @property
    def ranks(self) -> int:
        """The second half."""
        fitted(self._densities)
        return len(self._scores)

    def p_value(self, statistic: Tensor) -> Tensor:
        """The rank among the second half; scores that differ by rounding count as equal."""
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
