"""What an audit finds, and the same as JSON: equal findings give equal bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candid._support import __version__
from candid._support.errors import CandidError
from candid._support.files import safe_name
from candid._support.text import listed, percent
from candid.data.datasets import open_images, open_part
from candid.data.splits import Split
from candid.evaluation.result import EvaluationResult
from candid.explanations.explainer import Explanation
from candid.explanations.overview import Overview
from candid.inference.study import named_models
from candid.judging.held_out import HeldOut
from candid.models.protocol import Model, can
from candid.reports.audit import grades
from candid.reports.audit.grades import CRITERIA, Grade
from candid.reports.audit.options import AuditOptions
from candid.robustness.attacks.metrics import AttackResult
from candid.robustness.corruptions.metrics import CorruptionResult
from candid.trust.verdict import Examination

if TYPE_CHECKING:
    from candid.explanations.receptive_field import ReceptiveField

FORMAT, FORMAT_VERSION = "candid-audit", 2
DIGITS = 9
"""Digits of a number: further ones are rounding errors."""


@dataclass(frozen=True)
class AuditedModel:
    """A model under audit."""

    name: str
    path: str
    """What the user named: a folder, a bundled model, or the file of a classifier's test images."""
    loaded: Model | None
    """None if only arrays of it are stored."""
    held_out: int
    """Number of held-out images behind its p-values; 0 if it was never calibrated."""

    @property
    def model(self) -> Model:
        """The model itself."""
        assert self.loaded is not None
        return self.loaded

    @property
    def beta(self) -> float | None:
        """The beta that it was trained with."""
        return None if self.loaded is None else self.loaded.record.beta

    @property
    def is_generative(self) -> bool:
        """Whether it has a density and class means in latent space; an adopted model has no means."""
        return can(self.loaded, "geometry")

    @property
    def folder(self) -> str:
        """The name of its folders."""
        return safe_name(self.name)

    @property
    def parameters(self) -> int | None:
        """The number of its parameters; None if it is not known. A head in closed form counts, an eye not."""
        return None if self.loaded is None else self.loaded.size


@dataclass(frozen=True)
class Opinion:
    """What one model says about an image, and why."""

    model: AuditedModel
    examined: Examination
    explanation: Explanation


@dataclass(frozen=True)
class Example:
    """An image, why it was chosen, and what the generative models say about it."""

    why: str
    source: str
    """The name of its set."""
    path: Path
    true_class: str | None
    opinions: list[Opinion]


@dataclass
class AuditResult:
    """The result of :func:`candid.audit`; lists are in the order of the models."""

    data: str
    options: AuditOptions
    models: list[AuditedModel]
    evaluations: list[EvaluationResult] = field(default_factory=list)
    corruptions: CorruptionResult | None = None
    attacks: AttackResult | None = None
    overviews: dict[str, Overview] = field(default_factory=dict)
    """Explanations of generative models, by name."""
    fields: dict[str, ReceptiveField] = field(default_factory=dict)
    """Receptive fields, by name."""
    examples: list[Example] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    """Studies that were left out, by topic, and why."""
    commands: dict[str, list[str]] = field(default_factory=dict)
    """The commands that repeat each study."""


def grades_of(result: AuditResult) -> dict[str, list[Grade]]:
    """Return the grades of each model, by name."""
    by_name: dict[str, list[Grade]] = {}
    corrupted = [None] * len(result.models) if result.corruptions is None else result.corruptions.models
    attacked = [()] * len(result.models) if result.attacks is None else [e.metrics for e in result.attacks]
    for model, evaluation, corruptions, attacks in zip(
        result.models, result.evaluations, corrupted, attacked, strict=True
    ):
        metrics, posterior = evaluation.metrics, evaluation.predictions.posterior
        confidence = float(posterior.max(1).mean())
        chance = grades.chance_of(evaluation.predictions.labels)
        guesses, score = grades.guesses(metrics, chance), metrics.get("verdicts", {}).get("score")
        by_name[model.name] = [
            grades.accuracy(metrics, chance),
            grades.calibration(metrics, confidence, grades.error_by_chance(posterior)),
            grades.false_alarms(metrics),
            grades.out_of_distribution(metrics),
            grades.corruptions(corruptions, result.absent.get("corruptions", ""), guesses, score),
            grades.attacks(attacks, result.absent.get("attacks", "")),
        ]
    return by_name


