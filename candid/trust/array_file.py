"""What a classifier of any library says of images, read from an npz file; nothing in it is run."""

import hashlib
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from torch import Tensor

from candid._support.errors import CandidError
from candid.inference.predictions import Predictions
from candid.models.flow.config import checked_names
from candid.trust.arrays import Arrays, checked_classes, checked_groups

KEYS = ("logits", "labels", "features", "paths", "class_names")
"""What an npz file may have; ``logits`` is needed, and any other key can name groups."""
UNREADABLE = (ValueError, TypeError, AttributeError, OSError, EOFError, MemoryError, RuntimeError, zlib.error)
"""What numpy and zipfile raise for a foreign file."""
HOW = "write it with np.savez(FILE, logits=..., labels=...)"


@dataclass(frozen=True)
class ArrayFile:
    """What a classifier says of N images.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "new.npz"
        >>> np.savez(file, logits=[[2.0, 0.0], [0.0, 1.0]], labels=[0, 1], site=["north", "south"])
        >>> found = ArrayFile.read(file, by="site")
        >>> found.labels, found.paths, found.groups
        (tensor([0, 1]), ('0', '1'), ('north', 'south'))
    """

    file: Path
    arrays: Arrays
    labels: Tensor
    """True classes, (N,); -1 where the file has none."""
    paths: tuple[str, ...]
    class_names: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None
    """The group of each image; None without groups."""

    def __len__(self) -> int:
        return len(self.arrays)

    @classmethod
    def read(cls, file: Path, labelled: bool = True, by: str | None = None) -> "ArrayFile":
        """Return the arrays of ``file``, or raise an error that names the file and what is wrong.

        Args:
            file: an npz file with the keys of :data:`KEYS`.
            labelled: whether it must have labels, and the key of groups.
            by: the key that names the group of each image.
        """
        found = _read(file, (*KEYS, *([] if by is None else [by])))
        for key in ("logits", *(("labels", by) if labelled else ())):
            if key is not None and key not in found:
                raise CandidError(f"'{file}' has no key '{key}': {HOW}.")
        with about(file):
            arrays = Arrays.of(found["logits"], found.get("features"))
            n, classes = arrays.logits.shape
            if n == 0:
                raise CandidError("There are no images: give the logits of at least one.")
            labels = torch.full((n,), -1)
            if "labels" in found and labelled:
                labels = checked_classes(found["labels"], arrays)
            names = _texts(found, "class_names")
            known = None if names is None else checked_names(names, classes)
            paths = _texts(found, "paths") or [str(i) for i in range(n)]
            if len(paths) != n:
                raise CandidError(f"There are {len(paths)} paths and logits of {n} images: give both of all.")
            groups = None if by not in found else tuple(checked_groups(found[by], n))
        return cls(file, arrays, labels, tuple(paths), known, groups)

    @property
    def predictions(self) -> Predictions:
        """The same as predictions; images with equal logits and features have equal ``keys``."""
        classes = self.arrays.logits.shape[1]
        columns = {name: column for name, column in self.arrays.columns.items() if name == "features"}
        if self.groups is not None:
            numbers = {name: number for number, name in enumerate(dict.fromkeys(self.groups))}
            columns["group"] = torch.tensor([numbers[name] for name in self.groups])
        columns["keys"] = _keys(self.arrays)
        log_priors = torch.full((classes,), -math.log(classes))
        return Predictions(self.paths, self.labels, self.arrays.logits, log_priors, columns)


@contextmanager
def about(file: Path) -> Iterator[None]:
    """Let errors name the ``file`` that they are about."""
    try:
        yield
    except CandidError as error:
        raise CandidError(f"In '{file}': {error}") from error


def _read(file: Path, keys: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Return those of the ``keys`` that the file has."""
    if not file.is_file():
        raise CandidError(f"There is no file '{file}': {HOW}.")
    key = ""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as opened:
            if not isinstance(opened, NpzFile):
                raise ValueError("a single array")
            if opened.zip is None or opened.zip.testzip() is not None:  # numpy may stop before a checksum
                raise zipfile.BadZipFile
            found = {}
            for key in keys:
                if key in opened:
                    found[key] = opened[key]
    except UNREADABLE as error:
        if "allow_pickle" in str(error) and key:
            raise CandidError(
                f"'{key}' in '{file}' is pickled, which is never read: save numbers, or text as "
                "np.array(names, dtype=str)."
            ) from error
        raise CandidError(f"'{file}' is no npz file that can be read: {HOW}.") from error
    except zipfile.BadZipFile as error:
        raise CandidError(f"'{file}' is cut or damaged: {HOW}.") from error
    return found


def _texts(found: dict[str, NDArray[Any]], key: str) -> list[str] | None:
    if key not in found:
        return None
    if found[key].ndim != 1:
        raise CandidError(f"'{key}' must be a list of names, not an array of shape {found[key].shape}.")
    return [str(each) for each in found[key].tolist()]


def _keys(arrays: Arrays) -> Tensor:
    """Return a number for each image, (N,), equal for equal rows."""
    rows = zip(*(column.contiguous().numpy() for column in arrays.columns.values()), strict=True)
    digests = [
        hashlib.blake2b(b"".join(part.tobytes() for part in row), digest_size=8).digest() for row in rows
    ]
    return torch.tensor([int.from_bytes(each, signed=True) for each in digests])
