"""Teach a photo model a new class from a few photos, and forget it again."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from candid._support.errors import CandidError, did_you_mean
from candid._support.numbers import Array
from candid._support.processes import launch
from candid._support.progress import SILENT, Progress
from candid._support.text import listed
from candid.data.splits import FileSplit
from candid.inference.predictions import Predictions
from candid.judging.examine import image_paths
from candid.judging.held_out import HeldOut
from candid.models import checkpoint, saving
from candid.models.photo.model import PhotoModel
from candid.models.photo.taught import FEWEST, TaughtClasses
from candid.models.protocol import require
from candid.training.features import Extraction, FeatureCache
from candid.training.photo_report import first_alike
from candid.training.remembered import PREFIX, Remembered, left_out, updated_scores

RECORD, PHOTOS, BEFORE = "taught", "taught.", "before."
"""The entry of the metadata that lists taught classes; what their photos and what the held-out scores
before the first of them are stored under."""
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
DISCARDED = (
    "the held-out scores that 'candid calibrate' stored are for the old classes and are not kept: run "
    "'candid calibrate' on the new model"
)
Photos = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


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

    def sentences(self) -> list[str]:
        """Return what a user should know before the model is saved."""
        copies = f" ({self.copies} copies left out)" if self.copies else ""
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
        price = f"the price: mean recall of the known classes {100 * before:.1f} % -> {100 * after:.1f} %"
        price += " on held-out photos"
        worst = min(changes, key=lambda name: changes[name])
        if changes[worst] < 0:
            was, now = self.recalls[worst]
            price += f", most of '{worst}' ({100 * was:.1f} % -> {100 * now:.1f} %)"
        return [*sentences, price]


def teach(
    model: Any,
    classes: Mapping[str, Photos],
    *,
    out: str | os.PathLike[str] | None = None,
    progress: Progress = SILENT,
) -> TeachResult:
    """Add classes to a photo model, each from five photos or more, in seconds and without the old photos.

    The ratios of the posteriors of the known classes stay exactly as they were. Held-out scores are updated;
    each photo of a new class is scored by a class that it was left out of.

    Args:
        model: a photo model or its folder, which stays as it is.
        classes: for each new name its photos: a folder, a pattern such as ``"new/*.jpg"``, or files.
        out: the folder for the model with the new classes; nothing is saved if it is None.
        progress: where to show messages and bars.

    Returns:
        The new model, what is known of each new class, and the price in recall of the known classes.

    Raises:
        CandidError: if the model is not a photo model, a name exists, or there are too few different photos.

    Example:
        >>> import candid
        >>> candid.teach("cifar10-resnet", {"gadget": "photos/gadget"})
        Traceback (most recent call last):
            ...
        candid._support.errors.CandidError: Only a photo model can be taught a class, and this is ...
    """
    loaded: PhotoModel = require(checkpoint.resolve(model), "teach", "be taught a class")
    target = _target(out)
    _check_names(loaded, classes)
    lessons, records = [], list(loaded.metadata.get(RECORD, []))
    features, keys = _taught_photos(loaded)
    for name, photos in classes.items():
        new, new_keys, copies = _different(loaded, name, photos, progress)
        features, keys = [*features, new], [*keys, new_keys]
        accepted_as, accepted = _accepted(loaded, new)
        one = _one_object(loaded, new)
        lessons.append(Lesson(name, len(new), copies, _shown(photos), 0.0, accepted_as, accepted, one))
        records.append({"name": name, "photos": len(new), "copies": copies, "source": _shown(photos)})
    made, recalls = _assembled(_untaught(loaded), records, features, keys)
    latest = recalls[len(recalls) - len(lessons) :]
    lessons = [replace(lesson, recall=recall) for lesson, recall in zip(lessons, latest, strict=True)]
    result = TeachResult(made, tuple(lessons), _price(loaded, made), _calibrated(loaded))
    for sentence in result.sentences():
        progress.log(sentence)
    if target is not None:
        saving.save(made, target)
    return result


def forget(
    model: Any, name: str, *, out: str | os.PathLike[str] | None = None, progress: Progress = SILENT
) -> PhotoModel:
    """Remove a class that a photo model was taught; without its last one the model is exactly as before.

    Args:
        model: a photo model or its folder, which stays as it is.
        name: the class.
        out: the folder for the model without it; nothing is saved if it is None.
        progress: where to show messages.

    Returns:
        The model without the class.

    Raises:
        CandidError: if the model was not taught this class.

    Example:
        >>> import candid
        >>> candid.forget("cifar10-resnet", "cat")
        Traceback (most recent call last):
            ...
        candid._support.errors.CandidError: Only a photo model can forget a class, and this is ...
    """
    loaded: PhotoModel = require(checkpoint.resolve(model), "teach", "forget a class")
    target = _target(out)
    records = list(loaded.metadata.get(RECORD, []))
    names = [record["name"] for record in records]
    if name not in names:
        hint = did_you_mean(name, names) if names else "no class was taught to it."
        raise CandidError(f"'{name}' was not taught to this model: {hint}")
    features, keys = _taught_photos(loaded)
    number = names.index(name)
    for each in (records, features, keys):
        del each[number]
    base = _untaught(loaded)
    made = _assembled(base, records, features, keys)[0] if records else base
    progress.log(f"forgot '{name}': {listed(made.class_names)}")
    if _calibrated(loaded):
        progress.log(DISCARDED)
    if target is not None:
        saving.save(made, target)
    return made


def _calibrated(model: PhotoModel) -> bool:
    """Return whether ``model`` has held-out scores that those of remembered photos can't replace."""
    held_out, remembered = HeldOut.of(model), Remembered.of(model)
    if held_out is None:
        return False
    if remembered is None or held_out.learned:
        return True
    return not np.isin(remembered.keys, held_out.statistics["keys"]).all()


