"""What a photo model remembers of held-out photos, so that a class can be taught without them."""

from dataclasses import dataclass

import numpy as np

from candid._support.numbers import Array
from candid.inference.predictions import LARGEST_HALF, Predictions
from candid.judging.calibrate import held_out_scores
from candid.judging.held_out import HeldOut
from candid.models.photo.head import ClosedForm, out_of_fold_z
from candid.models.photo.model import PhotoModel
from candid.models.photo.taught import Seen, TaughtClasses
from candid.trust.sets import OLD_CLASS

PREFIX = "remembered."
MOST = 800
"""Held-out photos that are remembered, evenly spread: 2.8 kB each, so that a model stays below 6 MB."""


@dataclass(frozen=True)
class Remembered:
    """What the fitted part of a head says of held-out photos that have labels."""

    seen: Seen
    labels: Array
    """(N,)."""
    keys: Array
    """A hash of the pixels of each photo, (N,)."""
    series: Array | None = None
    """The series of each photo, (N,); None if each is one of its own."""

    @classmethod
    def of(cls, model: PhotoModel) -> "Remembered | None":
        """Return what ``model`` remembers; None if it has no held-out photos or is of an earlier version."""
        stored = {name: each for name, each in model.held_out.items() if name.startswith(PREFIX)}
        if not stored:
            return None
        columns = {name.removeprefix(PREFIX): each for name, each in stored.items()}
        z, scores, logits, novelty = (columns[name].astype(np.float64) for name in Seen._fields[:4])
        seen = Seen(z, scores, logits, novelty, columns.get("terms"))
        return cls(seen, columns["labels"], columns["keys"], columns.get("series"))

    @classmethod
    def out_of_fold(cls, head: ClosedForm, values: Array, labels: Array, keys: Array) -> "Remembered":
        """Return what heads say of the photos of other folds, with the statistics ``values``, (N, D)."""
        fold = head.out_of_fold
        seen = Seen(out_of_fold_z(head, values), fold.scores, fold.logits, fold.novelty, None)
        return cls(seen, labels, keys)

    def columns(self) -> dict[str, Array]:
        """Return it as a model stores it; at most ``MOST`` photos, and z in half precision."""
        count = min(MOST, len(self.labels))
        rows = np.arange(count) * len(self.labels) // max(1, count)
        columns = {**self.seen._asdict(), "labels": self.labels, "keys": self.keys, "series": self.series}
        columns["z"] = self.seen.z.clip(-LARGEST_HALF, LARGEST_HALF).astype(np.float16)
        return {
            PREFIX + name: (
                each.astype(np.float32) if each.dtype == np.float64 and name != "terms" else each
            )[rows]
            for name, each in columns.items()
            if each is not None
        }

    def predictions(self, model: PhotoModel) -> Predictions:
        """Return the photos as predictions of a model without taught classes."""
        columns = {"novelty": self.seen.novelty.astype(np.float32), "keys": self.keys}
        if self.seen.terms is not None:
            columns["log_density_terms"] = self.seen.terms
        if self.series is not None:
            columns["series"] = self.series
        logits, names = self.seen.logits.astype(np.float32), ("",) * len(self.labels)
        return Predictions(names, self.labels, logits, model.log_priors, columns)

    def recalls(self, logits: Array, classes: int, among: Array) -> list[float | None]:
        """Return the recall of each fitted class; only photos ``among`` some count, (N,) bool."""
        right = logits.argmax(1) == self.labels
        members = (among & (self.labels == y) for y in range(classes))
        return [float(right[rows].mean()) if rows.any() else None for rows in members]


def left_out(model: PhotoModel, photos: list[Array], series: list[Array]) -> list[Seen]:
    """Return what ``model`` says of the photos of each taught class, each photo left out of its class.

    With it are left out the other photos of its series, if at least two photos remain.

    Args:
        model: with taught classes.
        photos: their statistics, (n, D) each.
        series: the series of the photos, (n,) each.
    """
    known, taught = model.known, _double(model.taught)
    opinions = []
    for number, features in enumerate(photos):
        seen = model.fitted_part(features.astype(np.float64))
        rows = []
        for i in range(len(features)):
            others = series[number] != series[number][i]
            if others.sum() < 2:
                others = np.arange(len(features)) != i
            again = TaughtClasses.of([seen.z[others]], known.span)
            for values, new in zip(taught, again, strict=True):
                values[number] = new[0]
            rows.append(known.extended(seen.at(i), taught))
        for values, whole in zip(taught, model.taught, strict=True):
            values[number] = whole[number]
        opinions.append(joined(rows))
    return opinions


def updated_scores(
    model: PhotoModel,
    remembered: Remembered,
    taught: list[Seen],
    keys: list[Array],
    series: list[Array],
) -> HeldOut:
    """Return the held-out scores of a model with taught classes; they have no tree.

    Args:
        model: the model.
        remembered: the held-out photos of the fitted classes.
        taught: photos of the taught classes, each left out of its class.
        keys: their keys.
        series: the series of the photos of each taught class.
    """
    old = model.known.extended(remembered.seen, _double(model.taught))
    everyone = joined([old, *taught])
    numbers = [np.full(len(each.z), model.config.fitted + c) for c, each in enumerate(taught)]
    labels = np.concatenate((remembered.labels, *numbers))
    columns = {
        "novelty": everyone.novelty.astype(np.float32),
        "keys": np.concatenate((remembered.keys, *keys)),
        "taught": np.where(labels < model.config.fitted, OLD_CLASS, labels),
    }
    if everyone.terms is not None:
        columns["log_density_terms"] = everyone.terms
    count = len(remembered.labels)
    together = numbered_apart([np.arange(count) if remembered.series is None else remembered.series, *series])
    if len(np.unique(together)) < len(together):
        columns["series"] = together
    logits = everyone.logits.astype(np.float32)
    predictions = Predictions(("",) * len(labels), labels, logits, model.log_priors, columns)
    return held_out_scores(predictions)


def numbered_apart(parts: list[Array]) -> Array:
    """Return the series of the photos of several parts, of which no two share one.

    >>> numbered_apart([np.array([0, 0, 3]), np.array([0, 1])])
    array([0, 0, 1, 2, 3])
    """
    numbered = [np.unique(part, return_inverse=True)[1] for part in parts]
    starts = np.cumsum([0, *(part.max(initial=-1) + 1 for part in numbered)])
    return np.concatenate([part + start for part, start in zip(numbered, starts, strict=False)])


def _double(taught: TaughtClasses) -> TaughtClasses:
    return TaughtClasses(*(values.astype(np.float64) for values in taught))


def joined(parts: list[Seen]) -> Seen:
    """Return all photos of ``parts``; without densities if a part has none."""
    columns = (
        None if any(column is None for column in same) else np.concatenate(same)
        for same in zip(*parts, strict=True)
    )
    return Seen(*columns)  # type: ignore[arg-type]
