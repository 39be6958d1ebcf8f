"""The path of an attack through latent space, seen in a plane."""

import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.progress import SILENT, Progress
from candid.models.decision_plane import DecisionPlane, decision_plane, plane_through
from candid.models.protocol import Model, require
from candid.robustness.attacks.carlini_wagner import carlini_wagner
from candid.robustness.attacks.metrics import AttackedImages
from candid.robustness.attacks.search import Classes

if TYPE_CHECKING:
    from candid.models.flow.classifier import GenerativeClassifier

NEAREST = 5
"""Classes that the plane is fitted through, as in the paper."""
WEIGHTS = (0.1, 1.0, 10.0)
DEFAULTS: dict[str, Any] = {"learning_rate": 0.003, "patience": 100, "steps": 400}
"""They show both stages. With the paper's (0.01, 20) small images are fooled in a few steps, and
Adam, used to the gradients of these, doesn't lower the perturbation before the patience ends."""
AT_ONCE = 64
"""Latents that are projected together."""


@dataclass(frozen=True)
class AttackPath:
    """One attack, from the original to the best version of it, n - 1 steps later.

    Later steps, which found nothing better, are left out.
    """

    points: Array
    """Where the image was in the plane, (n, 2), in standard deviations of a class."""
    margins: Array
    """``l_t - max l_y`` over all classes y but the target t, of the whole model, (n,)."""
    fooled: Array
    """Whether the margin has reached kappa, (n,); for an infinite one, if it is > 0."""
    original: Array
    """(C, H, W), floats in [0, 1]."""
    attacked: Array
    distance: float
    """L2 norm of the difference."""
    posterior: float
    """p(target) of the attacked image."""
    predicted: int
    """The class of the original, as the model sees it."""
    label: int
    """The true class of the original; the predicted one if no labels are known."""

    @property
    def first(self) -> int:
        """The first step that fooled the model; n if none did."""
        return int(self.fooled.argmax()) if self.fooled.any() else len(self.fooled)


@dataclass(frozen=True)
class Trajectories:
    """Attacks with one target, in one plane.

    The plane of a planar model is ``exact``: all that decides lies in it, ``plane.logits`` of a point have
    the margins of the model, and boundaries are where they seem to be.

    The plane of any other model is the one nearest to the means of ``classes``; points and means in it are
    projections. ``plane.logits`` leave out the other classes and, of each margin ``l_i - l_j``, ::

        (z - origin) . (r_i - r_j) - (|r_i|^2 - |r_j|^2) / 2

    with r_i what the mean of class i has beyond the plane: its cells are not where the model decides.
    ``margins`` and ``fooled`` of a path are always the model's own.
    """

    plane: DecisionPlane
    exact: bool
    classes: tuple[int, ...]
    """The classes in the plane, in its order."""
    class_names: tuple[str, ...]
    """Names of all classes of the model."""
    target: int
    kappa: float
    paths: tuple[AttackPath, ...]


