"""The figures of an evaluation: pure functions of predictions and of what held-out images looked like."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from candid.evaluation.calibration_error import Interval, calibration_metrics, mean_interval, share_interval
from candid.inference.metrics import check_labels, label_ranks
from candid.inference.predictions import Predictions
from candid.inference.roc import Roc, detection_metrics, roc_curve
from candid.models.protocol import Model, require_latent
from candid.trust.detectors import Detector, shuffled_halves
from candid.trust.judge import LEVEL, HeldOut
from candid.trust.scores import Score, Statistics, available_scores
from candid.trust.verdict import Verdict

LEVELS = (0.01, 0.05, 0.1)
"""At which false positives are counted."""
Figures = dict[str, Interval | None]


def performance(predictions: Predictions, model: Model) -> Figures:
    """Accuracy, likelihood and calibration, with 95 % intervals.

    ``L_X`` and ``L_Y`` are as in the paper's Table 2: L_X without the constant of the Gaussian, L_Y the
    cross-entropy + ln M.
    """
    found = _classification(predictions.logits, predictions.labels)
    nats = found["cross_entropy"]
    assert nats is not None
    found["L_Y"] = Interval(*(value + math.log(predictions.logits.shape[1]) for value in nats))
    if predictions.log_density is not None and model.density_of == "pixels":
        bits = mean_interval(-predictions.log_density / (model.dimensions * math.log(2)))
        constant = (
            require_latent(model, "Bits per dimension").bits_offset * math.log(2) + math.log(2 * math.pi) / 2
        )
        found["bits_per_dim"] = bits
        found["L_X"] = Interval(*(value * math.log(2) - constant for value in bits))
    return found | calibration_metrics(predictions.posterior, predictions.labels)


def ten_crop_performance(log_posterior: Tensor, labels: Tensor) -> Figures:
    """Accuracy and cross-entropy of posteriors (N, M) that were averaged over ten crops."""
    return _classification(log_posterior, labels)


def _classification(logits: Tensor, labels: Tensor) -> Figures:
    check_labels(logits, labels)
    ranks = label_ranks(logits, labels)
    found: Figures = {"accuracy": share_interval(ranks < 1)}
    if logits.shape[1] > 5:
        found["top5_accuracy"] = share_interval(ranks < 5)
    found["cross_entropy"] = mean_interval(F.cross_entropy(logits.double(), labels, reduction="none"))
    return found


def temperature_scaled(predictions: Predictions, temperature: float) -> Predictions:
    """With logits divided by ``temperature``."""
    return replace(predictions, logits=predictions.logits.double() / temperature)


def unseen(statistics: Statistics, held_out: HeldOut) -> tuple[Statistics, int]:
    """Without the images that the model was calibrated on; and their number.

    If there are no others, those that rank scores are left: no density was shaped by them.
    """
    keys = held_out.statistics["keys"]
    known = torch.isin(statistics["keys"], keys)
    kept = ~known
    if not kept.any():
        shaping, _ = shuffled_halves(len(keys))
        kept = ~torch.isin(statistics["keys"], keys[shaping])
    if not kept.any():
        kept = known
    return {name: values[kept] for name, values in statistics.items()}, int(known.sum())


@dataclass(frozen=True)
class Detection:
    """All tests, fitted to held-out images, on images of the same kind and on other sets."""

    held_out: HeldOut
    inside: Statistics
    outside: Mapping[str, Statistics]

    @cached_property
    def tests(self) -> list[Score]:
        """Those that all statistics suffice for."""
        available = [available_scores(each) for each in (self.held_out.statistics, self.inside)]
        return [test for test in available[0] if test in available[1]]

    @cached_property
    def detectors(self) -> dict[str, Detector]:
        return {test.name: test.fitted(self.held_out.statistics) for test in self.tests}

    def scores(self, statistics: Statistics) -> dict[str, Tensor]:
        """Of each test."""
        return {test.name: self.detectors[test.name].score(test.of(statistics)) for test in self.tests}

    def p_values(self, statistics: Statistics) -> dict[str, Tensor]:
        """Of each test."""
        return {t.name: self.detectors[t.name].p_value(t.of(statistics)) for t in self.tests}

    @cached_property
    def scores_inside(self) -> dict[str, Tensor]:
        return self.scores(self.inside)

    @cached_property
    def scores_outside(self) -> dict[str, dict[str, Tensor]]:
        return {name: self.scores(statistics) for name, statistics in self.outside.items()}

    def curves(self) -> dict[str, dict[str, Roc]]:
        """By set and test."""
        return {
            name: {test: roc_curve(self.scores_inside[test], found) for test, found in scores.items()}
            for name, scores in self.scores_outside.items()
        }

    def figures(self) -> dict[str, dict[str, dict[str, float]]]:
        """By set and test: area under the curve, false positives at 95 % true ones, share with p <= 0.05."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        for name, scores in self.scores_outside.items():
            p = self.p_values(self.outside[name])
            found[name] = {
                test: {
                    **detection_metrics(self.scores_inside[test], outside),
                    "detected": share(p[test] <= LEVEL),
                }
                for test, outside in scores.items()
            }
        return found

    def false_positives(self) -> dict[str, dict[str, float]]:
        """By test and level: the share of images of the same kind with a p-value of at most the level."""
        p = self.p_values(self.inside)
        return {
            name: {f"{level:g}": share(values <= level) for level in LEVELS} for name, values in p.items()
        }


def shares(found: Sequence[Verdict]) -> dict[str, float]:
    """How often each verdict was given."""
    kinds = [verdict.kind for verdict in found]
    return {kind: kinds.count(kind) / len(kinds) for kind in ("accept", "ambiguous", "novel")}


def as_json(figures: Figures) -> dict[str, Any]:
    """Values by name, and their intervals under ``intervals``."""
    known = {name: figure for name, figure in figures.items() if figure is not None}
    values: dict[str, Any] = {
        name: None if figure is None else figure.value for name, figure in figures.items()
    }
    return values | {"intervals": {name: [figure.low, figure.high] for name, figure in known.items()}}


def share(flags: Tensor) -> float:
    """Of those that are true."""
    return flags.double().mean().item()
