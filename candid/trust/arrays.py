"""Arrays that users give, checked before anything is computed; and which of their images belong together.

A series are images that are copies of each other or belong together. No series is on both sides of a split.
"""

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
from candid._support.randomness import draws
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
        array = np.asarray(on_cpu(values))
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


def on_cpu(values: Any) -> Any:
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
    array = np.asarray(on_cpu(labels))
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
        >>> stored = ArrayFile.read(file, by="site")
        >>> stored.labels, stored.paths, stored.groups
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
        """Return a digest for each image, (N,), equal for equal rows."""
        columns = self.arrays.columns
        return np.array(digests(*(columns[name] for name in ("logits", "features") if name in columns)))


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


FEWEST_SERIES = 6
"""Fewer series than this are not divided into those that fit a score and those that rank it."""


def digests(*columns: Array) -> list[bytes]:
    """Return a digest of each row, (N,) or (N, d) of each column."""
    rows = zip(*(np.ascontiguousarray(column) for column in columns), strict=True)
    return [
        hashlib.blake2b(b"".join(part.tobytes() for part in row), digest_size=16).digest() for row in rows
    ]


def shuffled(*columns: Array) -> Array:
    """Return an order of images that looks random, and is the same however the images were sorted.

    It is made from digests of their rows, (N,) or (N, d) of each column.

    >>> x = np.arange(4.0)
    >>> bool((x[shuffled(x)] == x[::-1][shuffled(x[::-1])]).all())
    True
    """
    keys = [hashlib.blake2b(row + bytes(8)).digest() for row in digests(*columns)]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)


def shuffled_rows(columns: Columns, groups: Array) -> Array:
    """Return the images in the order of :func:`shuffled`, by their labels, groups, logits and features."""
    labels = () if columns.labels is None else (columns.labels,)
    return shuffled(*labels, groups, *(columns[name] for name in ("logits", "features") if name in columns))


def series_of(columns: Columns, together: Sequence[object] | Array | None = None) -> Array:
    """Return the number of the series of each image, (n,): copies of an image are in one series.

    Args:
        columns: the images; copies have the same pixels, or the same logits and features.
        together: names of objects, scenes or days, (n,): images with one name are in one series, too.
    """
    names = (
        ("keys",) if "keys" in columns else ("logits", "features") if "logits" in columns else tuple(columns)
    )
    rows = digests(*(columns[name] for name in names if name in columns))
    _, copies = np.unique(np.array(rows, "S16"), return_inverse=True)
    if together is None:
        return copies
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(copies)
    _, named = np.unique(np.array(list(map(str, together))), return_inverse=True)
    ends = np.concatenate((n + copies, n + copies.max() + 1 + named))
    nodes = int(ends.max()) + 1
    links = coo_array((np.ones(2 * n), (np.tile(np.arange(n), 2), ends)), (nodes, nodes))
    return np.unique(connected_components(links, directed=False)[1][:n], return_inverse=True)[1]


def in_series(order: Array, series: Array) -> Array:
    """Return the rows in this order, but those of one series next to each other.

    >>> in_series(np.array([2, 0, 1, 3]), np.array([0, 1, 0, 1]))
    array([2, 0, 1, 3])
    """
    places = np.empty(len(series), np.int64)
    places[order] = np.arange(len(order))
    first = np.full(series.max(initial=-1) + 1, len(order))
    np.minimum.at(first, series, places)
    return order[np.lexsort((places[order], first[series[order]]))]


def halves(order: Array, series: Array) -> tuple[Array, Array]:
    """Return two halves of the rows in this order; no series is in both.

    >>> halves(np.arange(4), np.array([0, 1, 1, 2]))
    (array([0, 1, 2]), array([3]))
    """
    order = in_series(order, series)
    starts = np.flatnonzero(np.diff(series[order], prepend=-1))
    cut = (
        int(starts[np.searchsorted(starts, len(order) // 2)]) if starts[-1] >= len(order) // 2 else starts[-1]
    )
    return order[:cut], order[cut:]


def fixed_halves(series: Array) -> tuple[Array, Array]:
    """Return two halves of n images after a fixed shuffle, by their series, (n,); no series is in both.

    >>> fitting, ranking = fixed_halves(np.array([0, 0, 1, 1]))
    >>> sorted(fitting.tolist()), sorted(ranking.tolist())
    ([2, 3], [0, 1])
    """
    return halves(draws(0).permutation(len(series)), series)


def firsts(series: Array) -> Array:
    """Return whether each row is the first of its series, (n,)."""
    first = np.zeros(len(series), bool)
    first[np.unique(series, return_index=True)[1]] = True
    return first
