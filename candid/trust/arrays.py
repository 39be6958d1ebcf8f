"""Arrays that users give: numpy, torch or anything like them, checked before anything is computed."""

import hashlib
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.options import checked_names
from candid.trust.scores import Columns

FEWEST_IMAGES = 20
ROUNDING = 1e-3
"""Probabilities add up to 1 but for this."""
SINGLE = "of a classifier with a single output s, (N,), give np.stack((0 * s, s), 1)."


@dataclass(frozen=True)
class Arrays:
    """What a classifier says of N images."""

    logits: Array
    """(N, M) in float64."""
    features: Array | None = None
    """(N, F) in float32."""

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def columns(self) -> Columns:
        """The columns that scores need."""
        features = {} if self.features is None else {"features": self.features}
        return Columns({"logits": self.logits, **features})

    @classmethod
    def of(cls, logits: Any, features: Any = None) -> "Arrays":
        """Return the arrays, or raise an error that says what is wrong with them."""
        scores = _numbers("logits", logits, np.float64)
        if scores.shape[1] < 2:
            raise CandidError(f"The logits must have one column for each of at least 2 classes: {SINGLE}")
        if len(scores) >= FEWEST_IMAGES and _are_probabilities(scores):  # logits of a few may look like it
            raise CandidError(
                "These are probabilities, not logits (each row lies between 0 and 1 and adds up to 1): give "
                "the numbers before the softmax, set from_probabilities=True, or give "
                "np.log(probabilities + 1e-12)."
            )
        if features is None:
            return cls(scores)
        columns = _numbers("features", features, np.float32)
        if len(columns) != len(scores):
            raise CandidError(
                f"There are features of {len(columns)} images and logits of {len(scores)}: give both of the "
                "same images, in the same order."
            )
        return cls(scores, columns)


