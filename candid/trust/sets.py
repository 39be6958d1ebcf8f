"""Class sets: which classes an answer names, how often its true class is among them, posteriors by name."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
FEW_NAMES = 64
"""Up to this number of classes, their names are sorted at once."""
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


def names_one(largest: Array, second: Array, ratio: Array, confidence: float) -> Array:
    """Return for which of N images :func:`answers` names one class, from the two largest posteriors, (N,).

    >>> names_one(np.array([0.52, 0.9]), np.array([0.48, 0.06]), np.array([0.95, 0.95]), 0.8)
    array([False,  True])
    """
    return (second / largest < ratio) & (largest >= confidence)


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

    def unmeasured(self, cut: float) -> int:
        """Return how many classes were taught from too few images for a bound of their own."""
        if self.taught is None:
            return 0
        _, counts = np.unique(self.taught[self.first & (self.taught != OLD_CLASS)], return_counts=True)
        return sum(not rejected_ranks(count, cut) for count in counts.tolist()) if cut < 1 else len(counts)

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


class Posterior(Mapping[str, float]):
    """p(class | image) by class name, falling; the classes are sorted when they are first listed.

    >>> posterior = Posterior(("cat", "dog"), np.array([0.1, 0.9]))
    >>> posterior.label, dict(posterior)
    ('dog', {'dog': 0.9, 'cat': 0.1})
    """

    __slots__ = ("_names", "_shares", "_values")

    def __init__(self, names: tuple[str, ...], values: Array) -> None:
        self._names, self._values = names, values
        self._shares: dict[str, float] | None = None

    @classmethod
    def of(cls, shares: Mapping[str, float]) -> "Posterior":
        """Return the posterior with these shares."""
        return cls(tuple(shares), np.array(list(shares.values()), np.float64))

    @property
    def label(self) -> str:
        """The most probable class."""
        return self._names[int(self._values.argmax())]

    @property
    def largest(self) -> float:
        """The posterior of the most probable class."""
        return float(self._values.max())

    def top(self, count: int) -> dict[str, float]:
        """Return the most probable classes; of equal ones, the first comes first."""
        classes = np.arange(len(self._values))
        if count < len(classes) // 8:
            classes = np.flatnonzero(self._values >= np.partition(self._values, -count)[-count])
        ordered = self._falling(classes)[:count]
        return dict(zip((self._names[y] for y in ordered), self._values[ordered].tolist(), strict=True))

    def among(self, named: Array) -> Sequence[str]:
        """Return the names of some classes, (M,), the most probable first; of many, sorted when needed."""
        classes = np.flatnonzero(named)
        return self.names(classes) if len(classes) <= FEW_NAMES else Names(self, classes)

    def names(self, classes: Array) -> tuple[str, ...]:
        """Return the names of classes by number, the most probable first."""
        return tuple(self._names[y] for y in self._falling(classes))

    def _falling(self, classes: Array) -> list[int]:
        """Return the numbers of some classes, the most probable first."""
        return classes[np.argsort(-self._values[classes], kind="stable")].tolist()

    def _all(self) -> dict[str, float]:
        """Return all classes, which are sorted once."""
        if self._shares is None:
            self._shares = self.top(len(self._names))
        return self._shares

    def __getitem__(self, name: str) -> float:
        if self._shares is not None:
            return self._shares[name]
        try:
            return float(self._values[self._names.index(name)])
        except ValueError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._names)

    def items(self) -> Any:
        """Return the classes and their posteriors, falling."""
        return self._all().items()

    def values(self) -> Any:
        """Return the posteriors, falling."""
        return self._all().values()

    def __repr__(self) -> str:
        return repr(self._all())


class Names(Sequence[str]):
    """The names of many classes, the most probable first: sorted when one of them is first needed.

    >>> posterior = Posterior(("cat", "dog"), np.array([0.1, 0.9]))
    >>> names = Names(posterior, np.array([0, 1]))
    >>> len(names), names[0], names == ("dog", "cat")
    (2, 'dog', True)
    """

    __slots__ = ("_classes", "_posterior", "_sorted")

    def __init__(self, posterior: Posterior, classes: Array) -> None:
        self._posterior, self._classes = posterior, classes
        self._sorted: tuple[str, ...] | None = None

    def _all(self) -> tuple[str, ...]:
        if self._sorted is None:
            self._sorted = self._posterior.names(self._classes)
        return self._sorted

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, place: Any) -> Any:
        return self._all()[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())
