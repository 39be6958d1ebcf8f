"""A photo model taken apart: the fitted head, and the photos of the classes that were taught to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.judging.calibrate import FEWEST_IMAGES, held_out_scores
from candid.judging.held_out import HeldOut
from candid.models.photo.known_photos import KnownPhotos
from candid.models.photo.model import PhotoModel
from candid.models.photo.revised import Photos, places, revised
from candid.models.photo.taught import Seen, TaughtClasses
from candid.training.photo_report import first_alike
from candid.training.remembered import PREFIX, Remembered, joined, left_out, numbered_apart, updated_scores

RECORD, PHOTOS, BEFORE = "taught", "taught.", "before."
"""The entry of the metadata that lists taught classes; what their photos and what the held-out scores
before the first of them are stored under."""


@dataclass(frozen=True)
class Pieces:
    """The parts of a photo model that changes are made to."""

    base: PhotoModel
    """The model without taught classes."""
    records: tuple[dict[str, Any], ...]
    """How each class was taught: name, photos, copies, source."""
    features: tuple[Array, ...]
    """The statistics of the photos of each taught class, (n, D) each."""
    keys: tuple[Array, ...]
    """The keys of these photos, (n,) each."""

    @classmethod
    def of(cls, model: PhotoModel) -> "Pieces":
        """Take a model apart."""
        numbers = range(model.config.taught)
        try:
            features = tuple(model.held_out[f"{PHOTOS}{number}.features"] for number in numbers)
            keys = tuple(model.held_out[f"{PHOTOS}{number}.keys"] for number in numbers)
        except KeyError as error:
            raise CandidError(
                "The model has lost the photos of its taught classes: start from the model without them."
            ) from error
        return cls(_untaught(model), tuple(model.metadata.get(RECORD, ())), features, keys)

    @property
    def names(self) -> tuple[str, ...]:
        """The taught classes."""
        return tuple(record["name"] for record in self.records)

    def with_class(self, record: dict[str, Any], features: Array, keys: Array) -> "Pieces":
        """Return them with one more taught class, or another version of a class that was taught."""
        records, photos, known = list(self.records), list(self.features), list(self.keys)
        if record["name"] in self.names:
            place = self.names.index(record["name"])
            records[place], photos[place], known[place] = record, features, keys
        else:
            records, photos, known = [*records, record], [*photos, features], [*known, keys]
        return Pieces(self.base, tuple(records), tuple(photos), tuple(known))

    def without(self, name: str) -> "Pieces":
        """Return them without a taught class."""
        kept = [i for i, known in enumerate(self.names) if known != name]
        records, features = tuple(self.records[i] for i in kept), tuple(self.features[i] for i in kept)
        return Pieces(self.base, records, features, tuple(self.keys[i] for i in kept))

    def model(self) -> tuple[PhotoModel, list[float]]:
        """Return the model, and the recall of each taught class on its photos, left out one by one."""
        if not self.records:
            return self.base, []
        return assembled(self.base, list(self.records), list(self.features), list(self.keys))


def calibrated(model: PhotoModel) -> bool:
    """Return whether ``model`` has held-out scores that those of remembered photos can't replace."""
    held_out, remembered = HeldOut.of(model), Remembered.of(model)
    if held_out is None:
        return False
    if remembered is None or held_out.learned:
        return True
    return not np.isin(remembered.keys, held_out.statistics["keys"]).all()


