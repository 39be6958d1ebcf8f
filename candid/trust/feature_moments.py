"""What scores of features learn from: checked images, the moments of their features, shrunk covariances."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from candid._support.errors import CandidError

Columns = Mapping[str, Tensor]
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


def checked_columns(names: Iterable[str], columns: Columns) -> dict[str, Tensor]:
    """Return the columns ``names``, (N, d) each; raise an error if they can't be scored."""
    found = {}
    for name in names:
        if name not in columns:
            raise CandidError(f"The score needs the column '{name}': only {', '.join(columns)} are given.")
        column = columns[name].detach()
        if column.ndim != 2 or 0 in column.shape[1:] or not column.is_floating_point():
            raise CandidError(
                f"The column '{name}' must have floats in the shape (images, numbers), not {column.dtype} in "
                f"{tuple(column.shape)}."
            )
        found[name] = column
    if len({len(column) for column in found.values()}) > 1:
        lengths = ", ".join(f"{len(column)} of '{name}'" for name, column in found.items())
        raise CandidError(f"Every column must have one row for each image, not {lengths}.")
    return found


@dataclass(frozen=True)
class FitImages:
    """Images that scores learn from; what several scores need of them is computed once."""

    columns: Columns
    labels: Tensor

    @classmethod
    def of(cls, names: Iterable[str], columns: Columns, labels: Tensor) -> Self:
        """Return the images, or ``MOST_FITTED`` of them at even steps, after checks."""
        own = checked_columns(names, columns)
        n = len(next(iter(own.values())))
        if n == 0 or labels.shape != (n,):
            raise CandidError(
                f"A score learns from images with one label each: given are {n} images and labels of shape "
                f"{tuple(labels.shape)}."
            )
        for name, column in own.items():
            if bad := int((~column.isfinite()).any(1).sum()):
                raise CandidError(f"The column '{name}' of {bad} of {n} images is not finite: find out why.")
        rows = even_steps(n, MOST_FITTED)
        return cls({name: column[rows] for name, column in own.items()}, labels[rows])

    @cached_property
    def moments(self) -> "Moments":
        """The moments of the features."""
        return Moments.of(self.columns["features"], self.labels)

    @cached_property
    def unit_moments(self) -> "Moments":
        """The moments of features that are scaled to length 1."""
        return Moments.of(unit(self.columns["features"].float()), self.labels)


def even_steps(n: int, most: int) -> Tensor:
    """Return at most ``most`` of the indices below ``n``, at even steps."""
    return torch.arange(n) if n <= most else torch.arange(most) * (n - 1) // (most - 1)


def unit(features: Tensor) -> Tensor:
    """Return features (N, F) scaled to length 1; zeros stay zeros."""
    return F.normalize(features, dim=1)


@dataclass(frozen=True)
class Moments:
    """Means and covariances of features, in float64."""

    share: Tensor
    """The share of images of each class that was seen, (K,)."""
    means: Tensor
    """(K, F)."""
    within: Tensor
    """The covariance around the means of the classes, (F, F), divided by the number of images."""
    shrinkage: float
    """Ledoit and Wolf's weight of the mean variance in place of that covariance."""
    mean_square: float
    """Of all features."""

    @classmethod
    def of(cls, features: Tensor, labels: Tensor) -> Self:
        """Return the moments of features (N, F) of images with these labels."""
        n, size = features.shape
        _, classes, counts = labels.unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(len(counts), size, dtype=torch.float64)
        for rows, part in zip(features.split(ROWS), classes.split(ROWS), strict=True):
            sums.index_add_(0, part, rows.double())
        means = sums / counts[:, None]
        second, fourth, square = torch.zeros(size, size, dtype=torch.float64), 0.0, 0.0
        for rows, part in zip(features.split(ROWS), classes.split(ROWS), strict=True):
            centred = rows.double() - means[part]
            second += torch.from_numpy(centred.numpy().T @ centred.numpy())  # numpy computes one half of it
            fourth += float(centred.square().sum(1).square().sum())
            square += float(rows.double().square().sum())
        within = second / n
        shrinkage = _ledoit_wolf(within, fourth / n, n)
        return cls(counts.double() / n, means, within, shrinkage, square / (n * size))

    @property
    def mean(self) -> Tensor:
        """The mean of all images, (F,)."""
        return self.share @ self.means

    @property
    def between(self) -> Tensor:
        """The means of the classes around that mean, each times the root of its share, (K, F)."""
        return self.share.sqrt()[:, None] * (self.means - self.mean)

    @property
    def total(self) -> Tensor:
        """The covariance around that mean, (F, F)."""
        return self.within + self.between.T @ self.between

    @cached_property
    def principal(self) -> tuple[Tensor, Tensor]:
        """The principal axes of that covariance: :func:`principal_axes`."""
        return principal_axes(self.total)

    @cached_property
    def whitening(self) -> Tensor:
        """W, lower triangular, with W^T W the inverse of the shrunk covariance within classes, (F, F)."""
        variance = self.within.diagonal().mean().clamp(min=ROUNDING * self.mean_square or 1.0)
        shrunk = (1 - self.shrinkage) * self.within
        shrunk.diagonal().add_(max(self.shrinkage, SMALLEST) * variance)
        unit = torch.eye(len(shrunk), dtype=torch.float64)
        return torch.linalg.solve_triangular(torch.linalg.cholesky(shrunk), unit, upper=False)


def _ledoit_wolf(covariance: Tensor, fourth: float, n: int) -> float:
    """Return the shrinkage of Ledoit & Wolf (2004) from the mean fourth power of the norms of n centred rows.

    The same as ``sklearn.covariance.ledoit_wolf_shrinkage``, without its second product of matrices.
    """
    size = len(covariance)
    square = float(covariance.square().sum())
    distance = square - float(covariance.trace()) ** 2 / size
    noise = min((fourth - square) / n, distance)
    return noise / distance if noise > 0 else 0.0


def principal_axes(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the variances along the principal axes, falling, (F,), and the axes in rows, (F, F)."""
    variances, axes = torch.linalg.eigh(covariance)
    return variances.flip(0).clamp(min=0), axes.T.flip(0)


def offset(features: Tensor, origin: Tensor) -> Tensor:
    """Return features (N, F) minus ``origin``, (F,), in single precision."""
    return (features - origin.to(features.dtype)).float()


def residual(features: Tensor, origin: Tensor, basis: Tensor) -> Tensor:
    """Return the distance of features (N, F) from the plane through ``origin`` along ``basis``, (N,).

    The basis is orthonormal, so that the square is |x|^2 minus that of the coordinates in the plane. Where
    the two are almost equal, the difference is computed before it is squared.
    """
    x = offset(features, origin)
    square = x.double().square().sum(1)
    found = square - (x @ basis.T).double().square().sum(1)
    near = found < NEARLY * square
    found[near] = (x[near] - x[near] @ basis.T @ basis).double().square().sum(1)
    return found.sqrt()
