"""The parts of a data set, in memory, in files or in tar shards, and how a model sees their images."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.files import digest
from candid._support.progress import Progress
from candid.data.augment import jittered, padded_crops, random_flips
from candid.data.images import (
    BadImageError,
    Crop,
    Preprocessing,
    centre_box,
    check_file,
    decode_as,
    fitted,
    resized,
)

Batch = tuple[Tensor, Tensor]
"""Images (B, C, H, W) uint8 and labels (B,)."""
NamedBatch = tuple[Tensor, Tensor, tuple[str, ...]]
"""A batch, and what its images are called."""
WINDOW = 4096
"""Files that wait to be looked at: a million would take gigabytes."""


CACHE_BYTES = 2 * 2**30
"""A set of image files that takes no more than this in memory is decoded once."""


@dataclass(frozen=True)
class ArraySplit:
    """Images in memory."""

    images: Tensor
    """(N, C, H, W) uint8."""
    labels: Tensor
    """(N,) int64; -1 where unknown."""
    names: tuple[str, ...] = ()
    """Of the files that the images come from, or their numbers in the data set; empty for 0, 1, 2, ..."""

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: Tensor) -> "ArraySplit":
        return ArraySplit(self.images[indices], self.labels[indices], self.named(indices))

    def named(self, indices: Tensor) -> tuple[str, ...]:
        """What the images ``indices`` are called."""
        return tuple(self.names[i] if self.names else str(i) for i in indices.tolist())

    def fingerprint(self) -> bytes:
        """Differs between splits that differ."""
        parts = (repr((self.images.shape, self.names)).encode(), self.images.numpy(), self.labels.numpy())
        return digest(
            *(np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part for part in parts)
        ).digest()

    def batch(self, indices: Tensor, preprocessing: Preprocessing, numbers: Tensor | None = None) -> Tensor:
        """The images ``indices``, (B, C, H, W) uint8; augmented if ``numbers`` (B, 5) are given."""
        images = self.images[indices]
        crop = (
            "shift" if preprocessing.crop == "resized" else preprocessing.crop
        )  # there is no more than these pixels
        return images if numbers is None else _augmented(images, numbers, crop, preprocessing.flip)

    def prepared(
        self, preprocessing: Preprocessing, skip_bad: bool, progress: Progress
    ) -> tuple["ArraySplit", list[str]]:
        """As the model sees them: slightly smaller ones are framed by zeros, others are resized."""
        channels, height, width = self.images.shape[1:]
        if (channels, height, width) == (preprocessing.channels, *preprocessing.size):
            return self, []
        images = self.images
        if channels != preprocessing.channels:
            images = images.expand(-1, 3, -1, -1) if channels == 1 else _grey(images)
        if all(
            7 / 8 * wanted <= had <= wanted
            for had, wanted in zip((height, width), preprocessing.size, strict=True)
        ):
            return replace(self, images=fitted(images, preprocessing.size).contiguous()), []
        box = centre_box(width, height, preprocessing.size)
        scaled = [
            np.array(
                resized(
                    Image.fromarray(pixels[..., 0] if preprocessing.channels == 1 else pixels),
                    box,
                    preprocessing.size,
                )
            )
            for pixels in progress.track(images.permute(0, 2, 3, 1).numpy(), "resizing", len(images))
        ]
        stacked = torch.from_numpy(np.stack(scaled)).view(-1, *preprocessing.size, preprocessing.channels)
        return replace(self, images=stacked.permute(0, 3, 1, 2).contiguous()), []


def _grey(images: Tensor) -> Tensor:
    weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    return (images * weights).sum(1, keepdim=True).round().to(torch.uint8)


@dataclass(frozen=True)
class FileSplit:
    """Image files, decoded when they are needed."""

    paths: tuple[Path, ...]
    labels: Tensor
    """(N,) int64; -1 where unknown."""

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: Tensor) -> "FileSplit":
        return FileSplit(tuple(self.paths[i] for i in indices.tolist()), self.labels[indices])

    def named(self, indices: Tensor) -> tuple[str, ...]:
        """What the images ``indices`` are called."""
        return tuple(str(self.paths[i]) for i in indices.tolist())

    def fingerprint(self) -> bytes:
        """Differs between splits whose files have other names, sizes or dates, or other labels."""
        listed = [(str(path), _size_and_date(path)) for path in self.paths]
        return digest(repr(listed).encode(), self.labels.numpy()).digest()

    def batch(self, indices: Tensor, preprocessing: Preprocessing, numbers: Tensor | None = None) -> Tensor:
        """The images ``indices``, (B, C, H, W) uint8; augmented if ``numbers`` (B, 5) are given."""
        paths = [self.paths[i] for i in indices.tolist()]
        return decode_batch(paths, preprocessing, numbers, lambda i, error: _bad_image(paths[i], error))

    def prepared(
        self, preprocessing: Preprocessing, skip_bad: bool, progress: Progress
    ) -> tuple["FileSplit | ArraySplit", list[str]]:
        """Decoded into memory if they fit and need no full resolution; with every file looked at."""
        cached = (
            preprocessing.crop != "resized"
            and len(self) * preprocessing.channels * preprocessing.height * preprocessing.width < CACHE_BYTES
        )
        images = (
            torch.empty(len(self), preprocessing.channels, *preprocessing.size, dtype=torch.uint8)
            if cached
            else None
        )

        def look(index: int) -> tuple[int, BadImageError | None]:
            try:
                if images is not None:
                    images[index] = decode_as(self.paths[index], preprocessing, None)
                elif skip_bad:
                    decode_as(self.paths[index], preprocessing, None)
                else:
                    check_file(self.paths[index])
            except BadImageError as error:
                return index, error
            return index, None

        bad: dict[int, BadImageError] = {}
        with ThreadPoolExecutor() as pool:
            task = "reading images" if cached else "checking images"
            windows = (range(i, min(i + WINDOW, len(self))) for i in range(0, len(self), WINDOW))
            looks = chain.from_iterable(pool.map(look, window) for window in windows)
            for index, error in progress.track(looks, task, len(self)):
                if error is not None and not skip_bad:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise _bad_image(self.paths[index], error) from error
                if error is not None:
                    bad[index] = error
        good = torch.tensor([i for i in range(len(self)) if i not in bad], dtype=torch.long)
        split = self if images is None else ArraySplit(images, self.labels, tuple(map(str, self.paths)))
        skipped = [f"{self.paths[i]}: {error}" for i, error in bad.items()]
        return (split.subset(good) if bad else split), skipped


@dataclass(frozen=True)
class ShardSplit:
    """Tar shards, read one after the other: no image can be looked up by its number."""

    urls: tuple[str, ...]
    images: int
    """How many there are; in training, how many an epoch has."""
    classes: int
    """Labels in the shards are below it."""
    numbers: tuple[int, ...] = ()
    """What evaluation takes each label for: a class of the model, or -1 for unknown. Empty: as it is."""

    def __len__(self) -> int:
        return self.images

    def fingerprint(self) -> bytes:
        """Differs between lists of shards; of local ones the sizes and dates count, too."""
        return digest(repr((self, [_size_and_date(Path(url)) for url in self.urls])).encode()).digest()

    def prepared(
        self, preprocessing: Preprocessing, skip_bad: bool, progress: Progress
    ) -> tuple["ShardSplit", list[str]]:
        """As it is: only reading the shards would tell which images are bad."""
        if skip_bad:
            raise CandidError(
                "Tar shards can't be searched for bad images: leave --skip-bad out, pack them without."
            )
        return self, []


def other_size(split: "Split", preprocessing: Preprocessing) -> str | None:
    """Return the size of the first image if it is not the model's size; None if it is or is not known."""
    if isinstance(split, ArraySplit):
        height, width = split.images.shape[2:]
    elif isinstance(split, FileSplit):
        try:
            with Image.open(split.paths[0]) as image:
                width, height = image.size
        except (OSError, Image.DecompressionBombError):
            return None
    else:
        return None
    return None if (height, width) == preprocessing.size else f"{height} x {width}"


