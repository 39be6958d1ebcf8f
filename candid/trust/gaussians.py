"""Moments of features, and whitening by shrunk covariances."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array

Columns = Mapping[str, Array]
"""Columns of a pass by name: ``logits`` (N, M) and, if there are any, ``features`` (N, F)."""
MOST_FITTED = 20_000
"""The most images that a score is fitted to; of more, this number is taken at even steps."""
ROWS = 4096
"""Images at a time: bounds the memory."""
SMALLEST = 1e-6
"""The least variance in any direction, as a share of the mean variance."""
NEARLY = 0.05
"""The share of a square below which a difference of squares is too coarse."""
ROUNDING = 1e-8
"""A mean variance below this share of the mean square is no more than rounding."""


def checked_columns(names: Iterable[str], columns: Columns) -> dict[str, Array]:
    """Return the columns ``names``, (N, d) each; raise an error if they can't be scored."""
    checked = {}
    for name in names:
        if name not in columns:
            raise CandidError(f"The score needs the column '{name}': only {', '.join(columns)} are given.")
        column = columns[name]
        if column.ndim != 2 or 0 in column.shape[1:] or column.dtype.kind != "f":
            raise CandidError(
                f"The column '{name}' must have floats in the shape (images, numbers), not {column.dtype} in "
                f"{column.shape}."
            )
        checked[name] = column
    if len({len(column) for column in checked.values()}) > 1:
        lengths = ", ".join(f"{len(column)} of '{name}'" for name, column in checked.items())
        raise CandidError(f"Every column must have one row for each image, not {lengths}.")
    return checked


def parts_of(*columns: Array) -> Iterator[tuple[Array, ...]]:
    """Yield the same rows of all columns, :data:`ROWS` at a time."""
    for start in range(0, len(columns[0]), ROWS):
        yield tuple(column[start : start + ROWS] for column in columns)


@dataclass(frozen=True)
class FitImages:
    """Images that scores learn from; what several scores need of them is computed once."""

    columns: Columns
    labels: Array

    @classmethod
    def of(cls, names: Iterable[str], columns: Columns, labels: Array) -> Self:
        """Return the images, or ``MOST_FITTED`` of them at even steps, after checks."""
        checked = checked_columns(names, columns)
        n = len(next(iter(checked.values())))
        labels = np.asarray(labels)
        if n == 0 or labels.shape != (n,):
            raise CandidError(
                f"A score learns from images with one label each: given are {n} images and labels of shape "
                f"{labels.shape}."
            )
        for name, column in checked.items():
            if bad := int((~np.isfinite(column)).any(1).sum()):
                raise CandidError(f"The column '{name}' of {bad} of {n} images is not finite: find out why.")
        rows = even_steps(n, MOST_FITTED)
        return cls({name: column[rows] for name, column in checked.items()}, labels[rows])

    @cached_property
    def moments(self) -> "Moments":
        """The moments of the features."""
        return Moments.of(self.columns["features"], self.labels)

    @cached_property
    def unit_moments(self) -> "Moments":
        """The moments of features that are scaled to length 1."""
        return Moments.of(unit(self.columns["features"].astype(np.float32)), self.labels)


def even_steps(n: int, most: int) -> Array:
    """Return at most ``most`` of the indices below ``n``, at even steps."""
    return np.arange(n) if n <= most else np.arange(most) * (n - 1) // (most - 1)


def unit(features: Array) -> Array:
    """Return features (N, F) scaled to length 1; zeros stay zeros."""
    return features / np.maximum(np.sqrt(np.square(features).sum(1, keepdims=True)), 1e-12)


