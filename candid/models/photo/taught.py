"""Classes that a photo model was taught after its training, each from a few photos, in closed form.

A taught class is a mean m of n photos in the whitened space of the head. Its logit is, with
D_e = sum |z - m|^2 / (n - 1)::

    T (rho (z . m - |m|^2 / 2 + D_e / 2n) + log 1/K),   rho = (1 - D_e / (n |m|^2))^(1/2)

The mean of all photos of the class is mu, and E |m|^2 = |mu|^2 + D_e / n: without D_e / 2n the logit would be
too low. The noise of m is about orthogonal to mu, so that rho is about the cosine between m and mu. It damps
what few photos can't say. The logits of the fitted classes stay as they are.
"""

import math
from typing import NamedTuple

import numpy as np

from candid._support.numbers import Array, logsumexp
from candid.models.photo.gaussian import SecondStage, Span, class_scores
from candid.models.photo.head import Posterior

FEWEST = 5
"""Photos that a class can be taught from."""


class TaughtClasses(NamedTuple):
    """What a model knows of t taught classes."""

    weights: Array
    """rho m, (t, D)."""
    constants: Array
    """What is added to z . weights, (t,)."""
    places: Array
    """Where the classes lie: their means, shrunk outside of the span of the fitted classes, (t, D)."""

    @classmethod
    def of(cls, photos: list[Array], span: Span) -> "TaughtClasses":
        """Learn classes from z of their photos, each (n, D); the fitted classes have the span ``span``."""
        basis = span.basis.astype(np.float64)
        rows = [_learned(z.astype(np.float64), basis) for z in photos]
        return cls(*(np.stack(parts) for parts in zip(*rows, strict=True)))

    def scores(self, z: Array) -> Array:
        """Return the scores of photos, (B, t), which the temperature multiplies."""
        return z @ self.weights.T + self.constants


def _learned(z: Array, basis: Array) -> tuple[Array, Array, Array]:
    n, mean = len(z), z.mean(0)
    inside = mean @ basis.T @ basis
    cosine = math.sqrt(_signal(z, mean))
    spread = float(((z - mean) ** 2).sum()) / (n - 1)
    constant = cosine * (-0.5 * float((mean**2).sum()) + spread / (2 * n)) - math.log(len(basis) + 1)
    outside = z - z @ basis.T @ basis
    place = inside + _signal(outside, mean - inside) * (mean - inside)
    return cosine * mean, np.array(constant), place


def _signal(z: Array, mean: Array) -> float:
    """Return which share of |mean|^2 is not the noise of a mean of n photos: 1 - D_e / (n |mean|^2)."""
    n = len(z)
    noise = float(((z - mean) ** 2).sum()) / (n - 1) / n
    return max(0.0, 1 - noise / max(float((mean**2).sum()), 1e-300))


class Seen(NamedTuple):
    """What a head says of B photos."""

    z: Array
    """Whitened statistics, (B, D)."""
    scores: Array
    """Scores of the fitted classes, (B, K)."""
    logits: Array
    """(B, K), or (B, K + t) with taught classes."""
    novelty: Array
    """(B, 3)."""
    terms: Array | None
    """Terms of the log density, (B, 3)."""

    def at(self, i: int) -> "Seen":
        """Return what it says of photo ``i`` alone."""
        return Seen(*(None if part is None else part[i : i + 1] for part in self))  # type: ignore[arg-type]


