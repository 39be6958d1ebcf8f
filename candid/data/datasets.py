"""One string to a data set to train on, to the part to evaluate a model on, or to any images."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from candid._support.errors import CandidError, did_you_mean
from candid._support.numbers import Array
from candid._support.old_formats import recorded_options
from candid._support.progress import SILENT, Progress
from candid._support.randomness import draws
from candid.data import Part, SplitRule
from candid.data.class_names import named
from candid.data.formats import PARTS, Query, format_of
from candid.data.images import Preprocessing, path_of
from candid.data.splits import FileSplit, IndexedSplit, Split

TEST_SHARE = 0.2
WANTED, USUAL_MOST = 100, 0.3
"""Held-out images that allow a level of 1 %, and the largest share of the images to hold out for that."""
LEAST, MOST = 30, 0.5
"""Held-out images without which there are no p-values, and the largest share to hold out for that."""


@dataclass(frozen=True)
class Dataset:
    """The parts of a data set. Training measures the model on ``val``."""

    train: Split
    val: Split
    test: Split | None
    class_names: tuple[str, ...]
    skipped: tuple[str, ...] = field(default=())
    """Files that were left out, each with the reason."""

    def preprocess(
        self, preprocessing: Preprocessing, skip_bad: bool = False, progress: Progress = SILENT
    ) -> "Dataset":
        """Return the data set with every split checked, and decoded if it is small."""
        parts: dict[str, Any] = {}
        skipped: list[str] = []
        for name in PARTS:
            split = getattr(self, name)
            if split is not None:
                parts[name], left_out = split.load(preprocessing, skip_bad, progress)
                skipped += left_out
        ready = replace(self, **parts, skipped=tuple(skipped))
        _check_classes(ready)
        return ready


class Chosen(NamedTuple):
    """A part of a data set and its name."""

    split: Split
    part: str


def open_dataset(
    spec: str,
    *,
    holdout: float = 0.05,
    split_seed: int = 0,
    split: SplitRule = "hash",
    val_spec: str | None = None,
    epoch_images: int | None = None,
    classes: int | None = None,
    only: Sequence[str] = (),
    nested: bool = False,
) -> Dataset:
    """Return the data set that ``spec`` names.

    Without a ``val`` folder, the share ``holdout`` of the training images of each class is not trained on:
    it chooses the best model and calibrates p-values. Without any second folder, a
    fifth of all images is the test set. In folders, a hash of each image decides, so that images that are
    added later move no other image; images in memory are shuffled.

    Args:
        spec: ``digits`` (bundled), tar shards, or a folder with ``train/<class>/...`` and ``val/<class>/...``
            and/or ``test/<class>/...``, with class folders alone, with MNIST-style idx files, or with
            CIFAR-10's binary or python batches; see ``candid.data.formats.FORMATS``.
        holdout: share of the training images to validate on.
        split_seed: changes which images these are.
        split: "shuffled" divides folders as older versions did.
        val_spec: tar shards to validate on.
        epoch_images: tar shards: images in an epoch.
        classes: tar shards: number of classes.
        only: use only the images of these classes, labelled in this order.
        nested: folders: the innermost ones are the classes.

    >>> digits = open_dataset("digits")
    >>> len(digits.train), len(digits.val), len(digits.test)
    (1368, 70, 359)
    >>> open_dataset("digits", only=("7", "1")).class_names
    ('7', '1')
    """
    format = format_of(spec)
    assert format.read is not None
    if format.divided is not None and (val_spec is not None or epoch_images is not None):
        raise CandidError(f"--val-data and --epoch-images are for tar shards: '{spec}' has none.")
    if format.divided is None:
        _check_only(spec, only)
    parts, class_names = format.read(Query(spec, True, classes, val_spec, epoch_images, nested))
    splits = {name: opened() for name, opened in parts.items()}
    if format.divided is not None:
        shares = {} if "val" in splits or "test" in splits else {"test": (TEST_SHARE, split_seed)}
        if "val" not in splits:
            shares["val"] = (holdout, split_seed + 1)
        by_hash = format.divided == "hash" and split == "hash"
        splits |= _divided(splits["train"], shares, class_names, by_hash)
    if only:
        class_names = tuple(named(class_names, only))
        splits = {name: of_classes(part, class_names, only) for name, part in splits.items()}
        class_names = tuple(only)
    dataset = Dataset(splits["train"], splits["val"], splits.get("test"), class_names)
    _check_classes(dataset)
    return dataset


def held_out_share(spec: str, share: float) -> float:
    """Return the share of the training images to hold out: ``share``, or more if that gives too few images.

    Args:
        spec: a data set, as in :func:`open_dataset`.
        share: what is held out of a large data set.

    >>> held_out_share("digits", 0.1), round(held_out_share("digits", 0.01), 3)
    (0.1, 0.07)
    """
    format = format_of(spec)
    assert format.read is not None
    if format.divided is None:
        return share
    parts = format.read(Query(spec, True)).parts
    if "val" in parts or "train" not in parts:
        return share
    images = len(parts["train"]()) * (1 if "test" in parts else 1 - TEST_SHARE)
    if images == 0:
        return share
    return max(share, min(USUAL_MOST, WANTED / images), min(MOST, LEAST / images))


def _check_only(spec: str, only: Sequence[str]) -> None:
    if only:
        raise CandidError(f"'{spec}' is read from end to end, with all its classes: choose some in folders.")


def of_classes(split: Split, class_names: Sequence[str], only: Sequence[str]) -> Split:
    """Return the images of the classes ``only``, labelled in this order."""
    assert isinstance(split, IndexedSplit)
    numbers = np.full(len(class_names), -1, np.int64)
    for number, name in enumerate(only):
        if name not in class_names:
            raise CandidError(f"The data has no class '{name}': {did_you_mean(name, class_names)}")
        numbers[class_names.index(name)] = number
    return split.subset(np.flatnonzero(numbers[split.labels] >= 0)).relabel(numbers)


def _divided(
    split: Split, shares: Mapping[str, tuple[float, int]], class_names: Sequence[str], by_hash: bool
) -> dict[str, Split]:
    """Divide ``split`` into train and one part for each of ``shares`` (fraction and seed)."""
    assert isinstance(split, IndexedSplit)
    digests = split.digests() if shares and by_hash and isinstance(split, FileSplit) else None
    parts: dict[str, Split] = {}
    for name, (fraction, seed) in shares.items():
        if not 0 < fraction < 1:
            raise CandidError(f"The share of images to hold out must lie between 0 and 1, not {fraction}.")
        chosen = _chosen(split.labels, fraction, seed, class_names, digests)
        rest = np.flatnonzero(~chosen)
        parts[name] = split.subset(np.flatnonzero(chosen))
        split, digests = split.subset(rest), digests and [digests[i] for i in rest.tolist()]
    return {"train": split, **parts}


def _chosen(
    labels: Array, fraction: float, seed: int, class_names: Sequence[str], digests: Sequence[bytes] | None
) -> Array:
    """Return which images are held out: about ``fraction`` of each class, at least one, but not all.

    By hash, an image is held out if its own number in [0, 1) is below ``fraction``. In a class without such
    an image it is the one with the smallest number, so a training image never becomes a held-out one.
    """
    chosen = np.zeros(len(labels), bool)
    for label, name in zip(count(), class_names):
        members = np.flatnonzero(labels == label)
        if len(members) == 1:
            raise CandidError(
                f"The class '{name}' has too few images to hold some out: add more or remove it."
            )
        if digests is None:
            order = draws(seed, label).permutation(len(members))
            wanted = round(fraction * len(members))
        else:
            numbers = np.array([_number(digests[i], seed) for i in members.tolist()])
            order, wanted = numbers.argsort(kind="stable"), int((numbers < fraction).sum())
        chosen[members[order[: min(max(1, wanted), len(members) - 1)]]] = True
    return chosen


def _number(digest: bytes, seed: int) -> float:
    """Return a number in [0, 1) that depends on an image's own bytes and the seed."""
    return int.from_bytes(hashlib.sha256(f"{seed} ".encode() + digest).digest()[:6], "big") / 2**48


