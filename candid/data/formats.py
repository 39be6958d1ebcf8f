"""The formats of data sets, one entry each in ``FORMATS``, and their readers."""

import gzip
import io
import math
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from candid._support.errors import CandidError, did_you_mean
from candid._support.numbers import Array
from candid._support.randomness import draws
from candid._support.text import listed, plural
from candid.data import FEATURES_FILE, SYNTHETIC, SplitRule, shards
from candid.data.images import EXTENSIONS, Preprocessing, path_of
from candid.data.splits import ArraySplit, FileSplit, Split, unknown

PARTS = ("train", "val", "test")
FOLDERS = {"train": ("train", "training"), "val": ("val", "validation", "valid"), "test": ("test", "testing")}
"""Names of the folders of each part, in small letters."""
IDX_NAMES = {"train": "train", "test": "t10k"}
CIFAR_TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SYNTHETIC_IMAGES = 2000
"""How images without their own val or test part are divided: by a hash of each image, or by a shuffle."""


@dataclass(frozen=True)
class Query:
    """What is asked of a data set."""

    spec: str
    training: bool = False
    """Whether a model is trained on it; else a model is evaluated on it."""
    classes: int | None = None
    """Number of classes, if it is known."""
    val_spec: str | None = None
    """Tar shards: those to validate on."""
    epoch_images: int | None = None
    """Tar shards: images in an epoch."""
    nested: bool = False
    """Folders: whether the innermost folders are the classes, and those around them kinds of classes."""


class Contents(NamedTuple):
    """The parts that a data set has of its own, and its class names."""

    parts: dict[str, Callable[[], Split]]
    """They are opened when they are needed. A set without parts has one that is called "all" or "train"."""
    class_names: tuple[str, ...]
    """In the order of the labels; empty if they are not known."""


@dataclass(frozen=True)
class Format:
    """A format of data sets.

    Args:
        recognises: whether a data set's name (a folder, a pattern, a URL) is of this format.
        read: finds its parts; None if its images have no labels.
        images: opens any of its images, without labels; None: the test images, else the others.
        divided: how images without their own val or test part are divided; None: not at all.
    """

    recognises: Callable[[str], bool]
    read: Callable[[Query], Contents] | None = None
    images: Callable[[str, Preprocessing], Split] | None = None
    divided: SplitRule | None = "shuffled"


def format_of(spec: str, labelled: bool = True) -> Format:
    """Return the format of a data set; of several that recognise it, the one registered last."""
    usable = [format for format in FORMATS.values() if format.read is not None or not labelled]
    return next(format for format in reversed(usable) if format.recognises(spec))


def _in_memory(arrays: "dict[str, LabelledImages]", class_names: Sequence[str]) -> Contents:
    parts = {name: ArraySplit(*part) for name, part in arrays.items()}
    return Contents({name: partial(_same, part) for name, part in parts.items()}, tuple(class_names))


def _same(split: Split) -> Split:
    return split


# image folders


def _folder(spec: str) -> Path:
    folder = path_of(spec)
    if not folder.exists():
        raise CandidError(f"There is no data set or folder '{spec}': name a folder, or use 'digits'.")
    if spec.endswith(FEATURES_FILE):
        raise CandidError(
            f"'{spec}' has features, which only 'candid train' reads: name a folder of photos; in Python, "
            "Examiner(model).examine_features judges features."
        )
    if not folder.is_dir():
        raise CandidError(f"'{spec}' is a file: name the folder of the data set.")
    return folder


def _read_folder(query: Query) -> Contents:
    folder = _folder(query.spec)
    parts = part_folders(folder)
    if query.training:
        if parts and "train" not in parts:
            raise CandidError(f"'{folder}' has {' and '.join(parts)} but no train folder: add it.")
        parts = parts or {"train": folder}
        class_names = tuple(class_folders(parts["train"], query.nested))
        if len(class_names) < 2:
            raise CandidError(_too_few_classes(parts["train"]))
    else:
        parts = parts or {"all": folder}
        class_names = tuple(
            sorted({name for part in parts.values() for name in class_folders(part, query.nested)})
        )
        if not class_names:
            raise CandidError(
                f"'{query.spec}' has no class folders: give a folder with one folder of images per class."
            )
    return Contents(
        {name: partial(image_files, part, class_names, query.nested) for name, part in parts.items()},
        class_names,
    )


