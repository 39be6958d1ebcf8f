"""The path of an attack through latent space, seen in a plane."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.progress import SILENT, Progress
from candid.models.flow.plane import DecisionPlane, decision_plane, oriented
from candid.models.protocol import LatentModel, require_latent
from candid.robustness.attacks.carlini_wagner import carlini_wagner
from candid.robustness.attacks.search import Attackable, AttackResult

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

    points: Tensor
    """Where the image was in the plane, (n, 2), in standard deviations of a class."""
    margins: Tensor
    """``l_t - max l_y`` over all classes y but the target t, of the whole model, (n,)."""
    fooled: Tensor
    """Whether the margin has reached kappa, (n,); for an infinite one, if it is > 0."""
    original: Tensor
    """(C, H, W), floats in [0, 1]."""
    attacked: Tensor
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
        return int(self.fooled.int().argmax()) if bool(self.fooled.any()) else len(self.fooled)


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
    model: Attackable,
    images: Tensor,
    target: int,
    *,
    labels: Tensor | Sequence[int] | None = None,
    kappa: float = 1.0,
    c: float | None = None,
    progress: Progress = SILENT,
    **arguments: Any,
) -> Trajectories:
    """Return the paths of :func:`carlini_wagner`, without refinement, from N images to one class.

    The latents of all steps are held in memory.

    Args:
        model: a model with a latent space.
        images: (N, C, H, W), 8-bit or floats in [0, 1].
        target: the class that all images are led to.
        labels: the true classes, (N,).
        kappa: the required lead of the target's logit.
        c: weight of the decision; by default the first of 0.1, 1 and 10 that fools the model with all
            images, and the last if none does.
        progress: shows the progress, by images.
        arguments: of the attack: ``d``, ``median``, ``steps``, ``learning_rate``, ``patience``.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("digits", seed=0).eval()
    >>> found = trajectories(model, torch.rand(2, 1, 8, 8), 3, c=10, steps=20)
    >>> len(found.paths), found.paths[0].points.shape[1], 3 in found.classes, found.exact
    (2, 2, True, False)
    """
    model = require_latent(model, "Trajectories")
    if not isinstance(target, int):
        raise CandidError(f"All paths of a figure lead to one class: give its number, not {target}.")
    frozen = model.frozen()
    for weight in WEIGHTS if c is None else (c,):
        attack = carlini_wagner(
            frozen,
            images,
            torch.tensor(target).expand(images.shape[:1]),
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
    traces = _until_best(attack)
    if model.mixture.planar:
        classes, plane = tuple(range(len(model.class_names))), decision_plane(model)
    else:
        classes = nearest_classes(model, [z for z, _ in traces], target)
        plane = fitted_plane(model, classes)
    originals = images.to(attack.images) / (255 if images.dtype == torch.uint8 else 1)
    paths = []
    for i, (z, margins) in enumerate(traces):
        predicted = int(frozen.mixture.logits(z[:1].to(frozen.mixture.prototypes)).argmax())
        path = AttackPath(
            torch.cat([plane.project(part) for part in z.split(AT_ONCE)]),
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
    return Trajectories(plane, model.mixture.planar, classes, model.class_names, target, kappa, tuple(paths))


def _until_best(attack: AttackResult) -> list[tuple[Tensor, Tensor]]:
    """Return latents (n, D) and margins (n,) of each image up to the step that was returned."""
    found = []
    for trace, distance, margin in zip(attack.traces or (), attack.distance, attack.margin, strict=True):
        assert trace.latents is not None
        missed = (trace.distances - distance).abs() + (trace.margins - margin).abs()
        n = int(missed.argmin()) + 1
        found.append((trace.latents[:n], trace.margins[:n]))
    return found


@torch.no_grad()
def nearest_classes(
    model: LatentModel, latents: list[Tensor], target: int, count: int = NEAREST
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
    for z in chain.from_iterable(each.split(AT_ONCE) for each in latents):
        scores = 2 * mixture.products(z.to(norms)) - norms  # (n, M): |z|^2 - |z - mu|^2
        best, own = scores.topk(2, dim=1)
        leads = torch.arange(len(norms), device=norms.device) == own[:, :1]
        most = most.maximum((scores - torch.where(leads, best[:, 1:], best[:, :1])).amax(0))
    most[target] = math.inf
    return tuple(most.topk(min(count, len(most))).indices.tolist())


@torch.no_grad()
def fitted_plane(model: LatentModel, classes: tuple[int, ...]) -> DecisionPlane:
    """Return the plane nearest to the means of ``classes`` in least squares, with these means projected.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("digits")
    >>> fitted_plane(model, (4, 0, 7, 1)).means.shape
    torch.Size([4, 2])
    """
    mixture = model.mixture
    y = torch.tensor(classes, device=mixture.prototypes.device)
    means = mixture.means(y).cpu().double()  # (M, D)
    origin = means.mean(0)
    axes = torch.linalg.svd(means - origin, full_matrices=False).Vh[:2]
    places = (means - origin) @ axes.T
    names = tuple(model.class_names[y] for y in classes)
    return oriented(names, origin, axes, places, mixture.log_priors[y])
