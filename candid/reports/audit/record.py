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

FORMAT, FORMAT_VERSION = "candid-audit", 1
DIGITS = 9
"""Of a number: more are rounding errors."""


def grades_of(found: Audit) -> dict[str, list[Grade]]:
    """Return the grades of each model, by name."""
    by_name: dict[str, list[Grade]] = {}
    for i, model in enumerate(found.models):
        metrics, posterior = found.evaluations[i].metrics, found.evaluations[i].predictions.posterior
        confidence = float(posterior.amax(1).mean())
        chance = grades.chance_of(found.evaluations[i].predictions.labels)
        guesses = grades.guesses(metrics, chance)
        by_name[model.name] = [
            grades.accuracy(metrics, chance),
            grades.calibration(metrics, confidence, grades.error_by_chance(posterior)),
            grades.false_alarms(metrics),
            grades.out_of_distribution(metrics),
            grades.corruptions(
                found.corruptions[i] if found.corruptions else None,
                found.absent.get("corruptions", ""),
                guesses,
            ),
            grades.attacks(
                found.attacks[0][i].figures if found.attacks else (), found.absent.get("attacks", "")
            ),
        ]
    return by_name


def missing(found: Audit) -> dict[str, list[str]]:
    """What is not known of each model, why, and what would change that."""
    by_name: dict[str, list[str]] = {}
    for model in found.models:
        texts = []
        if not model.is_generative:
            texts.append(
                "A ResNet has no likelihood: it has no bits/dim, no tests of the density, no heatmaps and "
                "samples, and attacks have no detection to fool."
            )
        if not model.held_out:
            texts.append(
                "It has no held-out scores, so there are no p-values, verdicts, out-of-distribution tests "
                f"and detections. To add them: candid calibrate {model.path} DATA, DATA being what it "
                "was trained on."
            )
        elif not found.options.ood:
            texts.append(
                "No other images were given (--ood NAME=PATH), so there are no out-of-distribution tests."
            )
        by_name[model.name] = texts
    return by_name


def side_by_side(found: Audit) -> list[str]:
    """Which model is best at what, where intervals say that it is more than chance."""
    metrics = {model.name: each.metrics for model, each in zip(found.models, found.evaluations, strict=True)}
    texts = [
        _best(metrics, "accuracy", "By accuracy, best first", 1),
        _best(metrics, "top1_ece", "By calibration error, best first", -1),
    ]
    losses = {
        model.name: swept.loss
        for model, each, swept in zip(found.models, found.evaluations, found.corruptions, strict=False)
        if not grades.guesses(each.metrics, grades.chance_of(each.predictions.labels))
    }
    if losses:
        ranked = sorted(losses, key=lambda name: losses[name])
        points = listed(f"{name} ({100 * losses[name]:+.1f} points wrong)" for name in ranked)
        texts.append(f"By what corruptions cost, least first: {points}.")
    return texts


def _best(metrics: dict[str, dict[str, Any]], key: str, words: str, sign: int) -> str:
    ranked = sorted(metrics, key=lambda name: -sign * metrics[name][key])
    shown = listed(f"{name} ({percent(metrics[name][key])})" for name in ranked)
    (low, high), (next_low, next_high) = (metrics[name]["intervals"][key] for name in ranked[:2])
    clear = low > next_high if sign > 0 else high < next_low
    return f"{words}: {shown}." + ("" if clear else " The intervals of the first two overlap.")


def record(found: Audit, judged: dict[str, list[Grade]]) -> dict[str, Any]:
    """Everything but pictures; shares, not percentages."""
    request, lacking = found.options, missing(found)
    first = found.evaluations[0].metrics
    made = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "library_version": __version__,
        "data": request.data,
        "part": first["part"],
        "images": first["images"],
        "quick": request.quick,
        "ood": dict(request.ood),
        "corruptions": list(request.corruptions) if found.corruptions else [],
        "severities": list(request.severities) if found.corruptions else [],
        "attack": None if found.attacks is None else _attack(found),
        "classes": list(found.models[0].model.class_names),
        "criteria": CRITERIA,
        "absent": found.absent,
        "side_by_side": side_by_side(found) if len(found.models) > 1 else [],
        "models": [
            {
                "name": model.name,
                "model": str(model.path),
                "kind": "generative" if model.is_generative else "resnet",
                "beta": None if model.beta is None else str(model.beta),
                "parameters": model.parameters,
                "held_out_images": model.held_out,
                "grades": [asdict(each) for each in judged[model.name]],
                "missing": lacking[model.name],
                "evaluation": found.evaluations[i].metrics,
                "corruptions": found.corruptions[i].record(found.reference) if found.corruptions else None,
                "attacks": [each.record() for each in found.attacks[0][i].figures] if found.attacks else None,
                "explanation": found.overviews[model.name].to_dict()
                if model.name in found.overviews
                else None,
                "receptive_field_width_pixels": _width(found, model.name),
            }
            for i, model in enumerate(found.models)
        ],
        "examples": [_example(found, each) for each in found.examples],
    }
    return rounded(made)


def _attack(found: Audit) -> dict[str, Any]:
    assert found.attacks is not None
    results, asked = found.attacks
    return {"images": len(results[0].scene.labels), **asked.described()}


def _width(found: Audit, name: str) -> float | None:
    return found.fields[name].width_at_half_maximum if name in found.fields else None


def _example(found: Audit, example: Example) -> dict[str, Any]:
    out, path = found.options.out, example.path
    return {
        "image": path.relative_to(out).as_posix() if path.is_relative_to(out) else str(path),
        "set": example.source,
        "why": example.why,
        "true_class": example.true_class,
        "opinions": [
            {
                "model": each.model,
                "class": each.examined.label,
                "posterior": each.examined.confidence,
                "p_value": each.examined.p_value,
                "verdict": each.examined.verdict,
                "in_words": each.explanation.summary.sentence,
            }
            for each in example.opinions
        ],
    }


def rounded(value: Any) -> Any:
    """With floats of at most ``DIGITS`` digits; what is not finite becomes a word.

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
