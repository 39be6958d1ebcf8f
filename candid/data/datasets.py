"""One string to a data set: its splits and its class names."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from candid._support.errors import CandidError, did_you_mean
from candid._support.progress import SILENT, Progress
from candid._support.randomness import generator
from candid.data import formats
from candid.data.images import EXTENSIONS, Preprocessing, path_of
from candid.data.splits import ArraySplit, FileSplit, IndexedSplit, ShardSplit, Split


@dataclass(frozen=True)
class Dataset:
    """A data set's parts; what is measured during training is measured on ``val``."""

    train: Split
    val: Split
    test: Split | None
    class_names: tuple[str, ...]
    skipped: tuple[str, ...] = field(default=())
    """Files that were left out, each with the reason."""

    def prepared(
        self, preprocessing: Preprocessing, skip_bad: bool = False, progress: Progress = SILENT
    ) -> "Dataset":
        """Every split checked, and decoded if it is small."""
        parts: dict[str, Any] = {}
        skipped: list[str] = []
        for name in ("train", "val", "test"):
            split = getattr(self, name)
            if split is not None:
                parts[name], more = split.prepared(preprocessing, skip_bad, progress)
                skipped += more
        prepared = replace(self, **parts, skipped=tuple(skipped))
        _check_classes(prepared)
        return prepared


def open_dataset(
    spec: str,
    *,
    holdout: float = 0.05,
    test_fraction: float = 0.2,
    split_seed: int = 0,
    val_spec: str | None = None,
    epoch_images: int | None = None,
    classes: int | None = None,
    only: Sequence[str] = (),
) -> Dataset:
    """The data set that ``spec`` names.

    ``digits`` (bundled), or a folder with: ``train/<class>/...`` and ``val/<class>/...`` and/or
    ``test/<class>/...``; class folders alone; MNIST-style idx files; CIFAR-10's binary or python batches.
    Or tar shards, see ``candid.data.shards.open_shards``; only they take ``val_spec``, ``epoch_images`` and
    ``classes``.

    Without a ``val`` folder, the share ``holdout`` of the training images is kept out of training, class
    by class, to choose the best model and to calibrate p-values. Without any second folder, the share
    ``test_fraction`` is the test set. Which images these are depends on ``split_seed`` alone. With ``only``,
    every part has just the images of these classes, labelled in this order.

    >>> digits = open_dataset("digits")
    >>> len(digits.train), len(digits.val), len(digits.test)
    (1368, 70, 359)
    >>> open_dataset("digits", only=("7", "1")).class_names
    ('7', '1')
    """
    from candid.data import shards

    if shards.is_shards(spec):
        shards_have_all_classes(spec, only)
        dataset = shards.open_shards(spec, val_spec, epoch_images, classes)
        _check_classes(dataset)
        return dataset
    if val_spec is not None or epoch_images is not None:
        raise CandidError(f"--val-data and --epoch-images are for tar shards: '{spec}' has none.")
    splits, class_names = _read(spec)
    if "val" not in splits and "test" not in splits:
        splits["train"], splits["test"] = _divided(splits["train"], test_fraction, split_seed, class_names)
    if "val" not in splits:
        splits["train"], splits["val"] = _divided(splits["train"], holdout, split_seed + 1, class_names)
    if only:
        splits = {name: of_classes(split, class_names, only) for name, split in splits.items()}
        class_names = tuple(only)
    dataset = Dataset(splits["train"], splits["val"], splits.get("test"), class_names)
    _check_classes(dataset)
    return dataset


def of_classes(split: IndexedSplit, class_names: Sequence[str], only: Sequence[str]) -> IndexedSplit:
    """The images of the classes ``only``, labelled in this order."""
    numbers = torch.full((len(class_names),), -1)
    for number, name in enumerate(only):
        if name not in class_names:
            raise CandidError(f"The data has no class '{name}': {did_you_mean(name, class_names)}")
        numbers[class_names.index(name)] = number
    kept = (numbers[split.labels] >= 0).nonzero().flatten()
    return replace(split.subset(kept), labels=numbers[split.labels[kept]])


def shards_have_all_classes(spec: str, only: Sequence[str]) -> None:
    """Classes can't be chosen from tar shards."""
    if only:
        raise CandidError(f"'{spec}' is read from end to end, with all its classes: choose some in folders.")


