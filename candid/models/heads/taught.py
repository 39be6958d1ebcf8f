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

import torch
from torch import Tensor

from candid.models.heads.closed_form import Posterior
from candid.models.heads.gaussian import SecondStage, Span, class_scores

FEWEST = 5
"""Photos that a class can be taught from."""


class TaughtClasses(NamedTuple):
    """What a model knows of t taught classes."""

    weights: Tensor
    """rho m, (t, D)."""
    constants: Tensor
    """What is added to z . weights, (t,)."""
    places: Tensor
    """Where the classes lie: their means, shrunk outside of the span of the fitted classes, (t, D)."""

    @classmethod
    def of(cls, photos: list[Tensor], span: Span) -> "TaughtClasses":
        """Learn classes from z of their photos, each (n, D); the fitted classes have the span ``span``."""
        basis = span.basis.double()
        rows = [_learned(z.double(), basis) for z in photos]
        return cls(*(torch.stack(parts) for parts in zip(*rows, strict=True)))

    def scores(self, z: Tensor) -> Tensor:
        """Return the scores of photos, (B, t), which the temperature multiplies."""
        return z @ self.weights.to(z).T + self.constants.to(z)


def _learned(z: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, mean = len(z), z.mean(0)
    inside = mean @ basis.T @ basis
    cosine = math.sqrt(_signal(z, mean))
    spread = float((z - mean).square().sum()) / (n - 1)
    constant = cosine * (-0.5 * float(mean.square().sum()) + spread / (2 * n)) - math.log(len(basis) + 1)
    outside = z - z @ basis.T @ basis
    place = inside + _signal(outside, mean - inside) * (mean - inside)
    return cosine * mean, torch.tensor(constant, dtype=torch.float64), place


def _signal(z: Tensor, mean: Tensor) -> float:
    """Return which share of |mean|^2 is not the noise of a mean of n photos: 1 - D_e / (n |mean|^2)."""
    n = len(z)
    noise = (z - mean).square().sum() / (n - 1) / n
    return max(0.0, 1 - float(noise / mean.square().sum().clamp(min=1e-300)))


class Seen(NamedTuple):
    """What a head says of B photos."""

    z: Tensor
    """Whitened statistics, (B, D)."""
    scores: Tensor
    """Scores of the fitted classes, (B, K)."""
    logits: Tensor
    """(B, K), or (B, K + t) with taught classes."""
    novelty: Tensor
    """(B, 3)."""
    terms: Tensor | None
    """Terms of the log density, (B, 3)."""

    def at(self, i: int) -> "Seen":
        """Return what it says of photo ``i`` alone."""
        terms = None if self.terms is None else self.terms[i : i + 1]
        own = slice(i, i + 1)
        return Seen(self.z[own], self.scores[own], self.logits[own], self.novelty[own], terms)


class Known(NamedTuple):
    """The fitted part of a head, which stays as it is."""

    temperatures: Tensor
    """Of both stages, (2,)."""
    priors: Tensor
    """(K,)."""
    second: SecondStage
    span: Span
    means: Tensor
    """Class means of z, (K, D)."""
    rest_scale: Tensor
    posterior: Posterior

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
        z = seen.z
        first = self.temperatures[0].to(z) * (seen.scores + self.priors.to(z))
        own = self.temperatures[0].to(z) * taught.scores(z)
        basis = self.span.basis.to(z)
        places = taught.places.to(z)
        outside = places - places @ basis.T @ basis
        # |z - place|^2 - |z|^2 outside of the span of the fitted classes
        nearer = outside.square().sum(1) - 2 * z @ outside.T
        relative, _, rest = seen.novelty.unbind(1)
        u = self.second.whitened(seen.scores)
        to_fitted = torch.cdist(u, self.second.means.to(u)).square().amin(1)
        place = self.second.whitened(class_scores(places, self.means.to(z)))
        to_taught = torch.cdist(u, place).square() + nearer / self.rest_scale.to(z).square()
        novelty = (
            relative + (to_taught.amin(1) - to_fitted).clamp(max=0),
            -torch.cat((first, own), 1).logsumexp(1),
            (rest + nearer.amin(1).clamp(max=0)).clamp(min=0),
        )
        logits = self.logits(seen.logits, first, z, taught)
        terms = None if seen.terms is None else self._terms(seen.terms, z, places, nearer)
        return Seen(z, seen.scores, logits, torch.stack(novelty, 1), terms)

    def logits(self, logits: Tensor, first: Tensor, z: Tensor, taught: TaughtClasses) -> Tensor:
        """Return the logits of all classes, (B, K + t); those of the fitted classes stay as they are."""
        own = self.temperatures[0].to(z) * taught.scores(z)
        if self.posterior == "second-stage":
            mean, second = first.mean(1, keepdim=True), logits.mean(1, keepdim=True)
            own = second + self.spread().to(z) * (own - mean)
        elif self.posterior == "logistic":  # the odds against all fitted classes
            own = own + logits.logsumexp(1, keepdim=True) - first.logsumexp(1, keepdim=True)
        return torch.cat((logits, own), 1)

    def spread(self) -> Tensor:
        """Return how many times as far apart the logits of the second stage are as those of the first.

        It is the slope of the one against the other at the class means, at least 1; logits of a taught class
        are multiplied by it, or it could not compete with the others. They stay linear in the statistics.
        """
        means, priors = self.means.double(), self.priors.double()
        scores = class_scores(means, means)
        second = class_scores(self.second.whitened(scores), self.second.means.double())
        x, y = (
            temperature * (each + priors - (each + priors).mean(1, keepdim=True))
            for temperature, each in zip(self.temperatures.double(), (scores, second), strict=True)
        )
        return ((x * y).sum() / (x * x).sum()).clamp(min=1)

    def _terms(self, terms: Tensor, z: Tensor, places: Tensor, nearer: Tensor) -> Tensor:
        """Return the terms of the density with one more component per taught class."""
        z, span = z.double(), self.span
        basis, classes, more = span.basis.to(z), len(self.means), len(places)
        inside, means = (
            each @ basis.T @ span.matrix.to(z).T + span.shift.to(z) for each in (z, places.to(z))
        )
        constant = -0.5 * inside.square().sum(1) - inside.shape[1] * 0.5 * math.log(2 * math.pi)
        own = class_scores(inside, means) + constant[:, None] - math.log(classes + more)
        own = own - 0.5 * nearer.double() / self.rest_scale.to(z).square()
        old = terms[:, :1].to(z) + math.log(classes / (classes + more))
        return torch.cat((torch.cat((old, own), 1).logsumexp(1, keepdim=True), terms[:, 1:].to(z)), 1)
