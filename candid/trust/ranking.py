"""Who fits the scores and who ranks them: p-values of images among held-out images, from their columns.

No image does both. With many images one half fits and the other half ranks; with few, each fold is ranked by
scores that the other folds fitted.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from candid.trust.combined import TOLERANCE, CombinedRanks, combination
from candid.trust.detectors import p_values
from candid.trust.feature_moments import Columns
from candid.trust.feature_scores import COLUMN_SCORES, ColumnScore, LogitScore, fit_scores
from candid.trust.promises import NoveltyPromise

FEW = 400
"""With fewer images than this, scores that learn are cross-fitted."""
FOLDS = 5
ALL = -1
"""The group of images that are ranked among the images of all groups."""


def shuffled(*columns: Tensor) -> Tensor:
    """Return an order of images that looks random, and is the same however the images were sorted.

    It is made from digests of their rows, (N,) or (N, d) of each column. Images whose rows are equal differ
    by their number, so that copies go to both halves.

    >>> x = torch.arange(4.0)
    >>> torch.equal(x[shuffled(x)], x.flip(0)[shuffled(x.flip(0))])
    True
    """
    seen: Counter[bytes] = Counter()
    keys = []
    for rows in zip(*(column.contiguous().numpy() for column in columns), strict=True):
        row = hashlib.blake2b(b"".join(part.tobytes() for part in rows), digest_size=16).digest()
        keys.append(hashlib.blake2b(row + seen[row].to_bytes(8)).digest())
        seen[row] += 1
    return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), dtype=torch.int64)


@dataclass(frozen=True)
class Ranking:
    """Fitted scores, and the held-out images that they rank: these had no part in the fit."""

    scores: Sequence[ColumnScore]
    held_out: Tensor
    """The values of the held-out images, (n, J)."""
    groups: Tensor
    """Their groups, (n,)."""
    labels: Tensor
    """Their true classes, (n,)."""
    fixed: CombinedRanks | None = None
    """Ranks among further images, which make one fixed score of several; None if there is one score, or if
    the ranks of several are combined exactly."""
    _ranks: dict[int, CombinedRanks] = field(default_factory=dict, repr=False, compare=False)

    def values(self, columns: Columns) -> Tensor:
        """Return the scores of N images, (N, J)."""
        found = values_of(self.scores, columns)
        return found if self.fixed is None else self.fixed.statistic(found)[:, None]

    def of_group(self, group: int) -> Tensor:
        """Return the values of the held-out images of a group, or of all."""
        return self.held_out if group == ALL else self.held_out[self.groups == group]

    def as_extreme(self, values: Tensor, group: int) -> Tensor:
        """Return how many held-out images of a group are at least as extreme as each of N images, (N,)."""
        known = self.of_group(group)
        if len(known) == 0:
            return torch.zeros(len(values), dtype=torch.int64)
        if known.shape[1] == 1:
            p = p_values(values[:, 0], known[:, 0])
        else:
            if group not in self._ranks:
                self._ranks[group] = CombinedRanks.fit(known)
            p = self._ranks[group].p_values(values)
        return (p * (len(known) + 1)).round().long() - 1


def values_of(scores: Sequence[ColumnScore], columns: Columns) -> Tensor:
    """Return the values of J scores of N images, (N, J)."""
    return torch.stack([score.score(columns) for score in scores], dim=1)


@dataclass(frozen=True)
class LabelledImages:
    """Shuffled images with labels that scores are fitted to and ranked among."""

    columns: Columns
    """Logits, and features if there are any, of n images in a random order."""
    labels: Tensor
    """(n,)."""
    groups: Tensor
    """The groups in which images are ranked, (n,)."""

    def rankings(self, names: Sequence[str], promise: NoveltyPromise) -> list[Ranking]:
        """Return fitted scores with the images that rank them; several scores are combined.

        Args:
            names: keys of :data:`~candid.trust.feature_scores.COLUMN_SCORES`.
            promise: what the false-alarm rate has to hold for; "confident" needs a score that is fixed before
                the images that rank it are seen.
        """
        everyone, half = torch.arange(len(self.labels)), len(self.labels) // 2
        if all(issubclass(COLUMN_SCORES[name], LogitScore) for name in names):
            scores, ranks = self._fit(names, everyone), everyone  # they learn nothing
        elif len(everyone) < FEW and promise == "average":
            return self._cross_fitted(names)
        else:
            scores, ranks = self._fit(names, everyone[:half]), everyone[half:]
        if promise == "average" or len(names) == 1:
            return [self._ranking(scores, ranks)]
        first, second = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
        return [self._ranking(scores, second, CombinedRanks.fit(self._values(scores, first)))]

    def _cross_fitted(self, names: Sequence[str]) -> list[Ranking]:
        """Return a ranking for each fold, made by the others.

        Also the ranks that combine several scores come from the others: for fold k, an image of fold l is
        scored by what the folds but k and l fitted.
        """
        fold = torch.arange(len(self.labels)) % FOLDS
        folds = [(fold == k).nonzero()[:, 0] for k in range(FOLDS)]
        known: dict[tuple[int, int], Tensor] = {}
        for k, other in combinations(range(FOLDS), 2) if len(names) > 1 else ():
            scores = self._fit(names, ((fold != k) & (fold != other)).nonzero()[:, 0])
            known[k, other], known[other, k] = (self._values(scores, folds[i]) for i in (other, k))
        found = []
        for k in range(FOLDS):
            values = [value for (own, _), value in known.items() if own == k]
            fixed = CombinedRanks.fit(torch.cat(values)) if values else None
            found.append(self._ranking(self._fit(names, (fold != k).nonzero()[:, 0]), folds[k], fixed))
        return found

    def _fit(self, names: Sequence[str], rows: Tensor) -> list[ColumnScore]:
        return list(fit_scores(names, self._columns(rows), self.labels[rows]).values())

    def _columns(self, rows: Tensor) -> Columns:
        return {name: column[rows] for name, column in self.columns.items()}

    def _values(self, scores: Sequence[ColumnScore], rows: Tensor) -> Tensor:
        return values_of(scores, self._columns(rows))

    def _ranking(
        self, scores: Sequence[ColumnScore], rows: Tensor, fixed: CombinedRanks | None = None
    ) -> Ranking:
        values = self._values(scores, rows)
        kept = values if fixed is None else fixed.statistic(values)[:, None]
        return Ranking(scores, kept, self.groups[rows], self.labels[rows], fixed)


def ranked_p_values(rankings: Sequence[Ranking], columns: Columns, groups: Tensor) -> Tensor:
    """Return (1 + number of held-out images at least as extreme) / (n + 1) of N images, in their groups.

    Of several rankings the numbers and n are added up: the cross-conformal p-value.
    """
    values = [ranking.values(columns) for ranking in rankings]
    found = torch.empty(len(groups), dtype=torch.float64)
    for group in groups.unique().tolist():
        own = groups == group
        count = torch.ones(int(own.sum()), dtype=torch.float64)
        for ranking, value in zip(rankings, values, strict=True):
            count += ranking.as_extreme(value[own], group)
        found[own] = count / (1 + ranked_images(rankings, group))
    return found


def ranked_images(rankings: Sequence[Ranking], group: int = ALL) -> int:
    """Return how many held-out images an image of a group is ranked among."""
    return sum(len(ranking.of_group(group)) for ranking in rankings)


def among_others(values: Tensor) -> Tensor:
    """Return the p-value that each of n held-out images has among the others, from J scores (n, J), (n,).

    >>> among_others(torch.tensor([[1.0], [3.0], [2.0], [0.0]]))
    tensor([0.7500, 0.2500, 0.5000, 1.0000], dtype=torch.float64)
    """
    n, combined = len(values), values[:, 0]
    if values.shape[1] > 1:
        columns = values.T.contiguous()
        ranks = n - torch.searchsorted(columns.sort().values, columns)
        combined = combination(ranks.T / n)
    return (p_values(combined - TOLERANCE, combined) * (n + 1) - 1) / n
