"""Statistics of photos through an eye: computed once, cached by the content of each photo."""

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from candid._support.distributed import first_error, gathered
from candid._support.errors import CandidError
from candid._support.files import digest, read_sealed, remove_unfinished, write_sealed
from candid._support.progress import Progress
from candid.data.images import BadImageError, Preprocessing, decode_as, image_keys
from candid.data.splits import FileSplit, Split
from candid.inference.predictions import to_float
from candid.models.eyes.eye import Eye
from candid.models.eyes.graph import cache_folder

if TYPE_CHECKING:
    from lightning_fabric import Fabric

CHUNK = 256
"""Photos in a file of the cache: no more are lost if the process is killed."""
BATCH = 16
AHEAD = 3
"""Batches that are decoded while one passes the eye."""
FEW = 16
"""Photos that the time of one is measured on."""
ABANDONED = 3600
"""Seconds after which a half-written file belongs to a process that was killed."""


class Row(NamedTuple):
    """What is known of one photo."""

    values: Tensor
    """Its statistics, (D,)."""
    key: int
    """A hash of its pixels."""


@dataclass(frozen=True)
class Features:
    """Statistics of N photos."""

    names: tuple[str, ...]
    """Files, or samples of tar shards."""
    labels: Tensor
    """(N,)."""
    values: Tensor
    """(N, D)."""
    keys: Tensor
    """A hash of the pixels of each photo, (N,)."""
    skipped: tuple[str, ...] = ()
    """Files that were left out, each with the reason."""

    def __len__(self) -> int:
        return len(self.labels)


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
        self._full = False
        if self.folder.is_dir():
            remove_unfinished(self.folder, older=ABANDONED)
            for file in sorted(self.folder.glob("*.safetensors")):
                self._list(file)

    def _list(self, file: Path) -> None:
        try:
            with safe_open(file, "pt") as stored:
                digests = stored.get_tensor("digests")
                shapes = [stored.get_slice(name).get_shape() for name in ("values", "keys")]
        except (OSError, SafetensorError):
            return  # cut or foreign: these photos are read again
        if shapes == [[len(digests), self.dimensions], [len(digests)]]:
            self._places |= {each.tobytes(): (file, row) for row, each in enumerate(digests.numpy())}

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
        found = {each: self._in_memory[each] for each in digests if each in self._in_memory}
        by_file: dict[Path, list[bytes]] = {}
        for each in digests:
            if each in self._places:
                by_file.setdefault(self._places[each][0], []).append(each)
        for file, own in by_file.items():
            with safe_open(file, "pt") as stored:
                values, keys = stored.get_tensor("values"), stored.get_tensor("keys").tolist()
            for each in own:
                row = self._places[each][1]
                found[each] = Row(values[row].clone(), keys[row])
        return [found[each] for each in digests]

    def store(self, digests: Sequence[bytes], rows: Sequence[Row]) -> None:
        """Add photos."""
        name = hashlib.sha256(b"".join(digests)).hexdigest()[:16]
        file = self.folder / f"{name}.safetensors"
        tensors = {
            "digests": torch.tensor([list(each) for each in digests], dtype=torch.uint8),
            "values": torch.stack([row.values for row in rows]),
            "keys": torch.tensor([row.key for row in rows]),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_sealed(tensors, file)
        except (OSError, SafetensorError) as error:
            if not self._full:
                self._progress.log(
                    f"statistics can't be kept in '{self.folder}' for a later training: {error}"
                )
            self._full = True
            self._in_memory |= dict(zip(digests, rows, strict=True))
        else:
            self._whole.add(file)
            self._places |= {each: (file, row) for row, each in enumerate(digests)}


class _Photo(NamedTuple):
    """One photo and what became of it."""

    name: str
    label: int
    found: Row | str
    """What the eye sees, or why it can't be used."""


@dataclass(frozen=True)
class Extraction:
    """Turns photos into statistics; several processes share the photos.

    Args:
        eye: what looks at them.
        cache: what is known already.
        fabric: the processes.
        progress: shows how many photos are done.
        skip_bad: whether photos that can't be read are left out, instead of an error.
    """

    eye: Eye
    cache: FeatureCache
    fabric: "Fabric"
    progress: Progress
    skip_bad: bool = False

    def __call__(self, split: Split, name: str = "photos") -> Features:
        """Return the statistics of photos; only the first process gets them, the others get none.

        The result is the same for any number of processes.
        """
        own: list[_Photo] = []
        error = None
        try:
            own = (
                self._of_files(split, name) if isinstance(split, FileSplit) else self._of_shards(split, name)
            )
        except CandidError as problem:
            error = problem
        error = first_error(self.fabric, error)
        if error is not None:
            raise error
        # files are dealt out one by one, so they come back in their order; shards are sorted by their names
        parts = gathered(self.fabric, own)
        photos = [part[i] for i in range(max(map(len, parts), default=0)) for part in parts if i < len(part)]
        if not isinstance(split, FileSplit):
            photos.sort(key=lambda photo: photo.name)
        good = [(photo, photo.found) for photo in photos if isinstance(photo.found, Row)]
        if self.fabric.is_global_zero and not good:
            raise CandidError(f"None of the {name} can be used: give others.")
        return Features(
            tuple(photo.name for photo, _ in good),
            torch.tensor([photo.label for photo, _ in good], dtype=torch.int64),
            torch.stack([row.values for _, row in good]) if good else torch.empty(0, self.eye.dimensions),
            torch.tensor([row.key for _, row in good], dtype=torch.int64),
            tuple(f"{photo.name}: {photo.found}" for photo in photos if isinstance(photo.found, str)),
        )

    def estimate(self, splits: Sequence[Split]) -> tuple[int, float]:
        """Return the number of photos that are not in the cache, and the seconds that they will take.

        A few of them are looked at to measure the time of one.
        """
        new = [
            path
            for split in splits
            if isinstance(split, FileSplit)
            for path, each in zip(split.paths, split.digests(), strict=True)
            if each not in self.cache
        ]
        streamed = sum(len(split) for split in splits if not isinstance(split, FileSplit))
        if not new:
            return streamed, 0.0
        few = FileSplit(tuple(new[:: max(1, len(new) // FEW)][:FEW]), torch.empty(0))
        numbers = range(len(few.paths))
        deque(self._described(_decoded(few, numbers[:1], self.preprocessing)), maxlen=0)  # opens the eye
        start = time.monotonic()
        deque(self._described(_decoded(few, numbers, self.preprocessing)), maxlen=0)
        seconds = (time.monotonic() - start) / len(numbers)
        return len(new) + streamed, seconds * (len(new) + streamed) / self.fabric.world_size

    @property
    def preprocessing(self) -> Preprocessing:
        """The whole centre square, at the eye's size."""
        return Preprocessing(3, self.eye.size, self.eye.size)

    def _of_files(self, split: FileSplit, name: str) -> list[_Photo]:
        """Return this process's share of the photos, in their order."""
        own = split.subset(torch.arange(self.fabric.global_rank, len(split), self.fabric.world_size))
        digests = own.digests()
        missing = [i for i, each in enumerate(digests) if each not in self.cache]
        bad: dict[int, str] = {}
        chunks = _parts(missing, CHUNK)
        for chunk in self.progress.track(chunks, name, len(chunks), CHUNK * self.fabric.world_size):
            new: dict[int, Row] = {}
            for i, found in self._described(_decoded(own, chunk, self.preprocessing)):
                if isinstance(found, Row):
                    new[i] = found
                elif self.skip_bad:
                    bad[i] = found
                else:
                    raise CandidError(
                        f"'{own.paths[i]}' can't be used: {found}. Repair or remove it, or add --skip-bad to "
                        "leave such files out."
                    )
            if new:
                self.cache.store([digests[i] for i in new], list(new.values()))
        rows = iter(self.cache.rows([each for i, each in enumerate(digests) if i not in bad]))
        labels = own.labels.tolist()
        return [
            _Photo(str(path), labels[i], bad[i] if i in bad else next(rows))
            for i, path in enumerate(own.paths)
        ]

    def _of_shards(self, split: Split, name: str) -> list[_Photo]:
        """Return the photos of this process's shards; here the digest is one of the pixels."""
        if self.skip_bad:
            split.load(self.preprocessing, True, self.progress)  # says that shards can't
        rank, world = self.fabric.global_rank, self.fabric.world_size
        batches = split.named_batches(self.preprocessing, CHUNK, rank, world, workers=0)
        found: list[_Photo] = []
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
            known = self.cache.rows(digests)
            found += [_Photo(*each) for each in zip(names, labels.tolist(), known, strict=True)]
        return found

    def _described(
        self, batches: "Iterator[tuple[Sequence[int], Sequence[Tensor | str]]]"
    ) -> Iterator[tuple[int, Row | str]]:
        """Yield what the eye sees in each photo of batches, or why it can't be used."""
        for numbers, images in batches:
            both = list(zip(numbers, images, strict=True))
            yield from ((i, image) for i, image in both if isinstance(image, str))
            good = [(i, image) for i, image in both if isinstance(image, Tensor)]
            if not good:
                continue
            pixels = torch.stack([image for _, image in good])
            with torch.no_grad():
                values = self.eye.statistics(to_float(pixels, self.fabric.device)).float().cpu()
            for (i, _), row, key in zip(good, values, image_keys(pixels).tolist(), strict=True):
                finite = bool(row.isfinite().all())
                yield i, Row(row.clone(), key) if finite else "the eye's numbers overflow on it"


def _parts(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]


def _decoded(
    split: FileSplit, indices: Sequence[int], preprocessing: Preprocessing
) -> Iterator[tuple[Sequence[int], list[Tensor | str]]]:
    """Yield batches of photos that are decoded in threads while earlier ones pass the eye."""
    waiting: deque[tuple[Sequence[int], list[Future[Tensor | str]]]] = deque()

    def look(i: int) -> Tensor | str:
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
