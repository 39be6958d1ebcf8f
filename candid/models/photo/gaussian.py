"""One Gaussian per class with a shared, shrunk covariance: fitted in closed form, from totals alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import ClassVar, NamedTuple

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array, log_softmax
from candid._support.randomness import draws
from candid.trust.gaussians import class_sums, inverse_factor, parts_of, ridged

RIDGE = 0.02
"""Share of the mean variance that is added to the covariance of the second stage."""


@dataclass(frozen=True)
class Totals:
    """Counts, sums and products of the features of images, by class: all that a Gaussian head needs.

    Totals of parts add up, so the moments of all folds but one are a difference.
    """

    counts: Array
    """Images of each class, (K,)."""
    sums: Array
    """Sums of their features, (K, D)."""
    products: Array
    """Sum of x x' over all images, (D, D)."""

    @classmethod
    def of(cls, features: Array, labels: Array, classes: int) -> "Totals":
        """Return the totals of N images with these features, (N, D), in float64."""
        dimensions = features.shape[1]
        counts = np.bincount(labels, minlength=classes).astype(np.float64)
        sums = np.zeros((classes, dimensions))
        products = np.zeros((dimensions, dimensions))
        for rows, part in parts_of(features, labels):
            x = rows.astype(np.float64)
            sums += class_sums(x, part, classes)
            products += x.T @ x
        return cls(counts, sums, products)

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(self.counts + other.counts, self.sums + other.sums, self.products + other.products)

    def __sub__(self, other: "Totals") -> "Totals":
        return Totals(self.counts - other.counts, self.sums - other.sums, self.products - other.products)


@dataclass(frozen=True)
class Standardised:
    """Features, centred, and each group divided by one number: the root of its mean variance.

    One number for a group and not for a channel: the small differences between channels count.
    """

    centre: Array
    """(D,)."""
    scale: Array
    """(D,)."""
    means: Array
    """Class means of standardised features, (K, D); zero for a class without images."""
    covariance: Array
    """Covariance of standardised features within classes, (D, D)."""
    variance: float
    """The mean of its diagonal."""

    @classmethod
    def of(cls, totals: Totals, groups: Sequence[int]) -> "Standardised":
        """Return the centre and scale of images with these totals, and their moments in these terms."""
        n, present = totals.counts.sum(), totals.counts > 0
        if n <= present.sum():
            raise CandidError("There are too few images: give at least two of a class.")
        centre = totals.sums.sum(0) / n
        variances = (totals.products.diagonal() / n - centre**2).clip(min=0)
        parts = np.split(variances, np.cumsum(groups)[:-1])
        scale = np.repeat([math.sqrt(part.mean()) for part in parts], groups)
        if not (scale > 0).any():
            raise CandidError("All images look the same to the eye: check that they are the right ones.")
        scale = np.where(scale > 0, scale, 1.0)
        counts = totals.counts.clip(min=1)
        means = np.where(present[:, None], totals.sums / counts[:, None], centre)
        within = totals.products - (totals.sums.T * (1 / counts)) @ totals.sums
        within = within / (n - present.sum())
        covariance = within / scale[:, None] / scale
        variance = float(covariance.diagonal().mean())
        if not variance > 0:
            raise CandidError("All images of a class look the same to the eye: give different photos.")
        return cls(centre, scale, (means - centre) / scale, covariance, variance)

    def whitening(self, ridge: float) -> Array:
        """Return L^-1, (D, D): L L' is the covariance within classes with ``ridge`` on its diagonal."""
        return inverse_factor(self.covariance, ridge)

    def __call__(self, features: Array) -> Array:
        """Return standardised features, (N, D) in float64."""
        return (features.astype(np.float64) - self.centre) / self.scale


@dataclass(frozen=True)
class Whitened:
    """Standardised features in coordinates in which every class has about unit covariance: z = L^-1 x."""

    factor: Array
    """L^-1, (D, D), lower triangular: L L' = (1 - g) C + g tr(C) / D."""
    means: Array
    """Class means of z, (K, D)."""

    @classmethod
    def of(cls, known: Standardised, shrinkage: float) -> "Whitened":
        """Return the whitening by a covariance that is shrunk towards a multiple of the identity."""
        factor = inverse_factor(shrunk(known, shrinkage))
        return cls(factor, known.means @ factor.T)


