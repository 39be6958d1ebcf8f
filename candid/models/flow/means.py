"""Rescale the span of the class means: the mixture then describes the latents, posteriors stay the same."""

import copy
import math
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid.models.flow.backbone import SpanScaling
from candid.models.flow.classifier import GenerativeClassifier
from candid.models.flow.mixture import LatentMixture

INDEPENDENT = 1e-10
"""The smallest variance of the means along a direction of their span, as a share of the largest one."""


class MeanScaling(NamedTuple):
    """The span of the class means about their average, in float64 on the CPU; M - 1 directions."""

    layer: SpanScaling
    """The directions and the centre, with scale 1 and shift 0."""
    places: Tensor
    """Where the means lie, relative to their average, (M, M - 1)."""
    shift: Tensor
    """g_1 of :func:`rescale`, (M - 1,)."""

    def log_likelihood(self, coordinates: Tensor, log_priors: Tensor, log_scale: float) -> Tensor:
        """Return what rescaling makes of log p(z) within the span, in nats, (N,).

        Args:
            coordinates: of latents in the span as it is now, (N, M - 1) in float64.
            log_priors: log p(y), (M,).
            log_scale: log s of :func:`rescale`.
        """
        scale = math.exp(log_scale)
        c, means = coordinates / scale + (scale - 1 / scale) * self.shift, scale * self.places
        logits = c @ means.T - 0.5 * means.square().sum(1) + log_priors
        return logits.logsumexp(1) - 0.5 * c.square().sum(1) - len(self.shift) * log_scale


@torch.no_grad()
def span_of(mixture: LatentMixture) -> MeanScaling:
    """Return the span of the class means; on a circle, that is its plane, and its centre their average.

    Raises:
        CandidError: if the means are affinely dependent, as those of a planar model without a circle.
    """
    mixture = mixture.double_copy()
    if mixture.angles is not None:
        return _plane_of_circle(mixture)
    classes, products = mixture.classes, mixture.mean_products()  # (M, M)
    centred = products - products.mean(0) - products.mean(1, keepdim=True) + products.mean()
    variances, vectors = torch.linalg.eigh(centred)
    variances, vectors = variances[1:], vectors[:, 1:]  # the first is 0: the average is left out
    if mixture.planar or classes < 2 or variances[0] <= INDEPENDENT * variances[-1]:
        raise CandidError(
            "The class means are affinely dependent (planar means without a circle, a single class, equal "
            "means): such a mixture can't be refitted."
        )
    coefficients = ((vectors - vectors.mean(0)) / variances.sqrt()).T  # (M - 1, M): U = coefficients @ means
    layer = SpanScaling(classes - 1, mixture.constant, mixture.dimensions, len(mixture.prototypes)).double()
    layer.constant = coefficients @ mixture.mean
    layer.weights = coefficients if mixture.weights is None else coefficients @ mixture.weights
    layer.prototypes = mixture.prototypes.detach().clone()
    layer.centre = coefficients @ products.mean(1)
    places = vectors * variances.sqrt()
    system = torch.cat((places, -torch.ones_like(places[:, :1])), 1)
    shift = torch.linalg.solve(system, 0.5 * places.square().sum(1))[:-1]
    return MeanScaling(layer, places, shift)


def _plane_of_circle(mixture: LatentMixture) -> MeanScaling:
    """Return the plane of means on a circle: all |m_y| are equal, so that no shift is needed."""
    layer = SpanScaling(2, mixture.pooled, mixture.dimensions, 3).double()
    layer.weights = torch.nn.functional.pad(mixture.plane_factor(), (1, 0))
    axes = layer.weights @ mixture.prototypes  # (2, D)
    layer.constant, layer.prototypes = (
        axes[:, : mixture.pooled],
        mixture.prototypes[:, mixture.pooled :].clone(),
    )
    layer.centre = axes @ mixture.prototypes[0]
    return MeanScaling(layer, mixture.circle_places(), layer.centre.new_zeros(2))


@torch.no_grad()
def rescale(model: GenerativeClassifier, scale: float) -> None:
    """Put the class means ``scale`` times as far apart, in place, with the same posteriors.

    With the average m_0 of the means, a_y = mu_y - m_0, U an orthonormal basis of their span and
    c = U^T (z - m_0)::

        z' = z + U ((1 / s - 1) c + g),   mu'_y = m_0 + s a_y,   g = (s - 1 / s) g_1,

    where g_1 solves ``g_1 . U^T a_y = |a_y|^2 / 2 + const`` for all y. Means on a circle lie about its
    centre m_0 in a plane U, at the same distance from it, and g_1 = 0. The latents get a last layer,
    :class:`~candid.models.flow.backbone.SpanScaling`; one that is there already is undone first.
    """
    if model.is_frozen:
        raise CandidError("A frozen model can't be refitted: refit the one it was made from.")
    restore(model)
    mixture = model.mixture
    layer, _, shift = span_of(mixture)
    layer.log_scale = torch.tensor(math.log(scale), dtype=torch.float64)
    layer.shift = (scale - 1 / scale) * shift
    _spread(mixture, scale)
    model.flow.add_module("span", layer.to(mixture.mean))
    _set_span(model, (len(shift), len(layer.prototypes)))


@torch.no_grad()
def restore(model: GenerativeClassifier) -> None:
    """Undo :func:`rescale`, in place and with the same posteriors: the model is as it was trained.

    Raises:
        CandidError: if the class means were changed since, so that they left the span.
    """
    if model.config.flow.span is None:
        return
    layer = copy.deepcopy(cast(SpanScaling, model.flow._modules["span"])).cpu().double()
    mixture = model.mixture.double_copy()
    within = layer.coordinates(mixture.means(torch.arange(mixture.classes)))
    if not torch.allclose(torch.cdist(within, within), mixture.pairwise_distances(), rtol=1e-3, atol=1e-3):
        raise CandidError(
            "The class means were changed after the mixture was refitted: refit the model before that change."
        )
    _spread(model.mixture, math.exp(-float(layer.log_scale)))
    del model.flow._modules["span"]
    _set_span(model, None)


@torch.no_grad()
def before_refit(model: GenerativeClassifier) -> tuple[LatentMixture, SpanScaling | None]:
    """Return the mixture as it was trained, in float64, and the layer that refitting added; None without one.

    The layer is computed again from the means, so that posteriors agree to the last digits of float64.
    """
    mixture = model.mixture.double_copy()
    if model.config.flow.span is None:
        return mixture, None
    scale = math.exp(float(model.state_dict()["flow.span.log_scale"]))
    _spread(mixture, 1 / scale)
    layer, _, shift = span_of(mixture)
    layer.log_scale = torch.tensor(math.log(scale), dtype=torch.float64)
    layer.shift = (scale - 1 / scale) * shift
    return mixture, layer


def _spread(mixture: LatentMixture, scale: float) -> None:
    """Move the means away from their average (or the centre of their circle) by the factor ``scale``."""
    if mixture.log_radius is not None:
        mixture.log_radius.add_(math.log(scale))
        return
    for part in (mixture.mean, mixture.prototypes if mixture.alpha is None else mixture.alpha):
        exact = part.double()
        average = exact.mean(0)
        part.copy_(average + scale * (exact - average))


def _set_span(model: GenerativeClassifier, span: tuple[int, int] | None) -> None:
    model.config = replace(model.config, flow=replace(model.config.flow, span=span))
    model.held_out = {}
