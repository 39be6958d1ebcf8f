"""Statistics of photos through an eye: computed once, cached by the content of each photo."""

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from candid._support.errors import CandidError, plainly
from candid._support.files import read_sealed, remove_unfinished, write_sealed
from candid._support.numbers import Array, digest
from candid._support.processes import Processes, first_error, gathered
from candid._support.progress import Progress
from candid.data.images import BadImageError, Preprocessing, decode_as, image_keys, to_float
from candid.data.splits import FileSplit, Split
from candid.models.photo.efficientnet import cache_folder
from candid.models.photo.eye import Eye

CHUNK = 256
"""Photos in a file of the cache: no more are lost if the process is killed."""
BATCH = 16
AHEAD = 3
"""Batches that are decoded while one passes the eye."""
MOST_LOOKED = 100_000
"""Of more photos, only about this many are looked up in the cache to say how long a training takes."""
FEW = 32
"""Photos that the time of one is measured on."""
SECONDS_EACH = 0.05
"""Seconds that a photo may take, where too few are new to measure that."""
ABANDONED = 3600
"""Seconds after which a half-written file belongs to a process that was killed."""


class Row(NamedTuple):
    """What is known of one photo."""

    values: Array
    """Its statistics, (D,)."""
    key: int
    """A hash of its pixels."""


@dataclass(frozen=True)
class Features:
    """Statistics of N photos."""

    names: tuple[str, ...]
    """Files, or samples of tar shards."""
    labels: Array
    """(N,)."""
    values: Array
    """(N, D)."""
    keys: Array
    """A hash of the pixels of each photo, (N,)."""
    skipped: tuple[str, ...] = ()
    """Files that were left out, each with the reason."""

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, rows: Array) -> "Features":
        """Return some of the photos."""
        names = tuple(compress(self.names, rows))
        return Features(names, self.labels[rows], self.values[rows], self.keys[rows], self.skipped)


@dataclass(frozen=True)
class Share:
    """Photos of one process; their statistics stay in the cache."""

    names: tuple[str, ...]
    labels: Array
    """(N,)."""
    digests: Array
    """What the cache finds each photo by, (N, 32) uint8."""
    cache: "FeatureCache"
    skipped: tuple[str, ...] = ()
    """Files that were left out, each with the reason."""

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, rows: Array) -> Features:
        """Return some of the photos with their statistics."""
        known = self.cache.rows([self.digests[i].tobytes() for i in rows.tolist()])
        values = np.array([row.values for row in known], np.float32)
        names = tuple(self.names[i] for i in rows.tolist())
        keys = np.array([row.key for row in known], np.int64)
        return Features(names, self.labels[rows], values.reshape(len(rows), self.cache.dimensions), keys)

    def pieces(self, size: int) -> Iterator[tuple[Array, Features]]:
        """Yield the numbers of ``size`` photos after the other, and their statistics."""
        for start in range(0, len(self), size):
            rows = np.arange(start, min(start + size, len(self)))
            yield rows, self.at(rows)


class FeatureCache:
    """Statistics on disk, found by a digest of the photo's bytes; a photo that moves or is renamed is known.

    Only the digests are in memory. If the disk is full, new statistics are in memory, too.

    Args:
        eye: the eye; statistics of each eye have their own folder.
        progress: is told if nothing can be written.
        folder: where to store them; by default in the user's cache.
    """

    def __init__(self, eye: Eye, progress: Progress, folder: Path | None = None) -> None:
        name = hashlib.sha256(f"{eye.name} {eye.sha256} {eye.size}".encode()).hexdigest()[:16]
        self.folder = (cache_folder() if folder is None else folder) / "features" / name
        self.dimensions, self._progress = eye.dimensions, progress
        self._places: dict[bytes, tuple[Path, int]] = {}
        self._whole: set[Path] = set()
        self._in_memory: dict[bytes, Row] = {}
        self._full, self.stored = False, 0
        """Photos that were added by this process."""
        if self.folder.is_dir():
            remove_unfinished(self.folder, older=ABANDONED)
            for file in sorted(self.folder.glob("*.safetensors")):
                self._list(file)

    def _list(self, file: Path) -> None:
        try:
            with safe_open(file, "np") as stored:
                digests = stored.get_tensor("digests")
                shapes = [stored.get_slice(name).get_shape() for name in ("values", "keys")]
        except (OSError, SafetensorError):
            return  # cut or foreign: these photos are read again
        if shapes == [[len(digests), self.dimensions], [len(digests)]]:
            self._places |= {each.tobytes(): (file, row) for row, each in enumerate(digests)}

    def __contains__(self, digest: bytes) -> bool:
        if digest in self._places and self._is_whole(self._places[digest][0]):
            return True
        return digest in self._in_memory

    def _is_whole(self, file: Path) -> bool:
        """Return whether a file has the content that was written; photos of a damaged one are forgotten."""
        if file not in self._whole:
            try:
                _, notes = read_sealed(file)
            except ValueError:
                notes = None
            if notes is None:
                self._places = {each: place for each, place in self._places.items() if place[0] != file}
                return False
            self._whole.add(file)
        return True

    def rows(self, digests: Sequence[bytes]) -> list[Row]:
        """Return what is known of photos that are in the cache."""
        rows = {each: self._in_memory[each] for each in digests if each in self._in_memory}
        by_file: dict[Path, list[bytes]] = {}
        for each in digests:
            if each in self._places:
                by_file.setdefault(self._places[each][0], []).append(each)
        for file, members in by_file.items():
            with safe_open(file, "np") as stored:
                values, keys = stored.get_tensor("values"), stored.get_tensor("keys").tolist()
            for each in members:
                i = self._places[each][1]
                rows[each] = Row(values[i].copy(), keys[i])
        return [rows[each] for each in digests]

    def store(self, digests: Sequence[bytes], rows: Sequence[Row]) -> None:
        """Add photos."""
        self.stored += len(digests)
        name = hashlib.sha256(b"".join(digests)).hexdigest()[:16]
        file = self.folder / f"{name}.safetensors"
        tensors = {
            "digests": np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), -1),
            "values": np.stack([row.values for row in rows]),
            "keys": np.array([row.key for row in rows], np.int64),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_sealed(tensors, file)
        except (OSError, SafetensorError) as error:
            if not self._full:
                self._progress.log(
                    f"statistics can't be kept in '{self.folder}' for a later training: {plainly(str(error))}"
                )
            self._full = True
            self._in_memory |= dict(zip(digests, rows, strict=True))
        else:
            self._whole.add(file)
            self._places |= {each: (file, row) for row, each in enumerate(digests)}