class Span(NamedTuple):
    """The mixture within the span of the class means, in coordinates in which every class has unit spread."""

    basis: Array
    """Orthonormal directions of z that the class means span, (K - 1, D)."""
    matrix: Array
    """From coordinates along the basis to those of the mixture, (K - 1, K - 1)."""
    shift: Array
    """Added to them, (K - 1,)."""
    means: Array
    """The class means in these coordinates, (K, K - 1)."""
    log_priors: Array
    """Log p(y), (K,)."""

    @classmethod
    def of(cls, means: Array, log_priors: Array, temperature: float) -> "Span":
        """Return the mixture whose posterior is that of the scores, times the temperature.

        Args:
            means: class means of z, (K, D) in float64.
            log_priors: (K,).
            temperature: what scores are multiplied by.
        """
        (basis, _), scale = _basis(means), math.sqrt(temperature)
        places = scale * means @ basis.T
        log_priors = log_softmax(temperature * log_priors)
        return cls(basis, scale * np.eye(len(basis)), np.zeros_like(places[0]), places, log_priors)


def _basis(means: Array) -> tuple[Array, Array]:
    """Return an orthonormal basis of the span of the class means, (K - 1, D), and what it is multiplied by.

    With C the contrasts, C @ means = root @ basis; root is symmetric, (K - 1, K - 1).
    """
    directions = contrasts(len(means)) @ means  # (K - 1, D)
    values, vectors = np.linalg.eigh(directions @ directions.T)
    values = values.clip(min=1e-12 * float(values.max()))
    root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    return inverse @ directions, root


@dataclass(frozen=True)
class PhotoGeometry:
    """Where the classes of a mixture lie in its latent space."""

    log_priors: Array
    """(M,)."""
    places: Array
    """The class means, (M, D) in float64."""
    planar: ClassVar[bool] = False

    def means(self, classes: Array | None = None) -> Array:
        """Return the means of ``classes``, all of them if None, (k, D)."""
        return self.places if classes is None else self.places[classes]

    def distances(self) -> Array:
        """Return the distances of the means in standard deviations, (M, M)."""
        squares = (self.places**2).sum(1)
        products = self.places @ self.places.T
        distances = np.sqrt((squares[:, None] + squares - 2 * products).clip(min=0))
        np.fill_diagonal(distances, 0)
        return distances


class SecondStage(NamedTuple):
    """Gaussians of the scores: their K - 1 contrasts, whitened by the covariance that new photos have."""

    factor: Array
    """Whitens contrasts of scores, (K - 1, K - 1)."""
    means: Array
    """Class means of whitened contrasts, (K, K - 1)."""
    centre: Array
    """Mean of all whitened contrasts, (K - 1,)."""
    spread: Array
    """Whitens them as one Gaussian over all classes, (K - 1, K - 1)."""

    @classmethod
    def of(cls, scores: Array, labels: Array) -> "SecondStage":
        """Fit it to out-of-fold scores, (N, K): scores of photos that a head has seen lie too far apart."""
        classes = scores.shape[1]
        e, counts = scores @ contrasts(classes).T, np.bincount(labels, minlength=classes)
        means = class_sums(e, labels, classes) / counts.clip(min=1)[:, None]
        away = e - means[labels]
        factor = _whitening(away.T @ away / max(1, len(e) - int((counts > 0).sum())))
        u = e @ factor.T
        centred = u - u.mean(0)
        spread = _whitening(centred.T @ centred / max(1, len(u) - 1))
        return cls(factor, means @ factor.T, u.mean(0), spread)

    def whitened(self, scores: Array) -> Array:
        """Return the whitened contrasts of scores, (N, K - 1)."""
        return scores @ contrasts(len(self.means)).astype(scores.dtype).T @ self.factor.T

    def relative_distance(self, scores: Array) -> Array:
        """Return the squared distance to the nearest class minus that to all photos as one Gaussian, (N,)."""
        u = self.whitened(scores)
        to_all = (((u - self.centre) @ self.spread.T) ** 2).sum(axis=1)
        nearest = (u**2).sum(axis=1) - 2 * class_scores(u, self.means).max(axis=1)  # squared
        return nearest - to_all

    def span(self, means: Array, log_priors: Array, temperature: float) -> Span:
        """Return the mixture whose posterior is that of the second stage, which is in float64.

        Args:
            means: class means of z, (K, D) in float64.
            log_priors: (K,).
            temperature: what scores of the second stage are multiplied by.
        """
        basis, root = _basis(means)
        # contrasts of scores are root @ (z along the basis) - rows @ |mu|^2 / 2
        scale = math.sqrt(temperature)
        factor = scale * self.factor
        shift = -factor @ (contrasts(len(means)) @ (0.5 * (means**2).sum(axis=1)))
        log_priors = log_softmax(temperature * log_priors)
        return Span(basis, factor @ root, shift, scale * self.means, log_priors)