@dataclass(frozen=True)
class Moments:
    """Means and covariances of features, in float64."""

    share: Array
    """The share of images of each class that was seen, (K,)."""
    means: Array
    """(K, F)."""
    within: Array
    """The covariance around the means of the classes, (F, F), divided by the number of images."""
    shrinkage: float
    """Ledoit and Wolf's weight of the mean variance in place of that covariance."""
    mean_square: float
    """Of all features."""

    @classmethod
    def of(cls, features: Array, labels: Array) -> Self:
        """Return the moments of features (N, F) of images with these labels."""
        n, size = features.shape
        _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        sums = np.zeros((len(counts), size))
        for rows, part in parts_of(features, classes):
            sums += class_sums(rows.astype(np.float64), part, len(counts))
        means = sums / counts[:, None]
        second, fourth, square = np.zeros((size, size)), 0.0, 0.0
        for rows, part in parts_of(features, classes):
            exact = rows.astype(np.float64)
            centred = exact - means[part]
            second += centred.T @ centred
            fourth += float(np.square(np.square(centred).sum(1)).sum())
            square += float(np.square(exact).sum())
        within = second / n
        shrinkage = _ledoit_wolf(within, fourth / n, n)
        return cls(counts / n, means, within, shrinkage, square / (n * size))

    @property
    def mean(self) -> Array:
        """The mean of all images, (F,)."""
        return self.share @ self.means

    @property
    def between(self) -> Array:
        """The means of the classes around that mean, each times the root of its share, (K, F)."""
        return np.sqrt(self.share)[:, None] * (self.means - self.mean)

    @property
    def total(self) -> Array:
        """The covariance around that mean, (F, F)."""
        return self.within + self.between.T @ self.between

    @cached_property
    def principal(self) -> tuple[Array, Array]:
        """The principal axes of that covariance: :func:`principal_axes`."""
        return principal_axes(self.total)

    @cached_property
    def whitening(self) -> Array:
        """W, lower triangular, with W^T W the inverse of the shrunk covariance within classes, (F, F)."""
        variance = max(float(self.within.diagonal().mean()), ROUNDING * self.mean_square or 1.0)
        return inverse_factor((1 - self.shrinkage) * self.within, max(self.shrinkage, SMALLEST) * variance)


def inverse_factor(covariance: Array, ridge: float = 0.0) -> Array:
    """Return L^-1, lower triangular, of a covariance L L^T with ``ridge`` added to its diagonal, (F, F).

    It whitens what has this covariance.
    """
    from scipy.linalg import solve_triangular

    root = np.linalg.cholesky(ridged(covariance, ridge))
    return solve_triangular(root, np.eye(len(root)), lower=True)


def ridged(covariance: Array, ridge: float) -> Array:
    """Return a covariance with ``ridge`` added to its diagonal, (F, F)."""
    covariance = covariance.copy()
    covariance[np.diag_indices_from(covariance)] += ridge
    return covariance


def class_sums(rows: Array, classes: Array, count: int) -> Array:
    """Return the sums of the rows (N, F) of each of ``count`` classes, (count, F)."""
    sums = np.zeros((count, rows.shape[1]), rows.dtype)
    if len(rows):
        order = np.argsort(classes, kind="stable")
        present, starts = np.unique(classes[order], return_index=True)
        sums[present] = np.add.reduceat(rows[order], starts, axis=0)
    return sums


def _ledoit_wolf(covariance: Array, fourth: float, n: int) -> float:
    """Return the shrinkage of Ledoit & Wolf (2004) from the mean fourth power of the norms of n centred rows.

    The same as ``sklearn.covariance.ledoit_wolf_shrinkage``, without its second product of matrices.
    """
    size = len(covariance)
    square = float(np.square(covariance).sum())
    distance = square - float(covariance.trace()) ** 2 / size
    noise = min((fourth - square) / n, distance)
    return noise / distance if noise > 0 else 0.0


def principal_axes(covariance: Array) -> tuple[Array, Array]:
    """Return the variances along the principal axes, falling, (F,), and the axes in rows, (F, F)."""
    variances, axes = np.linalg.eigh(covariance)
    return variances[::-1].clip(min=0), axes.T[::-1]


def offset(features: Array, origin: Array) -> Array:
    """Return features (N, F) minus ``origin``, (F,), in single precision."""
    # an origin may be too large for half precision
    wide = np.float32 if features.dtype == np.float16 else features.dtype
    return (features - origin.astype(wide)).astype(np.float32, copy=False)


def residual(features: Array, origin: Array, basis: Array) -> Array:
    """Return the distance of features (N, F) from the plane through ``origin`` along ``basis``, (N,).

    The basis is orthonormal, so that the square is |x|^2 minus that of the coordinates in the plane. Where
    the two are almost equal, the difference is computed before it is squared.
    """
    x = offset(features, origin)
    square = np.square(x, dtype=np.float64).sum(1)
    distance = square - np.square(x @ basis.T, dtype=np.float64).sum(1)
    near = distance < NEARLY * square
    if near.any():
        distance[near] = np.square(x[near] - x[near] @ basis.T @ basis, dtype=np.float64).sum(1)
    return np.sqrt(distance)
