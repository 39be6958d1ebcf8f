"""Class means: rescale their span, or put the means of a few classes in a plane.

With another span the mixture describes the latents, and posteriors stay the same. A model whose means lie
in a plane has a decision space that can be drawn as a whole.
"""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid.models.flow.backbone import SpanScaling
from candid.models.flow.classifier import GenerativeClassifier
from candid.models.flow.mixture import LatentMixture
from candid.models.protocol import Model, require

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


FEWEST, MOST = 2, 10
RADIUS = 1.0
"""Radius of a new circle: trained means are about one standard deviation apart before they are refitted."""


def planar_model(model: Model, classes: Sequence[int]) -> GenerativeClassifier:
    """A classifier of ``classes`` alone, in this order, with the same network and means in a plane.

    The means of these classes are put on a circle in a plane of mean-pooled coefficients in which they lie
    around an ellipse, so that each class keeps an outer cell; priors keep their ratios. If there are fewer of
    these coefficients than it takes, it is a plane of all. Two or three means stay where they are. More
    classify worse until they are fine-tuned, which :func:`candid.training.train.fit_plane` does.

    >>> model = GenerativeClassifier.from_preset("digits")
    >>> planar_model(model, [7, 1, 3]).class_names
    ('7', '1', '3')
    """
    model = cast(GenerativeClassifier, require(model, "invert", "A decision plane"))
    if model.is_frozen:
        raise CandidError("A frozen model has no weights to fine-tune: give the one it was made from.")
    _check_classes(classes, model.config.classes)
    if model.config.flow.span is not None:
        model = copy.deepcopy(model)
        restore(model)  # the plane is refitted by itself
    names = [model.class_names[y] for y in classes]
    all_priors = model.config.priors
    priors = None if all_priors is None else [all_priors[y] for y in classes]
    shares = None if priors is None else tuple(p / math.fsum(priors) for p in priors)
    config = replace(model.config, classes=len(classes), rank=None, priors=shares, planar=True, circle=True)
    with torch.device("meta"):
        planar = GenerativeClassifier(config, names, model.memory)
    kept = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("mixture.")}
    state = {name: tensor.detach().clone() for name, tensor in (kept | _in_a_plane(model, classes)).items()}
    planar.load_state_dict(state, assign=True)
    planar.metadata = copy.deepcopy({key: part for key, part in model.metadata.items() if key != "refit"})
    planar.metadata["training"] = _record(planar.metadata.get("training"), only=names)
    return planar.to(model.device).train(model.training)


def _check_classes(classes: Sequence[int], count: int) -> None:
    if not FEWEST <= len(classes) <= MOST:
        raise CandidError(f"A plane takes {FEWEST} to {MOST} classes, not {len(classes)}: choose that many.")
    for y in classes:
        if not 0 <= y < count:
            raise CandidError(f"Classes go from 0 to {count - 1}: there is no class {y}.")
        if list(classes).count(y) > 1:
            raise CandidError(f"Class {y} is chosen twice: name each class once.")


@torch.no_grad()
def _in_a_plane(model: GenerativeClassifier, classes: Sequence[int]) -> dict[str, Tensor]:
    """The mixture of ``classes`` with its means on a circle in a plane."""
    mixture = model.mixture
    y = torch.tensor(classes, device=mixture.prototypes.device)
    means = mixture.means(y).double()  # (M, D)
    centre = means.mean(0)
    if len(means) > 3:
        directions = means - centre
        if model.mixture.constant >= len(means) - 1:
            directions[:, model.mixture.constant :] = 0
        axes, angles = _around_an_ellipse(directions)
        radius = centre.new_tensor(RADIUS)
    else:  # they lie on a circle as they are
        axes = torch.linalg.svd(means - centre, full_matrices=False).Vh[:2]
        places = (means - centre) @ axes.T
        system = torch.cat((2 * places, -torch.ones_like(places[:, :1])), 1)
        middle = (torch.linalg.pinv(system) @ places.square().sum(1))[:2]
        centre, places = centre + middle @ axes, places - middle
        angles, radius = torch.atan2(places[:, 1], places[:, 0]), places[0].norm()
    scale = 2 * means.shape[1] ** 0.25  # a step of AdamW turns the plane a little
    parts = {
        "mean": means[:, :0],
        "angles": angles,
        "log_radius": radius.log(),
        "prototypes": torch.cat((centre[None], scale * axes)),
        "log_priors": mixture.log_priors[y].double().log_softmax(0),
    }
    return {f"mixture.{name}": part.to(mixture.prototypes.dtype).contiguous() for name, part in parts.items()}


def _around_an_ellipse(means: Tensor) -> tuple[Tensor, Tensor]:
    """Return the axes of a plane, (2, D), with centred means (M, D) around an ellipse, at the angles (M,).

    In the plane nearest to the means, some of many classes are surrounded by the others and have no cell.
    Directions a with ``means @ a = (cos, sin)`` of M even angles exist for any order of the classes; the
    order is chosen for which these directions are shortest, that is, for which the means stay furthest apart.
    """
    m = len(means)
    angles = 2 * math.pi / m * torch.arange(m, dtype=means.dtype, device=means.device)
    orders = np.array(list(itertools.permutations(range(1, m))), dtype=np.int64).reshape(-1, m - 1)
    places = torch.from_numpy(np.pad(orders, ((0, 0), (1, 0)))).to(means.device)  # of each class, (orders, M)
    cosines, weights = (angles[:, None] - angles).cos(), torch.linalg.pinv(means @ means.T)
    cost = torch.zeros(len(places), dtype=means.dtype, device=means.device)
    for i, j in itertools.combinations(range(m), 2):
        cost += weights[i, j] * cosines[places[:, i], places[:, j]]
    chosen = angles[places[cost.argmin()]]
    directions = torch.linalg.pinv(means) @ torch.stack((chosen.cos(), chosen.sin()), 1)  # (D, 2)
    left, _, right = torch.linalg.svd(directions, full_matrices=False)
    return (left @ right).T, chosen  # the nearest orthonormal axes: the ellipse is hardly turned


def _record(training: Any, **changes: Any) -> dict[str, Any]:
    """The record of a training with other values in its configuration."""
    record = training if isinstance(training, dict) else {}
    config = record.get("config")
    return record | {"config": (config if isinstance(config, dict) else {}) | changes}