def directions(model: PhotoModel, features: Array) -> Array:
    """Return standardised statistics of unit length: for cosines."""
    x: Array = (features - model.centre) / model.scale
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def changed_base(
    base: PhotoModel,
    groups: Sequence[int],
    class_names: Sequence[str],
    new: Photos | None = None,
    keys: Array | None = None,
) -> tuple[PhotoModel, Seen | None]:
    """Return a model whose fitted classes were merged, removed or given more photos.

    Its held-out scores are those of the photos that it remembers, and of the new ones, each judged by a head
    that it was not added to. That also is the second value.

    Args:
        base: a model without taught classes.
        groups: the class that each of its classes becomes; -1 removes it.
        class_names: the classes afterwards.
        new: photos that are added.
        keys: their keys.
    """
    remembered = Remembered.of(base)
    if remembered is None:
        raise CandidError(
            "The model remembers no held-out photos, which its classes can't be changed without: train it "
            "again."
        )
    labels = np.asarray(groups)[remembered.labels]
    rows = labels >= 0
    kept = Seen(*(None if part is None else part[rows] for part in remembered.seen))  # type: ignore[arg-type]
    series = None if new is None else first_alike(directions(base, new.values))
    result = revised(base, groups, class_names, kept, labels[rows], new, series)
    made, training_keys = result.model, base.held_out.get("training_keys")
    seen, labels, all_keys = result.known, labels[rows], remembered.keys[rows]
    together = None if remembered.series is None else remembered.series[rows]
    if new is not None and keys is not None and result.new is not None and series is not None:
        old = np.arange(len(labels)) if together is None else together
        together = numbered_apart([old, series])
        seen, labels = joined([seen, result.new]), np.concatenate((labels, new.labels))
        all_keys = np.concatenate((all_keys, keys))
        if training_keys is not None:
            training_keys = np.unique(np.concatenate((training_keys, keys)))
    if together is not None and len(np.unique(together)) == len(together):
        together = None
    if base.tree is not None:
        members = [np.flatnonzero(np.asarray(groups) == y) for y in range(len(class_names))]
        made.tree = replace(base.tree, class_parents=tuple(map(base.tree.cover, members)))
    made.thumbnails = _thumbnails(base, made, np.asarray(groups))
    if training_keys is not None:
        made.held_out = {"training_keys": training_keys}
    memory = Remembered(seen, labels, all_keys, together)
    if len(labels) >= FEWEST_IMAGES:
        held_out = HeldOut.of(base)
        occasions = held_out is None or held_out.occasions or calibrated(base)
        scores = held_out_scores(memory.predictions(made), tree=made.tree)
        replace(scores, out_of_fold=True, occasions=occasions).attach(made)
    made.held_out |= memory.columns()
    return made, result.new


def _thumbnails(old: PhotoModel, new: PhotoModel, groups: Array) -> dict[str, Array]:
    """Return the photos that are kept with a model, for other classes and another head."""
    photos = old.known_photos
    if photos is None:
        return {}
    labels = groups[photos.labels]
    rows = np.flatnonzero(labels >= 0)
    files = [photos.file(int(row)) for row in rows]
    jpeg = np.frombuffer(b"".join(files), np.uint8)
    ends = np.cumsum([len(file) for file in files], dtype=np.int64)
    moved = places(old, new, photos.places[rows]).astype(np.float32)
    return KnownPhotos(jpeg, ends, labels[rows], moved).to_tensors() if len(rows) else {}


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


def assembled(
    base: PhotoModel, records: list[dict[str, Any]], features: list[Array], keys: list[Array]
) -> tuple[PhotoModel, list[float]]:
    """Return ``base`` with taught classes, and the recall of each on its own photos, left out one by one."""
    z = [base.fitted_part(photos.astype(np.float64)).z for photos in features]
    taught = TaughtClasses.of(z, base.known.span)._asdict()
    weights = {f"taught_{name}": values.astype(np.float32) for name, values in taught.items()}
    made = _copy(base, [record["name"] for record in records], weights)
    series = [first_alike(directions(base, photos)) for photos in features]
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
        occasions = held_out is None or held_out.occasions or calibrated(base)
        replace(scores, out_of_fold=True, occasions=occasions).attach(made)
    made.held_out |= {BEFORE + name: each for name, each in before.items()}
    for c in range(len(records)):
        made.held_out |= {f"{PHOTOS}{c}.features": features[c], f"{PHOTOS}{c}.keys": keys[c]}
    return made, recalls
