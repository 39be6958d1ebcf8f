"""Trees of classes: kinds above classes, such as "terrier" above 26 breeds, for answers that are less exact.

An image that several classes fit gets a short list of them, or the smallest kind that covers them all.
"""

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from candid._support.errors import CandidError, did_you_mean
from candid._support.numbers import Array

LIST = 3
"""Up to this number of classes an answer lists them; more are covered by a kind."""
NAMED = 150
"""A kind of more classes says nothing: it has no name in an answer."""


@dataclass(frozen=True)
class Tree:
    """Kinds above M classes; every kind but the root lies below one other kind.

    Args:
        names: the names of the kinds.
        parents: by kind, the number of the kind above it; -1 for the root.
        class_parents: by class, the number of the kind above it, (M,).

    Example:
        >>> above = {"cat": "animal", "dog": "animal", "animal": "thing", "car": "thing"}
        >>> tree = Tree.of(above, ("cat", "dog", "car"))
        >>> tree.names, tree.kind(tree.cover([0, 1])), tree.kind(tree.cover([0, 2]))
        (('thing', 'animal'), 'animal', None)
    """

    names: tuple[str, ...]
    parents: tuple[int, ...]
    class_parents: tuple[int, ...]

    def __post_init__(self) -> None:
        kinds = range(len(self.names))
        whole = len(self.parents) == len(self.names) and all(
            parent in kinds for parent in (*self.parents[1:], *self.class_parents)
        )
        if not whole or self.parents[0] != -1 or any(p >= i for i, p in enumerate(self.parents)):
            raise CandidError(
                "This is not a tree: each kind must lie below an earlier one, the root below none."
            )

    @classmethod
    def of(
        cls, above: Mapping[str, str], class_names: Sequence[str], names: Mapping[str, str] | None = None
    ) -> "Tree":
        """Return a tree from the kind above each class and each kind.

        Kinds with one child are skipped, since they cover nothing more than that child.

        Args:
            above: the kind above each class and kind; the root is above others and below none.
            class_names: the classes, in the order of the model.
            names: what kinds are called, where that is not their key.

        Raises:
            CandidError: if it is no tree of these classes.
        """
        paths = [_path(above, name) for name in class_names]
        _check(above, class_names, {path[0] for path in paths})
        children: dict[str, set[str]] = {}
        for path in paths:
            for kind, child in pairwise(path):
                children.setdefault(kind, set()).add(child)
        kept = [[kind for kind in path[:-1] if len(children[kind]) > 1] for path in paths]
        numbers: dict[str, int] = {}
        parents: list[int] = []
        for path in kept:
            for parent, kind in zip((None, *path), path, strict=False):
                if kind not in numbers:
                    numbers[kind] = len(numbers)
                    parents.append(-1 if parent is None else numbers[parent])
        shown = tuple((names or {}).get(kind, kind) for kind in numbers)
        return cls(shown, tuple(parents), tuple(numbers[path[-1]] for path in kept))

    @classmethod
    def read(cls, path: str | os.PathLike[str], class_names: Sequence[str]) -> "Tree":
        """Return the tree in a CSV file: on each line a class or a kind, and the kind above it."""
        above: dict[str, str] = {}
        try:
            with Path(path).open(newline="", encoding="utf-8") as file:
                rows = [[cell.strip() for cell in row] for row in csv.reader(file) if any(row)]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise CandidError(f"The tree '{path}' can't be read: {error}.") from error
        for number, row in enumerate(rows, 1):
            if len(row) != 2 or not all(row):
                raise CandidError(
                    f"Line {number} of '{path}' must be a class or a kind, a comma and the kind above it, "
                    f"such as 'tabby,cat', not '{','.join(row)[:60]}'."
                )
            if above.setdefault(row[0], row[1]) != row[1]:
                raise CandidError(
                    f"'{row[0]}' stands below '{above[row[0]]}' and below '{row[1]}' in '{path}': keep one "
                    "of these lines."
                )
        return cls.of(above, class_names)

    @classmethod
    def from_dict(cls, entry: Any, classes: int | None = None) -> "Tree":
        """Return the tree that :meth:`to_dict` described, of this number of classes."""
        try:
            names, parents, class_parents = (
                tuple(entry[key]) for key in ("names", "parents", "class_parents")
            )
            tree = cls(tuple(map(str, names)), tuple(map(int, parents)), tuple(map(int, class_parents)))
        except (KeyError, TypeError, ValueError) as error:
            raise CandidError(f"The tree of classes can't be read ({error}): restore it.") from error
        if classes not in (None, len(tree.class_parents)):
            raise CandidError(
                f"The tree is of {len(tree.class_parents)} classes, not of {classes}: restore it."
            )
        return tree

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as JSON."""
        return {
            "names": list(self.names),
            "parents": list(self.parents),
            "class_parents": list(self.class_parents),
        }

    @cached_property
    def paths(self) -> Array:
        """The kinds above each class from the root down, (M, depth); -1 below the last."""
        above: list[tuple[int, ...]] = []
        for kind, parent in enumerate(self.parents):
            above.append((*above[parent], kind) if kind else (0,))
        paths = [above[kind] for kind in self.class_parents]
        table = np.full((len(paths), max(map(len, paths))), -1, np.int32)
        for row, path in zip(table, paths, strict=True):
            row[: len(path)] = path
        return table

    @cached_property
    def counts(self) -> Array:
        """How many classes each kind covers, by number."""
        return np.bincount(self.paths[self.paths >= 0], minlength=len(self.names))

    def cover(self, classes: Sequence[int] | Array) -> int:
        """Return the number of the smallest kind that covers these classes."""
        return int(self.covers(np.asarray(classes))[-1])

    def covers(self, order: Array) -> Array:
        """Return the smallest kinds that cover the first 1, 2, ... n classes of ``order``, (n,)."""
        paths = self.paths[order]
        shared = np.logical_and.accumulate((paths == paths[0]) & (paths >= 0), axis=1).sum(1)
        return paths[0, np.minimum.accumulate(shared) - 1]

    def covers_class(self, kind: int) -> Array:
        """Return which classes a kind covers, (M,)."""
        return (self.paths == kind).any(1)

    def kind(self, number: int) -> str | None:
        """Return the name of a kind, or None if it covers too much to be named."""
        return self.names[number] if number and self.counts[number] <= NAMED else None

    def reach(self, posterior: Array, labels: Array) -> tuple[Array, Array]:
        """Return from where on the answers about N images hold their true classes.

        With the posteriors in falling order, the answer that covers the first k classes holds the true class
        from some k on. For that k:

        Args:
            posterior: (N, M).
            labels: the true classes, (N,).

        Returns:
            The k-th largest posterior divided by the largest, (N,), and the sum of those before it, (N,).
        """
        ratio, mass = np.ones(len(labels)), np.zeros(len(labels))
        for i in np.flatnonzero(posterior.argmax(1) != labels):
            order = np.argsort(-posterior[i], kind="stable")
            k = int(np.flatnonzero(order == labels[i])[0])
            if k >= LIST:
                covered = (self.paths[labels[i]] == self.covers(order[: k + 1])[:, None]).any(1)
                covered[:LIST] = False
                k = int(covered.argmax())
            ratio[i] = posterior[i, order[k]] / posterior[i, order[0]]
            mass[i] = posterior[i, order[:k]].sum()
        return ratio, mass


def _path(above: Mapping[str, str], name: str) -> list[str]:
    """Return the kinds from the root down to a class, and the class."""
    path = [name]
    while path[-1] in above:
        parent = above[path[-1]]
        if parent in path:
            circle = " > ".join((*path[path.index(parent) :], parent)[::-1])
            raise CandidError(
                f"The tree goes round in a circle: {circle}; each kind must lie below one other."
            )
        path.append(parent)
    return path[::-1]


def _check(above: Mapping[str, str], class_names: Sequence[str], roots: set[str]) -> None:
    """Raise an error unless all classes, and no others, lie below one root."""
    kinds = set(above.values())
    if missing := [name for name in class_names if name not in above]:
        raise CandidError(
            f"The class '{missing[0]}' has no kind above it in the tree: add a line '{missing[0]},KIND'."
        )
    if inner := [name for name in class_names if name in kinds]:
        raise CandidError(
            f"'{inner[0]}' is a class and also a kind above others in the tree: rename the kind."
        )
    if unknown := [name for name in above if name not in kinds and name not in set(class_names)]:
        raise CandidError(
            f"The tree has '{unknown[0]}', which is no class of the model: "
            f"{did_you_mean(unknown[0], class_names)}"
        )
    for name in above:  # also where no class lies, there may be a circle
        _path(above, name)
    if len(roots) > 1:
        first, second, *_ = sorted(roots)
        raise CandidError(
            f"The tree has {len(roots)} roots, such as '{first}' and '{second}': put one kind above them all."
        )
