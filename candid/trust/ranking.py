"""How scores are ranked among held-out images: combined ranks, and who fits a score and who ranks it.

Near unknowns show in the logits, far ones in the features. Each score alone is blind to some images; a sum of
their p-values is not a p-value, since scores depend on each other. But its rank among held-out images is one.

No image both fits a score and ranks it. Scores that learn are fitted to one half of the held-out images and
ranked by the other half; with few images each fold is ranked by scores that the other folds fitted.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.trust import conformal
from candid.trust.arrays import FEWEST_SERIES, firsts, halves, in_series, series_of, shuffled_rows
from candid.trust.conformal import (
    Detector,
    OneTailed,
    checked,
    checked_held_out,
    fitted,
    p_values,
    rounding,
)
from candid.trust.scores import Columns, Score, learning_scores

if TYPE_CHECKING:
    from candid.trust.learned import LearnedScore

FEW = 400
"""With fewer images than this, scores that learn are cross-fitted."""
FOLDS = 5
ALL = -1
"""The group of images that are ranked among the images of all groups."""
OTHERS = -2
"""The group of images that are ranked among the images of all groups that are too small on their own."""
CLIP = 0.9
"""p-values above this count as this: so a score that finds nothing unusual can't outvote the others."""
TOLERANCE = 1e-9
"""Sums that differ by less are equal, whatever the order in which they were added."""
CHUNK = 2**20
"""Numbers at a time: 8 MB."""


def combination(p: Array) -> Array:
    """Return the sum over J parts of tan(pi (1/2 - min(p, 0.9))), (..., J) to (...): high for outliers.

    The Cauchy combination (Liu & Xie, 2020), with its terms bounded from below: each part can take away at
    most 3.08.

    >>> combination(np.array([[0.5, 0.5], [0.01, 1.0]])).round(4)
    array([ 0.    , 28.7428])
    """
    return _terms(p).sum(-1)


def _terms(p: Array) -> Array:
    return np.tan(math.pi * (0.5 - np.minimum(p, CLIP)))


