"""Train again into an existing model: which photos changed, and whether the new model is better."""

import csv
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.progress import Progress
from candid._support.text import as_csv, listed, percent, without_controls
from candid.data.splits import FileSplit, Split
from candid.inference.predictions import Predictions
from candid.models import checkpoint, saving
from candid.models.photo.model import PhotoModel
from candid.models.protocol import can
from candid.training.changes import Target, save_change, standing_changes, with_change
from candid.training.features import Features
from candid.training.pieces import Pieces
from candid.training.remembered import Remembered
from candid.training.run_folder import RunFolder

USED, CHANGED = "photos-used.csv", "photos-changed.csv"
"""The files that list the photos of a training, and those that differ from the training before."""
FEWEST = 20
"""Fewer photos than these say nothing of two models."""
MOST_NAMED = 3
"""Changes that a message names."""


class Used(NamedTuple):
    """One photo of a training."""

    part: str
    label: str
    path: str
    """Within the data set, so that a folder may move."""
    digest: str
    """The SHA-256 of the file."""


class Difference(NamedTuple):
    """One photo that differs from the training before."""

    what: str
    """"new", "moved", "other class" or "deleted"."""
    path: str
    label: str
    before: str
    """Where it was, or its class before."""


def used(parts: dict[str, Split], class_names: Sequence[str], data: str) -> list[Used]:
    """Return the photos of a training; none of tar shards, whose photos are no files."""
    root = data if Path(data).is_dir() else os.curdir
    return [
        Used(name, class_names[y], without_controls(os.path.relpath(path, root)), digest.hex())
        for name, part in parts.items()
        if isinstance(part, FileSplit)
        for path, y, digest in zip(part.paths, part.labels.tolist(), part.digests(), strict=True)
    ]


def differences(before: Sequence[Used], now: Sequence[Used]) -> list[Difference]:
    """Return what changed, by the content of the files.

    >>> a, b = Used("train", "pear", "pear/1.jpg", "0a"), Used("train", "apple", "apple/1.jpg", "0a")
    >>> [each.what for each in differences([a], [b, a._replace(digest="0b")])]
    ['other class', 'new']
    """
    known: dict[str, list[Used]] = {}
    for each in before:
        known.setdefault(each.digest, []).append(each)
    changed = []
    for each in now:
        same = known.get(each.digest, [])
        if not same:
            changed.append(Difference("new", each.path, each.label, ""))
        elif each.label not in {other.label for other in same}:
            changed.append(Difference("other class", each.path, each.label, same[0].label))
        elif each.path not in {other.path for other in same}:
            changed.append(Difference("moved", each.path, each.label, same[0].path))
    left = {each.digest for each in now}
    return changed + [Difference("deleted", e.path, e.label, "") for e in before if e.digest not in left]


def counted(changed: Sequence[Difference]) -> str:
    """Return how many photos changed, in words.

    >>> counted([Difference("new", "a", "pear", ""), Difference("deleted", "b", "pear", "")])
    '1 new and 1 deleted photo'
    """
    if not changed:
        return "no photos"
    kinds = ("new", "moved", "other class", "deleted")
    counts = [(kind, sum(each.what == kind for each in changed)) for kind in kinds]
    words = {"other class": "relabelled"}
    said = listed(f"{count:,} {words.get(kind, kind)}" for kind, count in counts if count)
    return f"{said} {'photo' if [count for _, count in counts if count][-1] == 1 else 'photos'}"


@dataclass(frozen=True)
class Earlier:
    """The model that a training replaces."""

    model: PhotoModel
    photos: tuple[Used, ...] | None
    """None if the run is of a version that did not list them."""
    folder: RunFolder
    record: str
    """The hash of the record of the model when the training began."""

    @classmethod
    def of(cls, folder: RunFolder) -> "Earlier | None":
        """Return the photo model of a run folder; None if it has none."""
        if not folder.has_best:
            return None
        record, model = saving.record_hash(folder.best), checkpoint.load(folder.best)
        if not can(model, "teach"):
            return None
        path, photos = folder.path / USED, None
        if path.is_file():
            with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
                rows = list(csv.reader(file))[1:]
            photos = tuple(Used(*row) for row in rows if len(row) == len(Used._fields))
        return cls(model, photos, folder, record)

    def results(self, digests: dict[str, str]) -> dict[str, Any] | None:
        """Return the results of the old run if photos and options are still the same; else None."""
        recorded = self.model.metadata.get("training", {}).get("digests", {})
        return self.folder.results if recorded == digests else None

    def shares(self, now: Sequence[Used]) -> bool:
        """Return whether any of the photos was in the training before."""
        return not {photo.digest for photo in self.photos or ()}.isdisjoint(photo.digest for photo in now)

    def keep(self) -> Path:
        """Copy the run folder next to itself, as NAME.1, NAME.2, ..., and return the copy."""
        place, number = self.folder.path, 1
        while (copy := place.with_name(f"{place.name}.{number}")).exists():
            number += 1
        try:
            shutil.copytree(place, copy)
        except OSError as error:
            raise CandidError(f"The old model can't be kept as '{copy}': {error}.") from error
        return copy

    def carried_over(self, model: PhotoModel, said: str, progress: Progress) -> PhotoModel:
        """Return a new model with the classes that the old one was taught, and with the record of changes."""
        old = Pieces.of(self.model)
        again = [name for name in old.names if name not in model.class_names]
        if again and self.model.config.eye_sha256 == model.config.eye_sha256:
            pieces = replace(Pieces.of(model), records=(), features=(), keys=())
            for name in again:
                place = old.names.index(name)
                pieces = pieces.with_class(old.records[place], old.features[place], old.keys[place])
            model, _ = pieces.model()
            progress.log(f"taught again from its photos: {listed(again)}")
        model.metadata = with_change(self.model, model, "train", said)
        return model

    def replace_with(self, model: PhotoModel) -> None:
        """Save a new model in place of the old one, which is kept for ``undo``."""
        save_change(model, Target(self.folder.best, in_place=True, expected=self.record), self.model)

    def lost(self) -> list[str]:
        """Return the changes since the training before that a new training does not have."""
        since: list[dict[str, Any]] = []
        for change in standing_changes(self.model):
            since = [] if change["what"] == "train" else [*since, change]
        return [each["text"] for each in since if each["what"] != "teach" or "more photos" in each["text"]]