def class_folders(folder: Path, nested: bool = False) -> dict[str, Path]:
    """Return the folders of the classes in ``folder`` by name; nested, these are the innermost ones."""
    if not nested:
        return {entry.name: entry for entry in subfolders(folder)}
    classes: dict[str, Path] = {}
    for entry in subfolders(folder):
        inner = class_folders(entry, nested) or {entry.name: entry}
        if entry.name not in inner and any(is_image(path, folder) for path in entry.iterdir()):
            raise CandidError(
                f"'{entry}' has images next to the folder '{subfolders(entry)[0].name}': with nested "
                "folders, give these images a folder of their own."
            )
        if twice := sorted(classes.keys() & inner.keys()):
            raise CandidError(
                f"'{classes[twice[0]]}' and '{inner[twice[0]]}' have one name: with nested folders, each "
                "innermost folder is a class; rename one."
            )
        classes |= inner
    return dict(sorted(classes.items()))


def kinds_above(spec: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the kind above each class and kind in nested folders, and what kinds are called, by key."""
    folder = _folder(spec)
    folder = part_folders(folder).get("train", folder)
    above: dict[str, str] = {}
    for name, path in class_folders(folder, nested=True).items():
        child = name
        for parent in path.relative_to(folder).parents:
            above[child] = f"{parent.as_posix()}/"
            child = above[child]
    return above, {kind: Path(kind).name for kind in above.values()}


def _too_few_classes(folder: Path) -> str:
    entries = subfolders(folder)
    text = f"'{folder}' has {plural(len(entries), 'class folder') if entries else 'no class folders'}: "
    if entries and len(subfolders(entries[0])) > 1:
        return f"{text}did you mean '{entries[0]}'?"
    return f"{text}give at least two, each with the images of one class."


def part_folders(folder: Path) -> dict[str, Path]:
    """Return the folders of the parts of a data set, by part; their names may have capitals."""
    folders = {}
    entries = subfolders(folder)
    for part, names in FOLDERS.items():
        matches = [entry for entry in entries if entry.name.lower() in names]
        if len(matches) > 1:
            raise CandidError(
                f"'{folder}' has the folders {listed(entry.name for entry in matches)}, which all mean the "
                f"{part} part: keep one of them."
            )
        if matches:
            folders[part] = matches[0]
    return folders


def image_files(folder: Path, class_names: Sequence[str], nested: bool = False) -> FileSplit:
    """Return all images in the class folders of ``folder``."""
    paths: list[Path] = []
    labels: list[int] = []
    for name, entry in class_folders(folder, nested).items():
        if name not in class_names:
            raise CandidError(
                f"'{entry}' is no class of the training images: {did_you_mean(name, class_names)}"
            )
        images = images_in(entry)
        if not images:
            raise CandidError(f"The class folder '{entry}' has no images: add some or remove it.")
        paths += images
        labels += [class_names.index(name)] * len(images)
    if not paths:
        raise CandidError(f"'{folder}' has no class folders with images: fill it or remove it.")
    return FileSplit(tuple(paths), np.array(labels, np.int64))


def _any_files(spec: str, preprocessing: Preprocessing) -> FileSplit:
    """Return all images in a folder and its subfolders; only the test or val part if there is one."""
    folder = _folder(spec)
    parts = part_folders(folder)
    if "train" in parts:
        folder = parts.get("test", parts.get("val", folder))
    paths = tuple(images_in(folder))
    if not paths:
        choices = ", ".join(SYNTHETIC)
        raise CandidError(f"'{spec}' has no images: name a folder with some, or one of {choices}.")
    return FileSplit(paths, unknown(len(paths)))


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in ``folder``, without hidden ones."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "__")))


def images_in(folder: Path) -> list[Path]:
    """Return all image files in ``folder`` and its subfolders, sorted."""
    return sorted(path for path in folder.rglob("*") if is_image(path, folder))


def is_image(path: Path, folder: Path) -> bool:
    """Return whether ``path`` is an image file and not hidden within ``folder``."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.suffix.lower() in EXTENSIONS and not hidden and path.is_file()


# tar shards


def _read_shards(query: Query) -> Contents:
    if query.training:
        parts, names = shards.open_shards(query.spec, query.val_spec, query.epoch_images, query.classes)
        return Contents({name: partial(_same, part) for name, part in parts.items()}, names)
    names = shards.class_names_of(query.spec)
    classes = query.classes and (len(names) or query.classes)
    urls = shards.part_urls(query.spec)
    return Contents(
        {name: partial(shards.counted, part, name, classes) for name, part in urls.items()}, names
    )


# images made here


def _synthetic(kind: str, preprocessing: Preprocessing) -> ArraySplit:
    size = preprocessing.size if kind == "uniform-noise" else (1, 1)
    shape = (SYNTHETIC_IMAGES, preprocessing.channels, *size)
    levels = draws(SYNTHETIC.index(kind), 7).integers(256, math.prod(shape)).astype(np.uint8).reshape(shape)
    images = np.broadcast_to(levels, (*shape[:2], *preprocessing.size))
    return ArraySplit(np.ascontiguousarray(images), unknown(SYNTHETIC_IMAGES))


# digits, idx and CIFAR-10


class LabelledImages(NamedTuple):
    """Images and labels in memory."""

    images: Array
    """(N, C, H, W) uint8."""
    labels: Array
    """(N,) int64."""


def read_digits() -> LabelledImages:
    """Return scikit-learn's 1797 handwritten digits, 8 x 8.

    Their 17 grey levels are spread over 0..254, each pixel at random within its level (always the same
    one): a density of 17 spikes would describe the scanner more than the digits.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    levels = digits.images.astype(np.uint8)[:, None]
    within = draws(0).integers(15, levels.size).astype(np.uint8).reshape(levels.shape)
    return LabelledImages(15 * levels + within, digits.target.astype(np.int64))


def read_idx(folder: Path) -> dict[str, LabelledImages]:
    """Read MNIST's layout: train and t10k, images and labels, plain or gzipped."""
    splits = {}
    for split, prefix in IDX_NAMES.items():
        files = [_idx_file(folder, prefix, "images", 3), _idx_file(folder, prefix, "labels", 1)]
        if split == "test" and files == [None, None]:
            continue
        if None in files:
            raise CandidError(
                f"'{folder}' has only one of {prefix}-images-idx3-ubyte and {prefix}-labels-idx1-ubyte: "
                "add the other."
            )
        images, labels = (read_idx_file(file) for file in files if file is not None)
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise CandidError(
                f"The {split} images and labels in '{folder}' have the shapes {tuple(images.shape)} and "
                f"{tuple(labels.shape)}: they don't belong together."
            )
        splits[split] = LabelledImages(images[:, None], labels.astype(np.int64))
    return splits


def _idx_file(folder: Path, prefix: str, what: str, dimensions: int) -> Path | None:
    for dash in "-.":
        for ending in ("", ".gz"):
            path = folder / f"{prefix}-{what}{dash}idx{dimensions}-ubyte{ending}"
            if path.is_file():
                return path
    return None


def read_idx_file(path: Path) -> Array:
    """Read an array of bytes in the idx format, gzipped or not."""
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise CandidError(f"'{path}' can't be unpacked (cut?): {error}; copy it again.") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise CandidError(f"'{path}' is not an idx file of bytes: give MNIST's format or an image folder.")
    if content[3] > 4:
        raise CandidError(f"'{path}' has {content[3]} dimensions, images have three: copy it again.")
    header = 4 + 4 * content[3]
    shape = struct.unpack(f">{content[3]}I", content[4:header].ljust(header - 4, b"\0"))
    if len(content) == header:
        raise CandidError(f"'{path}' is empty or cut: copy it again.")
    if len(content) != header + math.prod(shape):
        raise CandidError(
            f"'{path}' has {len(content)} bytes instead of {header + math.prod(shape)}: it is cut or padded; "
            "copy it again."
        )
    return np.frombuffer(content[header:], np.uint8).reshape(shape).copy()


def read_cifar(folder: Path) -> tuple[dict[str, LabelledImages], tuple[str, ...]]:
    """Read CIFAR-10 as published, binary or python version, and its class names."""
    ending = ".bin" if (folder / f"{CIFAR_TRAIN[0]}.bin").is_file() else ""
    read = _cifar_binary if ending else _cifar_python
    splits = {}
    for split, names in {"train": CIFAR_TRAIN, "test": ["test_batch"]}.items():
        parts = [read(folder / (name + ending)) for name in names]
        splits[split] = LabelledImages(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    names_file = folder / "batches.meta.txt"
    if not names_file.is_file():
        return splits, CIFAR_CLASSES
    class_names = tuple(names_file.read_text(encoding="utf-8", errors="replace").split())
    return splits, class_names if len(class_names) == len(CIFAR_CLASSES) else CIFAR_CLASSES


def _cifar_binary(path: Path) -> LabelledImages:
    content = _whole(path)
    if not content or len(content) % 3073:
        raise CandidError(f"'{path}' has {len(content)} bytes, not a multiple of 3073: copy it again.")
    records = np.frombuffer(content, np.uint8).reshape(-1, 3073)
    return _checked_cifar(path, records[:, 1:], records[:, 0].astype(np.int64))


def _cifar_python(path: Path) -> LabelledImages:
    try:
        batch = _ArraysOnly(io.BytesIO(_whole(path)), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"], dtype=np.uint8), np.asarray(batch[b"labels"], np.int64)
    except CandidError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CandidError(f"'{path}' is not a python batch of CIFAR-10 (cut?): {error}.") from error
    return _checked_cifar(path, pixels, labels)


def _checked_cifar(path: Path, pixels: Array, labels: Array) -> LabelledImages:
    fits = labels.ndim == 1 and len(labels) > 0 and pixels.shape == (len(labels), 3072)
    if not fits or int(labels.min()) < 0 or int(labels.max()) > 9:
        raise CandidError(f"'{path}' doesn't hold 3 x 32 x 32 images of ten classes: copy it again.")
    return LabelledImages(pixels.reshape(-1, 3, 32, 32), labels)


def _whole(path: Path) -> bytes:
    if not path.is_file():
        raise CandidError(f"'{path}' is missing: unpack the whole CIFAR-10 archive.")
    return path.read_bytes()


class _ArraysOnly(pickle.Unpickler):
    """Reads a pickle of numpy arrays and builtin containers. Anything else is refused, not run."""

    ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise CandidError(
                f"The file wants to run {module}.{name}: it is no CIFAR-10 batch; don't use it."
            )
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _found_idx(query: Query) -> Contents:
    arrays = read_idx(path_of(query.spec))
    classes = int(max(part.labels.max() for part in arrays.values())) + 1
    return _in_memory(arrays, [str(i) for i in range(classes)])


def _has_cifar(spec: str) -> bool:
    return any((path_of(spec) / (CIFAR_TRAIN[0] + ending)).is_file() for ending in ("", ".bin"))


FORMATS: dict[str, Format] = {
    "image folder": Format(lambda spec: True, _read_folder, _any_files, divided="hash"),
    "CIFAR-10": Format(_has_cifar, lambda query: _in_memory(*read_cifar(path_of(query.spec)))),
    "idx": Format(lambda spec: _idx_file(path_of(spec), "train", "images", 3) is not None, _found_idx),
    "digits": Format(
        lambda spec: spec == "digits", lambda query: _in_memory({"train": read_digits()}, "0123456789")
    ),
    "tar shards": Format(shards.is_shards, _read_shards, divided=None),
    "synthetic": Format(lambda spec: spec in SYNTHETIC, images=_synthetic),
}
"""All formats by name. A new format is one more entry; the entries at the end are asked first."""
