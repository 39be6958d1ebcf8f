"""Evaluate a saved model: passes over its data and over other images, then every study of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from candid._support.distributed import launch
from candid._support.errors import CandidError
from candid._support.progress import SILENT, Progress
from candid.data.datasets import Part, open_images, open_part
from candid.data.splits import Split
from candid.evaluation import study
from candid.evaluation.study import Detection
from candid.inference.predictions import Predictions
from candid.inference.runner import Runner
from candid.models import checkpoint
from candid.models.protocol import Model
from candid.trust.judge import LEVEL, HeldOut, Judge, measures_of, needed
from candid.trust.scores import Statistics, statistics_of, with_ensemble
from candid.trust.verdict import Verdict


@dataclass(frozen=True)
class Request:
    """What to evaluate, and how."""

    model: Path
    data: str
    out: Path | None = None
    """Passes are kept in its folder ``predictions``, so that a second study costs nothing."""
    part: Part | None = None
    ood: Mapping[str, str] = field(default_factory=dict)
    """Other sets of images by name."""
    ensemble: tuple[Path, ...] = ()
    """More models for WAIC."""
    ten_crop: bool = False
    temperature: bool = False
    """Whether to report figures with temperature scaling, too."""
    test: str | None = None
    """What verdicts rest on."""
    novelty: float | None = None
    error: float | None = None
    images: int | None = None
    skip_bad: bool = False
    devices: int | None = None
    workers: int = 2


@dataclass(frozen=True)
class Opinions:
    """What the model says of one set of images."""

    predictions: Predictions
    p_value: Tensor
    """Among all held-out images, (N,)."""
    class_p_value: Tensor
    """Among those of the same predicted class, (N,)."""
    verdicts: list[Verdict]


@dataclass(frozen=True)
class Evaluation:
    """All that an evaluation found."""

    metrics: dict[str, Any]
    """As in ``metrics.json``."""
    predictions: Predictions
    scaled: Predictions | None
    """With temperature scaling, if that was asked for."""
    detection: Detection | None
    opinions: dict[str, Opinions]
    """By set of images, the data's own first; empty for a model that was not calibrated."""
    model: Model


def evaluate(request: Request, progress: Progress = SILENT) -> Evaluation | None:
    """Every study of ``request``; None in all processes but the first."""
    fabric = launch(request.devices)
    if not fabric.is_global_zero:
        progress = SILENT
    model = checkpoint.load_any(request.model)
    others = {path: checkpoint.load_any(path) for path in request.ensemble}
    held_out = _held_out(request, model, others)
    levels = request.test, request.novelty, request.error
    judge = None if held_out is None else Judge.of(model, *levels, held_out)
    part, splits = _splits(request, model, progress)
    preprocessing = model.preprocessing

    def ask(each: Model, folder: str) -> tuple[Runner, dict[str, Predictions | None]]:
        measures = measures_of(each)
        kept_in = None if request.out is None else request.out / folder
        passes = Runner(each, fabric, kept_in, request.workers, progress)
        return passes, {
            name: passes.predictions(split, preprocessing, name, measures) for name, split in splits.items()
        }

    passes, found = ask(model, "predictions")
    crops = passes.ten_crops(splits[part], preprocessing, part) if request.ten_crop else None
    theirs = [ask(each, "predictions/ensemble")[1] for each in others.values()]
    if not fabric.is_global_zero:
        return None

    predictions = _present(found)
    metrics = _metrics(request, model, part, predictions[part], crops)
    if held_out is None or judge is None:
        progress.log(f"no p-values and verdicts: to add them, run 'candid calibrate {request.model} DATA'")
        return Evaluation(metrics, predictions[part], None, None, {}, model)
    statistics = {name: statistics_of(each) for name, each in predictions.items()}
    if others:
        companions = [_present(each) for each in theirs]
        statistics = {
            name: with_ensemble(own, [statistics_of(each[name]) for each in companions])
            for name, own in statistics.items()
        }
    outside = {name: each for name, each in statistics.items() if name != part}
    inside, overlap = study.unseen(statistics[part], held_out)
    if overlap:
        others_left = overlap < len(predictions[part])
        progress.log(
            f"{overlap:,} of {len(predictions[part]):,} images are this model's held-out ones: p-values are "
            + ("checked on the others" if others_left else "not checked by them; evaluate others")
        )
    detection = Detection(held_out, inside, outside)
    opinions = {name: _opinions(judge, each, statistics[name]) for name, each in predictions.items()}
    scaled = None
    if request.temperature:
        scaled = study.temperature_scaled(predictions[part], held_out.temperature)
        figures = study.as_json(study.performance(scaled, model))
        metrics["temperature_scaled"] = {"temperature": held_out.temperature, **figures}
    metrics |= {
        "held_out_images": len(held_out),
        "held_out_overlap": overlap,
        "false_positives": detection.false_positives(),
        "ood": detection.figures(),
        "detected_in_class": {name: study.share(p.class_p_value <= LEVEL) for name, p in opinions.items()},
        "verdicts": {
            "test": judge.score.name,
            "ranked_among": judge.detector.n_reference,
            "novelty": judge.novelty,
            "error": judge.error,
            "sets": {name: study.shares(each.verdicts) for name, each in opinions.items()},
        },
    }
    return Evaluation(metrics, predictions[part], scaled, detection, opinions, model)


