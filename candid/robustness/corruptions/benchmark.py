"""How models take corrupted images: errors, entropies and detection over all corruptions and severities."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from candid._support.distributed import launch
from candid._support.errors import CandidError
from candid._support.progress import SILENT, Progress
from candid._support.randomness import generator
from candid._support.text import short_names
from candid.data.datasets import Part, open_part
from candid.data.images import Preprocessing, image_keys
from candid.data.splits import Split
from candid.evaluation.study import Detection, unseen
from candid.inference.predictions import Predictions
from candid.inference.roc import area_under_curve
from candid.inference.runner import Runner, Transform
from candid.models import checkpoint
from candid.models.protocol import Model
from candid.robustness.corruptions.apply import CORRUPTIONS, SEVERITIES, corrupted
from candid.robustness.corruptions.registry import check_names, check_severities
from candid.trust.judge import HeldOut, measures_of
from candid.trust.scores import Statistics, chosen_score, statistics_of


@dataclass(frozen=True)
class Reference:
    """Errors that corruption errors are relative to, as shares: means over the five severities."""

    name: str
    clean: float
    errors: Mapping[str, float]


def alexnet() -> Reference:
    """Return AlexNet's errors, as published with ImageNet-C."""
    errors = {name: each.alexnet for name, each in CORRUPTIONS.items() if each.alexnet is not None}
    return Reference("AlexNet", 0.435, errors)


@dataclass(frozen=True)
class Request:
    """What to corrupt, and how."""

    models: tuple[Path, ...]
    data: str
    out: Path
    """Passes are kept in its folder ``predictions``: a sweep that was stopped goes on where it was."""
    part: Part | None = None
    corruptions: tuple[str, ...] = tuple(CORRUPTIONS)
    severities: tuple[int, ...] = SEVERITIES
    corrupted: Path | None = None
    """A folder with corrupted images, <corruption>/<severity>/<class>/..., instead of making them."""
    baseline: Path | None = None
    """The model whose errors corruption errors are relative to; of 1000 classes AlexNet's, if None."""
    images: int | None = None
    seed: int = 0
    skip_bad: bool = False
    devices: int | None = None
    workers: int = 2

    def __post_init__(self) -> None:
        check_names(self.corruptions)
        check_severities(self.severities)
        if not self.models or not self.corruptions or not self.severities:
            raise CandidError("A sweep needs at least one model, one corruption and one severity.")


