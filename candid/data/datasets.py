"""One string to a data set: its splits, its class names, and how a model sees its images."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from candid.data import formats
from candid.data.images import EXTENSIONS, MODES, BadImageError, check_file, decode
from candid.data.transforms import (
    centre_box,
    fitted,
    padded_crops,
    random_box,
    random_flips,
    resized,
    wobbled,
)
from candid.errors import CandidError, did_you_mean
from candid.randomness import generator

Crop = Literal["none", "shift", "wobble", "resized"]
Batch = tuple[Tensor, Tensor]
"""Images (B, C, H, W) uint8 and labels (B,)."""
Track = Callable[[Iterable[Any], str, int], Iterable[Any]]
"""Shows the progress of going through an iterable: (iterable, description, length)."""
CACHE_BYTES = 2 * 2**30
"""A set of image files that takes no more than this in memory is decoded once."""


@dataclass(frozen=True)
class View:
    """How a model sees images.

    Training images are shifted by up to an eighth of their height (``"shift"``, for sets whose images all
    have the model's framing), moved, turned and resized a little (``"wobble"``, for drawings), or randomly
    cropped and resized (``"resized"``, for photos), and mirrored if ``flip``. Others are resized until they
    cover the model's size, ``margin`` times it for photos, and their centre is cropped.
    """

    channels: int
    height: int
    width: int
    crop: Crop = "none"
    flip: bool = False

    def __post_init__(self) -> None:
        if self.channels not in MODES:
            raise CandidError(
                f"Images have 1 or 3 channels: set the model's 'channels' to that, not {self.channels}."
            )

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def margin(self) -> float:
        return 256 / 224 if self.crop == "resized" else 1.0


@dataclass(frozen=True)
class ArraySplit:
    """Images in memory."""

    images: Tensor
    """(N, C, H, W) uint8."""
    labels: Tensor
    """(N,) int64."""

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: Tensor) -> "ArraySplit":
        return ArraySplit(self.images[indices], self.labels[indices])

    def batch(self, indices: Tensor, view: View, numbers: Tensor | None = None) -> Tensor:
        """The images ``indices``, (B, C, H, W) uint8; augmented if ``numbers`` (B, 5) are given."""
        images = self.images[indices]
        crop = "shift" if view.crop == "resized" else view.crop  # there is no more than these pixels
        return images if numbers is None else _augmented(images, numbers, crop, view.flip)

    def prepared(self, view: View, skip_bad: bool, track: Track) -> tuple["ArraySplit", list[str]]:
        """As the model sees them: slightly smaller ones are framed by zeros, others are resized."""
        channels, height, width = self.images.shape[1:]
        if (channels, height, width) == (view.channels, *view.size):
            return self, []
        images = self.images
        if channels != view.channels:
            images = images.expand(-1, 3, -1, -1) if channels == 1 else _grey(images)
        if all(
            7 / 8 * wanted <= had <= wanted for had, wanted in zip((height, width), view.size, strict=True)
        ):
            return replace(self, images=fitted(images, view.size).contiguous()), []
        box = centre_box(width, height, view.size)
        scaled = [
            np.array(
                resized(Image.fromarray(pixels[..., 0] if view.channels == 1 else pixels), box, view.size)
            )
            for pixels in track(images.permute(0, 2, 3, 1).numpy(), "resizing", len(images))
        ]
        stacked = torch.from_numpy(np.stack(scaled)).view(-1, *view.size, view.channels)
        return replace(self, images=stacked.permute(0, 3, 1, 2).contiguous()), []


def _grey(images: Tensor) -> Tensor:
    weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    return (images * weights).sum(1, keepdim=True).round().to(torch.uint8)


@dataclass(frozen=True)
class FileSplit:
    """Image files, decoded when they are needed."""

    paths: tuple[Path, ...]
    labels: Tensor
    """(N,) int64."""

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: Tensor) -> "FileSplit":
        return FileSplit(tuple(self.paths[i] for i in indices.tolist()), self.labels[indices])

    def batch(self, indices: Tensor, view: View, numbers: Tensor | None = None) -> Tensor:
        """The images ``indices``, (B, C, H, W) uint8; augmented if ``numbers`` (B, 5) are given."""
        paths = [self.paths[i] for i in indices.tolist()]
        return decode_batch(paths, view, numbers, lambda i, error: _bad_image(paths[i], error))

    def prepared(
        self, view: View, skip_bad: bool, track: Track
    ) -> tuple["FileSplit | ArraySplit", list[str]]:
        """Decoded into memory if they fit and need no full resolution; with every file looked at."""
        cached = view.crop != "resized" and len(self) * view.channels * view.height * view.width < CACHE_BYTES
        images = torch.empty(len(self), view.channels, *view.size, dtype=torch.uint8) if cached else None

        def look(index: int) -> tuple[int, BadImageError | None]:
            try:
                if images is not None:
                    images[index] = decode_as(self.paths[index], view, None)
                elif skip_bad:
                    decode_as(self.paths[index], view, None)
                else:
                    check_file(self.paths[index])
            except BadImageError as error:
                return index, error
            return index, None

        bad: dict[int, BadImageError] = {}
        with ThreadPoolExecutor() as pool:
            task = "reading images" if cached else "checking images"
            for index, error in track(pool.map(look, range(len(self))), task, len(self)):
                if error is not None and not skip_bad:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise _bad_image(self.paths[index], error) from error
                if error is not None:
                    bad[index] = error
        good = torch.tensor([i for i in range(len(self)) if i not in bad], dtype=torch.long)
        split = self if images is None else ArraySplit(images, self.labels)
        skipped = [f"{self.paths[i]}: {error}" for i, error in bad.items()]
        return (split.subset(good) if bad else split), skipped


@dataclass(frozen=True)
class ShardSplit:
    """Tar shards, read one after the other: no image can be looked up by its number."""

    urls: tuple[str, ...]
    images: int
    """How many there are; in training, how many an epoch has."""
    classes: int

    def __len__(self) -> int:
        return self.images

    def prepared(self, view: View, skip_bad: bool, track: Track) -> tuple["ShardSplit", list[str]]:
        """As it is: only reading the shards would tell which images are bad."""
        if skip_bad:
            raise CandidError(
                "Tar shards can't be searched for bad images: leave --skip-bad out, pack them without."
            )
        return self, []


IndexedSplit = ArraySplit | FileSplit
Split = IndexedSplit | ShardSplit


def decode_batch(
    sources: Sequence[Path | bytes],
    view: View,
    numbers: Tensor | None,
    blame: Callable[[int, BadImageError], CandidError],
) -> Tensor:
    """Images (B, C, H, W), augmented if ``numbers`` (B, 5) are given; ``blame(i, error)`` names a bad one."""
    images = []
    for i, source in enumerate(sources):
        crop = numbers[i] if numbers is not None and view.crop == "resized" else None
        try:
            images.append(decode_as(source, view, crop))
        except BadImageError as error:
            raise blame(i, error) from error
    stacked = torch.stack(images)
    return stacked if numbers is None else _augmented(stacked, numbers, view.crop, view.flip)


def _augmented(images: Tensor, numbers: Tensor, crop: Crop, flip: bool) -> Tensor:
    if crop == "shift":
        images = padded_crops(images, numbers, padding=max(1, images.shape[2] // 8))
    if crop == "wobble":
        images = wobbled(images, numbers)
    return random_flips(images, numbers) if flip else images


def decode_as(source: Path | bytes, view: View, numbers: Tensor | None) -> Tensor:
    """One image as ``view`` wants it, with its random resized crop if ``numbers`` are given."""

    def box(width: int, height: int) -> tuple[float, float, float, float]:
        if numbers is not None:
            return random_box(width, height, numbers)
        return centre_box(width, height, view.size, 1.0 if (height, width) == view.size else view.margin)

    return decode(source, view.channels, view.size, box)


def _bad_image(path: Path, error: BadImageError) -> CandidError:
    return CandidError(
        f"'{path}' can't be used: {error}. Repair or remove it, or add --skip-bad to leave such files out."
    )


@dataclass(frozen=True)
class Dataset:
    """A data set's parts; what is measured during training is measured on ``val``."""

    train: Split
    val: Split
    test: Split | None
    class_names: tuple[str, ...]
    skipped: tuple[str, ...] = field(default=())
    """Files that were left out, each with the reason."""

    def prepared(self, view: View, skip_bad: bool = False, track: Track = lambda it, _, __: it) -> "Dataset":
        """Every split checked, and decoded if it is small."""
        parts: dict[str, Any] = {}
        skipped: list[str] = []
        for name in ("train", "val", "test"):
            split = getattr(self, name)
            if split is not None:
                parts[name], more = split.prepared(view, skip_bad, track)
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
) -> Dataset:
    """The data set that ``spec`` names.

    ``digits`` (bundled), or a folder with: ``train/<class>/...`` and ``val/<class>/...`` and/or
    ``test/<class>/...``; class folders alone; MNIST-style idx files; CIFAR-10's binary or python batches.
    Or tar shards, see ``candid.data.shards.open_shards``; only they take the last three arguments.

    Without a ``val`` folder, the share ``holdout`` of the training images is kept out of training, class
    by class, to choose the best model and to calibrate p-values. Without any second folder, the share
    ``test_fraction`` is the test set. Which images these are depends on ``split_seed`` alone.

    >>> digits = open_dataset("digits")
    >>> len(digits.train), len(digits.val), len(digits.test)
    (1368, 70, 359)
    """
    from candid.data import shards

    if shards.is_shards(spec):
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
    dataset = Dataset(splits["train"], splits["val"], splits.get("test"), class_names)
    _check_classes(dataset)
    return dataset


