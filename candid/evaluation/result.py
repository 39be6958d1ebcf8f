"""The result of an evaluation, and the metrics that it is made of."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from candid._support.files import write_texts
from candid._support.numbers import Array
from candid._support.text import as_csv
from candid.evaluation.calibration_error import calibration_metrics
from candid.evaluation.selective import Judged, selective_metrics
from candid.inference.metrics import (
    Interval,
    check_labels,
    label_losses,
    label_ranks,
    log_odds,
    mean_interval,
    share_interval,
)
from candid.inference.predictions import Predictions
from candid.inference.study import Note
from candid.judging.by_class import ByClass
from candid.judging.detection import GROUPS, Detection
from candid.judging.examine import examinations
from candid.judging.held_out import LEVEL
from candid.models.protocol import Model, require
from candid.trust.conformal import discovery_cut
from candid.trust.ranking import ALL, OTHERS
from candid.trust.rule import Rule
from candid.trust.scores import SCORES, Columns
from candid.trust.verdict import KINDS, Examination, Promises, Verdict, with_novel

Metrics = dict[str, Interval | None]
AT_ONCE = 1000
"""Images whose examinations are in memory together."""


@dataclass(frozen=True)
class JudgedSet:
    """One set of images with verdicts."""

    predictions: Predictions
    examine: Callable[[Predictions], list[Examination]]
    """Examines some of these images."""
    kinds: list[Verdict]
    """The verdicts."""
    promises: list[Promises]
    """What each verdict promises."""
    class_p_values: Array
    """p-values among held-out images of the same predicted class, (N,); NaN where there is none."""


@dataclass(frozen=True)
class EvaluationResult:
    """The result of :func:`candid.evaluate`."""

    model: Model | None
    """None if stored arrays were evaluated."""
    class_names: tuple[str, ...]
    metrics: dict[str, Any]
    """The metrics, as in ``metrics.json``."""
    predictions: Predictions
    """What the model says of each image."""
    scaled: Predictions | None = None
    """Predictions with temperature scaling, if that was asked for."""
    detection: Detection | None = None
    """Scores of all sets of images; None for a model without held-out scores."""
    judged: dict[str, JudgedSet] = field(default_factory=dict)
    """Judged images by set, the data's own first; empty for a model without held-out scores."""
    notes: tuple[Note, ...] = ()
    """What a reader of the metrics should know, by topic."""

    def examinations(self) -> Iterator[tuple[str, int, Examination]]:
        """Yield the name of the set, the label (-1 if unknown) and the examination of every image."""

        def without_verdicts(part: Predictions) -> list[Examination]:
            return examinations(part.statistics, part.paths, self.class_names)

        sets = [(name, judged.predictions, judged.examine) for name, judged in self.judged.items()]
        for name, predictions, examine in sets or [
            (self.metrics["part"], self.predictions, without_verdicts)
        ]:
            for part in _parts(predictions):
                yield from zip([name] * len(part), part.labels.tolist(), examine(part), strict=True)


def _parts(predictions: Predictions) -> Iterator[Predictions]:
    """Yield some images at a time."""
    for start in range(0, len(predictions), AT_ONCE):
        yield predictions[np.arange(start, min(start + AT_ONCE, len(predictions)))]


def performance(predictions: Predictions, model: Model | None = None) -> Metrics:
    """Return accuracy, likelihood and calibration errors, with 95 % intervals.

    ``L_X`` and ``L_Y`` are as in the paper's Table 2: L_X without the constant of the Gaussian, L_Y the
    cross-entropy + ln M.
    """
    metrics = classification(predictions.logits, predictions.labels)
    nats = metrics["cross_entropy"]
    assert nats is not None
    metrics["L_Y"] = Interval(*(value + math.log(predictions.logits.shape[1]) for value in nats))
    if predictions.log_density is not None and model is not None and model.density_of == "pixels":
        bits = mean_interval(-predictions.log_density / (model.dimensions * math.log(2)))
        offset = require(model, "invert", "Bits per dimension").bits_offset
        constant = offset * math.log(2) + math.log(2 * math.pi) / 2
        metrics["bits_per_dim"] = bits
        metrics["L_X"] = Interval(*(value * math.log(2) - constant for value in bits))
    return metrics | calibration_metrics(predictions.posterior, predictions.labels)