def _check_classes(dataset: Dataset) -> None:
    for name in PARTS:
        split = getattr(dataset, name)
        if split is not None and not len(split):
            raise CandidError(f"The {name} part of the data has no images: add some.")
    present = dataset.train.classes_present()
    if len(dataset.class_names) < 2 or (present is not None and len(present) < 2):
        raise CandidError("The data has a single class: a classifier needs at least two.")
    for label, class_name in enumerate(dataset.class_names):
        if present is not None and label not in present:
            raise CandidError(f"The class '{class_name}' has no training images: add some or remove it.")


def open_part(
    spec: str,
    class_names: Sequence[str],
    part: Part | None = None,
    training: Mapping[str, Any] | None = None,
) -> Chosen:
    """Return the images of ``spec`` with labels among a model's ``class_names``.

    If the model was trained on only some classes, the images of the others are left out.

    Args:
        spec: a data set, as in :func:`open_dataset`.
        class_names: the classes of the model.
        part: by default the test images, else the ones to validate on, else all.
        training: the configuration of the model's training. Where a data set has no such parts, it decides
            which images were held out then.
    """
    training = training or {}
    only = training.get("only", ())
    format = format_of(spec)
    assert format.read is not None
    if format.divided is None:
        _check_only(spec, only)
    nested = training.get("tree") == "folders"
    parts, names = format.read(Query(spec, classes=len(class_names), nested=nested))
    part = _part(part, parts, format.divided is not None, trained_on(spec, training))
    if part in parts and (part != "train" or format.divided is None):
        return Chosen(_relabelled(parts[part](), names, class_names, spec, only), part)
    if part == "all":
        if len(parts) > 1:
            raise CandidError(f"'{spec}' has {' and '.join(parts)}: choose one of them.")
        (opened,) = parts.values()
        return Chosen(_relabelled(opened(), names, class_names, spec, only), "all")
    if format.divided is None:
        raise CandidError(f"'{spec}' has no {part} shards: choose {' or '.join(parts)}.")
    if not parts.keys() & {"train", "all"}:
        raise CandidError(f"'{spec}' has no {part} images: choose {' or '.join(parts)}.")
    options = {key: training[key] for key in ("holdout", "split_seed") if key in training}
    rule: SplitRule = recorded_options(training)["split"] if training else "hash"
    data = open_dataset(spec, **options, split=rule, nested=nested)
    if getattr(data, part) is None:
        raise CandidError(f"'{spec}' has no test images: choose another part of it, such as val.")
    return Chosen(_relabelled(getattr(data, part), data.class_names, class_names, spec, only), part)


