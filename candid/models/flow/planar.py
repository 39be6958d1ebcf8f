"""A model of a few classes with means in a plane, whose whole decision space can be drawn."""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid.models.flow.classifier import GenerativeClassifier
from candid.models.flow.means import restore
from candid.models.protocol import Model, require

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
