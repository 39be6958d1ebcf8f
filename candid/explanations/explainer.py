"""Explanations of what a model says about an image."""

from dataclasses import dataclass, replace

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
from candid.explanations.options import HeatmapRule
from candid.explanations.similarity import entry, held_out_uncertainty
from candid.models.protocol import Model, require_latent
from candid.trust.verdict import Examination


@dataclass(frozen=True)
class Explanation:
    """The explanation of one decision."""

    maps: Heatmaps
    space: DecisionSpace
    summary: Summary
    changed: Counterfactual | str | None
    """The counterfactual, or why there is none; None if it was not asked for."""


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
    ) -> None:
        model = require_latent(model, "An explanation")
        if top < 1:
            raise CandidError(f"A page has the heatmap of at least 1 class, not of {top}.")
        check_contrast(contrast)
        check_target(target)
        check_rule(rule)
        self.model, self.top, self.contrast = model, min(top, len(model.class_names)), contrast
        self.towards, self.target, self.rule = towards, target, rule
        self.fast, self.spatial = model.frozen(), SpatialMixture(model)
        self.measured = held_out_uncertainty(model)

    def explain(self, examined: Examination) -> Explanation:
        """Return heatmaps of the most probable classes, the decision space and perhaps a counterfactual."""
        if examined.evidence is None:
            raise CandidError("This examination has no outputs to explain: examine with evidence=True.")
        outputs = examined.evidence.outputs
        (space,) = decision_spaces(self.model, outputs)
        space = replace(space, p_value=examined.p_value, verdict=examined.verdict)
        first, second = space.classes[:2]
        return Explanation(
            heatmaps(self.model, outputs, None, self.top, self.contrast, self.spatial, self.rule),
            space,
            summarise(space, self.model.class_names, entry(self.measured, first, second)),
            self._changed(examined.evidence.image),
        )

    def _changed(self, image: Tensor) -> Counterfactual | str | None:
        if self.towards is None:
            return None
        try:
            return counterfactual(self.fast, image, self.towards, self.target)
        except CandidError as error:  # of this image alone
            return str(error)
