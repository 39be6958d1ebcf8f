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


def grades_of(found: AuditResult) -> dict[str, list[Grade]]:
    """Return the grades of each model, by name."""
    by_name: dict[str, list[Grade]] = {}
    corrupted = [None] * len(found.models) if found.corruptions is None else found.corruptions.models
    attacked = [()] * len(found.models) if found.attacks is None else [e.metrics for e in found.attacks]
    for model, evaluation, corruptions, attacks in zip(
        found.models, found.evaluations, corrupted, attacked, strict=True
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
            grades.corruptions(corruptions, found.absent.get("corruptions", ""), guesses, score),
            grades.attacks(attacks, found.absent.get("attacks", "")),
        ]
    return by_name


def missing(found: AuditResult) -> dict[str, list[str]]:
    """Return what is not known about each model, why, and what would change that."""
    by_name: dict[str, list[str]] = {}
    for model in found.models:
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
        elif model.model.density_of == "features":
            texts.append(
                "Its density is one of features, not of pixels: there are no bits/dim, samples or "
                "counterfactuals. Known photos are shown instead, if it keeps any."
            )
        if not model.held_out:
            texts.append(
                "It has no held-out scores, so there are no p-values, verdicts and outlier scores. To add "
                f"them: candid calibrate {model.path} DATA, where DATA is the data it was trained on."
            )
        elif not found.options.ood:
            texts.append("No other images were given (--ood NAME=PATH), so nothing is known about detection.")
        by_name[model.name] = texts
    return by_name


def side_by_side(found: AuditResult) -> list[str]:
    """Return which model is best at what, and where intervals say that this may be chance."""
    metrics = {model.name: each.metrics for model, each in zip(found.models, found.evaluations, strict=True)}
    texts = [
        _best(metrics, "accuracy", "By accuracy, best first", 1),
        _best(metrics, "top1_ece", "By calibration error, best first", -1),
    ]
    losses = {
        own.name: own.loss
        for each, own in zip(found.evaluations, found.corruptions or (), strict=False)
        if not grades.guesses(each.metrics, grades.chance_of(each.predictions.labels))
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


def record(found: AuditResult, graded: dict[str, list[Grade]]) -> dict[str, Any]:
    """Return everything but pictures; rates are shares, not percentages."""
    options, first, corruptions = found.options, found.evaluations[0].metrics, found.corruptions
    return rounded(
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "library_version": __version__,
            "data": found.data,
            "part": first["part"],
            "images": first["images"],
            "quick": options.quick,
            "ood": options.others,
            "corruptions": list(corruptions.models[0].errors) if corruptions else [],
            "severities": list(options.severities) if corruptions else [],
            "attack": _attack(found),
            "classes": list(found.evaluations[0].class_names),
            "criteria": CRITERIA,
            "absent": found.absent,
            "side_by_side": side_by_side(found) if len(found.models) > 1 else [],
            "models": [_model(found, i, graded) for i in range(len(found.models))],
            "examples": [_example(found, each) for each in found.examples],
        }
    )


def _attack(found: AuditResult) -> dict[str, Any] | None:
    if found.attacks is None:
        return None
    images = len(found.attacks.models[0].inputs.labels)
    return {"images": images, **found.attacks.options.described(found.data)}


def _model(found: AuditResult, i: int, graded: dict[str, list[Grade]]) -> dict[str, Any]:
    model, corruptions, attacks = found.models[i], found.corruptions, found.attacks
    overview, field = found.overviews.get(model.name), found.fields.get(model.name)
    return {
        "name": model.name,
        "model": model.path,
        "kind": found.evaluations[i].metrics["kind"],
        "beta": None if model.beta is None else str(model.beta),
        "parameters": model.parameters,
        "held_out_images": model.held_out,
        "grades": [asdict(each) for each in graded[model.name]],
        "missing": missing(found)[model.name],
        "evaluation": found.evaluations[i].metrics,
        "corruptions": None if corruptions is None else corruptions.to_dict()[i],
        "attacks": None if attacks is None else [each.to_dict() for each in attacks.models[i].metrics],
        "explanation": None if overview is None else overview.to_dict(),
        "receptive_field_width_pixels": None if field is None else field.width_at_half_maximum,
    }


def _example(found: AuditResult, example: Example) -> dict[str, Any]:
    """Return the image and the examinations of all models, with paths relative to the audit's folder."""
    out, path = found.options.out, example.path
    image = path.relative_to(out).as_posix() if path.is_relative_to(out) else str(path)
    return {
        "image": image,
        "set": example.source,
        "why": example.why,
        "true_class": example.true_class,
        "opinions": [
            {
                "model": each.model.name,
                **each.examined.to_dict(),
                "path": image,
                "summary": each.explanation.sentence,
            }
            for each in example.opinions
        ],
    }


def rounded(value: Any) -> Any:
    """Return ``value`` with floats of at most ``DIGITS`` digits; infinity becomes a word.

    >>> rounded({"a": [0.1 + 0.2, float("inf")]})
    {'a': [0.3, 'inf']}
    """
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    return value


def audited_models(models: Any, data: str, options: AuditOptions) -> tuple[list[AuditedModel], bool]:
    """Return the loaded models, and whether the images of ``data`` can be looked up one by one."""
    named = list(models) if isinstance(models, list | tuple) else [models]
    sources = list({str(each) if isinstance(each, str | Path) else id(each): each for each in named}.values())
    audited = []
    for source, (name, model) in zip(sources, named_models(sources).items(), strict=True):
        path = str(source) if isinstance(source, str | Path) else name
        held_out = HeldOut.of(model)
        audited.append(AuditedModel(name, path, model, 0 if held_out is None else len(held_out)))
    folders = [each.folder for each in audited]
    for each in audited:
        if folders.count(each.folder) > 1:
            raise CandidError(f"The name of '{each.name}' is too similar to another model's: rename it.")
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