def _read(spec: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    if spec == "digits":
        return {"train": ArraySplit(*formats.read_digits())}, tuple(map(str, range(10)))
    folder = Path(spec).expanduser()
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
    return _read_image_folder(folder)


def _read_image_folder(folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    parts = {name: folder / name for name in ("train", "val", "test") if (folder / name).is_dir()}
    if "train" not in parts:
        if parts:
            raise CandidError(f"'{folder}' has {' and '.join(parts)} but no train folder: add it.")
        parts = {"train": folder}
    class_names = tuple(entry.name for entry in _subfolders(parts["train"]))
    if len(class_names) < 2:
        raise CandidError(
            f"'{parts['train']}' has {len(class_names) or 'no'} class folder{'s'[: len(class_names) != 1]}: "
            "give at least two, each with the images of one class."
        )
    splits = {}
    for name, part in parts.items():
        paths: list[Path] = []
        labels: list[int] = []
        for entry in _subfolders(part):
            if entry.name not in class_names:
                raise CandidError(
                    f"'{entry}' is no class of '{parts['train']}': {did_you_mean(entry.name, class_names)}"
                )
            found = sorted(p for p in entry.rglob("*") if _is_image(p, entry))
            if not found:
                raise CandidError(f"The class folder '{entry}' has no images: add some or remove it.")
            paths += found
            labels += [class_names.index(entry.name)] * len(found)
        if not paths:
            raise CandidError(f"'{part}' has no class folders with images: fill it or remove it.")
        splits[name] = FileSplit(tuple(paths), torch.tensor(labels))
    return splits, class_names


def _subfolders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "__")))


def _is_image(path: Path, folder: Path) -> bool:
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