class CombinedRanks:
    """Combined p-values, from J scores of n held-out images that rise with outlyingness, (n, J).

    With a new image there are n + 1 images. By each score, each of them has a p-value among all n + 1, and
    these have a :func:`combination`. The p-value of the new image is the share of the n + 1 images whose
    combination is at least as large. As all of them are treated alike, it is valid: if the new image is
    exchangeable with the held-out ones, it is at most t with a probability of at most t, for every t, with
    ties, and however the scores depend on each other. The scores must not be fitted to the held-out images.

    Example:
        >>> ranks = CombinedRanks(np.random.default_rng(0).normal(size=(99, 2)))
        >>> ranks.p_values(np.array([[0.0, 0.0], [9.0, 9.0]])) <= 0.01
        array([False,  True])
    """

    def __init__(self, held_out: Array) -> None:
        self._held_out = checked_held_out(held_out, 2)
        n, columns = len(self._held_out), np.ascontiguousarray(self._held_out.T)
        self._ordered = np.sort(columns, axis=1)  # (J, n)
        # among the held-out images, itself included
        rank = np.stack([n - np.searchsorted(a, v) for a, v in zip(self._ordered, columns, strict=True)])
        # if the new image has a lower score, and what is added if its score is at least as high
        lower = _terms(rank / (n + 1))
        added = _terms((rank + 1) / (n + 1)) - lower  # never positive
        base = lower.sum(0)
        order = np.argsort(base, kind="stable")
        self._columns, self._added, self._base = columns[:, order], added[:, order], base[order]
        least = self._base
        for column in self._added:
            least = least + column
        # of the images from each place on, the smallest sum if the new image has higher scores
        self._smallest = np.minimum.accumulate(least[::-1])[::-1]

    def __len__(self) -> int:
        return len(self._held_out)

    def p_values(self, scores: Array) -> Array:
        """Return the p-values of N images from their scores (N, J), (N,): 1 / (n + 1), ..., 1.

        A combination lies between those with lower and with higher scores of the new image. It is added up
        only where these lie on both sides of the new one, which is rare. The memory is bounded.
        """
        rows = self._checked(scores)
        rows = rows - rounding(rows)
        least = self._combined(rows) - TOLERANCE
        first = self._base.searchsorted(least)
        after = np.maximum(self._smallest.searchsorted(least), first)
        counts = len(self) - after
        size = max(1, CHUNK // len(self))
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            counts[part] += self._between(rows[part], least[part], first[part], after[part])
        return (1 + counts) / (len(self) + 1)

    def _between(self, rows: Array, least: Array, first: Array, after: Array) -> Array:
        """Return how many held-out images from ``first`` to ``after`` have at least this combination."""
        if len(rows) == 1:
            return self._at_least(rows[0], least[0], slice(int(first[0]), int(after[0]))).sum()
        lengths = after - first
        image = np.repeat(np.arange(len(rows)), lengths)
        place = np.arange(len(image)) + np.repeat(first - (lengths.cumsum() - lengths), lengths)
        large = self._at_least(rows[image].T, least[image], place)
        return np.bincount(image[large], minlength=len(rows))

    def _at_least(self, scores: Array, least: Array, place: Any) -> Array:
        """Return whether held-out images have this combination, given the J scores of new ones."""
        sums = self._base[place]
        for score, held_out, added in zip(scores, self._columns, self._added, strict=True):
            sums = sums + (score >= held_out[place]) * added[place]
        return sums >= least

    def statistic(self, scores: Array) -> Array:
        """Return the :func:`combination` of the p-values that N images have by each score, (N,).

        It is finer than the p-value, for curves; images beyond all held-out ones by every score are equal.
        """
        return self._combined(self._checked(scores))

    def _checked(self, scores: Array) -> Array:
        rows = checked(scores, 2)
        if rows.shape[1] != len(self._ordered):
            raise CandidError(
                f"The ranks are of {len(self._ordered)} scores per image, not of {rows.shape[1]}."
            )
        return rows

    def _combined(self, rows: Array) -> Array:
        below = np.array([a.searchsorted(v) for a, v in zip(self._ordered, rows.T, strict=True)])
        return combination((1 + len(self) - below.T) / (len(self) + 1))

    @property
    def held_out(self) -> Array:
        """The scores of the held-out images, (n, J)."""
        return self._held_out


class Combined(Detector):
    """The detector of the combined score: :class:`CombinedRanks` of several scores per image, (N, J).

    >>> rows = np.random.default_rng(0).normal(size=(199, 3))
    >>> Combined().fit(rows).smallest_p_value
    0.005
    """

    _ranks: CombinedRanks | None = None

    def fit(self, held_out: Array) -> Self:
        """Rank the held-out images."""
        self._ranks = CombinedRanks(held_out)
        return self

    def score(self, statistic: Array) -> Array:
        """Return the combination of p-values."""
        return fitted(self._ranks).statistic(statistic)

    def p_value(self, statistic: Array) -> Array:
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

    def among_others(self, held_out: Array) -> Array:
        """Return the p-value that each of the held-out images has among the others, (n,).

        >>> Combined().among_others(np.array([[1.0], [3.0], [2.0], [0.0]]))
        array([0.75, 0.25, 0.5 , 1.  ])
        """
        n, columns = len(held_out), held_out.T
        ranks = [n - np.searchsorted(np.sort(column), column) for column in columns]
        combined = combination(np.stack(ranks, 1) / n)
        return (p_values(combined - TOLERANCE, combined) * (n + 1) - 1) / n

    def state(self) -> dict[str, Array]:
        """Return the held-out scores."""
        return {"held_out": fitted(self._ranks).held_out}

    def restored(self, state: Mapping[str, Array]) -> Self:
        """Rank the held-out images again, which is fast."""
        return self.fit(state["held_out"])


@dataclass(frozen=True)
class Standard:
    """Centres and scales of J scores, from images that will not be ranked."""

    centre: Array
    scale: Array

    @classmethod
    def of(cls, values: Array) -> "Standard":
        """Return the medians and the interquartile ranges of scores (n, J)."""
        low, centre, high = np.quantile(np.asarray(values, np.float64), [0.25, 0.5, 0.75], axis=0)
        return cls(centre, np.where(high > low, (high - low) / 1.349, 1.0))

    def sum(self, values: Array) -> Array:
        """Return the sum of the standardised scores of N images, (N, J) to (N,).

        >>> Standard(np.zeros(2), np.ones(2)).sum(np.array([[1.0, 2.0]]))
        array([3.])
        """
        return ((values - self.centre) / self.scale).sum(1)


def new_detector(score: Score) -> Detector:
    """Return the detector of a score, which has still to be fitted."""
    if not isinstance(score.detector, str):
        return score.detector()
    return Combined() if score.detector == "Combined" else getattr(conformal, score.detector)()


@dataclass(frozen=True)
class Ranking:
    """A score, what it has learned, and the held-out images that rank it: these had no part in the fit."""

    score: Score
    learned: "Mapping[str, LearnedScore]"
    """The parts of the score that learned from other images, by name."""
    values: Array
    """The statistic of the held-out images, (n,) or (n, d): see :meth:`Score.of`."""
    groups: Array
    """Their groups, (n,)."""
    classes: Array
    """Their true classes, or the predicted ones if the true ones are unknown, (n,)."""
    fixed: CombinedRanks | None = None
    """Ranks among further images, which make one fixed score of several; None if there is one score, or if
    the ranks of several are combined exactly."""
    first: Array | None = None
    """Whether each is the first of its copies, (n,); None if there are no copies."""
    small: frozenset[int] = frozenset()
    """Groups that are too small to be ranked in: their images are ranked among those of all of them."""
    detectors: dict[int, Detector] = field(default_factory=dict, repr=False, compare=False)
    """By group; those that are not there yet are fitted when they are first needed."""

    def statistic(self, columns: Columns) -> Array:
        """Return the statistic of N images, (N,) or (N, d).

        Among fixed ranks, each score counts as at least as high as it is but for rounding: so that it has the
        same rank however it is computed.
        """
        values = self.parts(columns)
        if self.fixed is None:
            return values
        values = values.astype(np.float64, copy=False)
        return -self.fixed.statistic(values - rounding(values))

    def parts(self, columns: Columns) -> Array:
        """Return the score of N images, (N,), or what is combined to it, (N, J)."""
        missing = {name: part for name, part in self.learned.items() if name not in columns}
        return self.score.of(columns.with_columns({n: part.score(columns) for n, part in missing.items()}))

    def of_held_out(self, columns: Columns) -> Array:
        """Return the statistic of held-out images as it is: only new ones count as less extreme."""
        values = self.parts(columns)
        return values if self.fixed is None else -self.fixed.statistic(values)

    def new_detector(self) -> Detector:
        """Return a detector that has still to be fitted."""
        return new_detector(self.score) if self.fixed is None else OneTailed()

    def count(self, group: int = ALL) -> int:
        """Return how many held-out images an image of a group is ranked among."""
        return self.new_detector().ranking_count(int(self.members(group).sum()))

    def members(self, group: int) -> Array:
        """Return which held-out images belong to a group, (n,)."""
        return members(self.groups, group, self.small)

    @cached_property
    def distinct(self) -> "Ranking":
        """The ranking among the first of all copies of each image; itself if there are no copies."""
        rows = self.first
        if rows is None:
            return self
        return replace(
            self,
            values=self.values[rows],
            groups=self.groups[rows],
            classes=self.classes[rows],
            first=None,
            detectors={},
        )

    def detector(self, group: int) -> Detector:
        """Return the detector of a group, or of all images."""
        if group not in self.detectors:
            self.detectors[group] = self.new_detector().fit(self.values[self.members(group)])
        return self.detectors[group]

    def p_values(self, values: Array, groups: Array) -> Array:
        """Return the p-values of N images with these statistics among held-out images of their groups."""
        p = np.empty(len(groups))
        for group, rows in by_group(groups):
            p[rows] = self.detector(group).p_value(values[rows])
        return p

    def as_extreme(self, values: Array, groups: Array) -> Array:
        """Return how many held-out images of its group are at least as extreme as each of N images, (N,)."""
        counts = np.zeros(len(groups))
        for group, rows in by_group(groups):
            if n := self.count(group):
                counts[rows] = np.rint(self.detector(group).p_value(values[rows]) * (n + 1)) - 1
        return counts


def members(groups: Array, group: int, small: frozenset[int]) -> Array:
    """Return which images belong to a group, (n,), by their groups; ``OTHERS`` are those of small groups."""
    if group == ALL:
        return np.ones(len(groups), bool)
    return np.isin(groups, list(small)) if group == OTHERS else groups == group


def ranked_p_values(rankings: Sequence[Ranking], statistics: Sequence[Array], groups: Array) -> Array:
    """Return the p-values of N images of these groups, (N,), from their statistics by each ranking.

    They are (1 + number of held-out images at least as extreme) / (n + 1). Of several rankings the numbers
    and n are added up: the cross-conformal p-value. With copies they are the larger one of those among all
    images and among distinct ones. Equal rows may be copies of an image, or images that look the same to a
    coarse score. The first kind counts once, the second one as often as it is there: the larger p-value is
    valid for both.
    """
    p = _p_values(rankings, statistics, groups)
    if all(ranking.first is None for ranking in rankings):
        return p
    return np.maximum(p, _p_values([ranking.distinct for ranking in rankings], statistics, groups))


def _p_values(rankings: Sequence[Ranking], statistics: Sequence[Array], groups: Array) -> Array:
    if len(rankings) == 1:
        return rankings[0].p_values(statistics[0], groups)
    count, total = np.ones((2, len(groups)))
    for ranking, values in zip(rankings, statistics, strict=True):
        count += ranking.as_extreme(values, groups)
        for group, rows in by_group(groups):
            total[rows] += ranking.count(group)
    return count / total


def by_group(groups: Array) -> Iterator[tuple[int, Any]]:
    """Yield each group, and the rows of its images."""
    if len(groups) == 1 or (len(groups) and (groups == groups[0]).all()):
        yield int(groups[0]), slice(None)
        return
    for group in np.unique(groups).tolist():
        yield group, groups == group


def fit_rankings(
    score: Score,
    columns: Columns,
    groups: Array,
    order: Callable[[int], Array] | None = None,
    promise: str = "average",
    series: Array | None = None,
    together: bool = False,
) -> list[Ranking]:
    """Return a score with the held-out images that rank it: several rankings if it is cross-fitted.

    Args:
        score: the score; what it has to learn is learned from images that don't rank it.
        columns: the held-out images.
        groups: the groups in which images are ranked, (n,).
        order: gives a random order of n images; by default it is made from digests of their rows.
        promise: what the false-alarm rate has to hold for; "confident" needs a score that is fixed before
            the images that rank it are seen.
        series: the series of each image, (n,), see :func:`series_of`; no series both fits and ranks.
        together: whether only one image of each series ranks others; else only copies count once.
    """
    series = series_of(columns) if series is None else series
    first, parts = firsts(series), score.parts(columns)
    learners = learning_scores(columns, parts)
    several = isinstance(new_detector(score), Combined) and (len(parts) > 1 or score.of(columns).shape[1] > 1)

    def ranking(
        rows: Array, learned: "Mapping[str, LearnedScore]", fixed: CombinedRanks | None = None
    ) -> Ranking:
        rows = rows[first[rows]] if together else rows
        return _ranking(score, learned, columns.rows(rows), groups[rows], fixed, first[rows])

    if not learners and (promise == "average" or not several):
        return [ranking(np.arange(len(first)), {})]
    if (count := int(first.sum())) < FEWEST_SERIES:
        raise CandidError(
            f"The held-out images are {count} distinct images or series, and some must fit the score that "
            f"others rank: give at least {FEWEST_SERIES}, of different objects, scenes or days."
        )
    order_of = shuffled_rows(columns, groups) if order is None else order(columns.images)
    rows = in_series(order_of, series)
    if learners and count < FEW and promise == "average":
        return _cross_fitted(score, learners, columns, rows, series, ranking)
    learned: dict[str, LearnedScore] = {}
    if learners:
        fitting, rows = halves(rows, series)
        learned = fit_learners(learners, columns.rows(fitting))
    if promise == "average" or not several:
        return [ranking(rows, learned)]
    fixing, rows = halves(rows, series)
    return [ranking(rows, learned, CombinedRanks(ranking(fixing, learned).values))]


def fit_learners(learners: Sequence[Score], columns: Columns) -> "dict[str, LearnedScore]":
    """Return scores that have learned from the same images; their covariance is computed once.

    Args:
        learners: scores that learn; see :func:`~candid.trust.scores.learning_scores`.
        columns: labelled images that will not rank these scores.

    Returns:
        What learned, by the name of the score.

    Example:
        >>> columns = Columns({"features": np.random.default_rng(0).normal(size=(27, 3))}, np.arange(27) % 3)
        >>> list(fit_learners(learning_scores(columns, ("knn", "pca-residual")), columns))
        ['knn', 'pca-residual']
    """
    new = {score.name: score.new_learner() for score in learners}
    if not new:
        return {}
    from candid.trust.gaussians import FitImages

    needed = dict.fromkeys(name for learner in new.values() for name in learner.columns)
    assert columns.labels is not None
    images = FitImages.of(needed, columns, columns.labels)
    return {name: learner.learn(images) for name, learner in new.items()}


def _ranking(
    score: Score,
    learned: "Mapping[str, LearnedScore]",
    columns: Columns,
    groups: Array,
    fixed: CombinedRanks | None,
    first: Array,
) -> Ranking:
    classes = columns["predicted"] if columns.labels is None else columns.labels
    ranking = Ranking(score, learned, np.empty(0), groups, classes, fixed, None if first.all() else first)
    return replace(ranking, values=ranking.of_held_out(columns), detectors={})


def _cross_fitted(
    score: Score,
    learners: Sequence[Score],
    columns: Columns,
    order: Array,
    series: Array,
    ranking: "Callable[[Array, Mapping[str, LearnedScore], CombinedRanks | None], Ranking]",
) -> list[Ranking]:
    """Return a ranking for each fold, made by the others.

    Also the ranks that combine several scores come from the others: for fold k, an image of fold l is scored
    by what the folds but k and l fitted.
    """
    fold = (np.diff(series[order], prepend=-1) != 0).cumsum() - 1
    fold %= FOLDS
    folds = [order[fold == k] for k in range(FOLDS)]
    scored: dict[tuple[int, int], Array] = {}
    for k, other in combinations(range(FOLDS), 2) if isinstance(new_detector(score), Combined) else ():
        learned = fit_learners(learners, columns.rows(order[(fold != k) & (fold != other)]))
        for row, column in ((k, other), (other, k)):
            scored[row, column] = ranking(folds[column], learned, None).values
    rankings = []
    for k, rows in enumerate(folds):
        values = [value for (row, _), value in scored.items() if row == k]
        fixed = CombinedRanks(np.concatenate(values)) if values else None
        rankings.append(ranking(rows, fit_learners(learners, columns.rows(order[fold != k])), fixed))
    return rankings
