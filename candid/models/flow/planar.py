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
from candid.models.protocol import Model, require

FEWEST, MOST = 2, 10


def planar_model(model: Model, classes: Sequence[int]) -> GenerativeClassifier:
    """A classifier of ``classes`` alone, in this order, with the same network and means in a plane.

    The means of these classes are projected on a plane in which they lie around an ellipse, so that each
    class has a cell; priors keep their ratios. It classifies worse until it is fine-tuned, which
    :func:`candid.training.train.fit_plane` does.

    >>> model = GenerativeClassifier.from_preset("digits")
    >>> planar_model(model, [7, 1, 3]).class_names
    ('7', '1', '3')
    """
    model = cast(GenerativeClassifier, require(model, "invert", "A decision plane"))
    if model.is_frozen:
        raise CandidError("A frozen model has no weights to fine-tune: give the one it was made from.")
    _check_classes(classes, model.config.classes)
    names = [model.class_names[y] for y in classes]
    all_priors = model.config.priors
    priors = None if all_priors is None else [all_priors[y] for y in classes]
    shares = None if priors is None else tuple(p / math.fsum(priors) for p in priors)
    config = replace(model.config, classes=len(classes), rank=None, priors=shares, planar=True)
    with torch.device("meta"):
        planar = GenerativeClassifier(config, names, model.memory)
    kept = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("mixture.")}
    state = {name: tensor.detach().clone() for name, tensor in (kept | _in_a_plane(model, classes)).items()}
    planar.load_state_dict(state, assign=True)
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