def _target(out: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder to save to, which must not have a model yet."""
    if out is None:
        return None
    folder = Path(out)
    if (folder / checkpoint.RECORD).exists() or (folder / checkpoint.RUN).exists():
        raise CandidError(f"'{folder}' already has a model: choose another --out.")
    return folder


def _check_names(model: PhotoModel, classes: Mapping[str, Photos]) -> None:
    if not classes:
        raise CandidError("There is no class to teach: give NAME=FOLDER.")
    for name in classes:
        if name in model.class_names:
            raise CandidError(f"The model has a class '{name}' already: choose another name.")
        if not name.strip():
            raise CandidError("A class needs a name: give NAME=FOLDER.")


def _different(model: PhotoModel, name: str, photos: Photos, progress: Progress) -> tuple[Array, Array, int]:
    """Return the statistics and keys of the different photos of a class, and how many copies there were."""
    sources = [photos] if isinstance(photos, str | os.PathLike) else list(photos)
    paths = tuple(image_paths([os.fspath(each) for each in sources]))
    if len(paths) < FEWEST:
        raise CandidError(f"'{name}' has too few photos ({len(paths)}): give at least {FEWEST}.")
    split = FileSplit(paths, np.zeros(len(paths), np.int64))
    cache = FeatureCache(model.eye, progress)
    extract = Extraction(model.eye, cache, launch(1, network=False), progress, skip_bad=True)
    features = extract(split, f"photos of {name}")
    for line in features.skipped:
        progress.log(f"left out {line}")
    if len(features) < FEWEST:
        raise CandidError(f"Only {len(features)} photos of '{name}' can be read: give at least {FEWEST}.")
    x = _directions(model, features.values)
    kept: list[int] = []
    for i in range(len(x)):
        if not kept or float((x[kept] @ x[i]).max()) < COPY:
            kept.append(i)
    if len(kept) < FEWEST:
        raise CandidError(
            f"The photos of '{name}' are copies of each other: {len(kept)} of {len(x)} differ, and {FEWEST} "
            "are needed."
        )
    count = min(MOST, len(kept))
    rows = np.array(kept)[np.arange(count) * len(kept) // count]
    return features.values[rows], features.keys[rows], len(x) - len(kept)


def _directions(model: PhotoModel, features: Array) -> Array:
    """Return standardised statistics of unit length: for cosines."""
    x: Array = (features - model.centre) / model.scale
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


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


def _shown(photos: Photos) -> str:
    return os.fspath(photos) if isinstance(photos, str | os.PathLike) else f"{len(photos)} files"


def _taught_photos(model: PhotoModel) -> tuple[list[Array], list[Array]]:
    """Return the statistics and the keys of the photos of each class that was taught before."""
    numbers = range(model.config.taught)
    try:
        return (
            [model.held_out[f"{PHOTOS}{number}.features"] for number in numbers],
            [model.held_out[f"{PHOTOS}{number}.keys"] for number in numbers],
        )
    except KeyError as error:
        raise CandidError(
            "The model has lost the photos of its taught classes: start from the model without them."
        ) from error


def _untaught(model: PhotoModel) -> PhotoModel:
    """Return the model as it was before classes were taught; itself if none were."""
    if not model.config.taught:
        return model
    made = _copy(model, (), {})
    made.held_out = {
        name.removeprefix(BEFORE): column
        for name, column in model.held_out.items()
        if name.startswith((BEFORE, PREFIX))
    }
    made.metadata = {name: value for name, value in model.metadata.items() if name != RECORD}
    return made


def _copy(model: PhotoModel, names: Sequence[str], taught: Mapping[str, Array]) -> PhotoModel:
    """Return the fitted part of ``model`` with the taught classes ``names``, whose weights are ``taught``."""
    count = model.config.fitted
    config = replace(model.config, classes=count + len(names), taught=len(names))
    made = PhotoModel(config, (*model.class_names[:count], *names), model._eye)
    made.thumbnails, made.folder = model.thumbnails, model.folder
    if model.tree is not None:  # a taught class has no kind but the root
        parents = (*model.tree.class_parents[:count], *(0 for _ in names))
        made.tree = replace(model.tree, class_parents=parents)
    fitted = {name: values for name, values in model.state().items() if not name.startswith("taught_")}
    made.load_state({**fitted, **taught})
    return made


def _assembled(
    base: PhotoModel, records: list[dict[str, Any]], features: list[Array], keys: list[Array]
) -> tuple[PhotoModel, list[float]]:
    """Return ``base`` with taught classes, and the recall of each on its own photos, left out one by one."""
    z = [base.fitted_part(photos.astype(np.float64)).z for photos in features]
    taught = TaughtClasses.of(z, base.known.span)._asdict()
    weights = {f"taught_{name}": values.astype(np.float32) for name, values in taught.items()}
    made = _copy(base, [record["name"] for record in records], weights)
    series = [first_alike(_directions(base, photos)) for photos in features]
    unseen = left_out(made, features, series)
    recalls = [
        float((seen.logits.argmax(1) == base.config.fitted + c).mean()) for c, seen in enumerate(unseen)
    ]
    remembered = Remembered.of(base)
    made.metadata = {**base.metadata, RECORD: records}
    made.held_out = {name: each for name, each in base.held_out.items() if name.startswith(PREFIX)}
    before = {name: each for name, each in base.held_out.items() if name not in made.held_out}
    if "training_keys" in base.held_out:
        made.held_out["training_keys"] = np.unique(np.concatenate((base.held_out["training_keys"], *keys)))
    if remembered is not None:
        held_out = HeldOut.of(base)
        scores = updated_scores(made, remembered, unseen, keys, series)
        # what is remembered was taken on these occasions, whatever images calibrated the model
        occasions = held_out is None or held_out.occasions or _calibrated(base)
        replace(scores, out_of_fold=True, occasions=occasions).attach(made)
    made.held_out |= {BEFORE + name: each for name, each in before.items()}
    for c in range(len(records)):
        made.held_out |= {f"{PHOTOS}{c}.features": features[c], f"{PHOTOS}{c}.keys": keys[c]}
    return made, recalls


def _price(before: PhotoModel, after: PhotoModel) -> dict[str, tuple[float, float]]:
    """Return the recall of the fitted classes on the held-out photos, before and after."""
    remembered = Remembered.of(after)
    if remembered is None:
        return {}
    count = before.config.fitted
    pairs = []
    for model in (before, after):
        logits = remembered.seen.logits
        if model.config.taught:
            logits = model.known.extended(remembered.seen, model.taught).logits
        pairs.append(remembered.recalls(logits, count))
    return {
        name: (was, now)
        for name, was, now in zip(before.class_names, *pairs, strict=False)
        if was is not None and now is not None
    }