class Known(NamedTuple):
    """The fitted part of a head, which stays as it is: all arrays of one type, but the span in float64."""

    temperatures: Array
    """Of both stages, (2,)."""
    priors: Array
    """(K,)."""
    second: SecondStage
    span: Span
    means: Array
    """Class means of z, (K, D)."""
    rest_scale: Array
    posterior: Posterior
    basis: Array
    """That of the span, in the type of the others."""

    def extended(self, seen: Seen, taught: TaughtClasses) -> Seen:
        """Return what the head says with taught classes, from what its fitted part says of photos.

        Of a taught class with the place p, let z_o and p_o be the parts outside of the span of the fitted
        classes, r the scale of the rest, and u and v the whitened scores of z and of p. With
        n = |z_o - p_o|^2 - |z_o|^2, the three novelty scores become::

            relative + min(0, min_p (|u - v|^2 + n / r^2) - min_y |u - m_y|^2)
            -logsumexp of the tempered logits of all classes
            max(0, |z_o|^2 + min(0, min_p n))

        The first and the last are distances to the nearest of all classes.
        """
        z, places, basis = seen.z, taught.places, self.basis
        first = self.temperatures[0] * (seen.scores + self.priors)
        added = self.temperatures[0] * taught.scores(z)
        outside = places - places @ basis.T @ basis
        # |z - place|^2 - |z|^2 outside of the span of the fitted classes
        nearer = (outside**2).sum(axis=1) - 2 * (z @ outside.T)
        relative, rest = seen.novelty[:, 0], seen.novelty[:, 2]
        u = self.second.whitened(seen.scores)
        place = self.second.whitened(class_scores(places, self.means))
        # squared distances without |u|^2
        to_fitted = -2 * class_scores(u, self.second.means).max(axis=1)
        to_taught = -2 * class_scores(u, place) + nearer / self.rest_scale**2
        novelty = (
            relative + np.minimum(to_taught.min(axis=1) - to_fitted, 0),
            -logsumexp(np.concatenate((first, added), 1)),
            np.maximum(rest + np.minimum(nearer.min(axis=1), 0), 0),
        )
        logits = self.logits(seen.logits, first, z, taught)
        terms = None if seen.terms is None else self._terms(seen.terms, z, places, nearer)
        return Seen(z, seen.scores, logits, np.stack(novelty, 1), terms)

    def logits(self, logits: Array, first: Array, z: Array, taught: TaughtClasses) -> Array:
        """Return the logits of all classes, (B, K + t); those of the fitted classes stay as they are."""
        added = self.temperatures[0] * taught.scores(z)
        if self.posterior == "second-stage":
            mean, second = (each.mean(axis=1, keepdims=True) for each in (first, logits))
            added = second + np.asarray(self.spread(), z.dtype) * (added - mean)
        elif self.posterior == "logistic":  # the odds against all fitted classes
            added = added + logsumexp(logits, keepdims=True) - logsumexp(first, keepdims=True)
        return np.concatenate((logits, added), 1)

    def spread(self) -> float:
        """Return how many times as far apart the logits of the second stage are as those of the first.

        It is the slope of the one against the other at the class means, at least 1; logits of a taught class
        are multiplied by it, or it could not compete with the others. They stay linear in the statistics.
        """
        means, priors, temperatures = (
            each.astype(np.float64) for each in (self.means, self.priors, self.temperatures)
        )
        second = SecondStage(*(each.astype(np.float64) for each in self.second))
        scores = class_scores(means, means)
        both = scores + priors, class_scores(second.whitened(scores), second.means) + priors
        x, y = (
            temperature * (each - each.mean(1, keepdims=True))
            for temperature, each in zip(temperatures, both, strict=True)
        )
        return max(1.0, float((x * y).sum() / (x * x).sum()))

    def _terms(self, terms: Array, z: Array, places: Array, nearer: Array) -> Array:
        """Return the terms of the density with one more component per taught class."""
        span, classes, count = self.span, len(self.means), len(places)
        inside, means = (
            each.astype(np.float64) @ span.basis.T @ span.matrix.T + span.shift for each in (z, places)
        )
        constant = -0.5 * (inside**2).sum(axis=1) - len(span.basis) * 0.5 * math.log(2 * math.pi)
        added = class_scores(inside, means) + constant[:, None] - math.log(classes + count)
        added = added - 0.5 * nearer.astype(np.float64) / self.rest_scale.astype(np.float64) ** 2
        fitted = terms[:, :1] + math.log(classes / (classes + count))
        together = logsumexp(np.concatenate((fitted, added), 1), keepdims=True)
        return np.concatenate((together, terms[:, 1:]), 1)
