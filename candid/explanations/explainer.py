"""Explanations of what a model says about an image."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.data.images import to_float
from candid.explanations.class_maps import ClassMaps, class_maps
from candid.explanations.decision_space import DecisionSpace, Summary, decision_spaces, summarise
from candid.explanations.options import (
    CONTRAST,
    TARGET,
    HeatmapRule,
    Regions,
    check_contrast,
    check_regions,
    check_rule,
    check_target,
)
from candid.explanations.similarity import similarity
from candid.judging.held_out import HeldOut, measures_for
from candid.models.protocol import Outputs, can, require
from candid.trust.promises import Levels
from candid.trust.rule import Rule
from candid.trust.scores import SCORES, Columns
from candid.trust.verdict import Examination

if TYPE_CHECKING:
    from candid.explanations.counterfactual import Counterfactual
    from candid.models.photo.model import PhotoModel

NEAREST, NEAREST_OF_INSTEAD = 5, 3
NO_INVERSE = "This model sees features of a pretrained network, which has no inverse to pixels"
NO_THUMBNAILS = "no photos were kept with this model (--no-thumbnails), so the nearest ones can't be shown"
NO_MEANS = "This model has no class means, so that an image has no place between classes."
NEVER_KEPT = "no photos are kept with a network on features"
INSTEAD = "the nearest known photos are shown instead"
_PARTS = {
    "two-tailed": "the density of the image",
    "density-of-states": "the terms of the density together",
    "code-length": "the length of a code without a model",
}
"""What the scores are that others consist of."""


@dataclass(frozen=True)
class KnownPhoto:
    """A photo that is kept with the model."""

    y: int
    """Its class."""
    jpeg: bytes
    """A thumbnail of it."""
    picture: Array
    """The same, (3, H, W) uint8."""


@dataclass(frozen=True)
class NearestPhotos:
    """Known photos near one photo, nearest first, by distance along the span of the class means."""

    nearest: tuple[KnownPhoto, ...]
    """Of all classes."""
    instead: int
    """The class that it could be instead."""
    of_instead: tuple[KnownPhoto, ...]
    """Of that class."""
    missing: tuple[int, ...] = ()
    """Classes that no photo is kept of, such as those that were taught."""


@dataclass(frozen=True)
class Explanation:
    """The explanation of one decision."""

    maps: ClassMaps | str
    """Which parts of the image speak for which class, or why the eye of a photo model gives no maps."""
    space: DecisionSpace | None
    """None of an adopted model, which has no class means."""
    summary: Summary | None
    changed: Counterfactual | str | None
    """The counterfactual, or why there is none; None if it was not asked for."""
    nearest: NearestPhotos | None = None
    """The nearest known photos of a photo model; None if it keeps none."""
    parts: dict[str, float] = field(default_factory=dict)
    """Of a novel image: the p-values of the parts of the score that decided, smallest first; none if it has
    none."""

    @property
    def deciding(self) -> str:
        """Which parts of the score are unusual, in words; empty if the image is not novel."""
        if not self.parts:
            return ""
        parts = ", ".join(
            f"{_PARTS.get(name, name)} (p = {p_value:.2g})" for name, p_value in self.parts.items()
        )
        return f"What decided, most unusual first: {parts}."

    @property
    def sentence(self) -> str:
        """The summary in words; for a model without class means, that there is none."""
        return NO_MEANS if self.summary is None else self.summary.sentence


class Explainer:
    """A model that is ready to explain what it says about images.

    Args:
        model: one with class means or with class maps.
        top: number of classes that get a map.
        contrast: of the heatmaps of pixel models.
        towards: the class that a counterfactual should reach.
        target: the posterior that it should then have.
        rule: of the heatmaps of pixel models.
        against: a class; adds the map of the most probable class and not this one.
        regions: of the decision space; see :func:`~candid.explanations.decision_space.decision_spaces`.
    """

    def __init__(
        self,
        model: Any,
        top: int = 3,
        contrast: float = CONTRAST,
        towards: int | None = None,
        target: float = TARGET,
        rule: HeatmapRule = "candid",
        against: int | None = None,
        regions: Regions = "candid",
    ) -> None:
        self.has_means, self.inverts = can(model, "geometry"), can(model, "invert")
        if not can(model, "class maps"):
            require(model, "geometry", "An explanation")
        if towards is not None:
            require(model, "geometry", "A counterfactual")
        if against is not None and self.inverts:
            raise CandidError(
                "--against is for the heatmaps of photo models: leave it out, or try --towards."
            )
        if top < 1:
            raise CandidError(f"A page has the heatmap of at least 1 class, not of {top}.")
        check_contrast(contrast)
        check_target(target)
        check_rule(rule)
        check_regions(regions)
        self.model, self.top, self.contrast = model, min(top, len(model.class_names)), contrast
        self.towards, self.target, self.rule, self.against = towards, target, rule, against
        self.regions = regions
        self.frozen = model.frozen()
        self.held_out, self._rules = HeldOut.of(model), dict[str, Rule]()
        self.similarity = similarity(model, order="given") if self.has_means else None
        if self.inverts:
            from candid.explanations.heatmaps import SpatialMixture

            self.spatial = SpatialMixture(model)

    def explain(self, examined: Examination) -> Explanation:
        """Return heatmaps of the most probable classes, the decision space and perhaps a counterfactual."""
        if examined.evidence is None:
            raise CandidError("This examination has no outputs to explain: examine with evidence=True.")
        image, outputs = examined.evidence.image, examined.evidence.outputs
        maps = self._maps(image, outputs)
        if not self.has_means:
            return Explanation(maps, None, None, None)
        (space,) = decision_spaces(self.model, outputs, regions=self.regions)
        space = replace(space, p_value=examined.p_value, verdict=examined.verdict)
        first, second = space.classes[:2]
        nearest = None
        if can(self.model, "known photos"):
            assert outputs.latent is not None
            asked = self.towards if self.against is None else self.against
            nearest = nearest_photos(self.model, outputs.latent, second if asked in (None, first) else asked)
        pair = None if self.similarity is None else self.similarity.pair(first, second)
        summary = summarise(space, self.model.class_names, pair)
        return Explanation(maps, space, summary, self._changed(image), nearest, self._parts(examined))

    def _parts(self, examined: Examination) -> dict[str, float]:
        """Return the p-values of the parts of the score by which an image is novel, smallest first."""
        if examined.verdict != "novel" or examined.promises is None or self.held_out is None:
            return {}
        image, outputs = examined.evidence
        if not (names := SCORES[examined.promises.score].of_parts):
            return {}
        rules = [self._rule(name) for name in names]
        measures = measures_for(rule.score for rule in rules)
        measured = {name: measure(image[None], outputs) for name, measure in measures.items()}
        columns = Columns({**measured, **outputs.columns()})
        p_values = {rule.score.name: float(rule.p_values(columns)[0]) for rule in rules}
        return dict(sorted(p_values.items(), key=lambda part: part[1]))

    def _rule(self, score: str) -> Rule:
        """Return what gives the p-values of a score."""
        if score not in self._rules:
            assert self.held_out is not None
            self._rules[score] = self.held_out.rule(Levels(score=score))
        return self._rules[score]

    def _maps(self, image: Array, outputs: Outputs) -> ClassMaps | str:
        if self.inverts:
            from candid.explanations.heatmaps import heatmaps

            (maps,) = heatmaps(self.model, outputs, None, self.top, self.contrast, self.spatial, self.rule)
            return maps
        try:
            return class_maps(self.model, to_float(image), self.top, self.against)
        except CandidError as error:  # the eye gives no maps
            return str(error)

    def _changed(self, image: Array) -> Counterfactual | str | None:
        if self.towards is None:
            return None
        if not self.inverts:
            return f"{NO_INVERSE}; {INSTEAD if can(self.model, 'known photos') else no_photos(self.model)}."
        from candid.explanations.counterfactual import counterfactual

        try:
            return counterfactual(self.frozen, image, self.towards, self.target)
        except CandidError as error:  # of this image alone
            return str(error)


def nearest_photos(model: PhotoModel, latent: Array, instead: int) -> NearestPhotos | None:
    """Return the known photos nearest to a photo.

    Args:
        model: a photo model.
        latent: of the photo, (1, D).
        instead: the class that it could be instead.

    Returns:
        None if no photos were kept with the model.
    """
    photos = model.known_photos
    if photos is None:
        return None
    place = model.places(latent)[0]

    def read(rows: list[int]) -> tuple[KnownPhoto, ...]:
        return tuple(KnownPhoto(int(photos.labels[i]), photos.file(i), photos.picture(i)) for i in rows)

    missing = set(range(len(model.class_names))) - set(photos.labels.tolist())
    return NearestPhotos(
        read(photos.nearest(place, NEAREST)),
        instead,
        read(photos.nearest(place, NEAREST_OF_INSTEAD, instead)),
        tuple(sorted(missing)),
    )


def no_photos(model: Any) -> str:
    """Return why no known photos are shown of a model."""
    return NEVER_KEPT if can(model, "network") else NO_THUMBNAILS
