"""Evaluate a model: predictions for its data and for other images, then all metrics of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from candid._support.config import build
from candid._support.distributed import launch
from candid._support.errors import CandidError
from candid._support.progress import SILENT, Progress
from candid.data.datasets import open_images
from candid.data.splits import Split, seen_in_training
from candid.evaluation.calibration_error import BINS, calibration_metrics
from candid.evaluation.options import EvaluateOptions
from candid.inference.intervals import Interval, mean_interval, share_interval
from candid.inference.metrics import check_labels, label_ranks
from candid.inference.predictions import Predictions
from candid.inference.runner import Runner
from candid.inference.study import Note, labelled_images, prepared
from candid.models import checkpoint
from candid.models.protocol import Model, as_latent
from candid.trust.detection import Detection, share, unseen
from candid.trust.judge import LEVEL, HeldOut, Judge, examinations, measures_of, needed
from candid.trust.scores import statistics_of
from candid.trust.verdict import Examination, Verdict

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Metrics = dict[str, Interval | None]
AT_ONCE = 1000
"""Images whose examinations are in memory together."""


@dataclass(frozen=True)
class JudgedSet:
    """One set of images with p-values and verdicts."""

    predictions: Predictions
    judge: Judge
    p_value: Tensor
    """p-values among all held-out images, (N,)."""
    class_p_value: Tensor
    """p-values among held-out images of the same predicted class, (N,)."""
    verdicts: list[Verdict]


@dataclass(frozen=True)
class Evaluation:
    """The result of :func:`candid.evaluate`."""

    model: Model
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
        sets: list[tuple[str, Predictions, Judge | None]]
        sets = [(name, each.predictions, each.judge) for name, each in self.judged.items()]
        for name, predictions, judge in sets or [(self.metrics["part"], self.predictions, None)]:
            for rows in torch.arange(len(predictions)).split(AT_ONCE):
                part = predictions[rows]
                found = examinations(part, self.model.class_names, judge)
                yield from zip([name] * len(part), part.labels.tolist(), found, strict=True)


def evaluate(model: Any, data: str, progress: Progress = SILENT, **options: Any) -> Evaluation | None:
    """Measure accuracy, likelihood, calibration error, detection and verdicts of a model.

    Args:
        model: a model, a bundled name, a model folder or a run folder.
        data: a data set with labels, as for :func:`candid.train`.
        progress: shows what is being done.
        options: the fields of :class:`~candid.evaluation.options.EvaluateOptions`; ``ood`` may also be a
            dictionary of other sets by name.

    Returns:
        The metrics and all predictions; None in all processes but the first.

    Example:
        >>> import candid
        >>> model = candid.GenerativeClassifier.from_preset("digits").eval()
        >>> found = candid.evaluate(model, "digits", images=50, workers=0)
        >>> found.metrics["images"], len(found.predictions)
        (50, 50)
    """
    if isinstance(options.get("ood"), Mapping):
        options["ood"] = tuple(f"{name}={path}" for name, path in options["ood"].items())
    study = _Study(model, data, build(EvaluateOptions, options), progress)
    found = study.predictions()
    return None if found is None else study.evaluation(*found)


class _Crops(NamedTuple):
    """What the model says of other crops of the data."""

    ten: Tensor | None
    """Log posteriors averaged over ten crops, (N, M)."""
    published: Predictions | None
    """Predictions for the images as the paper's authors showed them."""