def classification(logits: Array, labels: Array) -> Metrics:
    """Return accuracy and cross-entropy of logits or log posteriors (N, M)."""
    check_labels(logits, labels)
    ranks = label_ranks(logits, labels)
    metrics: Metrics = {"accuracy": share_interval(ranks < 1)}
    if logits.shape[1] > 5:
        metrics["top5_accuracy"] = share_interval(ranks < 5)
    metrics["cross_entropy"] = mean_interval(label_losses(logits, labels))
    return metrics


def as_json(metrics: Metrics) -> dict[str, Any]:
    """Return the values by name, and their intervals under ``intervals``."""
    values: dict[str, Any] = {
        name: None if interval is None else interval.value for name, interval in metrics.items()
    }
    ends = {name: [interval.low, interval.high] for name, interval in metrics.items() if interval is not None}
    return values | {"intervals": ends}


@dataclass(frozen=True)
class ImageGroups:
    """Groups of images, within which levels hold."""

    by: str
    """What they are: "class" (the predicted one), a key, or a column of a table."""
    names: tuple[str, ...]
    """The names of the groups that have held-out images."""
    held_out: Array
    """The groups of the held-out images, (n,): numbers of names."""
    of: Callable[[Predictions], list[str]]
    """Returns the names of the groups of other images."""

    @classmethod
    def by_class(cls, class_names: tuple[str, ...], predicted: Array) -> "ImageGroups":
        """Return the predicted classes as groups; ``predicted`` are those of the held-out images."""
        return cls(
            "class", class_names, predicted, lambda part: [class_names[y] for y in part.logits.argmax(1)]
        )

    @classmethod
    def by_name(
        cls, by: str, held_out: Sequence[str], of: Callable[[Predictions], list[str]]
    ) -> "ImageGroups":
        """Return groups with names; ``held_out`` are those of the held-out images."""
        names = sorted(set(held_out))
        return cls(by, tuple(names), np.searchsorted(names, held_out), of)

    def numbers(self, predictions: Predictions) -> Array:
        """Return the groups of images, (N,); ``ALL`` for those without held-out images."""
        number = {name: i for i, name in enumerate(self.names)}
        return np.array([number.get(name, ALL) for name in self.of(predictions)], np.int64)


def statistics_of(sets: Mapping[str, Predictions], groups: ImageGroups | None = None) -> dict[str, Columns]:
    """Return the columns of sets of images, with their groups if there are any."""
    return {
        name: images.statistics.with_columns({} if groups is None else {GROUPS: groups.numbers(images)})
        for name, images in sets.items()
    }


def judged_sets(
    rule: Rule,
    sets: Mapping[str, Predictions],
    class_names: tuple[str, ...],
    groups: ImageGroups | None = None,
) -> dict[str, JudgedSet]:
    """Return sets of images with the verdicts of a rule."""

    def numbers(part: Predictions) -> Array | None:
        return None if groups is None else groups.numbers(part)

    def examine(cut: float | None, part: Predictions) -> list[Examination]:
        are_classes = groups is not None and groups.by == "class"
        judged = rule.examine(part.statistics, part.paths, class_names, numbers(part), are_classes)
        return judged if cut is None else with_novel(judged, cut)

    judged = {}
    for name, predictions in sets.items():
        cut = None
        if rule.levels.fdr is not None:  # all images of a set decide together
            p_values = [rule.p_values(part.statistics, numbers(part)) for part in _parts(predictions)]
            cut = discovery_cut(np.concatenate(p_values), rule.levels.fdr)
        judged[name] = _judged(predictions, partial(examine, cut))
    return judged


