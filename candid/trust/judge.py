"""The judge: predictions to p-values and verdicts."""

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from candid._support.errors import CandidError
from candid.inference.predictions import Predictions
from candid.trust.detectors import Detector, PerClass, checked_level
from candid.trust.held_out import HeldOut
from candid.trust.scores import OodTest, Statistics, default_test, named_test
from candid.trust.verdict import Verdict, check_enough, verdicts


@dataclass(frozen=True)
class Judge:
    """Turns predictions into p-values and verdicts."""

    held_out: HeldOut
    test: OodTest
    novelty: float
    error: float

    @classmethod
    def of(
        cls,
        held_out: HeldOut,
        test: str | None = None,
        novelty: float | None = None,
        error: float | None = None,
    ) -> "Judge":
        """With the default test and levels where none are given.

        A level below what so few held-out images can show is raised to the least one that they can.
        """
        chosen = default_test(held_out.statistics) if test is None else named_test(test, held_out.statistics)
        smallest = chosen.fitted(held_out.statistics).smallest_p_value
        novelty = max(NOVELTY, smallest) if novelty is None else novelty
        error = max(ERROR, 1 / (len(held_out) + 1)) if error is None else error
        if checked_level("novelty", novelty) < smallest:
            raise CandidError(
                f"With {len(held_out)} held-out images no image can be called novel at the level {novelty} "
                f"by the test '{chosen.name}': calibrate with more, or raise --novelty to {smallest:.2g}."
            )
        check_enough("error", error, len(held_out), "no class can be ruled out")
        return cls(held_out, chosen, novelty, error)

    def p_values(self, statistics: Statistics) -> tuple[Tensor, Tensor]:
        """Among all held-out images, and among those of the same predicted class."""
        values = self.test.statistic(statistics)
        return self._of_all.p_value(values), self._of_class.p_value(values, statistics["predicted"])

    @property
    def ranks(self) -> int:
        """Held-out images that an image is ranked among."""
        return self._of_all.ranks

    @cached_property
    def _of_all(self) -> Detector:
        return self.test.fitted(self.held_out.statistics)

    @cached_property
    def _of_class(self) -> PerClass:
        known = self.held_out.statistics
        enough = math.ceil(2 / LEVEL)  # for a p-value of LEVEL, also where half of the images rank the others
        return PerClass(self.test.detector, enough).fit(self.test.statistic(known), known["predicted"])

    def verdicts(self, predictions: Predictions, p_value: Tensor) -> list[Verdict]:
        """accept, ambiguous or novel."""
        known = self.held_out.statistics["true_posterior"]
        return verdicts(predictions.posterior, p_value, known, self.novelty, self.error)


LEVEL = 0.05
"""At which an image of another set counts as detected."""


NOVELTY, ERROR = 0.01, 0.05
"""Default levels of the verdict."""
