"""An audit as JSON: the same findings give the same bytes."""

import math
from dataclasses import asdict
from typing import Any

from candid._support.version import __version__
from candid.reports.audit import grades as verdicts
from candid.reports.audit.examples import Example
from candid.reports.audit.grades import CRITERIA, Finding, listed, percent
from candid.reports.audit.run import Audit

FORMAT, FORMAT_VERSION = "candid-audit", 1
DIGITS = 9
"""Of a number: more are rounding errors."""


def findings(found: Audit) -> dict[str, list[Finding]]:
    """The verdicts on each model, by its name."""
    by_name: dict[str, list[Finding]] = {}
    for i, subject in enumerate(found.subjects):
        metrics, posterior = found.evaluations[i].metrics, found.evaluations[i].predictions.posterior
        confidence = float(posterior.amax(1).mean())
        chance = verdicts.chance_of(found.evaluations[i].predictions.labels)
        guesses = verdicts.guesses(metrics, chance)
        by_name[subject.name] = [
            verdicts.accuracy(metrics, chance),
            verdicts.calibration(metrics, confidence, verdicts.error_by_chance(posterior)),
            verdicts.false_alarms(metrics),
            verdicts.out_of_distribution(metrics),
            verdicts.corruptions(
                found.sweeps[i] if found.sweeps else None, found.absent.get("corruptions", ""), guesses
            ),
            verdicts.attacks(
                found.attacked.found[i].figures if found.attacked else (), found.absent.get("attacks", "")
            ),
        ]
    return by_name


def missing(found: Audit) -> dict[str, list[str]]:
    """What is not known of each model, why, and what would change that."""
    by_name: dict[str, list[str]] = {}
    for subject in found.subjects:
        texts = []
        if not subject.is_generative:
            texts.append(
                "A ResNet has no likelihood: it has no bits/dim, no tests of the density, no heatmaps and "
                "samples, and attacks have no detection to fool."
            )
        if not subject.held_out:
            texts.append(
                "It has no held-out scores, so there are no p-values, verdicts, out-of-distribution tests "
                f"and detections. To add them: candid calibrate {subject.path} DATA, DATA being what it "
                "was trained on."
            )
        elif not found.request.ood:
            texts.append(
                "No other images were given (--ood NAME=PATH), so there are no out-of-distribution tests."
            )
        by_name[subject.name] = texts
    return by_name


def side_by_side(found: Audit) -> list[str]:
    """Which model is best at what, where intervals say that it is more than chance."""
    metrics = {
        subject.name: each.metrics for subject, each in zip(found.subjects, found.evaluations, strict=True)
    }
    texts = [
        _best(metrics, "accuracy", "By accuracy, best first", 1),
        _best(metrics, "top1_ece", "By calibration error, best first", -1),
    ]
    losses = {
        subject.name: swept.loss
        for subject, each, swept in zip(found.subjects, found.evaluations, found.sweeps, strict=False)
        if not verdicts.guesses(each.metrics, verdicts.chance_of(each.predictions.labels))
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


def record(found: Audit, judged: dict[str, list[Finding]]) -> dict[str, Any]:
    """Everything but pictures; shares, not percentages."""
    request, lacking = found.request, missing(found)
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
        "corruptions": list(request.corruptions) if found.sweeps else [],
        "severities": list(request.severities) if found.sweeps else [],
        "attack": None if found.attacked is None else _attack(found),
        "classes": list(found.subjects[0].model.class_names),
        "criteria": CRITERIA,
        "absent": found.absent,
        "side_by_side": side_by_side(found) if len(found.subjects) > 1 else [],
        "models": [
            {
                "name": subject.name,
                "model": str(subject.path),
                "kind": "generative" if subject.is_generative else "resnet",
                "beta": None if subject.beta is None else str(subject.beta),
                "parameters": sum(each.numel() for each in subject.model.parameters()),
                "held_out_images": subject.held_out,
                "findings": [asdict(each) for each in judged[subject.name]],
                "missing": lacking[subject.name],
                "evaluation": found.evaluations[i].metrics,
                "corruptions": found.sweeps[i].record(found.reference) if found.sweeps else None,
                "attacks": [each.record() for each in found.attacked.found[i].figures]
                if found.attacked
                else None,
                "explanation": found.overviews[subject.name].record()
                if subject.name in found.overviews
                else None,
                "receptive_field_width_pixels": _width(found, subject.name),
            }
            for i, subject in enumerate(found.subjects)
        ],
        "examples": [_example(found, each) for each in found.examples],
    }
    return rounded(made)


def _attack(found: Audit) -> dict[str, Any]:
    assert found.attacked is not None
    images = len(found.attacked.found[0].scene.labels)
    return {"images": images, **found.attacked.request.described()}


def _width(found: Audit, name: str) -> float | None:
    return found.fields[name].width_at_half_maximum if name in found.fields else None


def _example(found: Audit, example: Example) -> dict[str, Any]:
    out, path = found.request.out, example.path
    return {
        "image": path.relative_to(out).as_posix() if path.is_relative_to(out) else str(path),
        "set": example.source,
        "why": example.why,
        "true_class": example.true_class,
        "opinions": [
            {
                "model": each.model,
                "class": each.class_names[each.examined.classes[0]],
                "posterior": each.examined.posterior[0],
                "p_value": each.examined.p_value,
                "verdict": None if each.examined.verdict is None else each.examined.verdict.kind,
                "in_words": each.explanation.reading.sentence,
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
