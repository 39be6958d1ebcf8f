"""The parts of a data set, such as its training images: in memory, in files or in a stream."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array, digest
from candid._support.progress import SILENT, Progress
from candid.data import PHOTO_SIDE
from candid.data.batches import NamedBatch, loaded
from candid.data.crops import fitted
from candid.data.images import (
    BadImageError,
    Preprocessing,
    centre_box,
    check_file,
    decode_as,
    decode_batch,
    image_keys,
    opened,
    pixels,
    resized,
    to_pil,
)

WINDOW = 4096
"""Files that wait to be read at a time: a million would take gigabytes."""
CACHE_BYTES = 2 * 2**30
"""A set of image files that takes no more memory than this is decoded once."""
MOST_KEYS = 200_000
"""A model stores the keys of at most this many training images (8 bytes each)."""


class Split(ABC):
    """Images with labels, such as the test images of a data set.

    Those with ``can_index`` can be looked up by their number, so that a subset can be chosen; the others are
    read from end to end.
    """

    can_index: bool = True
    in_memory: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: Array, preprocessing: Preprocessing, numbers: Array | None = None) -> Array:
        """Return the images ``indices``, (B, C, H, W) uint8.

        With uniform ``numbers`` (B, 5), files are randomly cropped where ``preprocessing`` crops "resized".
        """

    @abstractmethod
    def subset(self, indices: Array) -> "Split":
        """Return a split with only the images ``indices``."""

    @abstractmethod
    def relabel(self, numbers: Array) -> "Split":
        """Return a split in which each label y is ``numbers[y]``."""

    @abstractmethod
    def unlabelled(self) -> "Split":
        """Return a split in which every label is -1, which means unknown."""

    @abstractmethod
    def classes_present(self) -> set[int] | None:
        """Return the labels that occur; None if they are not known without reading everything."""

    @abstractmethod
    def fingerprint(self) -> bytes:
        """Return a hash that differs between splits that differ."""

    def state(self) -> str:
        """Return what changes if files are replaced by others of the same name, size and date."""
        return ""

    @abstractmethod
    def image_size(self) -> tuple[int, int] | None:
        """Return (height, width) of the first image; None if it is not known."""

    @abstractmethod
    def load(
        self, preprocessing: Preprocessing, skip_bad: bool, progress: Progress
    ) -> tuple["Split", list[str]]:
        """Return the split, checked, and decoded if it is small, and the files that were left out."""

    @abstractmethod
    def named_batches(
        self, preprocessing: Preprocessing, batch: int, rank: int, world: int, workers: int
    ) -> Iterator[NamedBatch]:
        """Yield batches as :func:`candid.data.batches.named_batches` does."""

    def subsample(self, images: int | None) -> "Split":
        """Return ``images`` of the images, evenly spread; all of them for None or a larger number."""
        if images is None or images >= len(self):
            return self
        if images < 1:
            raise CandidError(f"The number of images must be at least 1, not {images}.")
        return self.subset(np.arange(images) * len(self) // images)

    def preprocess(
        self,
        preprocessing: Preprocessing,
        skip_bad: bool = False,
        progress: Progress = SILENT,
        name: str = "images",
    ) -> "Split":
        """Return the split as a model sees it, checked, and decoded if it is small.

        Args:
            preprocessing: how the model sees images.
            skip_bad: leave out images that can't be read, instead of an error.
            progress: is told when images have a different size or are left out.
            name: what these messages call the images.
        """
        size = self.image_size()
        photos = size is not None and min(*size, *preprocessing.size) >= PHOTO_SIDE
        if size is not None and size != preprocessing.size and not photos:
            progress.log(
                f"{name}: images of {size[0]} x {size[1]} pixels are fitted to "
                f"{preprocessing.height} x {preprocessing.width}"
            )
        ready, skipped = self.load(preprocessing, skip_bad, progress)
        for line in skipped:
            progress.log(f"left out {line}")
        if not len(ready):
            raise CandidError(f"'{name}' has no image that can be used: give others.")
        return ready


class IndexedSplit(Split):
    """Images that can be looked up by their number."""

    labels: Array
    """(N,) int64; -1 where unknown."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def subset(self, indices: Array) -> "IndexedSplit": ...

    @abstractmethod
    def named(self, indices: Array) -> tuple[str, ...]:
        """Return the names of the images ``indices``."""

    @abstractmethod
    def with_labels(self, labels: Array) -> Self:
        """Return the same images with the labels ``labels``, (N,)."""

    def relabel(self, numbers: Array) -> Self:
        return self.with_labels(numbers[self.labels])

    def unlabelled(self) -> Self:
        return self.with_labels(unknown(len(self)))

    def classes_present(self) -> set[int] | None:
        return set(self.labels.tolist())

    def named_batches(
        self, preprocessing: Preprocessing, batch: int, rank: int, world: int, workers: int
    ) -> Iterator[NamedBatch]:
        starts = range(rank * batch, len(self), world * batch)
        parts = (np.arange(start, min(start + batch, len(self))) for start in starts)
        calls = (partial(self._named_batch, part, preprocessing) for part in parts)
        return loaded(calls, 0 if self.in_memory else workers)

    def _named_batch(self, indices: Array, preprocessing: Preprocessing) -> NamedBatch:
        return self.batch(indices, preprocessing), self.labels[indices], self.named(indices)