def missing(result: AuditResult) -> dict[str, list[str]]:
    """Return what is not known about each model, why, and what would change that."""
    by_name: dict[str, list[str]] = {}
    for model in result.models:
        texts = []
        if model.loaded is None:
            texts.append(
                "Only its stored arrays are known: there is no likelihood, and corruptions, attacks and "
                "explanations need the network itself."
            )
        elif not model.is_generative and can(model.loaded, "density"):
            texts.append(
                "An adopted model has one density of features for all classes: there are no bits/dim, "
                "decision spaces or samples; 'candid examine --figures' draws its heatmaps."
            )
        elif not model.is_generative:
            texts.append(
                "A ResNet has no likelihood: there are no bits/dim, density scores, heatmaps or samples, and "
                "attacks have no detector to fool."
            )
        elif model.model.density_of != "pixels":
            texts.append(
                "Its density is one of features, not of pixels: there are no bits/dim, samples or "
                "counterfactuals. Known photos are shown instead, if it keeps any."
            )
        if not model.held_out:
            texts.append(
                "It has no held-out scores, so there are no p-values, verdicts and outlier scores. To add "
                f"them: candid calibrate {model.path} DATA, where DATA is the data it was trained on."
            )
        elif not result.options.ood:
            texts.append("No other images were given (--ood NAME=PATH), so nothing is known about detection.")
        by_name[model.name] = texts
    return by_name


def side_by_side(result: AuditResult) -> list[str]:
    """Return which model is best at what, and where intervals say that this may be chance."""
    metrics = {
        model.name: evaluation.metrics
        for model, evaluation in zip(result.models, result.evaluations, strict=True)
    }
    texts = [
        _best(metrics, "accuracy", "By accuracy, best first", 1),
        _best(metrics, "top1_ece", "By calibration error, best first", -1),
    ]
    losses = {
        corrupted.name: corrupted.loss
        for evaluation, corrupted in zip(result.evaluations, result.corruptions or (), strict=False)
        if not grades.guesses(evaluation.metrics, grades.chance_of(evaluation.predictions.labels))
    }
    if losses:
        ranked = sorted(losses, key=lambda name: losses[name])
        points = listed(f"{name} ({100 * losses[name]:+.1f} points)" for name in ranked)
        texts.append(f"By what corruptions add to the error rate, least first: {points}.")
    return texts


def _best(metrics: dict[str, dict[str, Any]], key: str, words: str, sign: int) -> str:
    ranked = sorted(metrics, key=lambda name: -sign * metrics[name][key])
    shown = listed(f"{name} ({percent(metrics[name][key])})" for name in ranked)
    (low, high), (next_low, next_high) = (metrics[name]["intervals"][key] for name in ranked[:2])
    clear = low > next_high if sign > 0 else high < next_low
    return f"{words}: {shown}." + ("" if clear else " The intervals of the first two overlap.")


def record(result: AuditResult, graded: dict[str, list[Grade]]) -> dict[str, Any]:
    """Return everything but pictures; rates are shares, not percentages."""
    options, first, corruptions = result.options, result.evaluations[0].metrics, result.corruptions
    return rounded(
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "library_version": __version__,
            "data": result.data,
            "part": first["part"],
            "images": first["images"],
            "quick": options.quick,
            "ood": options.others,
            "corruptions": list(corruptions.models[0].errors) if corruptions else [],
            "severities": list(options.severities) if corruptions else [],
            "attack": _attack(result),
            "classes": list(result.evaluations[0].class_names),
            "criteria": CRITERIA,
            "absent": result.absent,
            "side_by_side": side_by_side(result) if len(result.models) > 1 else [],
            "models": [_model(result, i, graded) for i in range(len(result.models))],
            "examples": [_example(result, example) for example in result.examples],
        }
    )


