"""Series: images that are copies of each other or belong together; no series is on both sides of a split."""

import hashlib
from collections.abc import Sequence

import numpy as np

from candid._support.numbers import Array
from candid._support.randomness import draws
from candid.trust.scores import Columns

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
