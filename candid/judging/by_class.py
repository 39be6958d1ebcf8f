"""Results by class: recall, precision, coverage, what is called novel, and what each class is taken for.

This is the one place that computes these tables. Training, evaluation, the report on the photos, cards and
audits show them.
"""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from candid._support.numbers import Array
from candid._support.text import listed, percent, plural
from candid.inference.metrics import binomial_interval
from candid.inference.predictions import Predictions

MOST_CELLS = 12
"""Up to this number of classes, confusions are shown as a square table; of more, the most frequent ones."""
MOST_SHOWN = 20
"""Classes or confusions in a table that is not complete."""
MOST_WEAK = 3
"""Classes that are named as weak ones."""
FEWEST_TESTED = 5
"""A class with fewer images is not called weak or good: too little is known of it."""
LEAST_MORE = 10
"""The smallest number of photos that is worth asking for."""
HEAD = ("class", "images", "recall", "precision", "accepted", "of these right", "novel", "mostly taken for")
SHORT = {"of these right": "right", "mostly taken for": "taken for"}
"""Heads in a terminal, so that a table fits into 80 columns."""
Grid = tuple[list[str], list[list[str]]]
"""Head and rows of a table."""


class ClassResult(NamedTuple):
    """What a model says of the images of one class."""

    name: str
    images: int
    right: int
    """Images whose most probable class is this one."""
    predicted: int
    """Images of all classes that are taken for this one."""
    taken_for: tuple[tuple[str, int], ...]
    """Other classes that its images are taken for, and how many are; the most frequent first."""
    accepted: int | None = None
    """Its images that are accepted; None without verdicts."""
    accepted_wrong: int | None = None
    """Those of them that are taken for another class."""
    novel: int | None = None
    """Its images that are called novel; None without verdicts."""
    trained: int | None = None
    """Training images of the class; None if the number is not known."""

    @property
    def wrong(self) -> int:
        """Its images that are taken for another class."""
        return self.images - self.right

    @property
    def recall(self) -> float | None:
        """The share of its images that is recognised; None without images."""
        return self.right / self.images if self.images else None

    @property
    def precision(self) -> float | None:
        """The share of what is taken for it that is of this class; None if nothing is."""
        return self.right / self.predicted if self.predicted else None

    @property
    def coverage(self) -> float | None:
        """The share of its images that is accepted."""
        return None if self.accepted is None or not self.images else self.accepted / self.images

    @property
    def novel_share(self) -> float | None:
        """The share of its images that is called novel."""
        return None if self.novel is None or not self.images else self.novel / self.images

    @property
    def right_of_accepted(self) -> float | None:
        """The share of its accepted images that is recognised; None if none is accepted."""
        if not self.accepted or self.accepted_wrong is None:
            return None
        return 1 - self.accepted_wrong / self.accepted

    @property
    def highest_recall(self) -> float:
        """The upper end of the 95 % interval of its recall: it is low if the class is weak beyond doubt."""
        return binomial_interval(self.right, self.images, 0.95).high

    def to_dict(self) -> dict[str, Any]:
        """Return numbers and shares for ``metrics.json``."""
        return self._asdict() | {
            "taken_for": dict(self.taken_for[:MOST_CELLS]),
            "recall": self.recall,
            "precision": self.precision,
            "coverage": self.coverage,
            "novel_share": self.novel_share,
        }


