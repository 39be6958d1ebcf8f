"""Metrics of models on corrupted images, their 95 % intervals, and the paper's table of them.

All corruptions and severities change the same images. So an interval says what other images of the same kind
could give, each with all its versions.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from candid._support.files import write_texts
from candid._support.numbers import Array
from candid._support.text import Cell, area_cell, in_all_formats, with_interval
from candid.inference.metrics import bootstrap_intervals, placement_interval, share_interval
from candid.inference.study import Note
from candid.robustness.corruptions import CORRUPTIONS, SEVERITIES
from candid.robustness.options import CorruptOptions

Ends = tuple[float, float]
"""The lower and the upper end of an interval."""
RESAMPLES = 1000


@dataclass(frozen=True)
class Reference:
    """Errors that corruption errors are relative to, as shares: means over the five severities."""

    name: str
    clean: float
    errors: Mapping[str, float]
    by_image: Array | None = field(default=None, compare=False, repr=False)
    """The errors on each image, as :attr:`CorruptedModel.by_image`."""
    published: bool = False
    """Whether the errors are numbers from a paper, which do not vary with the images."""

    def for_intervals(self, corruptions: Iterable[str]) -> Array | None:
        """Return the errors as :func:`error_intervals` takes them; None if they are not known by image."""
        if not self.published:
            return self.by_image
        return np.array([self.clean, *(self.errors[name] for name in corruptions)])


@dataclass(frozen=True)
class CorruptedModel:
    """One model on all corruptions and severities."""

    name: str
    beta: float | None
    clean_error: float
    clean_entropy: float
    """Mean entropy of the posterior, in nats."""
    errors: dict[str, list[float]]
    """Errors by corruption, one for each severity, as shares."""
    entropies: dict[str, list[float]]
    """Mean entropies, in nats."""
    auc: dict[str, dict[str, float]] = field(default_factory=dict)
    """Areas under the ROC curve of corrupted against clean images, by score and corruption; of a model with
    held-out scores only."""
    score: str = "two-tailed"
    """The score in the table."""
    images: int = 0
    """Number of images of each corruption and severity."""
    severities: tuple[int, ...] = SEVERITIES
    auc_intervals: dict[str, dict[str, Ends]] = field(default_factory=dict)
    """The 95 % intervals of the areas by score and corruption; empty if the images are not known to be the
    same for all corruptions."""
    mean_auc_intervals: dict[str, Ends] = field(default_factory=dict)
    """The 95 % intervals of the mean areas by score."""
    by_image: Array | None = field(default=None, compare=False, repr=False)
    """The errors on each image, (N, 1 + corruptions): on the clean image, then the share of severities at
    which it is wrong; None if the images are not known to be the same for all corruptions."""

    @property
    def mean_errors(self) -> dict[str, float]:
        """Mean errors over the severities, by corruption."""
        return {name: _mean(errors) for name, errors in self.errors.items()}

    @property
    def mean_error(self) -> float:
        """Mean error over all corruptions and severities."""
        return _mean(self.mean_errors.values())

    @property
    def loss(self) -> float:
        """Share of images that only corruptions make wrong."""
        return self.mean_error - self.clean_error

    @property
    def entropy_increase(self) -> float:
        """Mean increase of the entropy over all corruptions and severities, in nats."""
        return _mean(map(_mean, self.entropies.values())) - self.clean_entropy

    def as_reference(self) -> Reference:
        """Return the errors as a reference for other models."""
        return Reference(self.name, self.clean_error, self.mean_errors, self.by_image)

    def corruption_errors(self, reference: Reference) -> dict[str, float | None]:
        """Return ``CE_c = sum_s E_sc / sum_s E_sc(reference)`` by corruption; None if that makes no errors.

        Corruptions that the reference was not measured on are left out.
        """
        return {
            name: _ratio(error, reference.errors[name])
            for name, error in self.mean_errors.items()
            if name in reference.errors
        }

    def relative_errors(self, reference: Reference) -> dict[str, float | None]:
        """Return ``sum_s (E_sc - E_clean) / sum_s (E_sc - E_clean)(reference)`` by corruption."""
        return {
            name: _ratio(error - self.clean_error, reference.errors[name] - reference.clean)
            for name, error in self.mean_errors.items()
            if name in reference.errors
        }

    def intervals(self, reference: Reference | None) -> dict[str, Any]:
        """Return the 95 % intervals that are known, under the names of their metrics."""
        intervals: dict[str, Any] = {"auc": self.auc_intervals, "mean_auc": self.mean_auc_intervals}
        if self.by_image is None:
            return intervals
        intervals["clean_error"] = share_interval(self.by_image[:, 0] > 0)[1:]
        if reference is None or not self.errors.keys() <= reference.errors.keys():
            return intervals
        base = reference.for_intervals(self.errors)
        if base is not None and base.shape in (self.by_image.shape, self.by_image.shape[1:]):
            mce, relative = error_intervals(self.by_image, base)
            intervals |= {"mce": mce, "relative_mce": relative}
        return intervals

    def to_dict(self, reference: Reference | None) -> dict[str, Any]:
        """Return the metrics as JSON; rates are shares."""
        metrics: dict[str, Any] = {
            "model": self.name,
            "beta": None if self.beta is None else str(self.beta),
            "images": self.images,
            "severities": list(self.severities),
            "clean_error": self.clean_error,
            "entropy_increase_nats": self.entropy_increase,
            "errors": self.errors,
            "auc": self.auc,
            "mean_auc": {score: _mean(values.values()) for score, values in self.auc.items()},
            "score": self.score,
            "intervals": self.intervals(reference),
        }
        if reference is not None:
            ratios, relative = self.corruption_errors(reference), self.relative_errors(reference)
            metrics |= {
                "reference": reference.name,
                "ce": ratios,
                "mce": _mean_if_known(ratios.values()),
                "relative_mce": _mean_if_known(relative.values()),
            }
        return metrics


@dataclass(frozen=True)
class CorruptionResult:
    """The result of :func:`candid.corrupt`: every model on every corruption."""

    models: tuple[CorruptedModel, ...]
    """The metrics of each model by corruption and severity."""
    reference: Reference | None
    """The errors that corruption errors are relative to."""
    options: CorruptOptions
    notes: tuple[Note, ...] = ()
    """What was left out, and why."""

    def __iter__(self) -> Iterator[CorruptedModel]:
        return iter(self.models)

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The metrics of each model as JSON."""
        return [model.to_dict(self.reference) for model in self.models]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the metrics of each model as JSON."""
        return self.records


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)


def _mean_if_known(values: Iterable[float | None]) -> float | None:
    listed = list(values)
    return None if None in listed or not listed else _mean(value for value in listed if value is not None)


def _ratio(value: float, of: float) -> float | None:
    return value / of if of > 0 else None


def area_intervals(placed: Mapping[str, Array]) -> tuple[dict[str, Ends], Ends]:
    """Return the intervals of the areas under the ROC curve by corruption, and of their mean.

    Args:
        placed: the paired placements of the images by corruption, (N,); see
            :func:`candid.inference.metrics.paired_placements`.
    """
    mean = np.mean(list(placed.values()), 0)
    return {name: placement_interval([one]) for name, one in placed.items()}, placement_interval([mean])


def error_intervals(errors: Array, reference: Array) -> tuple[Ends | None, Ends | None]:
    """Return the intervals of mCE and of relative mCE, by a bootstrap of images.

    Args:
        errors: the errors of a model on each image, (N, 1 + corruptions): on the clean image, then the share
            of severities at which it is wrong.
        reference: the same of the reference model on the same images, or its published errors,
            (1 + corruptions,), which do not vary.

    Returns:
        The two intervals; None where a metric is not defined.
    """
    images, columns = errors.shape
    paired = reference.ndim == 2

    def metrics(sums: Array) -> Array:
        means = sums / images
        model, base = np.split(means, [columns], -1) if paired else (means, reference)
        ratios = []
        for relative in (0, 1):
            above = model[..., 1:] - relative * model[..., :1]
            below = base[..., 1:] - relative * base[..., :1]
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios.append(np.where(below > 0, above / below, np.nan).mean(-1))
        return np.stack(ratios, -1)

    per_image = np.concatenate((errors, reference), 1) if paired else errors
    mce, relative_mce = (
        None if interval is None else (interval.low, interval.high)
        for interval in bootstrap_intervals(per_image, metrics, RESAMPLES, 0, 0.95)
    )
    return mce, relative_mce


def write_tables(result: CorruptionResult, out: Path) -> list[Path]:
    """Write ``corruptions`` as .json (all), .csv (a row per model and corruption), .md, .tex and .html."""
    tables, notes = {"": table(result)}, ["Brackets show 95 % intervals."]
    return write_texts(in_all_formats("Corruptions", result.to_dict(), _lines(result), tables, notes), out)


def table(result: CorruptionResult, intervals: bool = True) -> tuple[list[str], list[list[Cell]]]:
    """Return head and rows as in the paper's table; areas under the ROC curve are those of one score.

    The means over corruptions have their 95 % intervals if ``intervals``.
    """
    score, corruptions = result.options.score, list(result.models[0].errors)
    head = ["model", "clean error (%)", "mCE (%)", "rel. mCE (%)", "Δ entropy (nats)"]
    head += [f"mean AUC, {score} (%)", *(CORRUPTIONS[name].short for name in corruptions)]
    rows = []
    for model, record in zip(result, result.records, strict=True):
        areas = model.auc.get(score, {})
        ends = record["intervals"] if intervals else {}
        rows.append(
            [
                (model.name, ""),
                (f"{100 * model.clean_error:.2f}", ""),
                (with_interval(record.get("mce"), ends.get("mce")), ""),
                (with_interval(record.get("relative_mce"), ends.get("relative_mce")), ""),
                (f"{model.entropy_increase:+.2f}", ""),
                area_cell(record["mean_auc"].get(score), ends.get("mean_auc", {}).get(score)),
                *(area_cell(areas.get(name)) for name in corruptions),
            ]
        )
    return head, rows


def _lines(result: CorruptionResult) -> Iterator[Sequence[object]]:
    """Yield one line per model and corruption."""
    scores = list(dict.fromkeys(score for model in result for score in model.auc))
    yield [
        "model",
        "corruption",
        *(f"error_{i}" for i in result.options.severities),
        "ce",
        *(f"auc_{score}" for score in scores),
        *(f"auc_{score}_{end}" for score in scores for end in ("low", "high")),
    ]
    for model in result:
        ratios = {} if result.reference is None else model.corruption_errors(result.reference)
        for name, errors in model.errors.items():
            areas = (model.auc.get(score, {}).get(name) for score in scores)
            stored = (model.auc_intervals.get(score, {}) for score in scores)
            ends = (end for intervals in stored for end in intervals.get(name, (None, None)))
            yield [model.name, name, *errors, ratios.get(name), *areas, *ends]