def _splits(request: Request, model: Model, progress: Progress) -> tuple[str, dict[str, Split]]:
    """The part of the data to evaluate, and the other sets, as the model sees them."""
    preprocessing = model.preprocessing
    chosen = open_part(request.data, model.class_names, request.part, model.record.config)
    splits = {chosen.part: chosen.split}
    for name, spec in request.ood.items():
        if name in splits:
            raise CandidError(f"'{name}' is already what the images of DATA are called: choose another name.")
        splits[name] = open_images(spec, preprocessing)
    prepared = {
        name: split.subsample(request.images).preprocess(preprocessing, request.skip_bad, progress, name)
        for name, split in splits.items()
    }
    return chosen.part, prepared


def _held_out(request: Request, model: Model, others: Mapping[Path, Model]) -> HeldOut | None:
    """What the model, and with it the others of its ensemble, know of held-out images."""
    options = ("ood", "ensemble", "temperature", "test", "novelty", "error")
    if not any(getattr(request, option) for option in options):
        return HeldOut.of(model)
    own = needed(model, request.model)
    if not others:
        return own
    known = {path: needed(other, path) for path, other in others.items()}
    if not all("log_density" in each.statistics for each in (own, *known.values())):
        raise CandidError("An ensemble is for generative classifiers: a ResNet has no likelihood.")
    for path, each in known.items():
        same = torch.equal(each.statistics["keys"], own.statistics["keys"])
        if others[path].image_shape != model.image_shape or not same:
            raise CandidError(
                f"'{path}' was calibrated on other images: calibrate all models of an ensemble on the same."
            )
    statistics = with_ensemble(own.statistics, [each.statistics for each in known.values()])
    return replace(own, statistics=statistics)


def _present(found: Mapping[str, Predictions | None]) -> dict[str, Predictions]:
    return {name: each for name, each in found.items() if each is not None}


def _metrics(
    request: Request, model: Model, part: str, predictions: Predictions, crops: Tensor | None
) -> dict[str, Any]:
    beta = model.record.beta
    metrics = {
        "model": str(request.model),
        "kind": model.kind,
        "beta": None if beta is None else str(beta),
        "data": request.data,
        "part": part,
        "images": len(predictions),
        **study.as_json(study.performance(predictions, model)),
    }
    if crops is not None:
        metrics["ten_crop"] = study.as_json(study.ten_crop_performance(crops, predictions.labels))
    return metrics


def _opinions(judge: Judge, predictions: Predictions, statistics: Statistics) -> Opinions:
    p_value, class_p_value = judge.p_values(statistics)
    return Opinions(predictions, p_value, class_p_value, judge.verdicts(predictions, p_value))