class _Study:
    """One evaluation: what was asked for, and the loaded models."""

    def __init__(self, model: Any, data: str, options: EvaluateOptions, progress: Progress) -> None:
        self.data, self.options = data, options
        source = str(model) if isinstance(model, str | Path) else getattr(model, "kind", "model")
        self.name = options.name or source
        self.fabric: Fabric = launch(options.devices)
        self.progress = progress if self.fabric.is_global_zero else SILENT
        self.model = checkpoint.resolve(model)
        self.companions = {path: checkpoint.resolve(path) for path in options.ensemble}
        self.held_out = self._held_out()
        self.judge: Judge | None = None
        if self.held_out is not None:
            levels = options.score, options.novelty, options.error
            self.judge = Judge.of(self.model, *levels, held_out=self.held_out)
        if options.as_published:
            self._check_published()
        self.part, self.splits = self._splits()

    def _check_published(self) -> None:
        """Refuse models that do not see a crop of a larger photo."""
        shown = self.model.preprocessing
        if shown.crop != "resized" or shown.height != shown.width:
            raise CandidError(
                "--as-published is for models that see a square crop of a larger photo: leave it out, as "
                f"'{self.name}' sees whole images."
            )

    def _held_out(self) -> HeldOut | None:
        """Return the held-out scores of the model, with those of its ensemble."""
        asked = ("ood", "ensemble", "temperature", "score", "novelty", "error")
        if not any(getattr(self.options, option) for option in asked):
            return HeldOut.of(self.model)
        own = needed(self.model, self.name)
        known = {path: needed(each, path) for path, each in self.companions.items()}
        if not known:
            return own
        if not all("log_density" in each.statistics for each in (own, *known.values())):
            raise CandidError("An ensemble is for generative classifiers: a ResNet has no likelihood.")
        for path, each in known.items():
            same = torch.equal(each.statistics["keys"], own.statistics["keys"])
            if self.companions[path].image_shape != self.model.image_shape or not same:
                raise CandidError(
                    f"'{path}' was calibrated on different images: calibrate all models of an ensemble on "
                    "the same images."
                )
        densities = [each.statistics["log_density"] for each in (own, *known.values())]
        statistics = {**own.statistics, "log_densities": torch.stack(densities, 1)}
        return replace(own, statistics=statistics)

    def _splits(self) -> tuple[str, dict[str, Split]]:
        """Return the name of the part of the data, and all sets as the model sees them."""
        part, split = labelled_images(self.model, self.data, self.options, self.progress)
        if self.options.as_published and split.in_memory:
            raise CandidError(
                "--as-published crops photo files: leave it out, as the images of "
                f"'{self.data}' all have one size."
            )
        splits: dict[str, Split] = {part: split}
        for name, spec in self.options.others.items():
            if name in splits:
                raise CandidError(f"The name '{name}' is taken by the test images: choose another for --ood.")
            images = open_images(spec, self.model.preprocessing)
            splits[name] = prepared(self.model, images, name, self.options, self.progress)
        return part, splits

    def predictions(self) -> tuple[dict[str, Predictions], _Crops] | None:
        """Run all models over all sets; return what the first process found, and other crops of the data."""
        found, runner = self._run(self.model, "predictions")
        own = self.splits[self.part], self.model.preprocessing, self.part
        published = runner.published_predictions(*own) if self.options.as_published else None
        ten = runner.ten_crops(*own, self.options.as_published) if self.options.ten_crop else None
        theirs = [self._run(each, "predictions/ensemble")[0] for each in self.companions.values()]
        if not self.fabric.is_global_zero:
            return None
        return {
            name: _with_ensemble(each, [other[name] for other in theirs]) for name, each in found.items()
        }, _Crops(ten, published)

    def _run(self, model: Model, folder: str) -> tuple[dict[str, Predictions], Runner]:
        out, measures = self.options.out, measures_of(model)
        cache = None if out is None else out / folder
        runner = Runner(model, self.fabric, cache, self.options.workers, self.progress)
        found = {
            name: runner.predictions(split, model.preprocessing, name, measures)
            for name, split in self.splits.items()
        }
        return {name: each for name, each in found.items() if each is not None}, runner

    def evaluation(self, predictions: dict[str, Predictions], crops: _Crops) -> Evaluation:
        """Return all metrics of the ``predictions``."""
        own = predictions[self.part]
        beta = self.model.record.beta
        metrics = {
            "model": self.name,
            "kind": self.model.kind,
            "beta": None if beta is None else str(beta),
            "data": self.data,
            "part": self.part,
            "images": len(own),
            "calibration_bins": BINS,
            **as_json(performance(own, self.model)),
        }
        where = metrics
        if crops.published is not None:
            where = metrics["as_published"] = as_json(performance(crops.published, self.model))
        if crops.ten is not None:
            where["ten_crop"] = as_json(classification(crops.ten, own.labels))
        notes = self._training_note(own)
        if self.held_out is None or self.judge is None:
            text = (
                f"There are no p-values and verdicts: to add them, run 'candid calibrate {self.name} DATA'."
            )
            return Evaluation(self.model, metrics, own, notes=(*notes, Note("no-held-out", text)))
        statistics = {name: statistics_of(each) for name, each in predictions.items()}
        inside, overlap = unseen(statistics[self.part], self.held_out)
        if overlap:
            how = (
                "checked on the others"
                if overlap < len(own)
                else "not checked by them; evaluate other images"
            )
            text = f"{overlap:,} of {len(own):,} images are this model's held-out images: p-values are {how}."
            notes.append(Note("overlap", text))
        detection = Detection(
            self.held_out, inside, {name: each for name, each in statistics.items() if name != self.part}
        )
        judged = {name: _judged(self.judge, each, statistics[name]) for name, each in predictions.items()}
        scaled = None
        if self.options.temperature:
            temperature = self.held_out.temperature
            scaled = replace(own, logits=own.logits.double() / temperature)
            values = as_json(performance(scaled, self.model))
            metrics["temperature_scaled"] = {"temperature": temperature, **values}
        metrics |= {
            "held_out_images": len(self.held_out),
            "held_out_overlap": overlap,
            "false_positives": detection.false_positives(),
            "ood": detection.metrics(),
            "detected_in_class": {name: share(p.class_p_value <= LEVEL) for name, p in judged.items()},
            "verdicts": {
                "score": self.judge.score.name,
                "n_reference": self.judge.promises.n_reference,
                "novelty": self.judge.novelty,
                "error": self.judge.error,
                "sets": {name: _shares(each.verdicts) for name, each in judged.items()},
            },
        }
        return Evaluation(self.model, metrics, own, scaled, detection, judged, tuple(notes))

    def _training_note(self, own: Predictions) -> list[Note]:
        """Say how many of the images the model was trained on, if it has the keys of its training images."""
        seen = int(seen_in_training(own.columns["keys"], self.model.held_out.get("training_keys")).sum())
        if not seen:
            return []
        text = (
            f"{seen:,} of {len(own):,} images are among this model's training images: the metrics flatter it."
        )
        return [Note("training-images", text)]