def _part(part: Part | None, parts: Mapping[str, Any], divisible: bool, trained: bool) -> Any:
    """Return the part to open, by default the one that the model has not seen."""
    if divisible:
        return part or next((name for name in ("test", "val") if name in parts), "test" if trained else "all")
    if part == "val":  # without val shards, training validates on the test images
        return next((name for name in ("val", "test", "all") if name in parts), part)
    return part or next(name for name in ("all", "test", "val", "train") if name in parts)


def trained_on(spec: str, training: Mapping[str, Any]) -> bool:
    """Return whether ``spec`` is what the model was trained on.

    Only the folder's name is compared: data may have been moved, or named from a different folder.
    """
    if spec == "digits" or "data" not in training:
        return spec == "digits"
    return path_of(spec).resolve().name == path_of(training["data"]).resolve().name


def _relabelled(
    split: Split, names: Sequence[str], class_names: Sequence[str], spec: str, only: Sequence[str]
) -> Split:
    names = named(names, class_names)
    present = [name for name in names if name in only]
    if present:
        split, names = of_classes(split, names, present), present
    return split.relabel(_numbers(names, class_names, spec)) if names else split


def _numbers(names: Sequence[str], class_names: Sequence[str], spec: str) -> Array:
    """Return the model's labels of the classes ``names``: by name, or without names by their order.

    Folders of ImageNet may be called by the numbers of WordNet.
    """
    names = named(names, class_names)
    numbers = [str(i) for i in range(max(len(names), len(class_names)))]
    nameless = numbers[: len(class_names)] == list(class_names) or numbers[: len(names)] == list(names)
    if set(names) <= set(class_names):
        return np.array([class_names.index(name) for name in names], np.int64)
    if nameless and len(names) == len(class_names):
        return np.arange(len(names))
    unknown = next(name for name in names if name not in class_names)
    if nameless:
        raise CandidError(
            f"'{spec}' has {len(names)} classes and the model {len(class_names)} without the same names: "
            "give both the names (candid import --class-names)."
        )
    raise CandidError(
        f"'{spec}' has a class '{unknown}', unknown to the model: {did_you_mean(unknown, class_names)}"
    )


def open_images(spec: str, preprocessing: Preprocessing) -> Split:
    """Return any images, without labels: a folder, searched with all its subfolders, or a data set.

    Of a data set with several parts, they are the test images (or those to validate on). ``uniform-noise``
    and ``constant`` (one colour per image) are made here.
    """
    format = format_of(spec, labelled=False)
    if format.images is not None:
        return format.images(spec, preprocessing)
    assert format.read is not None
    parts = format.read(Query(spec)).parts
    return next(parts[name] for name in ("all", "test", "val", "train") if name in parts)().unlabelled()