@dataclass(frozen=True)
class ArraySplit(IndexedSplit):
    """Images in memory."""

    in_memory = True
    images: Array
    """(N, C, H, W) uint8."""
    labels: Array
    """(N,) int64; -1 where unknown."""
    names: tuple[str, ...] = ()
    """Names of the files, or numbers in the data set; empty for 0, 1, 2, ..."""

    def subset(self, indices: Array) -> "ArraySplit":
        return ArraySplit(self.images[indices], self.labels[indices], self.named(indices))

    def with_labels(self, labels: Array) -> "ArraySplit":
        return replace(self, labels=labels)

    def named(self, indices: Array) -> tuple[str, ...]:
        return tuple(self.names[i] if self.names else str(i) for i in indices.tolist())

    def fingerprint(self) -> bytes:
        shape = f"torch.Size({list(self.images.shape)})"  # as in stored fingerprints
        return digest(f"({shape}, {self.names!r})".encode(), self.images, self.labels).digest()

    def batch(self, indices: Array, preprocessing: Preprocessing, numbers: Array | None = None) -> Array:
        return self.images[indices]

    def image_size(self) -> tuple[int, int] | None:
        height, width = self.images.shape[2:]
        return height, width

    def load(
        self, preprocessing: Preprocessing, skip_bad: bool, progress: Progress
    ) -> tuple["ArraySplit", list[str]]:
        """Pad slightly smaller images with zeros and resize the others."""
        channels, *had = self.images.shape[1:]
        wanted = preprocessing.size
        if (channels, *had) == (preprocessing.channels, *wanted):
            return self, []
        images = self.images
        if channels != preprocessing.channels:
            images = images.repeat(3, axis=1) if channels == 1 else _grey(images)
        if all(7 / 8 * new <= old <= new for old, new in zip(had, wanted, strict=True)):
            return replace(self, images=fitted(images, wanted)), []
        box = centre_box(had[1], had[0], wanted)
        tracked = progress.track(images, "resizing", len(images))
        return replace(self, images=np.stack([pixels(resized(to_pil(x), box, wanted)) for x in tracked])), []


def _grey(images: Array) -> Array:
    weights = np.array([0.299, 0.587, 0.114], np.float32)[:, None, None]
    return np.rint((images * weights).sum(1, keepdims=True)).astype(np.uint8)