class _Read(NamedTuple):
    """One photo and what became of it."""

    name: str
    label: int
    seen: Row | bytes | str
    """What the eye sees, or what the cache finds that by; or why the photo can't be used."""


@dataclass(frozen=True)
class Extraction:
    """Turns photos into statistics; several processes share the photos.

    Args:
        eye: what looks at them.
        cache: what is known already.
        processes: what shares the photos.
        progress: shows how many photos are done.
        skip_bad: whether photos that can't be read are left out, instead of an error.
    """

    eye: Eye
    cache: FeatureCache
    processes: Processes
    progress: Progress
    skip_bad: bool = False

    def __call__(self, split: Split, name: str = "photos") -> Features:
        """Return the statistics of photos; only the first process gets them, the others get none.

        The result is the same for any number of processes.
        """
        share = self._read(split, name)
        rows = iter(self.cache.rows([photo.seen for photo in share if isinstance(photo.seen, bytes)]))
        share = [
            photo._replace(seen=next(rows)) if isinstance(photo.seen, bytes) else photo for photo in share
        ]
        # files are dealt out one by one, so they come back in their order; shards are sorted by their names
        parts = gathered(self.processes, share)
        photos = [part[i] for i in range(max(map(len, parts), default=0)) for part in parts if i < len(part)]
        if not isinstance(split, FileSplit):
            photos.sort(key=lambda photo: photo.name)
        good = [(photo, photo.seen) for photo in photos if isinstance(photo.seen, Row)]
        if self.processes.is_global_zero and not good:
            raise CandidError(f"None of the {name} can be used: give others.")
        return Features(
            tuple(photo.name for photo, _ in good),
            np.array([photo.label for photo, _ in good], np.int64),
            np.array([row.values for _, row in good], np.float32).reshape(len(good), self.eye.dimensions),
            np.array([row.key for _, row in good], np.int64),
            tuple(f"{photo.name}: {photo.seen}" for photo in photos if isinstance(photo.seen, str)),
        )

    def share(self, split: Split, name: str = "photos") -> Share:
        """Return the photos of this process; their statistics are in the cache."""
        photos = self._read(split, name)
        good = [(photo, photo.seen) for photo in photos if isinstance(photo.seen, bytes)]
        return Share(
            tuple(photo.name for photo, _ in good),
            np.array([photo.label for photo, _ in good], np.int64),
            np.frombuffer(b"".join(seen for _, seen in good), np.uint8).reshape(
                len(good), -1 if good else 32
            ),
            self.cache,
            tuple(f"{photo.name}: {photo.seen}" for photo in photos if isinstance(photo.seen, str)),
        )

    def _read(self, split: Split, name: str) -> list[_Read]:
        """Return this process's share of the photos; an error of any process is raised by all."""
        share: list[_Read] = []
        error = None
        try:
            if isinstance(split, FileSplit):
                share = self._of_files(split, name)
            else:
                share = self._of_shards(split, name)
        except CandidError as problem:
            error = problem
        error = first_error(self.processes, error)
        if error is not None:
            raise error
        return share

    def estimate(self, splits: Sequence[Split]) -> tuple[int, float]:
        """Return the number of photos that are not in the cache, and the seconds that they will take.

        A few of them are looked at to measure the time of one.
        """
        files = [split for split in splits if isinstance(split, FileSplit)]
        total = sum(map(len, files))
        share = MOST_LOOKED / max(total, MOST_LOOKED)
        looked = [split.subset(np.unique(np.arange(0, len(split), 1 / share).astype(int))) for split in files]
        new = [
            path
            for split in looked
            for path, each in zip(split.paths, split.digests(), strict=True)
            if each not in self.cache
        ]
        streamed = sum(len(split) for split in splits if not isinstance(split, FileSplit))
        count = streamed + len(new) * total // max(1, min(total, MOST_LOOKED))
        if len(new) <= FEW:
            return count, SECONDS_EACH * count
        few = FileSplit(tuple(new[:: max(1, len(new) // FEW)][:FEW]), np.empty(0, np.int64))
        numbers = range(len(few.paths))
        deque(self._described(_decoded(few, numbers[:1], self.preprocessing)), maxlen=0)  # opens the eye
        start = time.monotonic()
        deque(self._described(_decoded(few, numbers, self.preprocessing)), maxlen=0)
        seconds = (time.monotonic() - start) / len(numbers)
        return count, seconds * count / self.processes.world_size

    @property
    def preprocessing(self) -> Preprocessing:
        """How the eye sees photos: the whole centre square, if it does not say otherwise."""
        return self.eye.preprocessing

    def _of_files(self, split: FileSplit, name: str) -> list[_Read]:
        """Return this process's share of the photos, in their order."""
        share = split.subset(np.arange(self.processes.global_rank, len(split), self.processes.world_size))
        digests = share.digests()
        missing = [i for i, each in enumerate(digests) if each not in self.cache]
        bad: dict[int, str] = {}
        chunks = _parts(missing, CHUNK)
        for chunk in self.progress.track(chunks, name, len(chunks), CHUNK * self.processes.world_size):
            new: dict[int, Row] = {}
            for i, seen in self._described(_decoded(share, chunk, self.preprocessing)):
                if isinstance(seen, Row):
                    new[i] = seen
                elif self.skip_bad:
                    bad[i] = seen
                else:
                    raise CandidError(
                        f"'{share.paths[i]}' can't be used: {seen}. Repair or remove it, or leave --strict "
                        "out."
                    )
            if new:
                self.cache.store([digests[i] for i in new], list(new.values()))
        labels = share.labels.tolist()
        return [_Read(str(path), labels[i], bad.get(i, digests[i])) for i, path in enumerate(share.paths)]

    def _of_shards(self, split: Split, name: str) -> list[_Read]:
        """Return the photos of this process's shards; here the digest is one of the pixels."""
        rank, world = self.processes.global_rank, self.processes.world_size
        batches = split.named_batches(self.preprocessing, CHUNK, rank, world, workers=0)
        photos: list[_Read] = []
        total = -(-len(split) // CHUNK // world)
        for images, labels, names in self.progress.track(batches, name, total, CHUNK * world):
            digests = [digest(image).digest() for image in images]
            new = [i for i, each in enumerate(digests) if each not in self.cache]
            parts = ((part, [images[i] for i in part]) for part in _parts(new, BATCH))
            rows: dict[int, Row] = {}
            for i, row in self._described(parts):
                if isinstance(row, str):
                    raise CandidError(f"'{names[i]}' can't be used: {row}.")
                rows[i] = row
            if rows:
                self.cache.store([digests[i] for i in rows], list(rows.values()))
            photos += [_Read(*each) for each in zip(names, labels.tolist(), digests, strict=True)]
        return photos

    def _described(
        self, batches: "Iterator[tuple[Sequence[int], Sequence[Array | str]]]"
    ) -> Iterator[tuple[int, Row | str]]:
        """Yield what the eye sees in each photo of batches, or why it can't be used."""
        for numbers, images in batches:
            both = list(zip(numbers, images, strict=True))
            yield from ((i, image) for i, image in both if isinstance(image, str))
            good = [(i, image) for i, image in both if not isinstance(image, str)]
            if not good:
                continue
            pixels = np.stack([image for _, image in good])
            values = np.asarray(self.eye.statistics(to_float(pixels)), np.float32)
            for (i, _), row, key in zip(good, values, image_keys(pixels).tolist(), strict=True):
                finite = bool(np.isfinite(row).all())
                yield i, Row(row.copy(), key) if finite else "the eye's numbers overflow on it"


def _parts(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]


def _decoded(
    split: FileSplit, indices: Sequence[int], preprocessing: Preprocessing
) -> Iterator[tuple[Sequence[int], list[Array | str]]]:
    """Yield batches of photos that are decoded in threads while earlier ones pass the eye."""
    waiting: deque[tuple[Sequence[int], list[Future[Array | str]]]] = deque()

    def look(i: int) -> Array | str:
        try:
            return decode_as(split.paths[i], preprocessing)
        except BadImageError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        for batch in _parts(indices, BATCH):
            waiting.append((batch, [pool.submit(look, i) for i in batch]))
            if len(waiting) > AHEAD:
                first, futures = waiting.popleft()
                yield first, [future.result() for future in futures]
        for last, futures in waiting:
            yield last, [future.result() for future in futures]
