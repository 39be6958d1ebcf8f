"""One Gaussian per class with a shared, shrunk covariance: fitted in closed form, from moments alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.randomness import generator

ROWS = 4096
"""Images whose moments are added up at a time."""
RIDGE = 0.02
"""Share of the mean variance that is added to the covariance of the second stage."""


@dataclass(frozen=True)
class Moments:
    """Counts, sums and products of the features of images, by class: all that a Gaussian head needs.

    Moments of parts add up, so the moments of all folds but one are a difference.
    """

    counts: Tensor
    """Images of each class, (K,)."""
    sums: Tensor
    """Sums of their features, (K, D)."""
    products: Tensor
    """Sum of x x' over all images, (D, D)."""

    @classmethod
    def of(cls, features: Tensor, labels: Tensor, classes: int) -> "Moments":
        """Return the moments of N images with these features, (N, D), in float64."""
        dimensions = features.shape[1]
        counts = torch.bincount(labels, minlength=classes).double()
        sums = torch.zeros(classes, dimensions, dtype=torch.float64)
        products = torch.zeros(dimensions, dimensions, dtype=torch.float64)
        for rows, y in zip(features.split(ROWS), labels.split(ROWS), strict=True):
            x = rows.double()
            sums.index_add_(0, y, x)
            products.addmm_(x.T, x)
        return cls(counts, sums, products)

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.counts + other.counts, self.sums + other.sums, self.products + other.products)

    def __sub__(self, other: "Moments") -> "Moments":
        return Moments(self.counts - other.counts, self.sums - other.sums, self.products - other.products)


@dataclass(frozen=True)
class Standardised:
    """Features, centred, and each group divided by one number: the root of its mean variance.

    One number for a group and not for a channel: the small differences between channels count.
    """

    centre: Tensor
    """(D,)."""
    scale: Tensor
    """(D,)."""
    means: Tensor
    """Class means of standardised features, (K, D); zero for a class without images."""
    covariance: Tensor
    """Covariance of standardised features within classes, (D, D)."""
    variance: Tensor
    """The mean of its diagonal."""

    @classmethod
    def of(cls, moments: Moments, groups: Sequence[int]) -> "Standardised":
        """Return the centre and scale of images with these moments, and their moments in these terms."""
        n, present = moments.counts.sum(), moments.counts > 0
        if n <= present.sum():
            raise CandidError("There are too few images: give at least two of a class.")
        centre = moments.sums.sum(0) / n
        variances = (moments.products.diagonal() / n - centre.square()).clamp(min=0)
        parts = [part.mean().sqrt().expand(len(part)) for part in variances.split(list(groups))]
        scale = torch.cat(parts)
        if not (scale > 0).any():
            raise CandidError("All images look the same to the eye: check that they are the right ones.")
        scale = torch.where(scale > 0, scale, 1.0)
        means = torch.where(present[:, None], moments.sums / moments.counts.clamp(min=1)[:, None], centre)
        within = moments.products - (moments.sums.T * (1 / moments.counts.clamp(min=1))) @ moments.sums
        within = within / (n - present.sum())
        covariance = within / scale[:, None] / scale
        variance = covariance.diagonal().mean()
        if not variance > 0:
            raise CandidError("All images of a class look the same to the eye: give different photos.")
        return cls(centre, scale, (means - centre) / scale, covariance, variance)

    def __call__(self, features: Tensor) -> Tensor:
        """Return standardised features, (N, D) in float64."""
        return (features.double() - self.centre) / self.scale


@dataclass(frozen=True)
class Whitened:
    """Standardised features in coordinates in which every class has about unit covariance: z = L^-1 x."""

    factor: Tensor
    """L^-1, (D, D), lower triangular: L L' = (1 - g) C + g tr(C) / D."""
    means: Tensor
    """Class means of z, (K, D)."""

    @classmethod
    def of(cls, known: Standardised, shrinkage: float) -> "Whitened":
        """Return the whitening by a covariance that is shrunk towards a multiple of the identity."""
        identity = torch.eye(len(known.covariance), dtype=torch.float64)
        cholesky = torch.linalg.cholesky(shrunk(known, shrinkage))
        factor = torch.linalg.solve_triangular(cholesky, identity, upper=False)
        return cls(factor, known.means @ factor.T)


class Span(NamedTuple):
    """The mixture within the span of the class means, in coordinates in which every class has unit spread."""

    basis: Tensor
    """Orthonormal directions of z that the class means span, (K - 1, D)."""
    matrix: Tensor
    """From coordinates along the basis to those of the mixture, (K - 1, K - 1)."""
    shift: Tensor
    """Added to them, (K - 1,)."""
    means: Tensor
    """The class means in these coordinates, (K, K - 1)."""
    log_priors: Tensor
    """Log p(y), (K,)."""

    @classmethod
    def of(cls, means: Tensor, log_priors: Tensor, temperature: Tensor) -> "Span":
        """Return the mixture whose posterior is that of the scores, times the temperature.

        Args:
            means: class means of z, (K, D) in float64.
            log_priors: (K,).
            temperature: what scores are multiplied by.
        """
        (basis, _), scale = _basis(means), temperature.sqrt()
        identity = torch.eye(len(basis), dtype=torch.float64, device=means.device)
        own = scale * means @ basis.T
        log_priors = (temperature * log_priors).log_softmax(0)
        return cls(basis, scale * identity, torch.zeros_like(own[0]), own, log_priors)


