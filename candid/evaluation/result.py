"""The result of an evaluation, and the metrics that it is made of."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from candid.evaluation.calibration_error import calibration_metrics
from candid.evaluation.selective import KINDS, Judged, selective_metrics
from candid.inference.intervals import Interval, mean_interval, share_interval
from candid.inference.metrics import check_labels, label_ranks, log_odds
from candid.inference.predictions import Predictions
from candid.inference.study import Note
from candid.models.protocol import Model, as_latent
from candid.trust.detection import Detection
from candid.trust.judge import examinations
from candid.trust.promises import Promises
from candid.trust.verdict import Examination, Kind

Metrics = dict[str, Interval | None]
AT_ONCE = 1000
"""Images whose examinations are in memory together."""


@dataclass(frozen=True)
class JudgedSet:
    """One set of images with p-values and verdicts."""

    predictions: Predictions
    examine: Callable[[Predictions], list[Examination]]
    """Examines some of these images."""
    p_value: Tensor
    """p-values of novelty, (N,)."""
    kinds: list[Kind]
    """The verdicts."""


@dataclass(frozen=True)
class Evaluation:
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
            return examinations(part, self.class_names)

        sets = [(name, each.predictions, each.examine) for name, each in self.judged.items()]
        for name, found, examine in sets or [(self.metrics["part"], self.predictions, without_verdicts)]:
            for rows in torch.arange(len(found)).split(AT_ONCE):
                part = found[rows]
                yield from zip([name] * len(part), part.labels.tolist(), examine(part), strict=True)


def performance(predictions: Predictions, model: Model | None = None) -> Metrics:
    """Return accuracy, likelihood and calibration errors, with 95 % intervals.

    ``L_X`` and ``L_Y`` are as in the paper's Table 2: L_X without the constant of the Gaussian, L_Y the
    cross-entropy + ln M.
    """
    found = classification(predictions.logits, predictions.labels)
    nats = found["cross_entropy"]
    assert nats is not None
    found["L_Y"] = Interval(*(value + math.log(predictions.logits.shape[1]) for value in nats))
    latent = None if model is None or model.density_of != "pixels" else as_latent(model)
    if predictions.log_density is not None and model is not None and latent is not None:
        bits = mean_interval(-predictions.log_density / (model.dimensions * math.log(2)))
        constant = latent.bits_offset * math.log(2) + math.log(2 * math.pi) / 2
        found["bits_per_dim"] = bits
        found["L_X"] = Interval(*(value * math.log(2) - constant for value in bits))
    return found | calibration_metrics(predictions.posterior, predictions.labels)


def classification(logits: Tensor, labels: Tensor) -> Metrics:
    """Return accuracy and cross-entropy of logits or log posteriors (N, M)."""
    check_labels(logits, labels)
    ranks = label_ranks(logits, labels)
    found: Metrics = {"accuracy": share_interval(ranks < 1)}
    if logits.shape[1] > 5:
        found["top5_accuracy"] = share_interval(ranks < 5)
    found["cross_entropy"] = mean_interval(F.cross_entropy(logits.double(), labels, reduction="none"))
    return found


def as_json(metrics: Metrics) -> dict[str, Any]:
    """Return the values by name, and their intervals under ``intervals``."""
    known = {name: each for name, each in metrics.items() if each is not None}
    values: dict[str, Any] = {name: None if each is None else each.value for name, each in metrics.items()}
    return values | {"intervals": {name: [each.low, each.high] for name, each in known.items()}}


def judged_set(
    found: Predictions, examine: Callable[[Predictions], list[Examination]]
) -> tuple[JudgedSet, list[Promises]]:
    """Return images with the verdicts that ``examine`` gives, and what each of them promises."""
    p_value, kinds, promises = [], [], []
    for rows in torch.arange(len(found)).split(AT_ONCE):
        for each in examine(found[rows]):
            assert each.p_value is not None and each.verdict is not None and each.promises is not None
            p_value.append(each.p_value)
            kinds.append(each.verdict)
            promises.append(each.promises)
    return JudgedSet(found, examine, torch.tensor(p_value, dtype=torch.float64), kinds), promises


def right_ones(predictions: Predictions) -> Tensor:
    """Return whether the most probable class is the true one, (N,) bool."""
    return predictions.logits.argmax(1) == predictions.labels


def verdict_metrics(
    promises: Promises, judged: Mapping[str, JudgedSet], more: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the shares of the verdicts in each set, and what they promise, with ``more`` sentences."""
    return {
        "score": promises.score,
        "n_reference": promises.n_reference,
        "novelty": promises.novelty.in_force,
        "error": promises.error.in_force,
        "sets": {
            name: {kind: each.kinds.count(kind) / len(each.kinds) for kind in KINDS}
            for name, each in judged.items()
        },
        "promises": promises.to_dict(),
        "sentences": [*promises.sentences(), *more],
    }


def selective(judged: Mapping[str, JudgedSet], kept: Tensor) -> dict[str, Any]:
    """Return selective metrics of the images ``kept``, (N,) bool, of the first set; others are foreign."""
    own, *others = (
        (name, Judged(log_odds(each.predictions.logits), each.kinds)) for name, each in judged.items()
    )
    name, (confidence, kinds) = own
    right = right_ones(judged[name].predictions)
    return selective_metrics(
        confidence[kept], right[kept], list(compress(kinds, kept.tolist())), dict(others)
    )