def _attack(result: AuditResult) -> dict[str, Any] | None:
    if result.attacks is None:
        return None
    images = len(result.attacks.models[0].inputs.labels)
    return {"images": images, **result.attacks.options.described(result.data)}


def _model(result: AuditResult, i: int, graded: dict[str, list[Grade]]) -> dict[str, Any]:
    model, corruptions, attacks = result.models[i], result.corruptions, result.attacks
    overview, field = result.overviews.get(model.name), result.fields.get(model.name)
    return {
        "name": model.name,
        "model": model.path,
        "kind": result.evaluations[i].metrics["kind"],
        "beta": None if model.beta is None else str(model.beta),
        "parameters": model.parameters,
        "held_out_images": model.held_out,
        "grades": [asdict(each) for each in graded[model.name]],
        "missing": missing(result)[model.name],
        "evaluation": result.evaluations[i].metrics,
        "corruptions": None if corruptions is None else corruptions.to_dict()[i],
        "attacks": None if attacks is None else [each.to_dict() for each in attacks.models[i].metrics],
        "explanation": None if overview is None else overview.to_dict(),
        "receptive_field_width_pixels": None if field is None else field.width_at_half_maximum,
    }


def _example(result: AuditResult, example: Example) -> dict[str, Any]:
    """Return the image and the examinations of all models, with paths relative to the audit's folder."""
    out, path = result.options.out, example.path
    image = path.relative_to(out).as_posix() if path.is_relative_to(out) else str(path)
    return {
        "image": image,
        "set": example.source,
        "why": example.why,
        "true_class": example.true_class,
        "opinions": [
            {
                "model": opinion.model.name,
                **opinion.examined.to_dict(),
                "path": image,
                "summary": opinion.explanation.sentence,
            }
            for opinion in example.opinions
        ],
    }


def rounded(value: Any) -> Any:
    """Return ``value`` with floats of at most ``DIGITS`` digits; infinity becomes a word.

    >>> rounded({"a": [0.1 + 0.2, float("inf")]})
    {'a': [0.3, 'inf']}
    """
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    return value


def audited_models(models: Any, data: str, options: AuditOptions) -> tuple[list[AuditedModel], bool]:
    """Return the loaded models, and whether the images of ``data`` can be looked up one by one."""
    named = list(models) if isinstance(models, list | tuple) else [models]
    sources = list(
        {str(model) if isinstance(model, str | Path) else id(model): model for model in named}.values()
    )
    audited = []
    for source, (name, model) in zip(sources, named_models(sources).items(), strict=True):
        path = str(source) if isinstance(source, str | Path) else name
        held_out = HeldOut.of(model)
        audited.append(AuditedModel(name, path, model, 0 if held_out is None else len(held_out)))
    folders = [opened.folder for opened in audited]
    for opened in audited:
        if folders.count(opened.folder) > 1:
            raise CandidError(f"The name of '{opened.name}' is too similar to another model's: rename it.")
    return audited, _check_data(audited, data, options)


def _check_data(models: Sequence[AuditedModel], data: str, options: AuditOptions) -> bool:
    """Check that all models see the same images, and return whether these can be looked up one by one."""
    first, *others = models
    split, part = _opened(first, data, options)
    split.subsample(options.corruption_images or None)
    for other in others:
        if other.model.class_names != first.model.class_names:
            raise CandidError(
                f"'{first.path}' and '{other.path}' have different classes: audit them separately."
            )
        if _opened(other, data, options)[0].fingerprint() != split.fingerprint():
            raise CandidError(
                f"'{first.path}' and '{other.path}' have different test images of '{data}': audit them "
                "separately."
            )
    if part in options.others:
        raise CandidError(f"The name '{part}' is taken by the test images: choose another name for --ood.")
    for spec in options.others.values():
        open_images(spec, first.model.preprocessing).subsample(options.images)
    return split.can_index


def _opened(model: AuditedModel, data: str, options: AuditOptions) -> tuple[Split, str]:
    chosen = open_part(data, model.model.class_names, options.part, model.model.record.config)
    return chosen.split.subsample(options.images), chosen.part
