"""What an audit finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candid._support.errors import CandidError
from candid._support.files import safe_name
from candid.data.datasets import open_images, open_part
from candid.data.splits import Split
from candid.evaluation.result import EvaluationResult
from candid.explanations.explainer import Explanation
from candid.explanations.overview import Overview
from candid.inference.study import named_models
from candid.judging.by_class import ByClass
from candid.judging.held_out import HeldOut
from candid.models.protocol import Model, can
from candid.reports.audit import grades
from candid.reports.audit.grades import Grade
from candid.reports.audit.options import AuditOptions
from candid.robustness.attacks.metrics import AttackResult
from candid.robustness.corruptions.metrics import CorruptionResult
from candid.trust.verdict import Examination

if TYPE_CHECKING:
    from candid.explanations.receptive_field import ReceptiveField


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
    def is_resnet(self) -> bool:
        """Whether it is a ResNet of candid: neither a density nor a classifier from elsewhere."""
        return can(self.loaded, "network") and not (self.is_generative or can(self.loaded, "density"))

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


STUDIES = ("corruptions", "attacks", "explanations")
NO_NETWORK = "Stored arrays have no network, which this study needs: audit a model."


def results_by_class(evaluation: EvaluationResult) -> ByClass:
    """Return the results by class of the test images."""
    return ByClass.from_dict(evaluation.metrics["by_class"])


def grades_of(result: AuditResult) -> dict[str, list[Grade]]:
    """Return the grades of each model, by name."""
    by_name: dict[str, list[Grade]] = {}
    corrupted = {model.name: model for model in result.corruptions or ()}
    attacked = {model.name: model.metrics for model in result.attacks or ()}
    for model, evaluation in zip(result.models, result.evaluations, strict=True):
        corruptions, attacks = corrupted.get(model.name), attacked.get(model.name, ())
        absent = result.absent if model.loaded is not None else dict.fromkeys(STUDIES, NO_NETWORK)
        metrics, posterior = evaluation.metrics, evaluation.predictions.posterior
        confidence = float(posterior.max(1).mean())
        chance = grades.chance_of(evaluation.predictions.labels)
        guesses, score = grades.guesses(metrics, chance), metrics.get("verdicts", {}).get("score")
        by_name[model.name] = [
            grades.accuracy(metrics, chance),
            grades.calibration(metrics, confidence, grades.error_by_chance(posterior)),
            grades.false_alarms(metrics),
            grades.out_of_distribution(metrics),
            grades.corruptions(corruptions, absent.get("corruptions", ""), guesses, score),
            grades.attacks(attacks, absent.get("attacks", "")),
        ]
    return by_name


def missing(result: AuditResult) -> dict[str, list[str]]:
    """Return what is not known about each model, why, and what would change that."""
    by_name: dict[str, list[str]] = {}
    for model, evaluation in zip(result.models, result.evaluations, strict=True):
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
        elif not evaluation.metrics.get("ood"):
            texts.append("No other images were given (--ood NAME=PATH), so nothing is known about detection.")
        by_name[model.name] = texts
    return by_name


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
    if part in options.image_sets:
        raise CandidError(f"The name '{part}' is taken by the test images: choose another name for --ood.")
    for spec in options.image_sets.values():
        open_images(spec, first.model.preprocessing).subsample(options.images)
    return split.can_index


def _opened(model: AuditedModel, data: str, options: AuditOptions) -> tuple[Split, str]:
    chosen = open_part(data, model.model.class_names, options.part, model.model.record.config)
    return chosen.split.subsample(options.images), chosen.part