def _numbers(name: str, values: Any, dtype: Any) -> Array:
    try:
        array = np.asarray(_on_cpu(values))
        array = np.array(array if array.dtype.kind == "f" else array.astype(np.float64), dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CandidError(f"The {name} must be an array of numbers: {error}.") from error
    if array.ndim != 2 or array.shape[1] == 0:
        columns = "classes" if name == "logits" else "features"
        hint = f": {SINGLE}" if name == "logits" and array.ndim == 1 else "."
        raise CandidError(f"The {name} must have the shape (images, {columns}), not {array.shape}{hint}")
    if not np.isfinite(array).all():
        bad = ~np.isfinite(array).all(1)
        raise CandidError(
            f"The {name} of {int(bad.sum())} of {len(array)} images are NaN or infinite (the first is image "
            f"{int(bad.argmax())}): leave these images out, or find out why."
        )
    return array


def _on_cpu(values: Any) -> Any:
    """Return a tensor without its gradient, on the CPU; anything else as it is."""
    return values.detach().cpu() if hasattr(values, "detach") else values


def _are_probabilities(logits: Array) -> bool:
    inside = bool(((logits >= 0) & (logits <= 1)).all())
    return inside and bool((np.abs(logits.sum(1) - 1) < ROUNDING).all())


def checked_labels(labels: Any, arrays: Arrays, class_names: Sequence[str]) -> Array:
    """Return the true classes of held-out images as whole numbers; every class has an image."""
    truth, classes = checked_classes(labels, arrays), arrays.logits.shape[1]
    if len(truth) < FEWEST_IMAGES:
        raise CandidError(f"{len(truth)} held-out images are too few: give at least {FEWEST_IMAGES}.")
    if (missing := np.bincount(truth, minlength=classes) == 0).any():
        y = int(missing.argmax())
        more = f" and {int(missing.sum()) - 1} more classes" if missing.sum() > 1 else ""
        raise CandidError(
            f"There is no held-out image of class '{class_names[y]}'{more}: give at least one of each class, "
            "or leave the column out of the logits."
        )
    return truth


def checked_classes(labels: Any, arrays: Arrays) -> Array:
    """Return the true classes of the images as whole numbers."""
    n, classes = arrays.logits.shape
    array = np.asarray(_on_cpu(labels))
    if array.shape != (n,):
        raise CandidError(f"There must be one label for each of the {n} images, not {array.shape}.")
    if array.dtype.kind not in "biuf" or (array != np.floor(array)).any():
        raise CandidError(
            "Labels must be whole numbers, the columns of the logits: of names, give "
            "np.searchsorted(classifier.classes_, labels) or the like."
        )
    if n and (array.min() < 0 or array.max() >= classes):
        raise CandidError(
            f"Labels must lie between 0 and {classes - 1}, the columns of the logits: these lie between "
            f"{int(array.min())} and {int(array.max())}."
        )
    return array.astype(np.int64)


def checked_groups(by: Any, n: int, name: str = "by") -> list[str]:
    """Return the name of the group of each image."""
    names = list(map(str, by.tolist() if hasattr(by, "tolist") else by))
    if len(names) != n:
        raise CandidError(f"'{name}' must name the group of each of the {n} images, not of {len(names)}.")
    return names


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
        (array([0, 1]), ('0', '1'), ('north', 'south'))
    """

    file: Path
    arrays: Arrays
    labels: Array
    """True classes, (N,); -1 where the file has none."""
    paths: tuple[str, ...]
    class_names: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None
    """The group of each image; None without groups."""
    together: tuple[str, ...] | None = None
    """The object, scene or day of each image; None if it was not asked for."""

    def __len__(self) -> int:
        return len(self.arrays)

    @classmethod
    def read(
        cls, file: Path, labelled: bool = True, by: str | None = None, together: str | None = None
    ) -> "ArrayFile":
        """Return the arrays of ``file``, or raise an error that names the file and what is wrong.

        Args:
            file: an npz file with the keys of :data:`KEYS`.
            labelled: whether it must have labels, and the key of groups.
            by: the key that names the group of each image.
            together: the key that names the object, scene or day of each image.
        """
        named = [key for key in (by, together) if key is not None]
        stored = _read(file, (*KEYS, *named))
        for key in ("logits", *(("labels", by, together) if labelled else ())):
            if key is not None and key not in stored:
                raise CandidError(f"'{file}' has no key '{key}': {HOW}.")
        with about(file):
            arrays = Arrays.of(stored["logits"], stored.get("features"))
            n, classes = arrays.logits.shape
            if n == 0:
                raise CandidError("There are no images: give the logits of at least one.")
            labels = np.full(n, -1)
            if "labels" in stored and labelled:
                labels = checked_classes(stored["labels"], arrays)
            names = _texts(stored, "class_names")
            class_names = None if names is None else checked_names(names, classes)
            paths = _texts(stored, "paths") or [str(i) for i in range(n)]
            if len(paths) != n:
                raise CandidError(f"There are {len(paths)} paths and logits of {n} images: give both of all.")
            groups, series = (
                None if key not in stored else tuple(checked_groups(stored[key], n, option))
                for key, option in ((by, "by"), (together, "together"))
            )
        return cls(file, arrays, labels, tuple(paths), class_names, groups, series)

    def keys(self) -> Array:
        """Return a number for each image, (N,), equal for equal rows."""
        columns = (
            self.arrays.columns[name] for name in ("logits", "features") if name in self.arrays.columns
        )
        digests = [
            hashlib.blake2b(b"".join(part.tobytes() for part in row), digest_size=8).digest()
            for row in zip(*columns, strict=True)
        ]
        return np.array([int.from_bytes(digest, signed=True) for digest in digests], np.int64)


@contextmanager
def about(file: Path) -> Iterator[None]:
    """Let errors name the ``file`` that they are about."""
    try:
        yield
    except CandidError as error:
        raise CandidError(f"In '{file}': {error}") from error


def _read(file: Path, keys: tuple[str, ...]) -> dict[str, Array]:
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
            arrays = {}
            for key in keys:
                if key in opened:
                    arrays[key] = opened[key]
    except UNREADABLE as error:
        if "allow_pickle" in str(error) and key:
            raise CandidError(
                f"'{key}' in '{file}' is pickled, which is never read: save numbers, or text as "
                "np.array(names, dtype=str)."
            ) from error
        raise CandidError(f"'{file}' is no npz file that can be read: {HOW}.") from error
    except zipfile.BadZipFile as error:
        raise CandidError(f"'{file}' is cut or damaged: {HOW}.") from error
    return arrays


def _texts(arrays: dict[str, Array], key: str) -> list[str] | None:
    if key not in arrays:
        return None
    if arrays[key].ndim != 1:
        raise CandidError(f"'{key}' must be a list of names, not an array of shape {arrays[key].shape}.")
    return [str(text) for text in arrays[key].tolist()]