class Comparison(NamedTuple):
    """The old and the new model on photos that neither was trained on."""

    photos: int
    before: float
    now: float
    out_of_fold: bool
    """Whether no photos were new to both, so that both are compared out of fold."""
    classes: dict[str, tuple[float, float]]
    """The recall of each class before and now."""

    def sentence(self) -> str:
        """Return it in words."""
        if self.out_of_fold:
            where = f"out of fold on {self.photos:,} photos, since too few are new to both"
        else:
            where = f"on {self.photos:,} photos that neither model was trained on"
        text = f"{where}: {percent(self.before)} right before, {percent(self.now)} now"
        moved = sorted(self.classes.items(), key=lambda each: -abs(each[1][1] - each[1][0]))
        shown = [
            f"{name} {percent(was)} -> {percent(now)}"
            for name, (was, now) in moved[:MOST_NAMED]
            if was != now
        ]
        return f"{text}; recall: {', '.join(shown)}" if shown else text


def compared(
    old: PhotoModel, new: PhotoModel, parts: dict[str, Features], predictions: dict[str, Predictions]
) -> Comparison | None:
    """Compare two models on photos of classes that both know; None if there are too few, or other eyes.

    Args:
        old: the model that is replaced.
        new: the new one.
        parts: the photos of each part.
        predictions: what heads of the new model that have not seen them say of the photos of each part.
    """
    if old.config.eye_sha256 != new.config.eye_sha256:
        return None
    trained = [model.held_out.get("training_keys", np.empty(0, np.int64)) for model in (old, new)]
    rows = [
        (part, predictions[name], ~np.isin(part.keys, np.concatenate(trained)))
        for name, part in parts.items()
        if name != "train"
    ]
    unseen = [
        (part.labels[kept], old.logits_of(part.values[kept]), said.logits[kept])
        for part, said, kept in rows
        if kept.any()
    ]
    if sum(len(labels) for labels, _, _ in unseen) >= FEWEST:
        labels, before, now = (np.concatenate(each) for each in zip(*unseen, strict=True))
        return _counted(old, new, labels, before, now, False)
    train, said = parts["train"], predictions["train"].logits
    remembered, logits = Remembered.of(old), np.full((len(train), len(old.class_names)), np.nan)
    fresh = ~np.isin(train.keys, trained[0])
    if fresh.any():
        logits[fresh] = old.logits_of(train.values[fresh])
    if remembered is not None:
        places = {key: i for i, key in enumerate(remembered.keys.tolist())}
        seen = remembered.seen
        if old.config.taught:
            seen = old.known.extended(seen, old.taught)
        for row, key in enumerate(train.keys.tolist()):
            if key in places and not fresh[row]:
                logits[row] = seen.logits[places[key]]
    judged = np.isfinite(logits).all(1)
    return _counted(old, new, train.labels[judged], logits[judged], said[judged], True)


def _counted(
    old: PhotoModel, new: PhotoModel, labels: Array, before: Array, now: Array, out_of_fold: bool
) -> Comparison | None:
    names = np.array(new.class_names)[labels]
    both = np.isin(names, old.class_names)
    if both.sum() < FEWEST:
        return None
    names = names[both]
    right = [
        np.array(model.class_names)[logits[both].argmax(1)] == names
        for model, logits in ((old, before), (new, now))
    ]
    classes = {
        str(name): (float(right[0][names == name].mean()), float(right[1][names == name].mean()))
        for name in np.unique(names)
    }
    return Comparison(len(names), float(right[0].mean()), float(right[1].mean()), out_of_fold, classes)


def lists(now: Sequence[Used], changed: Sequence[Difference]) -> dict[str, str]:
    """Return the files that list the photos of a training and what changed."""
    texts = {USED: as_csv([Used._fields, *now])}
    return texts | ({CHANGED: as_csv([Difference._fields, *changed])} if changed else {})