def performance(predictions: Predictions, model: Model) -> Metrics:
    """Return accuracy, likelihood and calibration errors, with 95 % intervals.

    ``L_X`` and ``L_Y`` are as in the paper's Table 2: L_X without the constant of the Gaussian, L_Y the
    cross-entropy + ln M.
    """
    found = classification(predictions.logits, predictions.labels)
    nats = found["cross_entropy"]
    assert nats is not None
    found["L_Y"] = Interval(*(value + math.log(predictions.logits.shape[1]) for value in nats))
    latent = as_latent(model)
    if predictions.log_density is not None and latent is not None and model.density_of == "pixels":
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


def _with_ensemble(own: Predictions, others: Sequence[Predictions]) -> Predictions:
    """Return the predictions with the log densities that the models of an ensemble give to the images."""
    if not others:
        return own
    densities = [each.log_density for each in (own, *others) if each.log_density is not None]
    return replace(own, columns={**own.columns, "log_densities": torch.stack(densities, 1)})


def _judged(judge: Judge, predictions: Predictions, statistics: Mapping[str, Tensor]) -> JudgedSet:
    p_value, class_p_value = judge.p_values(statistics)
    return JudgedSet(predictions, judge, p_value, class_p_value, judge.verdicts(predictions, p_value))


def _shares(verdicts: Sequence[Verdict]) -> dict[str, float]:
    kinds = [verdict.kind for verdict in verdicts]
    return {kind: kinds.count(kind) / len(kinds) for kind in ("accept", "ambiguous", "novel")}