@dataclass(frozen=True)
class FileSplit(IndexedSplit):
    """Image files, decoded when they are needed."""

    paths: tuple[Path, ...]
    labels: Array
    """(N,) int64; -1 where unknown."""

    def subset(self, indices: Array) -> "FileSplit":
        return FileSplit(tuple(self.paths[i] for i in indices.tolist()), self.labels[indices])

    def with_labels(self, labels: Array) -> "FileSplit":
        return replace(self, labels=labels)

    def named(self, indices: Array) -> tuple[str, ...]:
        return tuple(str(self.paths[i]) for i in indices.tolist())

    def fingerprint(self) -> bytes:
        """Return a hash of the names, sizes and dates of the files, and of the labels."""
        listed = [(str(path), size_and_date(path)) for path in self.paths]
        return digest(repr(listed).encode(), self.labels).digest()

    def state(self) -> str:
        return files_state(self.paths)

    def digests(self) -> list[bytes]:
        """Return the SHA-256 of each file's bytes; that of its name if it can't be read."""
        with ThreadPoolExecutor() as pool:
            windows = (self.paths[i : i + WINDOW] for i in range(0, len(self), WINDOW))
            return [digest for window in windows for digest in pool.map(_file_digest, window)]

    def batch(self, indices: Array, preprocessing: Preprocessing, numbers: Array | None = None) -> Array:
        paths = [self.paths[i] for i in indices.tolist()]
        return decode_batch(paths, preprocessing, numbers, lambda i, error: _bad_image(paths[i], error))

    def image_size(self) -> tuple[int, int] | None:
        try:
            with self.paths[0].open("rb") as file:
                width, height = opened(file).size
        except (OSError, BadImageError):
            return None
        return height, width

    def load(
        self, preprocessing: Preprocessing, skip_bad: bool, progress: Progress
    ) -> tuple["FileSplit | ArraySplit", list[str]]:
        """Check every file; decode them into memory if they fit and training needs no full resolution."""
        shape = (preprocessing.channels, *preprocessing.size)
        cached = preprocessing.crop != "resized" and len(self) * int(np.prod(shape)) < CACHE_BYTES
        images = np.empty((len(self), *shape), np.uint8) if cached else None

        def look(index: int) -> tuple[int, BadImageError | None]:
            try:
                if images is not None:
                    images[index] = decode_as(self.paths[index], preprocessing)
                elif skip_bad:
                    decode_as(self.paths[index], preprocessing)
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
        good = np.array([i for i in range(len(self)) if i not in bad], np.int64)
        split = self if images is None else ArraySplit(images, self.labels, tuple(map(str, self.paths)))
        skipped = [f"{self.paths[i]}: {error}" for i, error in bad.items()]
        return (split.subset(good) if bad else split), skipped


def _bad_image(path: Path, error: BadImageError) -> CandidError:
    return CandidError(
        f"'{path}' can't be used: {error}. Repair or remove it, or add --skip-bad to leave such files out."
    )


def _file_digest(path: Path) -> bytes:
    return _digest_at(path, size_and_date(path))


@lru_cache(maxsize=MOST_KEYS)
def _digest_at(path: Path, stamp: tuple[int, int] | None) -> bytes:
    """Return the SHA-256 of a file, cached by path, size and date."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:  # reading the image will say why
        return hashlib.sha256(str(path).encode(errors="replace")).digest()


def training_keys(
    split: Split, preprocessing: Preprocessing, workers: int = 0, progress: Progress = SILENT
) -> Array | None:
    """Return the keys of training images, sorted, for a model to store; see :func:`seen_in_training`.

    Args:
        split: the training images.
        preprocessing: how the model sees images.
        workers: threads that load images.
        progress: shows how many images are done.

    Returns:
        One hash of the pixels per image, (N,) int64; None for streams and more than 200 000 images.
    """
    if not split.can_index or len(split) > MOST_KEYS:
        return None
    batches = split.named_batches(preprocessing, 256, 0, 1, workers)
    total = -(-len(split) // 256)
    tracked = progress.track(batches, "keys of training images", total, 256)
    return np.unique(np.concatenate([image_keys(images) for images, _, _ in tracked]))


def seen_in_training(keys: Array, stored: Array | None) -> Array:
    """Return which images, by their keys (N,), are among the ``stored`` keys of training images, (N,) bool.

    >>> seen_in_training(np.array([3, 5]), np.array([1, 5])).tolist()
    [False, True]
    """
    return np.zeros(len(keys), bool) if stored is None else np.isin(keys, stored)


def unknown(images: int) -> Array:
    """Return the labels of this many images without labels."""
    return np.full(images, -1, np.int64)


def size_and_date(path: Path) -> tuple[int, int] | None:
    """Return the size and the date of a file; None if there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def files_state(paths: Iterable[Path]) -> str:
    """Return a hash of when the system saw a change of each file, which nobody can set."""
    return digest([path.stat().st_ctime_ns if path.exists() else None for path in paths]).hexdigest()
