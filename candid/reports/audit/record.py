"""An audit as JSON: the same findings give the same bytes."""

import math
from dataclasses import asdict
from typing import Any

from candid._support.text import listed, percent
from candid._support.version import __version__
from candid.reports.audit import grades
from candid.reports.audit.examples import Example
from candid.reports.audit.grades import CRITERIA, Grade
from candid.reports.audit.run import Audit

FORMAT, FORMAT_VERSION = "candid-audit", 2
DIGITS = 9
"""Digits of a number: further ones are rounding errors."""


def grades_of(found: Audit) -> dict[str, list[Grade]]:
    """Return the grades of each model, by name."""
    by_name: dict[str, list[Grade]] = {}
    corrupted = [None] * len(found.models) if found.corruptions is None else found.corruptions.models
    attacked = [()] * len(found.models) if found.attacks is None else [e.metrics for e in found.attacks]
    for model, evaluation, own, attacks in zip(
        found.models, found.evaluations, corrupted, attacked, strict=True
    ):
        metrics, posterior = evaluation.metrics, evaluation.predictions.posterior
        confidence = float(posterior.amax(1).mean())
        chance = grades.chance_of(evaluation.predictions.labels)
        guesses, score = grades.guesses(metrics, chance), metrics.get("verdicts", {}).get("score")
        by_name[model.name] = [
            grades.accuracy(metrics, chance),
            grades.calibration(metrics, confidence, grades.error_by_chance(posterior)),
            grades.false_alarms(metrics),
            grades.out_of_distribution(metrics),
            grades.corruptions(own, found.absent.get("corruptions", ""), guesses, score),
            grades.attacks(attacks, found.absent.get("attacks", "")),
        ]
    return by_name


def missing(found: Audit) -> dict[str, list[str]]:
    """Return what is not known about each model, why, and what would change that."""
    by_name: dict[str, list[str]] = {}
    for model in found.models:
        texts = []
        if model.loaded is None:
            texts.append(
                "Only its stored arrays are known: there is no likelihood, and corruptions, attacks and "
                "explanations need the network itself."
            )
        elif model.model.kind == "adopted":
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


def side_by_side(found: Audit) -> list[str]:
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


def record(found: Audit, graded: dict[str, list[Grade]]) -> dict[str, Any]:
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


def _attack(found: Audit) -> dict[str, Any] | None:
    if found.attacks is None:
        return None
    images = len(found.attacks.models[0].inputs.labels)
    return {"images": images, **found.attacks.options.described(found.data)}


def _model(found: Audit, i: int, graded: dict[str, list[Grade]]) -> dict[str, Any]:
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


def _example(found: Audit, example: Example) -> dict[str, Any]:
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
                "summary": each.explanation.summary.sentence,
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