def trajectories(
    model: Model,
    images: Tensor | Array,
    target: int,
    *,
    labels: Classes | None = None,
    kappa: float = 1.0,
    c: float | None = None,
    progress: Progress = SILENT,
    **arguments: Any,
) -> Trajectories:
    """Return the paths of :func:`carlini_wagner`, without refinement, from N images to one class.

    The latents of all steps are held in memory.

    Args:
        model: a model whose latents are as large as its images: a pixel model.
        images: (N, C, H, W), 8-bit or floats in [0, 1], an array or a tensor.
        target: the class that all images are led to.
        labels: the true classes, (N,).
        kappa: the required lead of the target's logit.
        c: weight of the decision; by default the first of 0.1, 1 and 10 that fools the model with all
            images, and the last if none does.
        progress: shows the progress, by images.
        arguments: of the attack: ``d``, ``median``, ``steps``, ``learning_rate``, ``patience``.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("digits", seed=0).eval()
    >>> drawn = trajectories(model, torch.rand(2, 1, 8, 8), 3, c=10, steps=20)
    >>> len(drawn.paths), drawn.paths[0].points.shape[1], 3 in drawn.classes, drawn.exact
    (2, 2, True, False)
    """
    require(model, "invert", "Trajectories")
    if not isinstance(target, int):
        raise CandidError(f"All paths of a figure lead to one class: give its number, not {target}.")
    frozen: Any = model.frozen()
    for weight in WEIGHTS if c is None else (c,):
        attack = carlini_wagner(
            frozen,
            images,
            [target] * len(images),
            labels=labels,
            kappa=kappa,
            c=weight,
            tighten=False,
            keep_latents=True,
            progress=progress,
            **(DEFAULTS | arguments),
        )
        if attack.success.all():
            break
    traces, exact = _until_best(attack), model.geometry.planar
    if exact:
        classes, plane = tuple(range(len(model.class_names))), decision_plane(model)
    else:
        classes = nearest_classes(frozen, [z for z, _ in traces], target)
        plane = plane_through(model, classes)
    originals = np.asarray(images)
    originals = originals.astype(attack.images.dtype) / (255 if originals.dtype == np.uint8 else 1)
    paths = []
    for i, (z, margins) in enumerate(traces):
        predicted = int(_logits(frozen, z[:1]).argmax())
        path = AttackPath(
            np.concatenate([plane.project(z[row : row + AT_ONCE]) for row in range(0, len(z), AT_ONCE)]),
            margins,
            margins > 0 if math.isinf(kappa) else margins >= kappa,
            originals[i],
            attack.images[i],
            float(attack.distance[i]),
            float(attack.posterior[i, target]),
            predicted,
            predicted if labels is None else int(labels[i]),
        )
        paths.append(path)
    return Trajectories(plane, exact, classes, model.class_names, target, kappa, tuple(paths))


@torch.no_grad()
def _logits(model: "GenerativeClassifier", z: Array) -> Tensor:
    """Return the logits of latents (n, D), (n, M)."""
    return model.mixture.logits(torch.from_numpy(z).to(model.mixture.prototypes))


def _until_best(attack: AttackedImages) -> list[tuple[Array, Array]]:
    """Return latents (n, D) and margins (n,) of each image up to the step that was returned."""
    parts = []
    for trace, distance, margin in zip(attack.traces or (), attack.distance, attack.margin, strict=True):
        assert trace.latents is not None
        missed = np.abs(trace.distances - distance) + np.abs(trace.margins - margin)
        n = int(missed.argmin()) + 1
        parts.append((trace.latents[:n], trace.margins[:n]))
    return parts


@torch.no_grad()
def nearest_classes(
    model: "GenerativeClassifier", latents: list[Array], target: int, count: int = NEAREST
) -> tuple[int, ...]:
    """Return the target, then the ``count`` - 1 other classes closest to any of the paths (n_i, D).

    How close a path comes to class y is counted against the other classes, at the step where that is most::

        max_t  ( min_{y' != y} |z_t - mu_y'|^2  -  |z_t - mu_y|^2 )

    The distances themselves differ more between images and steps than between classes: the nearest five
    would be those of the one step with the smallest |z|.
    """
    mixture = model.mixture
    norms = mixture.squared_norms()
    most = torch.full_like(norms, -math.inf)
    for z in chain.from_iterable(torch.from_numpy(path).split(AT_ONCE) for path in latents):
        scores = 2 * mixture.products(z.to(norms)) - norms  # (n, M): |z|^2 - |z - mu|^2
        best, nearest = scores.topk(2, dim=1)
        leads = torch.arange(len(norms), device=norms.device) == nearest[:, :1]
        most = most.maximum((scores - torch.where(leads, best[:, 1:], best[:, :1])).amax(0))
    most[target] = math.inf
    return tuple(most.topk(min(count, len(most))).indices.tolist())
