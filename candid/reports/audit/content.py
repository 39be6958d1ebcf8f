"""An audit as JSON: equal findings give equal bytes."""

import math
from dataclasses import asdict
from typing import Any

from candid._support import __version__
from candid.reports.audit.fitness import comparisons, fitness
from candid.reports.audit.governance import as_dict, digests, statement
from candid.reports.audit.grades import CRITERIA, Grade
from candid.reports.audit.record import AuditResult, Example, missing, results_by_class

FORMAT, FORMAT_VERSION = "candid-audit", 3
DIGITS = 9
"""Digits of a number: further ones are rounding errors."""


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
            "ood": options.image_sets | options.array_sets,
            "corruptions": list(corruptions.models[0].errors) if corruptions else [],
            "severities": list(options.severities) if corruptions else [],
            "attack": _attack(result),
            "classes": list(result.evaluations[0].class_names),
            "criteria": CRITERIA,
            "absent": result.absent,
            "side_by_side": comparisons(result),
            "digests": [asdict(each) for each in digests(result)],
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
    model = result.models[i]
    corrupted = {each["model"]: each for each in result.corruptions.to_dict()} if result.corruptions else {}
    attacked = {each.name: each.metrics for each in result.attacks or ()}
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
        "fitness": asdict(fit := fitness(result, i)),
        "by_class": results_by_class(result.evaluations[i]).to_dict(),
        "statement": as_dict(statement(result, i, fit)),
        "corruptions": corrupted.get(model.name),
        "attacks": [each.to_dict() for each in attacked[model.name]] if model.name in attacked else None,
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
