"""Teach a photo model: a new class from a few photos, or more photos of a class that it knows."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.processes import launch
from candid._support.progress import SILENT, Progress
from candid._support.text import listed
from candid.data.splits import FileSplit
from candid.inference.predictions import Predictions
from candid.judging.examine import image_paths
from candid.judging.held_out import HeldOut
from candid.models import checkpoint
from candid.models.photo.model import PhotoModel
from candid.models.photo.revised import Photos
from candid.models.photo.taught import FEWEST
from candid.models.protocol import require
from candid.training.changes import DISCARDED, save_change, target_of, with_change
from candid.training.features import Extraction, FeatureCache
from candid.training.photo_report import first_alike
from candid.training.pieces import Pieces, calibrated, changed_base, directions
from candid.training.remembered import Remembered

MOST = 500
"""Photos of a taught class that are used."""
COPY = 0.995
"""Cosine of standardised statistics from which on a photo is a copy of another one.

It is stricter than the report on the data, which only shows what it finds: a copy is left out."""
ONE_OBJECT = 0.8
"""Photos whose spread is below this share of that of every known class look like one object.

Measured with three bundled models: 0.98 to 14 of ten photos of 23 new kinds, at least 0.81 of 5 or 10 photos
of a known class; below 0.8 in 32 of 38 sets of ten views of one photo that is like those of the known
classes."""
Sources = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Lesson:
    """How a class was taught."""

    name: str
    photos: int
    """The number of different photos."""
    copies: int
    """Photos that were left out because they nearly equal another one."""
    source: str
    recall: float
    """The share of its photos that is recognised when it is left out of its class."""
    accepted_as: str | None
    """The known class that most of the photos were accepted as before, if there is one."""
    accepted: int
    """How many photos were."""
    one_object: bool = False
    """Whether the photos resemble each other much more than photos of a known class do."""
    before: float | None = None
    """Of a class that the model knew: the share of these photos that it recognised before."""
    known: int = 0
    """Photos that were left out because the model was trained on them, or remembers them."""

    def sentences(self) -> list[str]:
        """Return what a user should know before the model is saved."""
        copies = f" ({self.copies} copies left out)" if self.copies else ""
        if self.before is not None:
            known = f" ({self.known} that the model has seen left out)" if self.known else ""
            return [
                f"{self.photos} more photos of '{self.name}'{copies}{known}: {100 * self.before:.0f} % of "
                f"them were recognised before, {100 * self.recall:.0f} % are when left out"
            ]
        sentences = [
            f"'{self.name}' from {self.photos} photos{copies}: {100 * self.recall:.0f} % of them are "
            "recognised when left out"
        ]
        if self.accepted_as is not None:
            sentences.append(
                f"{self.accepted} of {self.photos} photos of '{self.name}' were accepted as "
                f"'{self.accepted_as}' before: if they show that class, don't teach them as a new one"
            )
        if self.one_object:
            sentences.append(
                f"the photos of '{self.name}' look like one object: they resemble each other much more than "
                "photos of a known class do, so that left-out photos say little of others; teach it from "
                "photos of several objects"
            )
        if self.recall < 0.5:
            sentences.append(
                f"the photos of '{self.name}' are hardly a group: most are not recognised when left out; "
                "give more photos of one kind"
            )
        return sentences


@dataclass(frozen=True)
class TeachResult:
    """The result of :func:`candid.teach`."""

    model: PhotoModel
    """The model with the new classes; the one that it was made from stays as it is."""
    lessons: tuple[Lesson, ...]
    recalls: dict[str, tuple[float, float]]
    """Recall of each fitted class on the held-out photos, before and after; empty if none are remembered."""
    discarded: bool = False
    """Whether the model that it was made from has held-out scores of ``candid calibrate``: the new one has
    those of the photos that were held out in training, and of the new classes."""

    def sentences(self) -> list[str]:
        """Return what was learned, and the price of it."""
        sentences = [sentence for lesson in self.lessons for sentence in lesson.sentences()]
        if self.discarded:
            sentences.append(DISCARDED)
        if not self.recalls:
            return [
                *sentences,
                "the price is unknown: the model remembers no held-out photos; train it again",
            ]
        changes = {name: now - was for name, (was, now) in self.recalls.items()}
        before, after = (sum(pair[i] for pair in self.recalls.values()) / len(self.recalls) for i in (0, 1))
        for lesson in self.lessons:
            if lesson.before is not None and lesson.name in self.recalls:
                was, now = self.recalls[lesson.name]
                sentences.append(
                    f"recall of '{lesson.name}' {100 * was:.1f} % -> {100 * now:.1f} % on held-out photos"
                )
        price = f"the price: mean recall of the known classes {100 * before:.1f} % -> {100 * after:.1f} %"
        price += " on held-out photos"
        worst = min(changes, key=lambda name: changes[name])
        if changes[worst] < 0:
            was, now = self.recalls[worst]
            price += f", most of '{worst}' ({100 * was:.1f} % -> {100 * now:.1f} %)"
        return [*sentences, price]


def teach(
    model: Any,
    classes: Mapping[str, Sources],
    *,
    out: str | os.PathLike[str] | None = None,
    progress: Progress = SILENT,
) -> TeachResult:
    """Add classes to a photo model, or photos to classes that it knows, in seconds, without the old photos.

    A new class needs five photos. The ratios of the posteriors of the known classes stay exactly as they
    were. Photos of a class that the model was trained on change its counts, means and shared covariance as
    if they had been trained on together; see :mod:`candid.models.photo.revised`. Held-out scores are updated;
    each new photo is scored by a model that it was not taught to.

    Args:
        model: a photo model or its folder, which stays as it is.
        classes: for each name its photos: a folder, a pattern such as ``"new/*.jpg"``, files, or several of
            these.
        out: the folder for the new model; that of ``model`` replaces it, and :func:`candid.undo` takes that
            back. Nothing is saved if it is None.
        progress: where to show messages and bars.

    Returns:
        The new model, what is known of each class, and the price in recall of the known classes.

    Raises:
        CandidError: if the model is not a photo model, or there are too few different photos.

    Example:
        >>> import candid
        >>> candid.teach("cifar10-resnet", {"gadget": "photos/gadget"})
        Traceback (most recent call last):
            ...
        candid._support.errors.CandidError: Only a photo model can be taught a class, and this is ...
    """
    loaded: PhotoModel = require(checkpoint.resolve(model), "teach", "be taught a class")
    target = target_of(model, out)
    _check_names(classes)
    pieces, lessons, said = Pieces.of(loaded), [], []
    for name, photos in classes.items():
        is_known, source = name in loaded.class_names, _shown(photos)
        given = _different(loaded, name, photos, 1 if is_known else FEWEST, progress)
        new = given.values
        lesson = Lesson(name, len(new), given.copies, source, 0.0, None, 0, known=given.known)
        text = f"{len(new)} photos of a new class '{name}' from {source}"
        if is_known:
            text = f"{len(new)} more photos of '{name}' from {source}"
            right = loaded.logits_of(new).argmax(1) == loaded.class_names.index(name)
            lesson = replace(lesson, before=float(right.mean()))
        else:
            accepted_as, accepted = _accepted(loaded, new)
            one = _one_object(loaded, new)
            lesson = replace(lesson, accepted_as=accepted_as, accepted=accepted, one_object=one)
        pieces, recall = _with_photos(pieces, name, given, source)
        lessons.append(lesson if recall is None else replace(lesson, recall=recall))
        said.append(text)
    made, recalls = pieces.model()
    of_taught = dict(zip(pieces.names, recalls, strict=True))
    lessons = [replace(lesson, recall=of_taught.get(lesson.name, lesson.recall)) for lesson in lessons]
    made.metadata = with_change(loaded, made, "teach", f"taught {listed(said)}")
    result = TeachResult(made, tuple(lessons), _price(loaded, made), calibrated(loaded))
    for sentence in result.sentences():
        progress.log(sentence)
    save_change(made, target, loaded)
    return result


def _with_photos(pieces: Pieces, name: str, given: "_Given", source: str) -> tuple[Pieces, float | None]:
    """Return the pieces with more photos of a class; of a fitted class, how many of them are recognised.

    Each of these is judged by a head that it was not added to.
    """
    new, keys = given.values, given.keys
    if name in pieces.base.class_names:
        number, classes = pieces.base.class_names.index(name), pieces.base.class_names
        photos = Photos(new, np.full(len(new), number))
        base, seen = changed_base(pieces.base, range(len(classes)), classes, photos, keys)
        assert seen is not None
        return replace(pieces, base=base), float((seen.logits.argmax(1) == number).mean())
    copies, sources = given.copies, [source]
    if name in pieces.names:
        place = pieces.names.index(name)
        old = pieces.records[place]
        new, keys = (
            np.concatenate(both) for both in ((pieces.features[place], new), (pieces.keys[place], keys))
        )
        copies, sources = copies + old["copies"], [old["source"], source]
    record = {"name": name, "photos": len(new), "copies": copies, "source": ", ".join(sources)}
    return pieces.with_class(record, new, keys), None


def _check_names(classes: Mapping[str, Sources]) -> None:
    if not classes:
        raise CandidError("There is no class to teach: give NAME=FOLDER.")
    if not all(name.strip() for name in classes):
        raise CandidError("A class needs a name: give NAME=FOLDER.")


class NothingNewError(CandidError):
    """The model has seen all photos of a class that it should be taught."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The model has seen all of these photos of '{name}': there is nothing to add.")
        self.name = name
        """The class."""


