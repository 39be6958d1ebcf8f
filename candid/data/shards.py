"""WebDataset tar shards: files or URLs whose images are streamed instead of looked up.

A sample is an image (``jpg``, ``png``, ...) and a text file ``cls`` with its label, under one name.
"""

import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from candid._support.errors import CandidError
from candid._support.randomness import generator
from candid.data.augment import NUMBERS
from candid.data.datasets import Dataset
from candid.data.images import EXTENSIONS, Preprocessing, path_of
from candid.data.splits import Batch, NamedBatch, ShardSplit, decode_batch

if TYPE_CHECKING:
    from candid.data.loader import Plan

B = TypeVar("B", Batch, NamedBatch)
BUFFER = 1000
"""Samples, not yet decoded, among which a reader draws the next one."""


def is_shards(spec: str) -> bool:
    """Whether ``spec`` names tar shards: files, a pattern, URLs, or a folder with ``train*.tar``.

    >>> is_shards("data/train-{000..127}.tar"), is_shards("digits")
    (True, False)
    """
    folder = _folder(spec)
    return ".tar" in spec if folder is None else any(folder.glob("train*.tar"))


def open_shards(
    spec: str, val_spec: str | None = None, epoch_images: int | None = None, classes: int | None = None
) -> Dataset:
    """The data set in tar shards that ``spec`` names.

    A folder has ``train*.tar`` and ``val*.tar`` and/or ``test*.tar``, and maybe ``classes.txt`` with a
    class name a line; without ``val*.tar``, the test shards are what is validated on. Anything else is
    expanded by webdataset: a file, ``train-{000..127}.tar``, a URL, ``pipe:`` and a command. Training
    images and classes are counted unless both are given, and behind URLs they must be given; images to
    validate on are always counted.
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
    images = {name: len(found) for name, found in labels.items()}
    images["train"] = epoch_images or images["train"]
    splits = {name: ShardSplit(urls, images[name], number or 0) for name, urls in parts.items()}
    class_names = class_names or tuple(map(str, range(number or 0)))
    return Dataset(splits["train"], splits["val"], splits.get("test"), class_names)


def open_part(spec: str, part: str | None, classes: int | None) -> tuple[ShardSplit, str]:
    """The shards of one part of a folder, by default its test images, else those to validate on.

    Anything but a folder is taken as a whole. Labels must be below ``classes``, if that is given.
    """
    found = {"all": _expanded(spec)} if (folder := _folder(spec)) is None else _folder_parts(folder)
    part = part or next(name for name in ("all", "test", "val", "train") if name in found)
    if part == "val":  # without them, training validates on the test images
        part = next((name for name in ("val", "test", "all") if name in found), part)
    if part not in found:
        raise CandidError(f"'{spec}' has no {part} shards: choose {' or '.join(found)}.")
    labels = [label for url in found[part] for label in _labels(url)]
    classes = classes or max(labels, default=0) + 1
    _check_labels(part, labels, classes)
    return ShardSplit(found[part], len(labels), classes), part


def shard_training_batches(
    split: ShardSplit,
    preprocessing: Preprocessing,
    plan: "Plan",
    start: int,
    stop: int,
    parts: range,
    workers: int = 0,
) -> Iterator[Batch]:
    """One batch for each of ``parts`` in each step from ``start`` to ``stop``, shuffled and augmented.

    The epoch's shuffled shards are dealt to readers, as many as there are workers in all processes; each
    goes round its own for as long as the epoch lasts. So the batches depend on the seed and the number of
    readers, and not on ``start``.
    """
    processes, rank = plan.parts // len(parts), parts.start // len(parts)
    readers = min(max(1, workers), len(split.urls) // processes)
    if not readers:
        raise CandidError(
            f"{processes} processes can't share {len(split.urls)} training shards: "
            "start fewer, or pack the images into more shards."
        )
    first, last = start * len(parts), stop * len(parts)
    streams = [
        partial(
            _training_stream,
            split,
            preprocessing,
            plan,
            numbers=range(number, last, readers),
            per_epoch=plan.steps_per_epoch * len(parts),
            reader=rank * readers + number % readers,
            readers=processes * readers,
        )
        for number in range(first, min(first + readers, last))
    ]
    return _in_turn(streams, workers)


def shard_evaluation_batches(
    split: ShardSplit,
    preprocessing: Preprocessing,
    batch: int,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
) -> Iterator[NamedBatch]:
    """Every image of ``split`` once over all ``world`` processes, without augmentation; with their names."""
    readers = min(max(1, workers), max(1, len(split.urls) // world))
    streams = [
        partial(_evaluation_stream, split, preprocessing, batch, rank * readers + i, world * readers)
        for i in range(readers)
    ]
    return _in_turn(streams, workers)


class _Sample(NamedTuple):
    shard: str
    key: str
    image: bytes
    label: int


class _Stream(IterableDataset[Any]):
    """One reader's batches; runs in a process of its own if there are workers."""

    def __init__(self, batches: Callable[[], Iterator[Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.batches()
        except CandidError as error:  # as an item, or the worker's traceback would end up in its message
            yield error


def _in_turn(streams: Sequence[Callable[[], Iterator[B]]], workers: int) -> Iterator[B]:
    """A batch of each stream in turn, until all have ended.

    Each has a loader to itself: one loader with many workers would order the last batches by their speed.
    """
    settings: dict[str, Any] = {
        "batch_size": None,
        "collate_fn": _unchanged,
        "num_workers": min(1, workers),
        "pin_memory": torch.cuda.is_available(),
        "prefetch_factor": 4 if workers else None,
    }
    loaders = deque(iter(DataLoader(_Stream(stream), **settings)) for stream in streams)
    while loaders:
        batch = next(loaders[0], None)
        if batch is None:
            loaders.popleft()
            continue
        if isinstance(batch, CandidError):
            loaders.clear()  # ends the workers now; a traceback would keep them
            raise batch
        yield batch
        loaders.rotate(-1)


def _unchanged(batch: B) -> B:  # torch would make lists of tuples
    return batch


def _training_stream(
    split: ShardSplit,
    preprocessing: Preprocessing,
    plan: "Plan",
    numbers: range,
    per_epoch: int,
    reader: int,
    readers: int,
) -> Iterator[Batch]:
    """The batches ``numbers`` of a process, which all are made by one reader."""
    size = plan.batch // plan.parts
    samples: Iterator[_Sample] = iter(())
    epoch = -1
    for number in numbers:
        turn = number % per_epoch // numbers.step  # how many this reader has made before in this epoch
        if number // per_epoch != epoch:
            epoch = number // per_epoch
            samples = _epoch_samples(split, plan.seed, epoch, reader, readers)
            samples = islice(samples, turn * size, None)
        random = torch.rand(size, NUMBERS, generator=generator(plan.seed, epoch, reader, 6, turn))
        yield _decoded(list(islice(samples, size)), preprocessing, random)


def _epoch_samples(split: ShardSplit, seed: int, epoch: int, reader: int, readers: int) -> Iterator[_Sample]:
    """A reader's samples, again and again, each time in another order."""
    order = torch.randperm(len(split.urls), generator=generator(seed, epoch, 0))
    urls = [split.urls[i] for i in order[reader::readers].tolist()]
    random = generator(seed, epoch, reader, 5)
    while True:
        empty = True
        for sample in _shuffled(_samples(urls, split.classes), random):
            empty = False
            yield sample
        if empty:
            raise CandidError(f"The shard '{urls[0]}' has no images: remove it.")


def _shuffled(samples: Iterable[_Sample], random: torch.Generator) -> Iterator[_Sample]:
    buffer: list[_Sample] = []
    for sample in samples:
        if len(buffer) < BUFFER:
            buffer.append(sample)
        else:
            i = int(torch.randint(BUFFER, (), generator=random))
            yield buffer[i]
            buffer[i] = sample
    for i in torch.randperm(len(buffer), generator=random).tolist():
        yield buffer[i]


def _evaluation_stream(
    split: ShardSplit, preprocessing: Preprocessing, batch: int, reader: int, readers: int
) -> Iterator[NamedBatch]:
    if len(split.urls) >= readers:
        samples = _samples(split.urls[reader::readers], split.classes)
    else:
        samples = islice(_samples(split.urls, split.classes), reader, None, readers)
    while chunk := list(islice(samples, batch)):
        images, labels = _decoded(chunk, preprocessing, None)
        labels = torch.tensor(split.numbers)[labels] if split.numbers else labels
        yield images, labels, tuple(f"{sample.shard}/{sample.key}" for sample in chunk)


def _decoded(samples: list[_Sample], preprocessing: Preprocessing, numbers: Tensor | None) -> Batch:
    def blame(i: int, error: CandidError) -> CandidError:
        return _bad_sample(samples[i].shard, samples[i].key, f"the image can't be used: {error}")

    images = decode_batch([sample.image for sample in samples], preprocessing, numbers, blame)
    return images, torch.tensor([sample.label for sample in samples])


def _samples(urls: Iterable[str], classes: int) -> Iterator[_Sample]:
    webdataset = _webdataset()
    for url in urls:
        with _opened(url) as stream:
            files = webdataset.tariterators.tar_file_expander([{"url": url, "stream": stream}])
            for parts in webdataset.tariterators.group_by_keys(files):
                key = parts["__key__"]
                label = _label(url, key, parts.get("cls", b""))
                image = next((data for ending, data in parts.items() if f".{ending}" in EXTENSIONS), None)
                if image is None:
                    raise _bad_sample(url, key, "it has no image")
                if label >= classes:
                    raise _bad_sample(url, key, f"its label {label} is not below {classes}")
                yield _Sample(url, key, image, label)


def _labels(url: str) -> Iterator[int]:
    """All labels of a shard; in a local file the images are stepped over, not read."""
    split_name = _webdataset().tariterators.base_plus_ext
    with _opened(url) as stream:
        remote = _is_url(url)
        with tarfile.open(fileobj=stream, mode="r|*") if remote else tarfile.open(fileobj=stream) as tar:
            for member in tar:
                key, ending = split_name(member.name)
                file = tar.extractfile(member) if key is not None and ending.lower() == "cls" else None
                if file is not None:
                    yield _label(url, key, file.read())
            if tar.fileobj is not None and tar.fileobj.tell() < tar.offset + tarfile.BLOCKSIZE:
                raise tarfile.ReadError("its end is missing")


def _label(url: str, key: str, text: bytes) -> int:
    if not text.strip().isdigit():
        raise _bad_sample(url, key, "it needs a label, a number from 0 on, in a 'cls' file")
    return int(text)


def _bad_sample(url: str, key: str, reason: str) -> CandidError:
    return CandidError(
        f"The sample '{key}' of the shard '{url}' is bad, {reason}: pack it anew or without it."
    )


@contextmanager
def _opened(url: str) -> Iterator[Any]:
    """The bytes of a shard; what goes wrong in reading them becomes an error that names it."""
    try:
        stream = _webdataset().gopen(url)
        try:
            yield stream
            while stream.read(2**20):  # a command whose output is not read to its end fails
                pass
            stream.close()
        finally:
            with suppress(OSError):
                stream.close()
    except CandidError:
        raise
    except Exception as error:  # of tarfile, the operating system and webdataset
        reason = error.args[0] if error.args and isinstance(error.args[0], str) else error
        reason = str(reason).split(" @ <")[0]
        raise CandidError(f"The shard '{url}' can't be read: {reason}; check it or copy it again.") from error


def _webdataset() -> Any:
    try:
        import webdataset
    except ImportError as error:
        raise CandidError(
            "Tar shards are read by webdataset, which is missing: pip install 'candid-vision[shards]'."
        ) from error
    return webdataset


def _is_url(url: str) -> bool:
    return "://" in url or "pipe:" in url or url.startswith("file:")


def _folder(spec: str) -> Path | None:
    path = path_of(spec)
    return path if not _is_url(spec) and path.is_dir() else None


def _parts(spec: str, val_spec: str | None) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """The shards of each split, and the class names if there is a list of them."""
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
    found = {name: sorted(map(str, folder.glob(f"{name}*.tar"))) for name in ("train", "val", "test")}
    return {name: tuple(urls) for name, urls in found.items() if urls}


def class_names_of(spec: str) -> tuple[str, ...]:
    """The names in the ``classes.txt`` of a folder; empty if there is none."""
    folder = _folder(spec)
    if folder is None or not (folder / "classes.txt").is_file():
        return ()
    lines = (folder / "classes.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    return tuple(line.strip() for line in lines if line.strip())


def _expanded(spec: str) -> tuple[str, ...]:
    if path_of(spec).is_file():
        return (str(path_of(spec)),)
    try:
        urls = [str(url) for url in _webdataset().shardlists.expand_urls(spec)]
    except (AssertionError, ValueError) as error:
        raise CandidError(f"The shards '{spec}' can't be listed: {error}; correct the pattern.") from error
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
            f"The class {min(missing)} has no training images: add some, or number the classes anew."
        )