@dataclass(frozen=True)
class ByClass:
    """Results by class of images whose classes are known.

    Example:
        >>> table = ByClass.of(np.array([0, 0, 1]), np.array([0, 1, 1]), ("apple", "pear"))
        >>> [(row.name, row.recall, row.precision) for row in table.rows]
        [('apple', 0.5, 1.0), ('pear', 1.0, 0.5)]
    """

    rows: tuple[ClassResult, ...]
    """One for each class, in the order of the classes."""

    @classmethod
    def of(
        cls,
        labels: Array,
        predicted: Array,
        class_names: Sequence[str],
        kinds: Sequence[str | None] | None = None,
        trained: Sequence[int] | None = None,
    ) -> "ByClass":
        """Count results.

        Args:
            labels: the true classes, (N,); images with the label -1 are left out.
            predicted: the most probable classes, (N,).
            class_names: the names of all classes.
            kinds: the verdicts, (N,); None for a model without them.
            trained: the number of training images of each class, if it is known.
        """
        count, labelled = len(class_names), labels >= 0
        labels, predicted = labels[labelled].astype(np.int64), predicted[labelled].astype(np.int64)
        pairs = _pairs(labels, predicted, count)
        accepted = novel = wrong = None
        if kinds is not None:
            words = np.array([str(kind) for kind in kinds])[labelled]
            accepts = words == "accept"
            accepted = np.bincount(labels[accepts], minlength=count)
            wrong = np.bincount(labels[accepts & (labels != predicted)], minlength=count)
            novel = np.bincount(labels[words == "novel"], minlength=count)
        images, taken = (np.bincount(classes, minlength=count) for classes in (labels, predicted))
        right = np.bincount(labels[labels == predicted], minlength=count)
        confused: dict[int, list[tuple[str, int]]] = {}
        for (label, other), number in sorted(pairs.items(), key=lambda pair: (-pair[1], pair[0])):
            confused.setdefault(label, []).append((class_names[other], number))
        return cls(
            tuple(
                ClassResult(
                    name,
                    int(images[y]),
                    int(right[y]),
                    int(taken[y]),
                    tuple(confused.get(y, ())),
                    *(
                        None if counts is None else int(counts[y])
                        for counts in (accepted, wrong, novel, trained)
                    ),
                )
                for y, name in enumerate(class_names)
            )
        )

    @classmethod
    def of_predictions(
        cls,
        predictions: Predictions,
        class_names: Sequence[str],
        kinds: Sequence[str | None] | None = None,
        trained: Sequence[int] | None = None,
    ) -> "ByClass":
        """Count the results of predictions; see :meth:`of`."""
        return cls.of(predictions.labels, predictions.logits.argmax(1), class_names, kinds, trained)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "ByClass":
        """Return what :meth:`to_dict` wrote."""
        rows = []
        for row in stored["classes"]:
            fields = {name: row.get(name) for name in ClassResult._fields}
            rows.append(ClassResult(**fields | {"taken_for": tuple(row["taken_for"].items())}))
        return cls(tuple(rows))

    def to_dict(self) -> dict[str, Any]:
        """Return everything for ``metrics.json``; confusions are in ``taken_for`` of each class."""
        return {"classes": [row.to_dict() for row in self.rows], "sentences": self.sentences()}

    def renamed(self, names: Mapping[str, str]) -> "ByClass":
        """Return the same results with new names of classes, by the old one."""
        rows = (
            row._replace(
                name=names.get(row.name, row.name),
                taken_for=tuple((names.get(other, other), count) for other, count in row.taken_for),
            )
            for row in self.rows
        )
        return ByClass(tuple(rows))

    @property
    def judged(self) -> bool:
        """Whether there are verdicts."""
        return any(row.accepted is not None for row in self.rows)

    @property
    def tested(self) -> list[ClassResult]:
        """The classes that have images."""
        return [row for row in self.rows if row.images]

    @property
    def accuracy(self) -> float:
        """The share of all images that is right."""
        return sum(row.right for row in self.rows) / max(1, sum(row.images for row in self.rows))

    def ranked(self) -> list[ClassResult]:
        """Return the classes that have images, the weakest first: by the highest recall that is plausible."""
        return sorted(self.tested, key=lambda row: (row.highest_recall, -row.wrong, row.name))

    def weakest(self, most: int = MOST_WEAK) -> list[ClassResult]:
        """Return classes whose recall is certainly below the accuracy, or else the one with the lowest."""
        ranked = [row for row in self.ranked() if row.wrong and row.images >= FEWEST_TESTED]
        certain = [row for row in ranked if row.highest_recall < self.accuracy]
        return (certain or ranked[:1])[:most]

    def confusions(self, most: int | None = None) -> list[tuple[str, str, int]]:
        """Return the true class, the class that it is taken for, and how many images; most frequent first."""
        confusions = [(row.name, other, count) for row in self.rows for other, count in row.taken_for]
        return sorted(confusions, key=lambda confusion: (-confusion[2], confusion[:2]))[:most]

    def sentences(self) -> list[str]:
        """Return the weakest classes with what they are taken for and what would help."""
        tested, weak = self.tested, self.weakest()
        few = [row.name for row in tested if row.images < FEWEST_TESTED]
        said = [f"weakest class: {self._sentence(row)}" for row in weak[:1]]
        said += [f"weak class: {self._sentence(row)}" for row in weak[1:]]
        if few:
            more = [f"{len(few) - MOST_WEAK} more classes"] if len(few) > MOST_WEAK else []
            said.append(
                f"fewer than {FEWEST_TESTED} images of {listed(few[:MOST_WEAK] + more)}: too few to say how "
                "well a class is recognised"
            )
        if not weak and len(few) < len(tested):
            said.append("every image of the other classes is right" if few else "every image is right")
        return said

    def _sentence(self, row: ClassResult) -> str:
        """Return the numbers of one class.

        >>> apples = ClassResult("Apples", 100, 98, 130, (("Pear", 2),), trained=200)
        >>> pear = ClassResult("Pear", 108, 74, 76, (("Apples", 32), ("Melon", 2)), trained=25)
        >>> ByClass((apples, pear))._sentence(pear)
        'Pear: 74 of 108 right, 32 taken for Apples; trained on 25 photos: add about 50'
        """
        text = f"{row.name}: {row.right:,} of {row.images:,} right"
        if row.taken_for:
            other, count = row.taken_for[0]
            text += f", {count:,} taken for {other}"
        if row.accepted_wrong:
            text += f"; {plural(row.accepted_wrong, 'wrong one is', 'wrong ones are')} accepted"
        if row.trained is None:
            return text
        more = self.helpful(row)
        text += f"; trained on {plural(row.trained, 'photo')}"
        if more:
            return f"{text}: add about {more}"
        return f"{text}, as many as others have: check the labels of this class and of what it is taken for"

    def helpful(self, row: ClassResult) -> int:
        """Return how many more training photos to ask for, a rule of thumb; 0 if a class has enough.

        A class with fewer photos than the median class is brought to the median, but at most to three times
        its number; the class that it is mostly taken for counts as the median if it has more.
        """
        trained = {other.name: other.trained for other in self.rows if other.trained is not None}
        if row.trained is None or not trained:
            return 0
        rival = trained.get(row.taken_for[0][0], 0) if row.taken_for else 0
        enough = max(int(np.median(list(trained.values()))), rival)
        more = min(enough - row.trained, 2 * row.trained)
        if more < 0.2 * row.trained:
            return 0
        return max(LEAST_MORE, round(more, -1) if more >= 2 * LEAST_MORE else more)

    def table(self, most: int | None = MOST_SHOWN) -> Grid:
        """Return head and rows, shares in percent: the weakest classes first, at most ``most`` of them."""
        judged = self.judged
        kept = [i for i, name in enumerate(HEAD) if judged or name not in HEAD[4:7]]
        rows = [_cells(row) for row in self.ranked()[:most]]
        head = [f"{name} (%)" if name in HEAD[2:7] else name for name in HEAD]
        return [head[i] for i in kept], [[row[i] for i in kept] for row in rows]

    def for_terminal(self, title: str, most: int = MOST_SHOWN) -> tuple[str, list[str], list[list[str]]]:
        """Return a title, and :meth:`table` with a head of short words, which the title explains."""
        head, rows = self.table(most)
        title += ", the weakest first"
        if len(self.tested) > most:
            title += f"; the weakest {most} of {len(self.tested):,}"
        title += "; shares in %" + ", right: of accepted ones" * self.judged
        names = (name.removesuffix(" (%)") for name in head)
        return title, [SHORT.get(name, name) for name in names], rows

    def confusion_table(self) -> Grid:
        """Return a square table, true classes down and predicted ones across; of many classes, a list."""
        names = [row.name for row in self.rows]
        if len(names) > MOST_CELLS:
            rows = [[true, other, f"{count:,}"] for true, other, count in self.confusions(MOST_SHOWN)]
            return ["true class", "taken for", "images"], rows
        rows = []
        for row in self.rows:
            counts = dict(row.taken_for) | {row.name: row.right}
            rows.append([row.name, *(f"{counts[name]:,}" if counts.get(name) else "·" for name in names)])
        return ["true \\ taken for", *names], rows

    @property
    def is_square(self) -> bool:
        """Whether :meth:`confusion_table` is the whole table."""
        return len(self.rows) <= MOST_CELLS

    def csv_rows(self) -> Iterator[Sequence[object]]:
        """Yield a head, and a row for each class with an empty cell for what is not known."""
        yield "class", "images", "recall", "precision", "coverage", "right_of_accepted", "novel", "taken_for"
        for row in self.rows:
            shares = (row.recall, row.precision, row.coverage, row.right_of_accepted, row.novel_share)
            yield row.name, row.images, *shares, "; ".join(f"{name} ({n})" for name, n in row.taken_for)

    def html(self) -> str:
        """Return both tables as HTML, without a page around them."""
        parts = [_html_table(self.table(None)), f"<h3>{self.confusion_title}</h3>"]
        return "\n".join([*parts, _html_table(self.confusion_table(), square=self.is_square)])

    @property
    def confusion_title(self) -> str:
        """What :meth:`confusion_table` shows."""
        if self.is_square:
            return "Images of each class (down) by the class that they are taken for (across)"
        return "The most frequent confusions"


def _pairs(labels: Array, predicted: Array, classes: int) -> dict[tuple[int, int], int]:
    """Return how many images of a class are taken for another one, by both."""
    wrong = labels != predicted
    numbers, counts = np.unique(labels[wrong] * classes + predicted[wrong], return_counts=True)
    return {divmod(int(pair), classes): int(n) for pair, n in zip(numbers, counts, strict=True)}


def _cells(row: ClassResult) -> list[str]:
    shares = (row.recall, row.precision, row.coverage, row.right_of_accepted, row.novel_share)
    mostly = ", ".join(f"{name} ({count:,})" for name, count in row.taken_for[:2])
    return [row.name, f"{row.images:,}", *(percent(share, sign=False) for share in shares), mostly]


def _html_table(grid: Grid, square: bool = False) -> str:
    head, rows = grid
    body = []
    for i, row in enumerate(rows):
        cells = []
        for j, cell in enumerate(row[1:], 1):
            style = ' class="right"' if square and i == j - 1 else ""
            cells.append(f"<td{style}>{html.escape(cell)}</td>")
        body.append(f'<tr><th scope="row">{html.escape(row[0])}</th>{"".join(cells)}</tr>')
    names = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in head)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(body)}</tbody></table>"
