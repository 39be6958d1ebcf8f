"""Where an image lies between the classes that it could be."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array, softmax
from candid._support.text import listed, percent
from candid.explanations.options import Regions, check_regions
from candid.explanations.similarity import Pair, expected_uncertainty
from candid.models.protocol import Model, Outputs, require
from candid.trust.verdict import Verdict

TOP = 5
"""Classes that span the space, as in the paper."""
MASS = 0.9
"""Share of a class that lies in its region."""
CONFIDENT = 0.95
"""The posterior from which on a decision is called confident."""
TYPICAL = 0.1
"""p-value from which on an image is called typical."""
OTHERS, MANY = 0.2, 1 / 3
"""From these posteriors on, the classes after the first two are mentioned, and the sentence is about all."""
FLAT = 1e-3
"""Height of a region in a span of one dimension, where nothing lies away from the line: it can be drawn."""


@dataclass(frozen=True)
class DecisionSpace:
    """An image in the space that the means of its most probable classes span, seen in two coordinates.

    ``along`` runs from the mean of the most probable class to that of the second, 0 in the middle between
    them; ``away`` is the distance from that line. Both are in standard deviations of a class. What lies
    outside of the span decides nothing between these classes, but makes an image novel: see ``outside``.
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
    """Half axis, along the line, of the region of a class; see `region`."""
    half_height: float
    """The other half axis: distance from the line."""
    boundary: float
    """Where on the line the first two classes are equally probable."""
    outside: float
    """Distance of the image from the span."""
    outside_expected: float
    """The distance that the mixture expects: the root of the number of directions outside of the span."""
    p_value: float | None = None
    """Share of held-out images that are at least as unusual; None without held-out scores."""
    verdict: Verdict | None = None
    regions: Regions = "candid"
    """Whether a region holds ``MASS`` of its class, or ``MASS`` in each direction as the paper's circles."""

    @property
    def distance(self) -> float:
        """Distance between the means of the two most probable classes."""
        return self.means_along[1] - self.means_along[0]

    @property
    def inside(self) -> tuple[bool, bool]:
        """Whether the image lies in the regions of the two most probable classes."""
        height = self.away / self.half_height
        first, second = (
            math.hypot((self.along - mean) / self.half_width, height) <= 1 for mean in self.means_along[:2]
        )
        return first, second

    @property
    def outside_ratio(self) -> float:
        """Distance of the image from the span, divided by the expected one."""
        return self.outside / self.outside_expected


def decision_spaces(
    model: Model, outputs: Outputs, top: int = TOP, regions: Regions = "candid"
) -> list[DecisionSpace]:
    """Return the decision space of each image, from one forward pass.

    Args:
        model: a model with class means.
        outputs: what ``model.outputs(images)`` returned, of B images.
        top: number of the most probable classes that a space shows.
        regions: "paper" for its circles, which hold 90 % of a class in each of two directions.

    Returns:
        One space for each image.

    >>> import candid
    >>> model = candid.load("clothing")
    >>> features = model.centre[None].astype(np.float32)
    >>> space = decision_spaces(model, model.outputs_of(features))[0]
    >>> len(space.classes), round(space.half_width, 3), round(space.half_height, 3)
    (5, 2.314, 3.405)
    """
    require(model, "geometry", "A decision space")
    check_regions(regions)
    assert outputs.latent is not None
    if min(len(model.class_names), top) < 2:
        raise CandidError(
            "A decision is between at least two classes: give a model with two or more, and a top of 2."
        )
    posterior = softmax(outputs.logits.astype(np.float64))
    best = np.argsort(-posterior, axis=1, kind="stable")[:, :top]
    return [
        _space(model, z, classes, shares[classes], regions)
        for z, shares, classes in zip(outputs.latent, posterior, best, strict=True)
    ]


