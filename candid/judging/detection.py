"""All scores on ordinary images and on other sets: ROC curves, p-values, false positives."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from candid._support.numbers import Array
from candid.inference.metrics import Roc, detection_metrics, roc_curve
from candid.judging.held_out import LEVEL, HeldOut
from candid.trust.arrays import series_of
from candid.trust.conformal import Detector, shuffled_halves
from candid.trust.ranking import ALL, Ranking, fit_rankings, ranked_p_values
from candid.trust.rule import Rule
from candid.trust.scores import Columns, Score, available_scores

GROUPS = "groups"
"""The column of the groups of images, (N,), within which the rule ranks them."""
LEVELS = (0.01, 0.05, 0.1)
"""The levels at which false positives are counted."""


def unseen_rows(keys: Array, held_out: HeldOut) -> tuple[Array, int]:
    """Return which images are not among the held-out ones, (N,) bool, and the number of those that are.

    Images that scores were fitted to count as held-out ones. If all images are held-out ones, those are left
    that shaped no density.
    """
    stored, fitted = held_out.statistics["keys"], held_out.fitted_keys
    seen = np.isin(keys, stored if fitted is None else np.concatenate((stored, fitted)))
    unseen = ~seen
    if not unseen.any():
        shaping, _ = shuffled_halves(len(stored))
        unseen = np.isin(keys, stored) & ~np.isin(keys, stored[shaping])
    return (unseen if unseen.any() else seen), int(seen.sum())


def unseen(columns: Columns, held_out: HeldOut) -> tuple[Columns, int]:
    """Return the columns of the images that are not among the held-out ones; see :func:`unseen_rows`."""
    rows, overlap = unseen_rows(columns["keys"], held_out)
    return columns.rows(rows), overlap


@dataclass(frozen=True)
class Detection:
    """All scores, ranked among held-out images, on images of the same kind and on other sets."""

    held_out: Columns
    """The held-out images."""
    inside: Columns
    outside: Mapping[str, Columns]
    rule: Rule | None = None
    """The rule behind the verdicts: its score is ranked as it is there."""
    extra: tuple[Score, ...] = ()
    """Scores that are not in the registry."""

    @cached_property
    def scores(self) -> list[Score]:
        """The scores that all columns suffice for."""
        inside = available_scores(self.inside)
        return [*(score for score in available_scores(self.held_out) if score in inside), *self.extra]

    @cached_property
    def rankings(self) -> dict[str, list[Ranking]]:
        """Each score with the held-out images that rank it."""
        groups, named = np.full(self.held_out.images, ALL), self.held_out.get("series")
        series, together = series_of(self.held_out, named), named is not None
        rankings = {
            score.name: fit_rankings(score, self.held_out, groups, series=series, together=together)
            for score in self.scores
        }
        if self.rule is not None:
            rankings[self.rule.score.name] = list(self.rule.rankings)
        return rankings

    @cached_property
    def detectors(self) -> dict[str, Detector]:
        """The fitted detector of each score that is not cross-fitted."""
        return {name: parts[0].detector(ALL) for name, parts in self.rankings.items() if len(parts) == 1}

    def values(self, columns: Columns) -> dict[str, Array]:
        """Return the value of each score for N images, (N,): the mean of those of cross-fitted scores."""
        return {
            name: np.mean([part.detector(ALL).score(part.statistic(columns)) for part in parts], axis=0)
            for name, parts in self.rankings.items()
        }

    def p_values(self, columns: Columns) -> dict[str, Array]:
        """Return the p-values of N images by each score, (N,); those of the rule by its own score."""
        groups = np.full(columns.images, ALL)
        p = {
            name: ranked_p_values(parts, [part.statistic(columns) for part in parts], groups)
            for name, parts in self.rankings.items()
        }
        if self.rule is not None:
            p[self.rule.score.name] = self.rule.p_values(columns, columns.get(GROUPS))
        return p

    @cached_property
    def values_inside(self) -> dict[str, Array]:
        """The values of each score for the images of the same kind."""
        return self.values(self.inside)

    @cached_property
    def values_outside(self) -> dict[str, dict[str, Array]]:
        """The values of each score for the other sets."""
        return {name: self.values(columns) for name, columns in self.outside.items()}

    def curves(self) -> dict[str, dict[str, Roc]]:
        """Return the ROC curves by set and score."""
        return {
            name: {score: roc_curve(self.values_inside[score], outside) for score, outside in values.items()}
            for name, values in self.values_outside.items()
        }

    def metrics(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return, by set and score, the AUC, the false-positive rate at 95 % and the share with p <= 0.05.

        The AUC has its 95 % interval under ``intervals``.
        """
        metrics: dict[str, dict[str, dict[str, Any]]] = {}
        for name, values in self.values_outside.items():
            p = self.p_values(self.outside[name])
            metrics[name] = {
                score: {
                    **detection_metrics(self.values_inside[score], outside),
                    "detected": share(p[score] <= LEVEL),
                }
                for score, outside in values.items()
            }
        return metrics

    def false_positives(self) -> dict[str, dict[str, float]]:
        """Return, by score and level, the share of images of the same kind with p <= level."""
        p = self.p_values(self.inside)
        return {
            name: {f"{level:g}": share(values <= level) for level in LEVELS} for name, values in p.items()
        }


def share(flags: Array) -> float:
    """Return the share of flags that are true."""
    return float(np.mean(flags))