class _Given(NamedTuple):
    """The different photos of a class that the model has not seen."""

    values: Array
    """Their statistics, (n, D)."""
    keys: Array
    copies: int
    """Photos that were left out because they nearly equal another one."""
    known: int
    """Photos that were left out because the model was trained on them, or remembers them."""


def _different(model: PhotoModel, name: str, photos: Sources, fewest: int, progress: Progress) -> _Given:
    """Return the different photos of a class, at least ``fewest``."""
    sources = [photos] if isinstance(photos, str | os.PathLike) else list(photos)
    paths = tuple(image_paths([os.fspath(each) for each in sources]))
    if len(paths) < fewest:
        raise CandidError(f"'{name}' has too few photos ({len(paths)}): give at least {fewest}.")
    split = FileSplit(paths, np.zeros(len(paths), np.int64))
    cache = FeatureCache(model.eye, progress)
    extract = Extraction(model.eye, cache, launch(1, network=False), progress, skip_bad=True)
    features = extract(split, f"photos of {name}")
    for line in features.skipped:
        progress.log(f"left out {line}")
    if len(features) < fewest:
        raise CandidError(f"Only {len(features)} photos of '{name}' can be read: give at least {fewest}.")
    seen = _seen_before(model, features.keys) if name in model.class_names else np.zeros(len(features), bool)
    if seen.all():
        raise NothingNewError(name)
    features, known = features.rows(~seen), int(seen.sum())
    kept = np.unique(first_alike(directions(model, features.values), COPY))
    if len(kept) < fewest:
        raise CandidError(
            f"The photos of '{name}' are copies of each other: {len(kept)} of {len(features)} differ, and "
            f"{fewest} are needed."
        )
    count = len(kept) if name in model.class_names[: model.config.fitted] else min(MOST, len(kept))
    rows = kept[np.arange(count) * len(kept) // count]
    return _Given(features.values[rows], features.keys[rows], len(features) - len(kept), known)


def _seen_before(model: PhotoModel, keys: Array) -> Array:
    """Return which photos the model was trained on, or remembers, (n,) bool."""
    remembered = Remembered.of(model)
    seen = np.isin(keys, model.held_out.get("training_keys", keys[:0]))
    return seen if remembered is None else seen | np.isin(keys, remembered.keys)


def _one_object(model: PhotoModel, features: Array) -> bool:
    """Return whether photos are much closer to each other than those of every known class, as whitened."""
    remembered = Remembered.of(model)
    if remembered is None:
        return False
    classes = [remembered.seen.z[remembered.labels == y] for y in range(model.config.fitted)]
    spreads = [_spread(z) for z in classes if len(z) >= FEWEST]
    z = model.fitted_part(features.astype(np.float64)).z
    return bool(spreads) and _spread(z) < ONE_OBJECT * min(spreads)


def _spread(z: Array) -> float:
    """Return half the mean squared distance of two of n photos, (n, D)."""
    return float(np.square(z - z.mean(0)).sum() / (len(z) - 1))


def _accepted(model: PhotoModel, features: Array) -> tuple[str | None, int]:
    """Return the class that more than half of the photos are accepted as, and how many; None without one."""
    held_out = HeldOut.of(model)
    if held_out is None:
        return None, 0
    outputs = model.outputs_of(features)
    images, unknown = np.zeros((len(features), 1)), np.full(len(features), -1)
    predictions = Predictions.of(outputs, model, (images, unknown, ("",) * len(features)))
    judged = held_out.rule().examine(predictions.statistics, predictions.paths, model.class_names)
    counts = Counter(each.label for each in judged if each.verdict == "accept")
    name, count = counts.most_common(1)[0] if counts else (None, 0)
    return (name, count) if 2 * count > len(features) else (None, 0)


def _shown(photos: Sources) -> str:
    return os.fspath(photos) if isinstance(photos, str | os.PathLike) else f"{len(photos)} files"


def _price(before: PhotoModel, after: PhotoModel) -> dict[str, tuple[float, float]]:
    """Return the recall of the fitted classes on the held-out photos that both remember."""
    memories = [Remembered.of(model) for model in (before, after)]
    if memories[0] is None or memories[1] is None:
        return {}
    keys = np.intersect1d(memories[0].keys, memories[1].keys)
    pairs = []
    for model, remembered in zip((before, after), memories, strict=True):
        assert remembered is not None
        logits = remembered.seen.logits
        if model.config.taught:
            logits = model.known.extended(remembered.seen, model.taught).logits
        pairs.append(remembered.recalls(logits, before.config.fitted, np.isin(remembered.keys, keys)))
    return {
        name: (was, now)
        for name, was, now in zip(before.class_names, *pairs, strict=False)
        if was is not None and now is not None
    }