def _space(model: Model, z: Array, classes: Array, posterior: Array, regions: Regions) -> DecisionSpace:
    means = model.geometry.means(classes)
    difference = means[1] - means[0]
    distance = float(np.linalg.norm(difference))
    axis = difference / max(distance, np.finfo(np.float64).tiny)
    points = np.concatenate((z[None].astype(np.float64), means)) - (means[0] + means[1]) / 2
    along = points @ axis
    span = _basis(means)
    within = np.square(points @ span).sum(1)
    away = np.sqrt(np.maximum(within - np.square(along), 0))
    away[1:3] = 0  # both lie on the line
    outside = math.sqrt(max(float(np.square(points[0]).sum() - within[0]), 0))
    log_priors = model.geometry.log_priors.astype(np.float64)
    odds = float(log_priors[classes[0]] - log_priors[classes[1]])
    return DecisionSpace(
        tuple(classes.tolist()),
        tuple(posterior.tolist()),
        float(along[0]),
        float(away[0]),
        tuple(along[1:].tolist()),
        tuple(away[1:].tolist()),
        *region(span.shape[1], regions),
        odds / distance if distance else 0.0,
        outside,
        math.sqrt(max(len(z) - span.shape[1], 1)),
        regions=regions,
    )


def _basis(vectors: Array) -> Array:
    """Return orthonormal columns that span the rows of ``vectors``, (D, rank)."""
    _, values, rows = np.linalg.svd(vectors, full_matrices=False)
    spanning: Array = rows[values > 1e-6 * max(float(values[0]), np.finfo(np.float64).tiny)].T
    return spanning


@lru_cache
def region(dimensions: int, regions: Regions = "candid") -> tuple[float, float]:
    """Return the half axes, along the line and away from it, of the region of a class: an ellipse.

    In a span of n dimensions the position along the line is normal, the distance from it chi-distributed with
    n - 1 degrees of freedom. The share q of a class that lies within one half axis is the same in both
    directions. In the paper's circles q is ``MASS``; by default the ellipse itself holds ``MASS``.

    >>> [round(half, 3) for half in region(2)], [round(half, 3) for half in region(5, "paper")]
    ([2.146, 2.146], [1.645, 2.789])
    """
    from scipy.optimize import brentq
    from scipy.special import gammainc, gammaincinv, ndtri

    if dimensions < 2:
        return float(ndtri((1 + MASS) / 2)), FLAT
    nodes, weights = np.polynomial.legendre.leggauss(64)
    angles = 0.5 * math.pi * nodes

    def half_axes(q: float) -> tuple[float, float]:
        return float(ndtri((1 + q) / 2)), math.sqrt(2 * gammaincinv((dimensions - 1) / 2, q))

    def excess(q: float) -> float:
        width, height = half_axes(q)
        density = np.exp(-0.5 * (width * np.sin(angles)) ** 2) / math.sqrt(2 * math.pi)
        below = gammainc((dimensions - 1) / 2, 0.5 * (height * np.cos(angles)) ** 2)
        inside = 0.5 * math.pi * weights * density * width * np.cos(angles) * below
        return float(inside.sum()) - MASS

    return half_axes(MASS if regions == "paper" else brentq(excess, MASS, 1 - 1e-9, xtol=1e-12))


class Summary(NamedTuple):
    """What a decision space shows, in words."""

    kind: Literal["confident", "ambiguous", "several interpretations", "novel"]
    sentence: str


