"""The out-of-distribution tests that one pass feeds: the paper's, newer ones, and those of any classifier."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from candid._support.errors import CandidError, did_you_mean
from candid.inference.predictions import Predictions
from candid.trust.density import DensityOfStates, TypicalSet
from candid.trust.detectors import Detector, OneTailed, TwoTailed, Typicality, waic

Statistics = Mapping[str, Tensor]
"""Of each image, by name; all that tests, p-values and verdicts need, and small enough for a checkpoint."""


def statistics_of(predictions: Predictions) -> dict[str, Tensor]:
    """Each (N,) or (N, d) in float64; without a density or distance if the predictions have none."""
    logits = predictions.logits.double()
    found = {
        "keys": predictions.keys,
        "predicted": logits.argmax(1),
        "max_posterior": predictions.posterior.amax(1),
        "log_evidence": logits.logsumexp(1),
        "max_logit": logits.amax(1),
        "complexity": predictions.complexity,
    }
    if (predictions.labels >= 0).all():
        found["true_posterior"] = predictions.posterior.gather(1, predictions.labels[:, None])[:, 0]
    if predictions.terms is not None:
        found |= {"log_density": predictions.terms.sum(1), "terms": predictions.terms}
    if predictions.distance is not None:
        found["distance"] = predictions.distance
    return found


def with_ensemble(statistics: Statistics, others: Sequence[Statistics]) -> dict[str, Tensor]:
    """``statistics`` with the log densities of other models of the same images beside the own one."""
    densities = [each["log_density"] for each in (statistics, *others)]
    if len({len(density) for density in densities}) > 1:
        raise CandidError("The models of an ensemble must have seen the same images: evaluate them alike.")
    return {**statistics, "log_densities": torch.stack(densities, 1)}


class OodTest(NamedTuple):
    """A statistic of an image and the detector that judges it."""

    name: str
    kind: Literal["paper", "new", "classifier", "control"]
    needs: str
    """What must be among the statistics."""
    statistic: Callable[[Statistics], Tensor]
    """(N,), low for outliers, or (N, d)."""
    detector: type[Detector]

    def fitted(self, held_out: Statistics) -> Detector:
        """The detector, fitted to held-out images."""
        return self.detector().fit(self.statistic(held_out))


def _column(name: str, sign: int = 1) -> Callable[[Statistics], Tensor]:
    return lambda statistics: sign * statistics[name]


def _beyond_compression(statistics: Statistics) -> Tensor:
    """How many nats the model saves over a lossless code (Serrà et al., 2020)."""
    return statistics["log_density"] + math.log(2) * statistics["complexity"][:, 0]


def _terms_and_complexity(statistics: Statistics) -> Tensor:
    return torch.cat((statistics["terms"], statistics["complexity"]), 1)


TESTS = (
    OodTest("one-tailed", "paper", "log_density", _column("log_density"), OneTailed),
    OodTest("typicality", "paper", "log_density", _column("log_density"), Typicality),
    OodTest("two-tailed", "paper", "log_density", _column("log_density"), TwoTailed),
    OodTest("complexity", "new", "log_density", _beyond_compression, OneTailed),
    OodTest("typical-set", "new", "terms", _column("terms"), TypicalSet),
    OodTest("density-of-states", "new", "terms", _column("terms"), DensityOfStates),
    OodTest("joint", "new", "terms", _terms_and_complexity, DensityOfStates),
    OodTest("waic", "new", "log_densities", lambda statistics: waic(statistics["log_densities"]), OneTailed),
    OodTest("max-posterior", "classifier", "max_posterior", _column("max_posterior"), OneTailed),
    OodTest("energy", "classifier", "log_evidence", _column("log_evidence"), OneTailed),
    OodTest("max-logit", "classifier", "max_logit", _column("max_logit"), OneTailed),
    OodTest("mahalanobis", "classifier", "distance", _column("distance", -1), OneTailed),
    OodTest("code-length", "control", "complexity", _column("complexity"), DensityOfStates),
)
"""The last one needs no model: what it finds, too, is no merit of one."""


def available_tests(statistics: Statistics) -> list[OodTest]:
    """Those that ``statistics`` suffice for."""
    return [test for test in TESTS if test.needs in statistics]


def default_test(statistics: Statistics) -> OodTest:
    """What a verdict rests on: the joint test, or for a baseline the distance of its features."""
    best_first = ("joint", "mahalanobis", "max-posterior")
    available = {test.name: test for test in available_tests(statistics)}
    return next(available[name] for name in best_first if name in available)


def named_test(name: str, statistics: Statistics) -> OodTest:
    """The test ``name``, if ``statistics`` suffice for it."""
    available = {test.name: test for test in available_tests(statistics)}
    if name not in available:
        raise CandidError(f"There is no test '{name}' for this model: {did_you_mean(name, available)}")
    return available[name]
