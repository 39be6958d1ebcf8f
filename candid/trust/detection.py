"""All scores on ordinary images and on other sets: ROC curves, p-values, false positives."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from candid.inference.roc import Roc, detection_metrics, roc_curve
from candid.trust.detectors import Detector, shuffled_halves
from candid.trust.judge import LEVEL, HeldOut
from candid.trust.scores import Score, Statistics, available_scores

LEVELS = (0.01, 0.05, 0.1)
"""The levels at which false positives are counted."""


def unseen_rows(keys: Tensor, held_out: HeldOut) -> tuple[Tensor, int]:
    """Return which images are not among the held-out ones, (N,) bool, and the number of those that are.

    Images that scores were fitted to count as held-out ones. If all images are held-out ones, those are left
    that shaped no density.
    """
    own, fitted = held_out.statistics["keys"], held_out.fitted_keys
    known = torch.isin(keys, own if fitted is None else torch.cat((own, fitted)))
    kept = ~known
    if not kept.any():
        shaping, _ = shuffled_halves(len(own))
        kept = torch.isin(keys, own) & ~torch.isin(keys, own[shaping])
    if not kept.any():
        kept = known
    return kept, int(known.sum())


def unseen(statistics: Statistics, held_out: HeldOut) -> tuple[Statistics, int]:
    """Return the statistics of the images that are not among the held-out ones; see :func:`unseen_rows`."""
    kept, overlap = unseen_rows(statistics["keys"], held_out)
    return {name: values[kept] for name, values in statistics.items()}, overlap


@dataclass(frozen=True)
class Detection:
    """All scores, fitted to held-out images, on images of the same kind and on other sets."""

    held_out: HeldOut
    inside: Statistics
    outside: Mapping[str, Statistics]
    extra: tuple[Score, ...] = ()
    """Scores that are not in the registry."""

    @cached_property
    def scores(self) -> list[Score]:
        """The scores that all statistics suffice for."""
        inside = available_scores(self.inside)
        known = [score for score in available_scores(self.held_out.statistics) if score in inside]
        return [*known, *self.extra]

    @cached_property
    def detectors(self) -> dict[str, Detector]:
        """The fitted detector of each score."""
        return {score.name: score.fitted(self.held_out.statistics) for score in self.scores}

    def values(self, statistics: Statistics) -> dict[str, Tensor]:
        """Return the value of each score for N images, (N,)."""
        return {each.name: self.detectors[each.name].score(each.of(statistics)) for each in self.scores}

    def p_values(self, statistics: Statistics) -> dict[str, Tensor]:
        """Return the p-values of N images by each score, (N,)."""
        return {each.name: self.detectors[each.name].p_value(each.of(statistics)) for each in self.scores}

    @cached_property
    def values_inside(self) -> dict[str, Tensor]:
        """The values of each score for the images of the same kind."""
        return self.values(self.inside)

    @cached_property
    def values_outside(self) -> dict[str, dict[str, Tensor]]:
        """The values of each score for the other sets."""
        return {name: self.values(statistics) for name, statistics in self.outside.items()}

    def curves(self) -> dict[str, dict[str, Roc]]:
        """Return the ROC curves by set and score."""
        return {
            name: {score: roc_curve(self.values_inside[score], found) for score, found in values.items()}
            for name, values in self.values_outside.items()
        }

    def metrics(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return, by set and score, the AUC, the false-positive rate at 95 % and the share with p <= 0.05.

        The AUC has its 95 % interval under ``intervals``.
        """
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for name, values in self.values_outside.items():
            p = self.p_values(self.outside[name])
            found[name] = {
                score: {
                    **detection_metrics(self.values_inside[score], outside),
                    "detected": share(p[score] <= LEVEL),
                }
                for score, outside in values.items()
            }
        return found

    def false_positives(self) -> dict[str, dict[str, float]]:
        """Return, by score and level, the share of images of the same kind with p <= level."""
        p = self.p_values(self.inside)
        return {
            name: {f"{level:g}": share(values <= level) for level in LEVELS} for name, values in p.items()
        }


def share(flags: Tensor) -> float:
    """Return the share of flags that are true."""
    return flags.double().mean().item()
