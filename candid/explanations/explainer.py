"""Explanations of what a model says about an image."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from candid._support.errors import CandidError
from candid.explanations.counterfactual import TARGET, Counterfactual, check_target, counterfactual
from candid.explanations.decision_space import DecisionSpace, Summary, decision_spaces, summarise
from candid.explanations.heatmaps import (
    CONTRAST,
    Heatmaps,
    SpatialMixture,
    check_contrast,
    check_rule,
    heatmaps,
)
from candid.explanations.nearest_photos import NO_INVERSE, NO_THUMBNAILS, NearestPhotos, nearest_photos
from candid.explanations.options import HeatmapRule
from candid.explanations.photo_maps import PhotoMaps, photo_maps
from candid.explanations.similarity import entry, held_out_uncertainty
from candid.inference.predictions import to_float
from candid.models.heads.photo import PhotoModel
from candid.models.protocol import Model, require_mixture
from candid.trust.verdict import Evidence, Examination

INSTEAD = "the nearest known photos are shown instead"


@dataclass(frozen=True)
class Explanation:
    """The explanation of one decision."""

    maps: Any
    """:class:`~candid.explanations.heatmaps.Heatmaps` of a pixel model,
    :class:`~candid.explanations.photo_maps.PhotoMaps` of a photo model, or why its eye gives none."""
    space: DecisionSpace
    summary: Summary
    changed: Counterfactual | str | None
    """The counterfactual, or why there is none; None if it was not asked for."""
    nearest: NearestPhotos | None = None
    """The nearest known photos of a photo model; None if it keeps none."""


class Explainer:
    """A generative model that is ready to explain what it says about images."""

    def __init__(
        self,
        model: Model,
        top: int = 3,
        contrast: float = CONTRAST,
        towards: int | None = None,
        target: float = TARGET,
        rule: HeatmapRule = "candid",
        against: int | None = None,
    ) -> None:
        model = require_mixture(model, "An explanation")
        self.photo = model if isinstance(model, PhotoModel) else None
        if against is not None and self.photo is None:
            raise CandidError(
                "--against is for the heatmaps of photo models: leave it out, or try --towards."
            )
        self.against = against
        if top < 1:
            raise CandidError(f"A page has the heatmap of at least 1 class, not of {top}.")
        check_contrast(contrast)
        check_target(target)
        check_rule(rule)
        self.model, self.top, self.contrast = model, min(top, len(model.class_names)), contrast
        self.towards, self.target, self.rule = towards, target, rule
        self.fast = model.frozen()
        self.spatial = SpatialMixture(model) if self.photo is None else None
        self.measured = held_out_uncertainty(model)

    def explain(self, examined: Examination) -> Explanation:
        """Return heatmaps of the most probable classes, the decision space and perhaps a counterfactual."""
        if examined.evidence is None:
            raise CandidError("This examination has no outputs to explain: examine with evidence=True.")
        outputs = examined.evidence.outputs
        (space,) = decision_spaces(self.model, outputs)
        space = replace(space, p_value=examined.p_value, verdict=examined.verdict)
        first, second = space.classes[:2]
        nearest = None
        if self.photo is not None:
            assert outputs.latent is not None
            asked = self.towards if self.against is None else self.against
            nearest = nearest_photos(self.photo, outputs.latent, second if asked in (None, first) else asked)
        return Explanation(
            self._maps(examined.evidence),
            space,
            summarise(space, self.model.class_names, entry(self.measured, first, second)),
            self._changed(examined.evidence.image),
            nearest,
        )

    def _maps(self, evidence: Evidence) -> Heatmaps | PhotoMaps | str:
        if self.photo is not None:
            image = to_float(evidence.image, self.photo.device)
            try:
                return photo_maps(self.photo, image, self.top, self.against)
            except CandidError as error:  # the eye gives no maps
                return str(error)
        return heatmaps(self.model, evidence.outputs, None, self.top, self.contrast, self.spatial, self.rule)

    def _changed(self, image: Tensor) -> Counterfactual | str | None:
        if self.towards is None:
            return None
        if self.photo is not None:
            return f"{NO_INVERSE}; {INSTEAD if self.photo.thumbnails else NO_THUMBNAILS}."
        try:
            return counterfactual(self.fast, image, self.towards, self.target)
        except CandidError as error:  # of this image alone
            return str(error)
