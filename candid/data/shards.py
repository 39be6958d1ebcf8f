"""WebDataset tar shards: files or URLs whose images are streamed instead of looked up.

A sample is an image (``jpg``, ``png``, ...) and a text file ``cls`` with its label, under one name.
"""

import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from PIL import Image

from candid._support.errors import CandidError, require_extra
from candid._support.numbers import Array, digest
from candid._support.progress import Progress
from candid._support.randomness import Draws, draws
from candid.data.batches import NamedBatch, in_turn
from candid.data.images import EXTENSIONS, Preprocessing, decode_batch, path_of
from candid.data.splits import Split, files_state, size_and_date

BUFFER = 1000
"""Samples, not yet decoded, among which a reader draws the next one."""
LABEL_BYTES, LARGEST_LABEL = 20, 999_999
"""Larger labels would fill the memory with class names."""
MEMBER_BYTES = 200 * 2**20
"""A larger file in a shard would fill the memory: packed, it can be a thousand times smaller."""


@dataclass(frozen=True)
class ShardSplit(Split):
    """Tar shards, read one after the other. No image can be looked up by its number."""

    can_index = False
    urls: tuple[str, ...]
    images: int
    """Number of images; in training, the number in an epoch."""
    classes: int
    """Labels in the shards are below it."""
    numbers: tuple[int, ...] = ()
    """The label that evaluation uses for each label in the shards; -1 is unknown. Empty: the same."""

    def __len__(self) -> int:
        return self.images

    def batch(self, indices: Array, preprocessing: Preprocessing, numbers: Array | None = None) -> NoReturn:
        raise CandidError("Tar shards are read from end to end: use a folder to look images up.")

    def subset(self, indices: Array) -> NoReturn:
        raise CandidError("Tar shards are read from end to end: leave --images out.")

    def relabel(self, numbers: Array) -> "ShardSplit":
        return replace(self, numbers=tuple(numbers.tolist()))

    def unlabelled(self) -> "ShardSplit":
        return replace(self, numbers=(-1,) * self.classes)

    def classes_present(self) -> None:
        return None

    def image_size(self) -> None:
        return None

    def fingerprint(self) -> bytes:
        """Return a hash of the list of shards, and of the sizes and dates of local ones."""
        return digest(repr((self, [size_and_date(Path(url)) for url in self.urls])).encode()).digest()

    def state(self) -> str:
        return files_state(map(Path, self.urls))

    def load(
        self, preprocessing: Preprocessing, skip_bad: bool, progress: Progress
    ) -> tuple["ShardSplit", list[str]]:
        """Return the split unchanged: only reading the shards would show which images are bad."""
        if skip_bad:
            raise CandidError(
                "Tar shards can't be searched for bad images: leave --skip-bad out, pack them without."
            )
        return self, []

    def named_batches(
        self, preprocessing: Preprocessing, batch: int, rank: int, world: int, workers: int
    ) -> Iterator[NamedBatch]:
        """Yield every image once over all ``world`` processes."""
        readers = min(max(1, workers), max(1, len(self.urls) // world))
        sources = [
            _evaluation_stream(self, preprocessing, batch, rank * readers + i, world * readers)
            for i in range(readers)
        ]
        return in_turn(sources, workers)


def is_shards(spec: str) -> bool:
    """Return whether ``spec`` names tar shards: files, a pattern, URLs, or a folder with ``train*.tar``.

    >>> is_shards("data/train-{000..127}.tar"), is_shards("digits")
    (True, False)
    """
    folder = _folder(spec)
    return ".tar" in spec if folder is None else any(folder.glob("train*.tar"))


def open_shards(
    spec: str, val_spec: str | None = None, epoch_images: int | None = None, classes: int | None = None
) -> tuple[dict[str, ShardSplit], tuple[str, ...]]:
    """Return the parts of a data set in tar shards to train on, and its class names.

    A folder has ``train*.tar`` and ``val*.tar`` and/or ``test*.tar``, and maybe ``classes.txt`` with one
    class name per line. Without ``val*.tar``, training validates on the test shards. Anything else is
    expanded by webdataset: a file, ``train-{000..127}.tar`` or a URL. Training images and classes are counted
    unless both are given; behind URLs they must be given. Images to validate on are always counted.
    """
    if _is_url(spec):
        _check_given(spec, val_spec, epoch_images, classes)
    if epoch_images is not None and epoch_images < 1:
        raise CandidError(f"An epoch needs images: set --epoch-images to 1 or more, not {epoch_images}.")
    parts, class_names = _parts(spec, val_spec)
    number = len(class_names) or classes
    labels = {}
    for name, urls in parts.items():
        if name != "train" or epoch_images is None or not number:
            labels[name] = [label for url in urls for label in _labels(url)]
            number = number or max(labels[name], default=-1) + 1
            _check_labels(name, labels[name], number)
    if "train" in labels:
        _check_gaps(labels["train"], len(class_names) or max(labels["train"]) + 1)
    images = {name: len(values) for name, values in labels.items()}
    images["train"] = epoch_images or images["train"]
    splits = {name: ShardSplit(urls, images[name], number or 0) for name, urls in parts.items()}
    return splits, class_names or tuple(map(str, range(number or 0)))


def part_urls(spec: str) -> dict[str, tuple[str, ...]]:
    """Return the shards of each part of a folder, or all that ``spec`` names as one part."""
    folder = _folder(spec)
    return {"all": _expanded(spec)} if folder is None else _folder_parts(folder)


def counted(urls: tuple[str, ...], part: str, classes: int | None) -> ShardSplit:
    """Return these shards with their images counted. Labels must be below ``classes``, if that is given."""
    labels = [label for url in urls for label in _labels(url)]
    classes = classes or max(labels, default=0) + 1
    _check_labels(part, labels, classes)
    return ShardSplit(urls, len(labels), classes)


def first_side(spec: str) -> int | None:
    """Return the shorter side, in pixels, of the first image; None if it can't be read, or behind a URL."""
    if _is_url(spec):
        return None
    try:
        urls = next(iter(part_urls(spec).values()))
        sample = next(_samples(urls, LARGEST_LABEL + 1))
        with Image.open(BytesIO(sample.image)) as image:
            return min(image.size)
    except (CandidError, OSError, StopIteration, Image.DecompressionBombError):
        return None  # reading the shards says what is wrong


class Sample(NamedTuple):
    """An image of a shard that is not decoded yet."""

    shard: str
    key: str
    image: bytes
    label: int


def epoch_samples(split: ShardSplit, seed: int, epoch: int, reader: int, readers: int) -> Iterator[Sample]:
    """Yield the samples of one of ``readers`` again and again, each time in a different order."""
    order = draws(seed, epoch, 0).permutation(len(split.urls))
    urls = [split.urls[i] for i in order[reader::readers].tolist()]
    random = draws(seed, epoch, reader, 5)
    while True:
        empty = True
        for sample in _shuffled(_samples(urls, split.classes), random):
            empty = False
            yield sample
        if empty:
            raise CandidError(f"The shard '{urls[0]}' has no images: remove it.")


def _shuffled(samples: Iterable[Sample], random: Draws) -> Iterator[Sample]:
    buffer: list[Sample] = []
    for sample in samples:
        if len(buffer) < BUFFER:
            buffer.append(sample)
        else:
            i = int(random.integers(BUFFER, 1)[0])
            yield buffer[i]
            buffer[i] = sample
    for i in random.permutation(len(buffer)).tolist():
        yield buffer[i]


def _evaluation_stream(
    split: ShardSplit, preprocessing: Preprocessing, batch: int, reader: int, readers: int
) -> Iterator[NamedBatch]:
    if len(split.urls) >= readers:
        samples = _samples(split.urls[reader::readers], split.classes)
    else:
        samples = islice(_samples(split.urls, split.classes), reader, None, readers)
    while chunk := list(islice(samples, batch)):
        images, labels = decoded(chunk, preprocessing)
        labels = np.array(split.numbers)[labels] if split.numbers else labels
        yield images, labels, tuple(f"{sample.shard}/{sample.key}" for sample in chunk)


def decoded(
    samples: list[Sample], preprocessing: Preprocessing, numbers: Array | None = None
) -> tuple[Array, Array]:
    """Return images (B, C, H, W) and labels (B,), randomly cropped if ``numbers`` (B, 5) are given."""

    def blame(i: int, error: CandidError) -> CandidError:
        return _bad_sample(samples[i].shard, samples[i].key, f"the image can't be used: {error}")

    images = decode_batch([sample.image for sample in samples], preprocessing, numbers, blame)
    return images, np.array([sample.label for sample in samples], np.int64)


class LargeMemberError(CandidError):
    """A file in a shard is too large."""


class _Member(tarfile.TarInfo):
    """A file in a shard, or a header of one, that is refused before it is read if it is too large."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Member":
        member = super().frombuf(buf, encoding, errors)
        if member.size > MEMBER_BYTES:
            raise LargeMemberError(
                f"has a file '{member.name[:60]}' of {member.size / 1e6:,.0f} MB, more than "
                f"{MEMBER_BYTES / 1e6:,.0f}"
            )
        return member


def _files(url: str, stream: Any) -> Iterator[dict[str, Any]]:
    """Yield the files of a shard as webdataset does; of labels only what a number needs."""
    with tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Member) as tar:
        for member in tar:
            if member.isreg() and not member.name.startswith("__"):
                file = tar.extractfile(member)
                assert file is not None
                most = LABEL_BYTES + 1 if member.name.lower().endswith(".cls") else -1
                yield {"fname": member.name, "data": file.read(most), "__url__": url}


def _samples(urls: Iterable[str], classes: int) -> Iterator[Sample]:
    webdataset = _webdataset()
    for url in urls:
        with _opened(url) as stream:
            for parts in webdataset.tariterators.group_by_keys(_files(url, stream)):
                key = parts["__key__"]
                label = _label(url, key, parts.get("cls", b""))
                image = next((data for ending, data in parts.items() if f".{ending}" in EXTENSIONS), None)
                if image is None:
                    raise _bad_sample(url, key, "it has no image")
                if label >= classes:
                    raise _bad_sample(url, key, f"its label {label} is not below {classes}")
                yield Sample(url, key, image, label)


def _labels(url: str) -> Iterator[int]:
    """Yield all labels of a shard. In a local file the images are skipped, not read."""
    split_name = _webdataset().tariterators.base_plus_ext
    with _opened(url) as stream:
        remote = _is_url(url)
        mode: Any = "r|*" if remote else "r"
        with tarfile.open(fileobj=stream, mode=mode, tarinfo=_Member) as tar:
            for member in tar:
                key, ending = split_name(member.name)
                file = tar.extractfile(member) if key is not None and ending.lower() == "cls" else None
                if file is not None:
                    yield _label(url, key, file.read(LABEL_BYTES + 1))
            if tar.fileobj is not None and tar.fileobj.tell() < tar.offset + tarfile.BLOCKSIZE:
                raise tarfile.ReadError("its end is missing")


def _label(url: str, key: str, text: bytes) -> int:
    if len(text) > LABEL_BYTES or not text.strip().isdigit():
        raise _bad_sample(url, key, "it needs a label, a number from 0 on, in a 'cls' file")
    if int(text) > LARGEST_LABEL:
        raise _bad_sample(url, key, f"its label {int(text)} is larger than {LARGEST_LABEL:,}")
    return int(text)


def _bad_sample(url: str, key: str, reason: str) -> CandidError:
    return CandidError(
        f"The sample '{key}' of the shard '{url}' is bad, {reason}: pack it again or without it."
    )


@contextmanager
def _opened(url: str) -> Iterator[Any]:
    """Open the bytes of a shard. Every error of reading them becomes one that names the shard."""
    try:
        stream = _webdataset().gopen(url)
        try:
            yield stream
            while stream.read(
                2**20
            ):  # webdataset reads a URL through a command, which fails if it is cut off
                pass
            stream.close()
        finally:
            with suppress(OSError):
                stream.close()
    except LargeMemberError as error:
        raise CandidError(f"The shard '{url}' {error}: pack it again without.") from None
    except CandidError:
        raise
    except Exception as error:  # of tarfile, the operating system and webdataset
        reason = error.args[0] if error.args and isinstance(error.args[0], str) else error
        reason = str(reason).split(" @ <")[0]
        raise CandidError(f"The shard '{url}' can't be read: {reason}; check it or copy it again.") from error


def _webdataset() -> Any:
    return require_extra("webdataset", "shards", "Reading tar shards")


def _is_url(url: str) -> bool:
    return "://" in url or url.startswith("file:")


def _folder(spec: str) -> Path | None:
    path = path_of(spec)
    return path if not _is_url(spec) and path.is_dir() else None


def _parts(spec: str, val_spec: str | None) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return the shards of each split, and the class names if there is a list of them."""
    folder = _folder(spec)
    parts = {"train": _expanded(spec)} if folder is None else _folder_parts(folder)
    if val_spec is not None:
        parts["val"] = _expanded(val_spec)
    elif "val" not in parts and "test" in parts:
        parts["val"] = parts.pop("test")
    if "val" not in parts:
        raise CandidError(f"'{spec}' has no images to validate on: name their shards with --val-data.")
    return parts, class_names_of(spec)


def _folder_parts(folder: Path) -> dict[str, tuple[str, ...]]:
    parts = {name: sorted(map(str, folder.glob(f"{name}*.tar"))) for name in ("train", "val", "test")}
    return {name: tuple(urls) for name, urls in parts.items() if urls}


def class_names_of(spec: str) -> tuple[str, ...]:
    """Return the names in the ``classes.txt`` of a folder; empty if there is none."""
    folder = _folder(spec)
    if folder is None or not (folder / "classes.txt").is_file():
        return ()
    lines = (folder / "classes.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    return tuple(line.strip() for line in lines if line.strip())


def _expanded(spec: str) -> tuple[str, ...]:
    try:
        is_file = path_of(spec).is_file()
        urls = [str(url) for url in ([spec] if is_file else _webdataset().shardlists.expand_urls(spec))]
    except (AssertionError, ValueError) as error:
        raise CandidError(f"The shards '{spec}' can't be listed: {error}; correct the pattern.") from error
    if any("pipe:" in url.lower() for url in urls):  # webdataset would run it
        raise CandidError(f"'{spec}' is a command, which is never run: write its output to a file.")
    urls = [url if _is_url(url) else str(path_of(url)) for url in urls]
    for url in urls:
        if not _is_url(url) and not Path(url).is_file():
            raise CandidError(f"There is no shard '{url}': check the name, or copy it there.")
    return tuple(urls)


def _check_given(spec: str, val_spec: str | None, epoch_images: int | None, classes: int | None) -> None:
    options = {"--epoch-images": epoch_images, "--set classes=N": classes, "--val-data": val_spec}
    missing = [option for option, value in options.items() if value is None]
    if missing:
        raise CandidError(
            f"Images behind a URL are not counted before training: to use '{spec}', add {', '.join(missing)}."
        )


def _check_labels(name: str, labels: list[int], classes: int) -> None:
    if not labels:
        raise CandidError(f"The {name} shards have no labels: pack each image with a 'cls' file.")
    if max(labels) >= classes:
        raise CandidError(
            f"The {name} shards have a label {max(labels)}, but the classes go from 0 to {classes - 1}: "
            "correct the labels or the number of classes."
        )


def _check_gaps(labels: list[int], classes: int) -> None:
    missing = set(range(classes)).difference(labels)
    if missing:
        raise CandidError(
            f"The class {min(missing)} has no training images: add some, or renumber the classes."
        )
