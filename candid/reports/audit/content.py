"""An audit as text for reviewers and as JSON: equal findings give equal bytes.

The text is what a reviewer under the EU AI Act or an ISO/IEC 42001 auditor looks for, from card and figures.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from candid._support import __version__
from candid._support.files import file_hash
from candid._support.numbers import digest
from candid._support.text import listed, percent, plural, span
from candid.inference.predictions import Predictions
from candid.models import zoo
from candid.models.protocol import can
from candid.reports.audit import grades
from candid.reports.audit.fitness import Fitness, comparisons, fitness, noun
from candid.reports.audit.grades import CRITERIA, Grade
from candid.reports.audit.record import (
    AuditedModel,
    AuditResult,
    Example,
    grades_of,
    missing,
    results_by_class,
)

NOT_STATED = "Not stated: the model has no card. Its owner has to say it."
MOST_CHANGES = 20
MOST_HASHED = 20_000
"""Files of a set that are read for its digest; of more, the names and what the model saw of them."""


@dataclass(frozen=True)
class Part:
    """A heading of the statement, where it is asked for, and what there is to say."""

    heading: str
    asked_in: str
    texts: list[str]


@dataclass(frozen=True)
class Digest:
    """The identity of a model, an eye or a set of images."""

    of: str
    name: str
    sha256: str
    """Empty if there is none."""
    how: str = ""


def statement(result: AuditResult, i: int, fitness: Fitness) -> list[Part]:
    """Return the statement on the model number ``i``."""
    model = result.models[i]
    card = zoo.card(model.path) if model.path in zoo.MODELS else {}
    intended = [card["summary"]] if card else [NOT_STATED]
    return [
        Part(
            "Intended use",
            "AI Act Art. 13(3)(b)(i), Annex IV 1(a); ISO/IEC 42001 A.9.4",
            [*intended, *fitness.fit],
        ),
        Part(
            "Not to be used for",
            "AI Act Art. 13(3)(b)(iii); ISO/IEC 42001 A.9.2",
            [*card.get("not_for", [NOT_STATED]), *fitness.unfit],
        ),
        Part("Data", "AI Act Art. 10, Annex IV 2(d); ISO/IEC 42001 A.7", list(_data(result, i, card))),
        Part(
            "Metrics",
            "AI Act Art. 15(1)–(3), Annex IV 2(g) and 4; ISO/IEC 42001 A.6.2.4",
            list(_metrics(result, i)),
        ),
        Part(
            "Limits",
            "AI Act Art. 13(3)(b), Annex IV 3; ISO/IEC 42001 A.8.2",
            card.get("limits", []) + result.evaluations[i].metrics.get("verdicts", {}).get("sentences", []),
        ),
        Part(
            "Robustness and security",
            "AI Act Art. 15(4)–(5), Annex IV 2(h); ISO/IEC 42001 A.6.2.4",
            list(_robustness(result, model)),
        ),
        Part(
            "Human oversight",
            "AI Act Art. 14, Annex IV 2(e); ISO/IEC 42001 A.9.2",
            list(_oversight(result, i)),
        ),
        Part("Changes", "AI Act Annex IV 6; ISO/IEC 42001 A.6.2.6", list(_changes(model))),
        Part("What was not tested", "AI Act Annex IV 3; ISO/IEC 42001 A.6.2.4", fitness.untested),
    ]


def _data(result: AuditResult, i: int, card: dict[str, Any]) -> Iterator[str]:
    model, evaluation = result.models[i], result.evaluations[i]
    yield from card.get("data", [])
    if model.loaded is not None:
        head = model.model.metadata.get("head")
        fitted = f" ({head['photos']:,} photos)" if isinstance(head, dict) and "photos" in head else ""
        source = model.model.record.data or model.model.record.source
        yield f"Trained on: {source or 'not recorded'}{fitted}."
    images = np.bincount(evaluation.predictions.labels, minlength=len(evaluation.class_names))
    yield (
        f"Tested on {evaluation.metrics['images']:,} {noun(result)} of {result.data} "
        f"({evaluation.metrics['part']}): {len(images):,} classes with {images.min():,} to {images.max():,} "
        "each."
    )
    if model.held_out:
        overlap = evaluation.metrics.get("held_out_overlap", 0)
        yield (
            f"Verdicts are calibrated on {plural(model.held_out, 'held-out image')}; "
            f"{overlap or 'none'} of the test images {'is' if overlap == 1 else 'are'} among them."
        )
    yield "Who took and labelled the images, with which rights, and whom they show, is not known to candid."


def _metrics(result: AuditResult, i: int) -> Iterator[str]:
    metrics = result.evaluations[i].metrics
    chance = grades.chance_of(result.evaluations[i].predictions.labels)
    yield grades.accuracy(metrics, chance).sentence
    top = metrics["intervals"]["top1_ece"]
    yield (
        f"Calibration error of the most probable class: {percent(metrics['top1_ece'])} "
        f"(95 % interval: {span(*top)})."
    )
    if "false_positives" in metrics:
        yield grades.false_alarms(metrics).sentence
        yield grades.out_of_distribution(metrics).sentence
    yield "Intervals are exact binomial or bootstrap intervals of these test images; the tables are above."


def _robustness(result: AuditResult, model: AuditedModel) -> Iterator[str]:
    for grade in grades_of(result)[model.name]:
        if grade.aspect in ("Corruptions", "Attacks"):
            yield f"{grade.aspect}: {grade.sentence}"
    yield "Poisoned training data, stolen models and the security of the server were not tested here."


def _oversight(result: AuditResult, i: int) -> Iterator[str]:
    model, metrics = result.models[i], result.evaluations[i].metrics
    if "verdicts" in metrics:
        shares = metrics["verdicts"]["sets"][metrics["part"]]
        left = 1 - shares["accept"]
        yield (
            "Every answer has a verdict: accept, ambiguous (a person chooses among the named classes) or "
            f"novel (a person says what it is). {percent(left)} of these images are left to a person."
        )
    else:
        yield "It has no verdicts: nothing tells a person which answers to check."
    if can(model.loaded, "class maps"):
        yield "'candid examine --figures' shows a person which parts of an image speak for a class."
    if can(model.loaded, "known photos"):
        yield "The nearest known photos are shown next to a photo."
    if "verdicts" in metrics:
        yield "'candid watch' raises an alarm when images change; people decide what to do then."
    if can(model.loaded, "teach"):
        yield "'candid teach' and 'candid forget' correct the model; both can be undone."


def _changes(model: AuditedModel) -> Iterator[str]:
    if model.loaded is None:
        yield "Not known: only arrays of the classifier are here."
        return
    metadata = model.model.metadata
    changes = [str(entry.get("text")) for entry in metadata.get("changes", ()) if isinstance(entry, dict)]
    taught = [str(entry.get("name")) for entry in metadata.get("taught", ()) if isinstance(entry, dict)]
    if changes:
        yield f"Since its training: {'; '.join(changes[-MOST_CHANGES:])}."
    elif taught:
        yield f"Since its training it was taught {listed(taught)}."
    else:
        yield "No change since its training is recorded."
    yield "The digests below name what was audited: a model with another digest needs another audit."


def digests(result: AuditResult) -> list[Digest]:
    """Return the digests of models, eyes and data."""
    rows: list[Digest] = []
    for model, evaluation in zip(result.models, result.evaluations, strict=True):
        if model.loaded is None:
            rows += _of_arrays(result, model)
            continue
        how = "configuration, classes, preprocessing and weights"
        rows.append(Digest("model", model.name, model.model.fingerprint(), how))
        eye = getattr(model.model.config, "eye_sha256", "")
        if eye:
            rows.append(Digest("eye", f"{model.model.config.eye} of {model.name}", eye, "weights"))
        training = model.model.metadata.get("training")
        trained = training.get("digests", {}).get("data", "") if isinstance(training, dict) else ""
        if trained:
            rows.append(Digest("training data", str(model.model.record.data), trained, "its files"))
        if not any(row.of == "test data" for row in rows):
            for name, predictions in {
                evaluation.metrics["part"]: evaluation.predictions,
                **{name: judged.predictions for name, judged in evaluation.judged.items()},
            }.items():
                is_data = name == evaluation.metrics["part"]
                label = f"{result.data} ({name})" if is_data else name
                rows.append(_of_images("test data" if is_data else "foreign images", label, predictions))
    return [*rows, Digest("software", "candid", "", __version__)]


def _of_arrays(result: AuditResult, model: AuditedModel) -> Iterator[Digest]:
    files = [result.options.held_out, result.options.test, *map(Path, result.options.array_sets.values())]
    for file in files:
        if file is not None:
            yield Digest("stored arrays", f"{file.name} of {model.name}", file_hash(file), "the file")


def _of_images(kind: str, name: str, predictions: Predictions) -> Digest:
    """Return the digest of a set of images, the same in any order."""
    paths = [Path(path) for path in predictions.paths]
    labels = predictions.labels.tolist()
    if len(paths) <= MOST_HASHED and all(path.is_file() for path in paths):
        lines = sorted(f"{file_hash(path)} {label}" for path, label in zip(paths, labels, strict=True))
        return Digest(
            kind, name, digest("\n".join(lines).encode()).hexdigest(), "contents and labels of the files"
        )
    if (keys := predictions.columns.get("keys")) is not None:
        seen = digest(np.sort(np.asarray(keys), axis=0), np.sort(predictions.labels)).hexdigest()
        return Digest(kind, name, seen, "images as the model sees them, and labels")
    return Digest(kind, name, "", "not known")


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
            "digests": [asdict(entry) for entry in digests(result)],
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
    corrupted = (
        {measured["model"]: measured for measured in result.corruptions.to_dict()}
        if result.corruptions
        else {}
    )
    attacked = {measured.name: measured.metrics for measured in result.attacks or ()}
    overview, field = result.overviews.get(model.name), result.fields.get(model.name)
    return {
        "name": model.name,
        "model": model.path,
        "kind": result.evaluations[i].metrics["kind"],
        "beta": None if model.beta is None else str(model.beta),
        "parameters": model.parameters,
        "held_out_images": model.held_out,
        "grades": [asdict(grade) for grade in graded[model.name]],
        "missing": missing(result)[model.name],
        "evaluation": result.evaluations[i].metrics,
        "fitness": asdict(fit := fitness(result, i)),
        "by_class": results_by_class(result.evaluations[i]).to_dict(),
        "statement": [asdict(part) for part in statement(result, i, fit)],
        "corruptions": corrupted.get(model.name),
        "attacks": [attack.to_dict() for attack in attacked[model.name]] if model.name in attacked else None,
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