def _size_and_date(path: Path) -> tuple[int, int] | None:
    """None for what is no file (any more): reading it will say so."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


IndexedSplit = ArraySplit | FileSplit
Split = IndexedSplit | ShardSplit


def decode_batch(
    sources: Sequence[Path | bytes],
    preprocessing: Preprocessing,
    numbers: Tensor | None,
    blame: Callable[[int, BadImageError], CandidError],
) -> Tensor:
    """Images (B, C, H, W), augmented if ``numbers`` (B, 5) are given; ``blame(i, error)`` names a bad one."""
    images = []
    for i, source in enumerate(sources):
        crop = numbers[i] if numbers is not None and preprocessing.crop == "resized" else None
        try:
            images.append(decode_as(source, preprocessing, crop))
        except BadImageError as error:
            raise blame(i, error) from error
    stacked = torch.stack(images)
    return (
        stacked if numbers is None else _augmented(stacked, numbers, preprocessing.crop, preprocessing.flip)
    )


def _augmented(images: Tensor, numbers: Tensor, crop: Crop, flip: bool) -> Tensor:
    if crop == "shift":
        images = padded_crops(images, numbers, padding=max(1, images.shape[2] // 8))
    if crop == "wobble":
        images = jittered(images, numbers)
    return random_flips(images, numbers) if flip else images


def _bad_image(path: Path, error: BadImageError) -> CandidError:
    return CandidError(
        f"'{path}' can't be used: {error}. Repair or remove it, or add --skip-bad to leave such files out."
    )
