"""Where an image lies between the classes that it could be."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from scipy.special import gammaincinv, ndtri
from torch import Tensor

from candid._support.errors import CandidError
from candid.explanations.similarity import expected_uncertainty
from candid.models.protocol import LatentModel, Outputs, require_latent
from candid.trust.verdict import Kind

TOP = 5
"""Classes that span the space, as in the paper."""
MASS = 0.9
"""Share of a class that lies within its circle, in either direction."""
CONFIDENT = 0.95
"""The posterior at which a decision is called confident if the model gives no verdict."""


@dataclass(frozen=True)
class DecisionSpace:
    """An image in the space that the means of its most probable classes span, seen in two coordinates.

    ``along`` runs from the mean of the most probable class to that of the second, 0 in the middle between
    them; ``away`` is the distance from that line. Both are in standard deviations of a class.
    """

    classes: tuple[int, ...]
    """The most probable classes, falling."""
    posterior: tuple[float, ...]
    """Posteriors of these classes."""
    along: float
    away: float
    means_along: tuple[float, ...]
    """Positions of the class means."""
    means_away: tuple[float, ...]
    half_width: float
    """Along the line, the share ``MASS`` of a class lies this close to its mean."""
    half_height: float
    """The same for the distance from the line."""
    boundary: float
    """Where on the line the first two classes are equally probable."""

    @property
    def distance(self) -> float:
        """Distance between the means of the two most probable classes."""
        return self.means_along[1] - self.means_along[0]

    @property
    def overlap(self) -> bool:
        """Whether the circles of the two most probable classes overlap."""
        return self.distance < 2 * self.half_width


@torch.no_grad()
def decision_spaces(model: LatentModel, outputs: Outputs, top: int = TOP) -> list[DecisionSpace]:
    """Return the decision space of each image, from one forward pass.

    A class is normal with unit variance: its position along the line is normal, its distance from the line
    in the n-dimensional span chi-distributed with n - 1 degrees of freedom.

    >>> from candid import GenerativeClassifier
    >>> model = GenerativeClassifier.from_preset("digits").eval()
    >>> space = decision_spaces(model, model.outputs(torch.rand(1, 1, 8, 8)))[0]
    >>> len(space.classes), round(space.half_width, 3), round(space.half_height, 3)
    (5, 1.645, 2.789)
    """
    require_latent(model, "A decision space")
    assert outputs.latent is not None
    if min(len(model.class_names), top) < 2:
        raise CandidError(
            "A decision is between at least two classes: give a model with two or more, and a top of 2."
        )
    log_priors = model.mixture.log_priors.double()
    posterior = outputs.logits.double().softmax(1)
    best = posterior.topk(min(top, len(model.class_names)))
    return [
        _space(model, z, classes, values, log_priors)
        for z, values, classes in zip(outputs.latent, best.values, best.indices, strict=True)
    ]


def _space(
    model: LatentModel, z: Tensor, classes: Tensor, posterior: Tensor, log_priors: Tensor
) -> DecisionSpace:
    means = model.mixture.means(classes).double()
    difference = means[1] - means[0]
    distance = float(difference.norm())
    axis = difference / max(distance, torch.finfo(difference.dtype).tiny)
    points = torch.cat((z.double()[None], means)) - (means[0] + means[1]) / 2
    along = points @ axis
    span = _basis(means)
    square = (points @ span).square().sum(1) - along.square()
    away = square.clamp(min=0).sqrt()
    away[1:3] = 0  # both lie on the line
    odds = float(log_priors[classes[0]] - log_priors[classes[1]])
    return DecisionSpace(
        tuple(classes.tolist()),
        tuple(posterior.tolist()),
        float(along[0]),
        float(away[0]),
        tuple(along[1:].tolist()),
        tuple(away[1:].tolist()),
        float(ndtri((1 + MASS) / 2)),
        math.sqrt(2 * gammaincinv((span.shape[1] - 1) / 2, MASS)) if span.shape[1] > 1 else 0.0,
        odds / distance if distance else 0.0,
    )


def _basis(vectors: Tensor) -> Tensor:
    """Return orthonormal columns that span the rows of ``vectors``, (D, rank)."""
    _, values, rows = torch.linalg.svd(vectors, full_matrices=False)
    return rows[values > 1e-6 * values[0].clamp(min=torch.finfo(values.dtype).tiny)].T


class Summary(NamedTuple):
    """What a decision space shows, in words."""

    kind: Literal["confident", "ambiguous", "several interpretations", "novel"]
    sentence: str


def summarise(
    space: DecisionSpace,
    class_names: tuple[str, ...],
    p_value: float | None = None,
    verdict: Kind | None = None,
) -> Summary:
    """The four cases of the paper's Figure 4.

    Novel and confident are the verdict's, or without one, a posterior of at least ``CONFIDENT``. An uncertain
    decision is between similar classes if their circles overlap; else between interpretations of the image.

    >>> space = DecisionSpace((3, 5), (0.6, 0.3), -0.2, 1.0, (-0.8, 0.8), (0.0, 0.0), 1.645, 2.789, 0.0)
    >>> print(summarise(space, tuple("abcdef")).sentence)
    Ambiguous: 'd' (60 %) or 'f' (30 %). To the model they are similar: with means 1.6 standard deviations \
apart, the expected uncertainty between them is 21 %.
    """
    first, second = (
        f"'{class_names[y]}' ({_percent(share)})"
        for y, share in zip(space.classes[:2], space.posterior[:2], strict=True)
    )
    typical = "" if p_value is None else f" The image is typical (p = {p_value:.2g})."
    expected = float(expected_uncertainty(torch.tensor(space.distance)))
    if verdict == "novel":
        return Summary(
            "novel",
            f"Novel: nothing like the training images (p = {p_value:.2g}), so don't trust the class {first}.",
        )
    confident = space.posterior[0] >= CONFIDENT if verdict is None else verdict == "accept"
    if confident:
        return Summary("confident", f"Confident: {first}; next is {second}.{typical}")
    if space.overlap:
        return Summary(
            "ambiguous",
            f"Ambiguous: {first} or {second}. To the model they are similar: with means {space.distance:.1f} "
            "standard deviations apart, the expected uncertainty between them is "
            f"{_percent(expected)}.{typical}",
        )
    return Summary(
        "several interpretations",
        f"Several interpretations: {first} and {second}. To the model they are different: with means "
        f"{space.distance:.1f} standard deviations apart, the expected uncertainty between them is "
        f"{_percent(expected)}; the image has something of both.{typical}",
    )


def _percent(share: float) -> str:
    digits = ".2g" if share < 0.005 else ".0f" if share < 0.995 else ".1f"
    return f"{100 * share:{digits}} %"
