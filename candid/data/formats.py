"""Data sets in files of their own formats: MNIST's idx, CIFAR-10's binary and python batches, digits."""

import gzip
import io
import math
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.randomness import generator

IDX_NAMES = {"train": "train", "test": "t10k"}
CIFAR_TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class Arrays(NamedTuple):
    """Images and labels in memory."""

    images: Tensor
    """(N, C, H, W) uint8."""
    labels: Tensor
    """(N,) int64."""


def read_digits() -> Arrays:
    """scikit-learn's 1797 handwritten digits, 8 x 8.

    Their 17 grey levels are spread over 0..254, each pixel at random within its level (always the same
    one): a density of 17 spikes would say more of the scanner than of digits.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    levels = torch.from_numpy(digits.images).to(torch.uint8)[:, None]
    within = torch.randint(0, 15, levels.shape, generator=generator(0), dtype=torch.uint8)
    return Arrays(15 * levels + within, torch.from_numpy(digits.target).long())


def has_idx(folder: Path) -> bool:
    return _idx_file(folder, "train", "images", 3) is not None


def read_idx(folder: Path) -> dict[str, Arrays]:
    """MNIST's layout: train and t10k, images and labels, plain or gzipped."""
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
        if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
            raise CandidError(
                f"The {split} images and labels in '{folder}' have the shapes {tuple(images.shape)} and "
                f"{tuple(labels.shape)}: they don't belong together."
            )
        splits[split] = Arrays(images[:, None], labels.long())
    return splits


def _idx_file(folder: Path, prefix: str, what: str, dimensions: int) -> Path | None:
    for dash in "-.":
        for ending in ("", ".gz"):
            path = folder / f"{prefix}-{what}{dash}idx{dimensions}-ubyte{ending}"
            if path.is_file():
                return path
    return None


def read_idx_file(path: Path) -> Tensor:
    """An array of bytes in the idx format, gzipped or not."""
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
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).reshape(shape)


def has_cifar(folder: Path) -> bool:
    return any((folder / (CIFAR_TRAIN[0] + ending)).is_file() for ending in ("", ".bin"))


def read_cifar(folder: Path) -> tuple[dict[str, Arrays], tuple[str, ...]]:
    """CIFAR-10 as published, binary or python version, and its class names."""
    ending = ".bin" if (folder / f"{CIFAR_TRAIN[0]}.bin").is_file() else ""
    read = _cifar_binary if ending else _cifar_python
    splits = {}
    for split, names in {"train": CIFAR_TRAIN, "test": ["test_batch"]}.items():
        parts = [read(folder / (name + ending)) for name in names]
        splits[split] = Arrays(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    names_file = folder / "batches.meta.txt"
    if not names_file.is_file():
        return splits, CIFAR_CLASSES
    found = tuple(names_file.read_text(encoding="utf-8", errors="replace").split())
    return splits, found if len(found) == len(CIFAR_CLASSES) else CIFAR_CLASSES


def _cifar_binary(path: Path) -> Arrays:
    content = _whole(path)
    if not content or len(content) % 3073:
        raise CandidError(f"'{path}' has {len(content)} bytes, not a multiple of 3073: copy it again.")
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, 3073)
    return _checked_cifar(path, records[:, 1:], records[:, 0].long())


def _cifar_python(path: Path) -> Arrays:
    try:
        batch = _ArraysOnly(io.BytesIO(_whole(path)), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"], dtype=np.uint8), np.asarray(batch[b"labels"], np.int64)
    except CandidError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CandidError(f"'{path}' is not a python batch of CIFAR-10 (cut?): {error}.") from error
    return _checked_cifar(path, torch.from_numpy(pixels.copy()), torch.from_numpy(labels))


def _checked_cifar(path: Path, pixels: Tensor, labels: Tensor) -> Arrays:
    fits = labels.dim() == 1 and len(labels) > 0 and pixels.shape == (len(labels), 3072)
    if not fits or int(labels.min()) < 0 or int(labels.max()) > 9:
        raise CandidError(f"'{path}' doesn't hold 3 x 32 x 32 images of ten classes: copy it again.")
    return Arrays(pixels.reshape(-1, 3, 32, 32), labels)


def _whole(path: Path) -> bytes:
    if not path.is_file():
        raise CandidError(f"'{path}' is missing: unpack the whole CIFAR-10 archive.")
    return path.read_bytes()


class _ArraysOnly(pickle.Unpickler):
    """Reads a pickle of numpy arrays and builtin containers; anything else it names is refused, not run."""

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
