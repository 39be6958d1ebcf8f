"""The decision plane: a few classes with means in a plane, whose whole decision space can be drawn."""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid.models import checkpoint
from candid.models.flow.classifier import GenerativeClassifier
from candid.models.protocol import LatentModel, Model, require_latent, require_mixture

FEWEST, MOST = 2, 10


def planar_model(model: Model, classes: Sequence[int]) -> GenerativeClassifier:
    """A classifier of ``classes`` alone, in this order, with the same network and means in a plane.

    The means of these classes are projected on a plane in which they lie around an ellipse, so that each
    class has a cell; priors keep their ratios. It classifies worse until it is fine-tuned, which
    :func:`candid.training.plane.fit_plane` does.

    >>> model = GenerativeClassifier.from_preset("digits")
    >>> planar_model(model, [7, 1, 3]).class_names
    ('7', '1', '3')
    """
    model = cast(GenerativeClassifier, require_latent(model, "A decision plane"))
    if model.is_frozen:
        raise CandidError("A frozen model has no weights to fine-tune: give the one it was made from.")
    _check_classes(classes, model.config.classes)
    names = [model.class_names[y] for y in classes]
    known = model.config.priors
    priors = None if known is None else [known[y] for y in classes]
    shares = None if priors is None else tuple(p / math.fsum(priors) for p in priors)
    config = replace(model.config, classes=len(classes), rank=None, priors=shares, planar=True)
    with torch.device("meta"):
        planar = GenerativeClassifier(config, names, model.memory)
    kept = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("mixture.")}
    state = {name: tensor.detach().clone() for name, tensor in (kept | _in_a_plane(model, classes)).items()}
    checkpoint.load_weights(planar, state, "the model")
    planar.metadata = copy.deepcopy(model.metadata)
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
    """The mixture of ``classes`` with its means projected on a plane."""
    mixture = model.mixture
    y = torch.tensor(classes, device=mixture.prototypes.device)
    means = mixture.means(y).double()  # (M, D)
    centre = means.mean(0)
    axes = _around_an_ellipse(means - centre)
    places = (means - centre) @ axes.T
    # Both factors have numbers of the same size: a step of the optimiser moves the means and turns the plane.
    scale = (places.square().mean() * means.shape[1]).pow(0.25).clamp(min=1e-3)
    parts = {
        "mean": means[:, :0],
        "alpha": places / scale,
        "prototypes": torch.cat((centre[None], scale * axes)),
        "log_priors": mixture.log_priors[y].double().log_softmax(0),
    }
    return {f"mixture.{name}": part.to(mixture.prototypes.dtype).contiguous() for name, part in parts.items()}


def _around_an_ellipse(means: Tensor) -> Tensor:
    """Return the axes of a plane, (2, D), in which centred means (M, D) lie around an ellipse.

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
    return torch.linalg.qr(directions).Q.T


def _record(training: Any, **changes: Any) -> dict[str, Any]:
    """The record of a training with other values in its configuration."""
    record = training if isinstance(training, dict) else {}
    config = record.get("config")
    return record | {"config": (config if isinstance(config, dict) else {}) | changes}


@dataclass(frozen=True)
class DecisionPlane:
    """The plane of the means with lengths as in latent space; all tensors in float64, on the CPU.

    The first axis is the one along which the means lie furthest apart. What a latent has beyond the plane is
    the same for every class, so two numbers decide, and the cell of a class is a polygon::

        |z - mu_y|^2 = |p(z) - m_y|^2 + (distance of z to the plane)^2
    """

    class_names: tuple[str, ...]
    origin: Tensor
    """The average of the means, (D,): the point (0, 0)."""
    axes: Tensor
    """Orthonormal, (2, D)."""
    means: Tensor
    """m_y, (M, 2), in standard deviations of a class."""
    log_priors: Tensor
    """log p(y), (M,)."""

    def project(self, z: Tensor) -> Tensor:
        """p(z), the point of the plane nearest to each latent (N, D), in standard deviations, (N, 2)."""
        return (z.detach().cpu().double() - self.origin) @ self.axes.T

    def logits(self, points: Tensor) -> Tensor:
        """``p . m_y - |m_y|^2 / 2 + log p(y)`` of the points (N, 2), (N, M): log p(y | z) but a constant."""
        return points.double() @ self.means.T - 0.5 * self.means.square().sum(1) + self.log_priors

    def posterior(self, points: Tensor) -> Tensor:
        """p(y | z) of every latent above the points (N, 2), (N, M); the model's own, exactly."""
        return self.logits(points).softmax(1)

    def log_density(self, points: Tensor) -> Tensor:
        """Log of the mixture's density in the plane, sum_y p(y) N(p; m_y, 1), in nats, (N,)."""
        squares = points.double().square().sum(1)
        return self.logits(points).logsumexp(1) - 0.5 * squares - math.log(2 * math.pi)


@torch.no_grad()
def decision_plane(model: LatentModel) -> DecisionPlane:
    """The plane that the means of a planar model lie in.

    >>> plane = decision_plane(planar_model(GenerativeClassifier.from_preset("digits"), [7, 1, 3]))
    >>> plane.project(torch.randn(5, 64)).shape, plane.means.shape
    (torch.Size([5, 2]), torch.Size([3, 2]))
    """
    if not require_latent(model, "A decision plane").mixture.planar:
        raise CandidError("The means of this model lie in no plane: choose classes and fit one first.")
    mixture = model.mixture
    assert mixture.weights is not None
    prototypes = mixture.prototypes.cpu().double()
    means = mixture.weights.cpu().double() @ prototypes  # (M, D)
    origin = means.mean(0)
    axes = torch.linalg.qr(prototypes[1:].T).Q.T
    turn = torch.linalg.svd((means - origin) @ axes.T).Vh  # (2, 2): to the principal axes of the means
    places = (means - origin) @ (turn @ axes).T
    return oriented(model.class_names, origin, turn @ axes, places, mixture.log_priors)


@torch.no_grad()
def plane_of_three(model: Model, classes: Sequence[int]) -> DecisionPlane:
    """The plane through the means of three ``classes`` of a model with class means, as it is.

    Nothing is fine-tuned: three means always lie in a plane. Posteriors are those between the three.

    >>> plane = plane_of_three(GenerativeClassifier.from_preset("digits"), [7, 1, 3])
    >>> plane.class_names, plane.means.shape
    (('7', '1', '3'), torch.Size([3, 2]))
    """
    mixture = require_mixture(model, "A decision plane").mixture
    if len(set(classes)) != 3:
        raise CandidError(
            f"The head of a photo model is not fine-tuned, so that its plane has three classes, not "
            f"{len(set(classes))}: choose three with --classes."
        )
    y = torch.tensor(classes, device=mixture.prototypes.device)
    means = mixture.means(y).cpu().double()
    origin = means.mean(0)
    axes = torch.linalg.svd(means - origin, full_matrices=False).Vh[:2]
    names = tuple(model.class_names[c] for c in classes)
    log_priors = mixture.log_priors[y].double().log_softmax(0)
    return oriented(names, origin, axes, (means - origin) @ axes.T, log_priors)


def oriented(
    class_names: tuple[str, ...], origin: Tensor, axes: Tensor, means: Tensor, log_priors: Tensor
) -> DecisionPlane:
    """The plane with its axes (2, D) turned round where the mean that is furthest out is negative."""
    furthest = means.gather(0, means.abs().argmax(0)[None])  # (1, 2)
    signs = torch.where(furthest < 0, -1.0, 1.0)
    return DecisionPlane(class_names, origin, signs.T * axes, signs * means, log_priors.cpu().double())