def _judged(predictions: Predictions, examine: Callable[[Predictions], list[Examination]]) -> JudgedSet:
    kinds, promises, within = [], [], []
    for part in _parts(predictions):
        for examined in examine(part):
            assert examined.verdict is not None and examined.promises is not None
            kinds.append(examined.verdict)
            promises.append(examined.promises)
            within.append(math.nan if examined.class_p_value is None else examined.class_p_value)
    return JudgedSet(predictions, examine, kinds, promises, np.array(within))


def right_ones(predictions: Predictions) -> Array:
    """Return whether the most probable class is the true one, (N,) bool."""
    return predictions.logits.argmax(1) == predictions.labels


def verdict_metrics(
    rule: Rule, judged: Mapping[str, JudgedSet], groups: ImageGroups | None = None
) -> dict[str, Any]:
    """Return the shares of the verdicts in each set, and what they promise."""
    promises = rule.promises[ALL]
    small = [] if groups is None else rule.too_small(groups.names)
    return {
        "score": promises.score,
        "n_reference": promises.n_reference,
        "novelty": promises.novelty.in_force,
        "error": promises.error.in_force,
        "sets": {
            name: {kind: images.kinds.count(kind) / len(images.kinds) for kind in KINDS}
            for name, images in judged.items()
        },
        "promises": promises.to_dict(),
        "sentences": [*promises.sentences(), *small],
    }


def selective(judged: Mapping[str, JudgedSet], kept: Array) -> dict[str, Any]:
    """Return selective metrics of the images ``kept``, (N,) bool, of the first set; others are foreign."""
    (name, (confidence, kinds)), *others = (
        (name, Judged(log_odds(images.predictions.logits), images.kinds)) for name, images in judged.items()
    )
    right = right_ones(judged[name].predictions)
    return selective_metrics(confidence[kept], right[kept], list(compress(kinds, kept)), dict(others))


def group_metrics(groups: ImageGroups, judged: JudgedSet, shared: Sequence[Promises]) -> dict[str, Any]:
    """Return, by group, its test images, its levels and its verdicts.

    ``own_levels`` says whether the levels hold within the group; in one that is too small they do not.

    Args:
        groups: the groups.
        judged: test images with verdicts, each in a group.
        shared: what verdicts promise over the images of several groups.
    """
    names, right = groups.of(judged.predictions), right_ones(judged.predictions)
    metrics: dict[str, dict[str, Any]] = {}
    for name in sorted(set(names)):
        rows = [i for i, group in enumerate(names) if group == name]
        accepted = [i for i in rows if judged.kinds[i] == "accept"]
        levels = judged.promises[rows[0]]
        metrics[name] = {
            "images": len(rows),
            "own_levels": all(levels is not others for others in shared),
            "n_reference": levels.n_reference,
            "novelty": levels.novelty.in_force,
            "error": levels.error.in_force,
            **{kind: sum(judged.kinds[i] == kind for i in rows) / len(rows) for kind in KINDS},
            "accepted_accuracy": float(right[accepted].mean()) if accepted else None,
        }
    return {"by": groups.by, "groups": metrics}


def with_verdicts(
    result: EvaluationResult,
    sets: Mapping[str, Predictions],
    rule: Rule,
    detection: Detection,
    kept: Array,
    temperature: float | None = None,
    groups: ImageGroups | None = None,
) -> EvaluationResult:
    """Return the result with all that held-out images add.

    Args:
        result: what is known without them.
        sets: the images by set, the data's own first.
        rule: gives the verdicts.
        detection: the scores of all sets.
        kept: which images of the first set are no held-out ones, (N,) bool: they check p-values.
        temperature: divides the logits, if metrics with temperature scaling are wanted, too.
        groups: groups within which the levels of the rule hold.
    """
    scaled, metrics = None, dict(result.metrics)
    if temperature is not None:
        scaled = replace(
            result.predictions, logits=result.predictions.logits.astype(np.float64) / temperature
        )
        values = as_json(performance(scaled, result.model))
        metrics["temperature_scaled"] = {"temperature": temperature, **values}
    judged = judged_sets(rule, sets, result.class_names, groups)
    metrics |= {"false_positives": detection.false_positives(), "ood": detection.metrics()}
    if rule.by_class is not None:
        metrics["detected_in_class"] = {
            name: float((images.class_p_values <= LEVEL).mean()) for name, images in judged.items()
        }
    data = judged[metrics["part"]]
    metrics |= {
        "by_class": class_metrics(result, data.kinds),
        "verdicts": verdict_metrics(rule, judged, groups),
        "selective": selective(judged, kept),
    }
    if groups is not None:
        shared = [rule.promises[group] for group in (ALL, OTHERS) if group in rule.promises]
        metrics["groups"] = group_metrics(groups, data, shared)
    return replace(result, metrics=metrics, scaled=scaled, detection=detection, judged=judged)