def _read(spec: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    return read_arrays(spec) or _read_image_folder(path_of(spec))


def read_arrays(spec: str) -> tuple[dict[str, ArraySplit], tuple[str, ...]] | None:
    """A data set in files of its own format, with its class names; None if ``spec`` is another folder."""
    if spec == "digits":
        return {"train": ArraySplit(*formats.read_digits())}, tuple(map(str, range(10)))
    folder = path_of(spec)
    if not folder.exists():
        raise CandidError(f"There is no data set or folder '{spec}': name a folder, or use 'digits'.")
    if not folder.is_dir():
        raise CandidError(f"'{spec}' is a file: name the folder of the data set.")
    if formats.has_idx(folder):
        arrays = formats.read_idx(folder)
        classes = int(max(part.labels.max() for part in arrays.values())) + 1
        return {k: ArraySplit(*part) for k, part in arrays.items()}, tuple(map(str, range(classes)))
    if formats.has_cifar(folder):
        arrays, class_names = formats.read_cifar(folder)
        return {k: ArraySplit(*part) for k, part in arrays.items()}, class_names
    return None


def _read_image_folder(folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    parts = {name: folder / name for name in ("train", "val", "test") if (folder / name).is_dir()}
    if "train" not in parts:
        if parts:
            raise CandidError(f"'{folder}' has {' and '.join(parts)} but no train folder: add it.")
        parts = {"train": folder}
    class_names = tuple(entry.name for entry in subfolders(parts["train"]))
    if len(class_names) < 2:
        raise CandidError(
            f"'{parts['train']}' has {len(class_names) or 'no'} class folder{'s'[: len(class_names) != 1]}: "
            "give at least two, each with the images of one class."
        )
    return {name: image_files(part, class_names) for name, part in parts.items()}, class_names


def image_files(folder: Path, class_names: Sequence[str]) -> FileSplit:
    """All images in the class folders of ``folder``."""
    paths: list[Path] = []
    labels: list[int] = []
    for entry in subfolders(folder):
        if entry.name not in class_names:
            raise CandidError(
                f"'{entry}' is no class of the training images: {did_you_mean(entry.name, class_names)}"
            )
        found = sorted(p for p in entry.rglob("*") if is_image(p, entry))
        if not found:
            raise CandidError(f"The class folder '{entry}' has no images: add some or remove it.")
        paths += found
        labels += [class_names.index(entry.name)] * len(found)
    if not paths:
        raise CandidError(f"'{folder}' has no class folders with images: fill it or remove it.")
    return FileSplit(tuple(paths), torch.tensor(labels))


def subfolders(folder: Path) -> list[Path]:
    """The folders in ``folder``, without hidden ones."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "__")))


def is_image(path: Path, folder: Path) -> bool:
    """Whether it is an image file and not hidden within ``folder``."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.suffix.lower() in EXTENSIONS and not hidden and path.is_file()


def _divided(
    split: IndexedSplit, fraction: float, seed: int, class_names: tuple[str, ...]
) -> tuple[IndexedSplit, IndexedSplit]:
    """``split`` without, and with only, a random ``fraction`` of each class."""
    if not 0 < fraction < 1:
        raise CandidError(f"The share of images to keep apart must lie between 0 and 1, not {fraction}.")
    chosen = torch.zeros(len(split), dtype=torch.bool)
    for label, name in zip(count(), class_names):
        members = (split.labels == label).nonzero().flatten()
        if len(members) == 1:
            raise CandidError(
                f"The class '{name}' has too few images to keep some apart: add more or remove it."
            )
        order = torch.randperm(len(members), generator=generator(seed, label))
        kept = min(max(1, round(fraction * len(members))), len(members) - 1)
        chosen[members[order[:kept]]] = True
    return split.subset((~chosen).nonzero().flatten()), split.subset(chosen.nonzero().flatten())


def _check_classes(dataset: Dataset) -> None:
    for name in ("train", "val", "test"):
        split = getattr(dataset, name)
        if split is not None and not len(split):
            raise CandidError(f"The {name} part of the data has no images: add some.")
    labels = range(len(dataset.class_names))
    present = set(labels if isinstance(dataset.train, ShardSplit) else dataset.train.labels.tolist())
    if len(labels) < 2 or len(present) < 2:
        raise CandidError("The data has a single class: a classifier needs at least two.")
    for label, name in enumerate(dataset.class_names):
        if label not in present:
            raise CandidError(f"The class '{name}' has no training images: add some or remove it.")
