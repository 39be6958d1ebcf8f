"""Class sets: which classes an answer names, and how often its true class is among them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from candid._support.numbers import Array
from candid.trust.conformal import rejected_ranks
from candid.trust.ranking import members
from candid.trust.scores import Columns
from candid.trust.tree import Tree

MASS_ROUNDING = 1e-12
"""Posteriors that add up to a confidence but for this do so."""
LIKELY = 64
"""Classes of an image that nearly always add up to its confidence."""
TAUGHT_BOUND = 0.05
"""The largest bound of a class that was taught, and that of one with too few photos for one of its own."""
OLD_CLASS = -1
"""In the column ``taught``: the image is of no class that was taught."""


def answers(
    posterior: Array, ratio: Array, confidence: float = 0.0, bounds: Mapping[int, float] | None = None
) -> Array:
    """Return which classes the answers about N images name, (N, M): the larger of two sets.

    - Class y is in the conformal set if its posterior, divided by the largest one of the image, is at least
      ``ratio``.
    - The other set has the most probable classes, until their posteriors add up to ``confidence``.

    The most probable class is always named.

    Args:
        posterior: (N, M).
        ratio: the smallest ratio of a class in the conformal set, (N,).
        confidence: the posterior that an answer has at least.
        bounds: the smallest ratio of classes that have one of their own, by number.

    Example:
        >>> answers(np.array([[0.52, 0.48, 0.0], [0.9, 0.06, 0.04]]), np.array([0.95, 0.95]), 0.8)
        array([[ True,  True, False],
               [ True, False, False]])
    """
    largest = posterior.max(1)
    ratios = posterior / largest[:, None]
    named: Array = ratios >= np.minimum(ratio, 1)[:, None]
    for y, bound in (bounds or {}).items():
        named[:, y] = ratios[:, y] >= min(bound, 1.0)
    if (unsure := np.flatnonzero(largest < confidence)).size:
        last = np.full(len(posterior), np.inf)
        last[unsure] = _last_of(posterior if unsure.size == len(last) else posterior[unsure], confidence)
        named |= posterior >= last[:, None]
    return named


def _last_of(posterior: Array, confidence: float, likely: int = LIKELY) -> Array:
    """Return the last of the largest posteriors of each image that add up to ``confidence``, (N,).

    Args:
        posterior: (N, M).
        confidence: what they add up to.
        likely: how many classes are sorted first; all of them where these do not suffice.
    """
    classes = posterior.shape[1]
    rows = np.partition(posterior, -likely, axis=1)[:, -likely:] if classes > 2 * likely else posterior
    falling = np.sort(rows, axis=1)[:, ::-1]
    count = (falling.cumsum(1) < confidence - MASS_ROUNDING).sum(1).clip(max=classes - 1)
    last = np.take_along_axis(falling, count.clip(max=falling.shape[1] - 1)[:, None], 1)[:, 0]
    if (more := np.flatnonzero(count == falling.shape[1])).size:
        last[more] = _last_of(posterior[more], confidence, classes)
    return last


@dataclass(frozen=True)
class Truths:
    """From where on the answers about n held-out images hold their true classes."""

    ratios: Array | None
    """The posteriors of the true classes, each divided by the largest of its image, (n,), or with a tree
    those from which on the answer holds the true class; None without labels."""
    groups: Array
    """The groups of the images, (n,)."""
    first: Array
    """Whether each is the first of its copies, (n,)."""
    taught: Array | None = None
    """The class that each image taught, (n,), ``OLD_CLASS`` if none."""
    small: frozenset[int] = frozenset()
    """Groups that are too small for levels of their own."""

    @classmethod
    def of(
        cls, columns: Columns, groups: Array, first: Array, confidence: float, tree: Tree | None
    ) -> "Truths":
        """Return those of held-out images; without a tree, the confidence makes no difference."""
        taught = columns.get("taught")
        if "true_posterior" not in columns:
            return cls(None, groups, first, taught)
        if tree is None:
            ratios = columns["true_posterior"] / columns["max_posterior"]
            return cls(ratios, groups, first, taught)
        if "kind_ratio" in columns:
            ratios, mass = columns["kind_ratio"], columns["kind_mass"]
        else:
            assert columns.labels is not None
            ratios, mass = tree.reach(columns["posterior"], columns.labels)
        ratios = np.where(mass < confidence - MASS_ROUNDING, 1.0, ratios)  # the confidence names it already
        return cls(ratios, groups, first, taught)

    def rows(self, rows: Array) -> "Truths":
        """Return those of some of the images."""
        ratios, taught = (None if part is None else part[rows] for part in (self.ratios, self.taught))
        return replace(self, ratios=ratios, taught=taught, groups=self.groups[rows], first=self.first[rows])

    def count(self, group: int) -> int:
        """Return how many distinct images of a group have a true class, no taught one; -1 without."""
        return -1 if self.ratios is None else int((self._members(group) & self.first).sum())

    def smallest_ratio(self, group: int, cut: float) -> float:
        """Return the ratio that at most a share ``cut`` of true classes is below."""
        if self.ratios is None:
            return 1.0
        return self._smallest(self._members(group), cut)

    def bounds(self, cut: float) -> dict[int, float]:
        """Return the same for each class that was taught: ``TAUGHT_BOUND`` at most.

        With too few images it is that. With more, their ratios may all be 1, if they show one object.
        """
        if self.taught is None or self.ratios is None:
            return {}
        bounds = {}
        for y in np.unique(self.taught[self.taught != OLD_CLASS]).tolist():
            rows = self.taught == y
            enough = rejected_ranks(int((rows & self.first).sum()), cut) > 0 if cut < 1 else True
            bounds[y] = min(self._smallest(rows, cut), TAUGHT_BOUND) if enough else TAUGHT_BOUND
        return bounds

    def _members(self, group: int) -> Array:
        rows = members(self.groups, group, self.small)
        return rows if self.taught is None else rows & (self.taught == OLD_CLASS)

    def _smallest(self, rows: Array, cut: float) -> float:
        """Return the quantile; with copies the smaller one of those with and without them."""
        assert self.ratios is not None
        smallest = []
        for ratios in (self.ratios[rows], self.ratios[rows & self.first]):
            rank = rejected_ranks(len(ratios), cut) if cut < 1 else len(ratios)
            smallest.append(float(np.partition(ratios, rank - 1)[rank - 1]) if rank else 0.0)
        return min(smallest)

    def state(self) -> dict[str, Array]:
        """Return all numbers, to be saved."""
        arrays = {"groups": self.groups, "true_ratios": self.ratios, "taught": self.taught}
        if not self.first.all():
            arrays["true_first"] = self.first
        return {name: array for name, array in arrays.items() if array is not None}

    @classmethod
    def restored(cls, arrays: Mapping[str, Array]) -> "Truths":
        """Return those whose :meth:`state` it was."""
        groups = arrays["groups"]
        first = arrays.get("true_first", np.ones(len(groups), bool))
        return cls(arrays.get("true_ratios"), groups, first.astype(bool), arrays.get("taught"))