def _whitening(covariance: Array) -> Array:
    return inverse_factor(covariance, RIDGE * covariance.diagonal().mean().clip(min=1e-12))


def shrunk(known: Standardised, shrinkage: float) -> Array:
    """Return the covariance within classes, shrunk towards a multiple of the identity, (D, D)."""
    return ridged((1 - shrinkage) * known.covariance, shrinkage * known.variance)


def class_scores(z: Array, means: Array) -> Array:
    """Return z . mu_y - |mu_y|^2 / 2 for each class, (N, K): log N(z; mu_y, 1) up to a constant of z."""
    return z @ means.T - 0.5 * (means**2).sum(axis=1)


@lru_cache(4)
def contrasts(classes: int) -> Array:
    """Return K - 1 orthonormal rows that are orthogonal to (1, ..., 1), (K - 1, K) in float64.

    >>> rows = contrasts(4)
    >>> np.allclose(rows @ rows.T, np.eye(3)), bool(abs(rows.sum(1)).max() < 1e-12)
    (True, True)
    """
    rows = np.tril(np.ones((classes, classes)), -1)[1:]
    numbers = np.arange(1.0, classes)
    rows[np.arange(classes - 1), np.arange(1, classes)] = -numbers
    rows /= np.sqrt(numbers * (numbers + 1))[:, None]
    rows.setflags(write=False)  # all callers share it
    return rows


def rest_norm(z: Array, means: Array) -> Array:
    """Return |z|^2 without what lies in the span of the differences between class means, (N,)."""
    from scipy.linalg import lstsq

    directions = contrasts(len(means)) @ means  # (K - 1, D)
    inside, gram = z @ directions.T, directions @ directions.T
    precision = len(gram) * np.finfo(np.float64).eps
    solved = lstsq(gram, inside.T, cond=precision, lapack_driver="gelsy")[0]
    return (z**2).sum(1) - (inside * solved.T).sum(1)


def stratified_folds(labels: Array, folds: int, seed: int = 0, series: Array | None = None) -> Array:
    """Return a fold for each image, (N,): each class is spread evenly over the folds, each series in one.

    >>> np.sort(stratified_folds(np.array([0, 0, 1, 1]), 2))
    array([0, 0, 1, 1])
    """
    numbers = np.empty(len(labels), np.int64)
    start = 0
    for label in np.unique(labels).tolist():
        members = np.flatnonzero(labels == label)
        order = draws(seed, label).permutation(len(members))
        numbers[members[order]] = (np.arange(len(members)) + start) % folds
        start += len(members)
    if series is None:
        return numbers
    _, first, places = np.unique(series, return_index=True, return_inverse=True)
    return numbers[first][places]


def halved(values: Array) -> Array:
    """Return numbers in half precision, rounded by way of float32; infinite where they are too large."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(np.float16)


def total(totals: Sequence[Totals]) -> Totals:
    """Return the totals of all parts together."""
    return reduce(Totals.__add__, totals)
