"""The combined score: p-values of several scores, combined and ranked again, so that the level is exact.

Near unknowns show in the logits, far ones in the features. Each score alone is blind to some images; a sum of
their p-values is not a p-value, since scores depend on each other. But its rank among held-out images is one.
"""

import math
from collections.abc import Collection, Mapping
from typing import Self

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid.trust.detectors import Detector, checked, checked_held_out, fitted

CLIP = 0.9
"""p-values above this count as this: so a score that finds nothing unusual can't outvote the others."""
TOLERANCE = 1e-9
"""Sums that differ by less are equal, whatever the order in which they were added."""
CHUNK = 2**20
"""Numbers at a time: 8 MB."""


def parts_for(columns: Collection[str]) -> tuple[str, ...]:
    """Return the names of the scores that are combined by default, for the ``columns`` that there are.

    One of them looks at the logits, the others at the features: near unknowns, and far ones.

    >>> parts_for(["logits"]), parts_for(["logits", "features"])
    (('energy', 'max-posterior'), ('mahalanobis++', 'energy', 'pca-residual'))
    """
    if "logits" not in columns:
        raise CandidError("A combined score needs the column 'logits'.")
    return (
        ("mahalanobis++", "energy", "pca-residual") if "features" in columns else ("energy", "max-posterior")
    )


def combination(p: Tensor) -> Tensor:
    """Return the sum over J parts of tan(pi (1/2 - min(p, 0.9))), (..., J) to (...): high for outliers.

    The Cauchy combination (Liu & Xie, 2020), with its terms bounded from below: each part can take away at
    most 3.08.

    >>> combination(torch.tensor([[0.5, 0.5], [0.01, 1.0]], dtype=torch.float64))
    tensor([ 0.0000, 28.7428], dtype=torch.float64)
    """
    return _terms(p).sum(-1)


def _terms(p: Tensor) -> Tensor:
    return (math.pi * (0.5 - p.double().clamp(max=CLIP))).tan()


class CombinedRanks:
    """Combined p-values, from J scores of n held-out images that rise with outlyingness, (n, J).

    With a new image there are n + 1 images. By each score, each of them has a p-value among all n + 1, and
    these have a :func:`combination`. The p-value of the new image is the share of the n + 1 images whose
    combination is at least as large. As all of them are treated alike, it is valid: if the new image is
    exchangeable with the held-out ones, it is at most t with a probability of at most t, for every t, with
    ties, and however the scores depend on each other. The scores must not be fitted to the held-out images.

    Example:
        >>> ranks = CombinedRanks.fit(torch.randn(99, 2, generator=torch.Generator().manual_seed(0)))
        >>> ranks.p_values(torch.tensor([[0.0, 0.0], [9.0, 9.0]])) <= 0.01
        tensor([False,  True])
    """

    def __init__(self, held_out: Tensor) -> None:
        self._held_out = checked_held_out(held_out, 2)
        columns, n = self._held_out.T.contiguous(), len(self._held_out)
        self._ordered = columns.sort().values  # (J, n)
        # among the held-out images, itself included
        rank = (n - torch.searchsorted(self._ordered, columns)).double()
        self._terms = _terms(rank / (n + 1))  # if the new image has a lower score
        self._later = _terms((rank + 1) / (n + 1))  # if its score is at least as high

    @classmethod
    def fit(cls, scores: Tensor) -> Self:
        """Return the ranks among held-out images with these ``scores``, (n, J)."""
        return cls(scores)

    def __len__(self) -> int:
        return len(self._held_out)

    def p_values(self, scores: Tensor) -> Tensor:
        """Return the p-values of N images from their scores (N, J), (N,): 1 / (n + 1), ..., 1.

        It takes J n steps for each image, and a bounded memory.
        """
        own, rows = self.statistic(scores), checked(scores, 2)
        counts = torch.empty(len(rows), dtype=torch.int64)
        size = max(1, CHUNK // len(self))
        for part, new, found in zip(rows.split(size), own.split(size), counts.split(size), strict=True):
            sums = torch.zeros(len(part), len(self), dtype=torch.float64)
            for column, held_out, terms, later in zip(
                part.T, self._held_out.T, self._terms, self._later, strict=True
            ):
                sums += torch.where(column[:, None] >= held_out, later, terms)
            torch.sum(sums >= new[:, None] - TOLERANCE, dim=1, out=found)
        return (1 + counts).double() / (len(self) + 1)

    def statistic(self, scores: Tensor) -> Tensor:
        """Return the :func:`combination` of the p-values that N images have by each score, (N,).

        It is finer than the p-value, for curves; images beyond all held-out ones by every score are equal.
        """
        columns = checked(scores, 2).T.contiguous()
        if len(columns) != len(self._ordered):
            raise CandidError(
                f"The ranks are of {len(self._ordered)} scores an image, not of {len(columns)}."
            )
        rank = 1 + len(self) - torch.searchsorted(self._ordered, columns)
        return combination(rank.T.double() / (len(self) + 1))

    def state(self) -> dict[str, Tensor]:
        """Return the scores of the held-out images, to be saved."""
        return {"held_out": self._held_out}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """Return the ranks whose :meth:`state` it was."""
        return cls(state["held_out"])


class Combined(Detector):
    """The detector of the combined score: :class:`CombinedRanks` of several scores an image, (N, J).

    >>> rows = torch.randn(199, 3, generator=torch.Generator().manual_seed(0))
    >>> Combined().fit(rows).smallest_p_value
    0.005
    """

    _ranks: CombinedRanks | None = None

    def fit(self, held_out: Tensor) -> Self:
        """Rank the held-out images."""
        self._ranks = CombinedRanks.fit(held_out)
        return self

    def score(self, statistic: Tensor) -> Tensor:
        """Return the combination of p-values."""
        return fitted(self._ranks).statistic(statistic)

    def p_value(self, statistic: Tensor) -> Tensor:
        """Return the share of images, itself included, with a combination that is at least as large."""
        return fitted(self._ranks).p_values(statistic)

    @property
    def smallest_p_value(self) -> float:
        """The p-value of an image whose combination is the largest."""
        return 1 / (self.n_reference + 1)

    @property
    def n_reference(self) -> int:
        """All held-out images."""
        return len(fitted(self._ranks))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the held-out scores."""
        return fitted(self._ranks).state()

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Rank the held-out images again, which is fast."""
        self._ranks = CombinedRanks.from_state(tensors)
        return self