def summarise(space: DecisionSpace, class_names: tuple[str, ...], pair: Pair | None = None) -> Summary:
    """The four cases of the paper's Figure 4.

    Novel and confident are the verdict's, or without one, a posterior of at least ``CONFIDENT``. An uncertain
    decision is between similar classes (`Pair.similar`), whatever is drawn, or between interpretations of the
    image. If the classes after the first two have a third of the posterior or more,
    the sentence is about all of them. ``pair`` is the similarity of the first two, by default that of the
    drawn means; its measured uncertainty is named if it differs from the expected one by more than a factor
    of 1.5.

    >>> space = DecisionSpace(
    ...     (3, 5), (0.6, 0.3), -0.2, 1.0, (-0.8, 0.8), (0.0, 0.0), 2.314, 3.405, 0.0, 55.0, 55.4
    ... )
    >>> print(summarise(space, tuple("abcdef")).sentence)
    Ambiguous: 'd' (60 %) or 'f' (30 %). To the model the two are similar: at a distance of 1.6 standard \
deviations, the expected uncertainty between them is 21 %. The image lies in the 90 % regions of both.
    """
    shares = [
        f"'{class_names[y]}' ({_percent(share)})"
        for y, share in zip(space.classes, space.posterior, strict=True)
    ]
    first, second = shares[:2]
    if space.verdict == "novel":
        return Summary("novel", _novel(space, first))
    confident = space.posterior[0] >= CONFIDENT if space.verdict is None else space.verdict == "accept"
    place = _place(space, class_names)
    if confident:
        start = f"Confident: {first}"
        if space.posterior[0] < CONFIDENT:
            start = f"Accepted: at the chosen level only {first} fits"
        return Summary("confident", f"{start}; next is {second}. {place}")
    others = 1 - sum(space.posterior[:2])
    if others >= MANY:
        likely = listed(shares)
        return Summary(
            "several interpretations",
            f"Several interpretations: {likely}; no two classes together have more than two thirds of the "
            f"posterior.{_typical(space)}",
        )
    if pair is None:
        expected = float(expected_uncertainty(space.distance))
        pair = Pair(min(space.classes[:2]), max(space.classes[:2]), space.distance, expected)
    of_images = abs(pair.distance - space.distance) >= 0.05  # not that of the drawn means
    uncertainty = (
        f"at a {'measured ' * of_images}distance of {pair.distance:.1f} standard deviations, the expected "
        f"uncertainty between them is {_percent(pair.uncertainty)}"
    )
    if pair.measured is not None and pair.differs:
        uncertainty += f" (measured on held-out images: {_percent(pair.measured)})"
    either = f"{first} or {second}"
    if others >= OTHERS:
        either = f"{first}, {second} or another class ({_percent(others)})"
    if pair.similar:
        return Summary(
            "ambiguous",
            f"Ambiguous: {either}. To the model the two are similar: {uncertainty}. {place}",
        )
    return Summary(
        "several interpretations",
        f"Several interpretations: {either}. The model usually separates the two: {uncertainty}; this "
        f"image has something of both. {place}",
    )


def _novel(space: DecisionSpace, first: str) -> str:
    p_value = "" if space.p_value is None else f" (p = {space.p_value:.2g})"
    return (
        f"Novel: unlike the held-out images{p_value}, so don't trust the class {first}, wherever the "
        f"image lies between the classes. In the {space.outside_expected**2:,.0f} directions outside of "
        f"their span it lies {space.outside_ratio:.2f} times as far out as expected."
    )


def _place(space: DecisionSpace, class_names: tuple[str, ...]) -> str:
    region = "the circle" if space.regions == "paper" else f"the {100 * MASS:.0f} % region"
    first, second = (f"'{class_names[y]}'" for y in space.classes[:2])
    place = {
        (True, True): f"in {region}s of both",
        (True, False): f"in {region} of {first} only",
        (False, True): f"in {region} of {second} only",
        (False, False): f"outside of {region}s of both",
    }[space.inside]
    if not any(space.inside) and space.along < space.means_along[0]:
        place = f"outside of {region} of {first}, on the side away from {second}"
    return f"The image lies {place}.{_typical(space)}"


def _typical(space: DecisionSpace) -> str:
    if space.p_value is None:
        return ""
    typical = "typical" if space.p_value >= TYPICAL else "unusual, but not novel at the chosen level"
    return f" It is {typical} (p = {space.p_value:.2g})."


def _percent(share: float) -> str:
    """Return a share in percent, with a decimal where it is next to 0 or 100."""
    return percent(share, 0 if 0.005 <= share < 0.995 else 1)