@dataclass(frozen=True)
class Sweep:
    """What became of one model."""

    name: str
    beta: float | None
    clean_error: float
    clean_entropy: float
    """Mean of the posterior's, in nats."""
    errors: dict[str, list[float]]
    """By corruption, one for each severity, as shares."""
    entropies: dict[str, list[float]]
    """In nats."""
    auc: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of telling corrupted images from clean ones, by test and corruption; of a calibrated model only."""
    test: str | None = None
    """The one that verdicts rest on."""
    images: int = 0
    """Of each corruption and severity."""
    severities: tuple[int, ...] = SEVERITIES

    @property
    def mean_errors(self) -> dict[str, float]:
        """By corruption, over the severities."""
        return {name: _mean(each) for name, each in self.errors.items()}

    @property
    def mean_error(self) -> float:
        """Over all corruptions and severities."""
        return _mean(self.mean_errors.values())

    @property
    def loss(self) -> float:
        """What corruptions make wrong in addition, as a share."""
        return self.mean_error - self.clean_error

    @property
    def entropy_increase(self) -> float:
        """Mean over all corruptions and severities, in nats."""
        return _mean(_mean(each) for each in self.entropies.values()) - self.clean_entropy

    def as_reference(self) -> Reference:
        """For the corruption errors of other models."""
        return Reference(self.name, self.clean_error, self.mean_errors)

    def corruption_errors(self, reference: Reference) -> dict[str, float | None]:
        """Return ``CE_c = sum_s E_sc / sum_s E_sc(reference)`` by corruption; None if that makes no errors.

        Corruptions that the reference was not measured on are left out.
        """
        known = {name: own for name, own in self.mean_errors.items() if name in reference.errors}
        return {name: _ratio(own, reference.errors[name]) for name, own in known.items()}

    def relative_errors(self, reference: Reference) -> dict[str, float | None]:
        """``sum_s (E_sc - E_clean) / sum_s (E_sc - E_clean)(reference)`` by corruption."""
        return {
            name: _ratio(own - self.clean_error, reference.errors[name] - reference.clean)
            for name, own in self.mean_errors.items()
            if name in reference.errors
        }

    def record(self, reference: Reference | None) -> dict[str, Any]:
        """As JSON; percentages are shares here."""
        found: dict[str, Any] = {
            "model": self.name,
            "beta": None if self.beta is None else str(self.beta),
            "images": self.images,
            "severities": list(self.severities),
            "clean_error": self.clean_error,
            "entropy_increase_nats": self.entropy_increase,
            "errors": self.errors,
            "auc": self.auc,
            "mean_auc": {test: _mean(values.values()) for test, values in self.auc.items()},
        }
        if reference is not None:
            own, relative = self.corruption_errors(reference), self.relative_errors(reference)
            found |= {
                "reference": reference.name,
                "ce": own,
                "mce": _mean_if_known(own.values()),
                "relative_mce": _mean_if_known(relative.values()),
            }
        return found


def sweep(request: Request, progress: Progress = SILENT) -> tuple[list[Sweep], Reference | None] | None:
    """Every model on every corruption; None in all processes but the first."""
    fabric = launch(request.devices)
    if not fabric.is_global_zero:
        progress = SILENT
    paths = list(dict.fromkeys((*request.models, *([request.baseline] if request.baseline else []))))
    found: dict[Path, Sweep] = {}
    classes = 0
    for path, name in zip(paths, short_names(paths), strict=True):
        model = checkpoint.load_any(path)
        classes = model.config.classes
        passes = Runner(model, fabric, request.out / "predictions", request.workers, progress)
        swept = _swept(request, passes, name, progress)
        if swept is not None:
            found[path] = swept
    if not fabric.is_global_zero:
        return None
    if request.baseline is not None:
        reference: Reference | None = found[request.baseline].as_reference()
    elif classes == 1000 and request.severities == SEVERITIES:
        reference = alexnet()
    else:
        reference = None
        progress.log("no mCE: name the model that it is relative to with --baseline")
    return [found[path] for path in dict.fromkeys(request.models)], reference


def _swept(request: Request, passes: Runner, name: str, progress: Progress) -> Sweep | None:
    model = passes.model
    held_out = HeldOut.of(model)
    preprocessing = model.preprocessing
    measures = measures_of(model)
    clean_split = _split(request.data, request.part, request, model, preprocessing, progress)
    clean = passes.predictions(clean_split, preprocessing, f"{name}, clean", measures)
    detection = None
    if clean is not None and held_out is not None:
        detection = Detection(held_out, unseen(statistics_of(clean), held_out)[0], {})
    errors: dict[str, list[float]] = {}
    entropies: dict[str, list[float]] = {}
    auc: dict[str, dict[str, float]] = {}
    images: list[int] = []
    for corruption in request.corruptions:
        statistics: list[Statistics] = []
        for severity in request.severities:
            split = clean_split
            change: Transform | None = _change(corruption, severity, request.seed)
            if request.corrupted is not None:
                folder = request.corrupted / corruption / str(severity)
                split, change = _split(str(folder), "all", request, model, preprocessing, progress), None
            title = f"{name}, {corruption} {severity}"
            predictions = passes.predictions(split, preprocessing, title, measures, change)
            if predictions is not None:
                errors.setdefault(corruption, []).append(_error(predictions))
                entropies.setdefault(corruption, []).append(_entropy(predictions))
                statistics.append(statistics_of(predictions))
                images.append(len(predictions))
        if detection is not None:
            together = {key: torch.cat([each[key] for each in statistics]) for key in statistics[0]}
            for test, scores in detection.scores(together).items():
                area = area_under_curve(detection.scores_inside[test], scores)
                auc.setdefault(test, {})[corruption] = area
    if clean is None:
        return None
    return Sweep(
        name,
        model.record.beta,
        _error(clean),
        _entropy(clean),
        errors,
        entropies,
        auc,
        None if held_out is None else chosen_score(held_out.statistics).name,
        min(images),
        request.severities,
    )


def _split(
    spec: str,
    part: Part | None,
    request: Request,
    model: Model,
    preprocessing: Preprocessing,
    progress: Progress,
) -> Split:
    chosen = open_part(spec, model.class_names, part, model.record.config)
    return chosen.split.subsample(request.images).preprocess(preprocessing, request.skip_bad, progress, spec)


def _change(corruption: str, severity: int, seed: int) -> Transform:
    """The corruption; its randomness is a function of the seed and of the batch's pixels."""
    return Transform(f"{corruption} {severity} {seed}", partial(_apply, corruption, severity, seed))


def _apply(corruption: str, severity: int, seed: int, images: Tensor) -> Tensor:
    number = CORRUPTIONS[corruption].number
    pixels = int(image_keys(images).sum()) % 2**63
    return corrupted(images, corruption, severity, generator(seed, number, severity, pixels))


def _error(predictions: Predictions) -> float:
    return float((predictions.logits.argmax(1) != predictions.labels).double().mean())


def _entropy(predictions: Predictions) -> float:
    return float(torch.special.entr(predictions.posterior).sum(1).mean())


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)


def _mean_if_known(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known or not known else _mean(value for value in known if value is not None)


def _ratio(value: float, of: float) -> float | None:
    return value / of if of > 0 else None