def _basis(means: Tensor) -> tuple[Tensor, Tensor]:
    """Return an orthonormal basis of the span of the class means, (K - 1, D), and what it is multiplied by.

    With C the contrasts, C @ means = root @ basis; root is symmetric, (K - 1, K - 1).
    """
    directions = contrasts(len(means)).to(means) @ means  # (K - 1, D)
    values, vectors = torch.linalg.eigh(directions @ directions.T)
    values = values.clamp(min=1e-12 * float(values.max()))
    root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    return inverse @ directions, root


class SecondStage(NamedTuple):
    """Gaussians of the scores: their K - 1 contrasts, whitened by the covariance that new photos have."""

    factor: Tensor
    """Whitens contrasts of scores, (K - 1, K - 1)."""
    means: Tensor
    """Class means of whitened contrasts, (K, K - 1)."""
    centre: Tensor
    """Mean of all whitened contrasts, (K - 1,)."""
    spread: Tensor
    """Whitens them as one Gaussian over all classes, (K - 1, K - 1)."""

    @classmethod
    def of(cls, scores: Tensor, labels: Tensor) -> "SecondStage":
        """Fit it to out-of-fold scores, (N, K): scores of photos that a head has seen lie too far apart."""
        e = scores @ contrasts(scores.shape[1]).T
        classes, counts = scores.shape[1], torch.bincount(labels, minlength=scores.shape[1])
        means = torch.zeros(classes, classes - 1, dtype=torch.float64).index_add_(0, labels, e)
        means = means / counts.clamp(min=1)[:, None]
        away = e - means[labels]
        factor = _whitening(away.T @ away / max(1, len(e) - int((counts > 0).sum())))
        u = e @ factor.T
        centred = u - u.mean(0)
        spread = _whitening(centred.T @ centred / max(1, len(u) - 1))
        return cls(factor, means @ factor.T, u.mean(0), spread)

    def whitened(self, scores: Tensor) -> Tensor:
        """Return the whitened contrasts of scores, (N, K - 1)."""
        return scores @ contrasts(scores.shape[1]).to(scores).T @ self.factor.to(scores).T

    def relative_distance(self, scores: Tensor) -> Tensor:
        """Return the squared distance to the nearest class minus that to all photos as one Gaussian, (N,)."""
        u = self.whitened(scores)
        to_all = ((u - self.centre.to(u)) @ self.spread.to(u).T).square().sum(1)
        nearest = u.square().sum(1) - 2 * class_scores(u, self.means.to(u)).amax(1)  # squared
        return nearest - to_all

    def span(self, means: Tensor, log_priors: Tensor, temperature: Tensor) -> Span:
        """Return the mixture whose posterior is that of the second stage.

        Args:
            means: class means of z, (K, D) in float64.
            log_priors: (K,).
            temperature: what scores of the second stage are multiplied by.
        """
        basis, root = _basis(means)
        # contrasts of scores are root @ (z along the basis) - rows @ |mu|^2 / 2
        factor, rows = temperature.sqrt() * self.factor.double(), contrasts(len(means)).to(means)
        shift = -factor @ (rows @ (0.5 * means.square().sum(1)))
        own = temperature.sqrt() * self.means.double()
        return Span(basis, factor @ root, shift, own, (temperature * log_priors).log_softmax(0))


def _whitening(covariance: Tensor) -> Tensor:
    ridge = RIDGE * covariance.diagonal().mean().clamp(min=1e-12)
    ridged = covariance + ridge * torch.eye(len(covariance), dtype=covariance.dtype)
    identity = torch.eye(len(covariance), dtype=covariance.dtype)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(ridged), identity, upper=False)


def shrunk(known: Standardised, shrinkage: float) -> Tensor:
    """Return the covariance within classes, shrunk towards a multiple of the identity, (D, D)."""
    found = (1 - shrinkage) * known.covariance
    found.diagonal().add_(shrinkage * known.variance)
    return found


def class_scores(z: Tensor, means: Tensor) -> Tensor:
    """Return z . mu_y - |mu_y|^2 / 2 for each class, (N, K): log N(z; mu_y, 1) up to a constant of z."""
    return z @ means.T - 0.5 * means.square().sum(1)


def contrasts(classes: int) -> Tensor:
    """Return K - 1 orthonormal rows that are orthogonal to (1, ..., 1), (K - 1, K) in float64.

    >>> rows = contrasts(4)
    >>> torch.allclose(rows @ rows.T, torch.eye(3).double()), rows.sum(1).abs().max() < 1e-12
    (True, tensor(True))
    """
    rows = torch.tril(torch.ones(classes, classes, dtype=torch.float64), diagonal=-1)[1:]
    numbers = torch.arange(1, classes, dtype=torch.float64)
    rows[torch.arange(classes - 1), torch.arange(1, classes)] = -numbers
    return rows / (numbers * (numbers + 1)).sqrt()[:, None]


def rest_norm(z: Tensor, means: Tensor) -> Tensor:
    """Return |z|^2 without what lies in the span of the differences between class means, (N,)."""
    directions = contrasts(len(means)).to(means) @ means  # (K - 1, D)
    inside = z @ directions.T
    gram = directions @ directions.T
    return z.square().sum(1) - (inside * torch.linalg.lstsq(gram, inside.T).solution.T).sum(1)


def stratified_folds(labels: Tensor, folds: int, seed: int = 0) -> Tensor:
    """Return a fold for each image, (N,): each class is spread evenly over the folds.

    >>> stratified_folds(torch.tensor([0, 0, 1, 1]), 2).sort().values
    tensor([0, 0, 1, 1])
    """
    found = torch.empty_like(labels)
    start = 0
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator(seed, label))
        found[members[order]] = (torch.arange(len(members)) + start) % folds
        start += len(members)
    return found


def total(moments: Sequence[Moments]) -> Moments:
    """Return the moments of all parts together."""
    return reduce(Moments.__add__, moments)