def class_metrics(result: EvaluationResult, kinds: Sequence[str] | None = None) -> dict[str, Any]:
    """Return results by class; ``kinds`` are the verdicts of the images, if there are any."""
    trained, names = None, result.class_names
    if result.model is not None:
        record = result.model.metadata
        counts = [*record.get("head", {}).get("counts", ()), *(e["photos"] for e in record.get("taught", ()))]
        trained = counts if len(counts) == len(names) else None
    return ByClass.of_predictions(result.predictions, names, kinds, trained).to_dict()


OPTIONAL = ("ood", "ood_zones", "roc", "auc")
"""The files that not every evaluation has."""


def remove_older(out: Path, written: Sequence[Path]) -> None:
    """Remove results of an earlier evaluation in ``out`` that this one has not ``written`` again."""
    for name in {*OPTIONAL} - {path.stem for path in written}:
        for ending in ("csv", "png", "svg"):
            (out / f"{name}.{ending}").unlink(missing_ok=True)


def write(evaluation: EvaluationResult, out: Path) -> list[Path]:
    """Write the files into ``out`` and return their paths."""
    texts = {
        "metrics.json": json.dumps(evaluation.metrics, indent=1, allow_nan=False) + "\n",
        "images.csv": as_csv(_image_rows(evaluation)),
        "by_class.csv": as_csv(ByClass.from_dict(evaluation.metrics["by_class"]).csv_rows()),
        "confusions.csv": as_csv(_confusion_rows(evaluation)),
    }
    if evaluation.metrics.get("ood"):
        texts["ood.csv"] = as_csv(_ood_rows(evaluation))
    return write_texts(texts, out)


def _confusion_rows(evaluation: EvaluationResult) -> Iterator[Sequence[object]]:
    """Yield how many images of each class are taken for which one, without the pairs that do not occur."""
    table = ByClass.of_predictions(evaluation.predictions, evaluation.class_names)
    yield "class", "taken_for", "images"
    for row in table.rows:
        if row.images:
            yield row.name, row.name, row.right
        yield from ((row.name, other, count) for other, count in row.taken_for)


def _image_rows(evaluation: EvaluationResult) -> Iterator[Sequence[object]]:
    """Yield the set, the true label and the keys of ``Examination.to_dict`` of every image."""
    names, head = evaluation.class_names, False
    for set_name, label, examined in evaluation.examinations():
        values = examined.to_dict()
        values.pop("promises")  # once, in metrics.json
        if not head:
            yield "set", "true_label", *values
            head = True
        yield set_name, names[label] if label >= 0 else "", *map(_cell, values.values())


def _cell(value: Any) -> object:
    """Return what stands in a cell: eight digits, names separated by semicolons, tables as JSON."""
    if isinstance(value, float):
        return f"{value:.8g}"
    if isinstance(value, list):
        return ";".join(value)
    return json.dumps(value) if isinstance(value, dict) else value


def _ood_rows(evaluation: EvaluationResult) -> Iterator[Sequence[object]]:
    yield "set", "score", "family", "auc", "fpr_at_95_tpr", "detected_at_5_percent", "auc_low", "auc_high"
    for name, scores in evaluation.metrics["ood"].items():
        for score, metrics in scores.items():
            values = (metrics[key] for key in ("auc", "fpr95", "detected"))
            yield name, score, SCORES[score].family, *values, *metrics["intervals"]["auc"]
