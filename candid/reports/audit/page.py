"""The data of the audit page; the text and the markup are in ``templates``."""

import json
import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from candid._support import __version__
from candid._support.files import write_texts
from candid._support.text import METRICS, Cell, area_cell, listed, number, percent
from candid.evaluation.compare import group_table, group_title
from candid.evaluation.result import EvaluationResult
from candid.evaluation.selective import RULES
from candid.evaluation.selective import sentences as selective_sentences
from candid.evaluation.selective import table as selective_table
from candid.judging.by_class import MOST_SHOWN, ByClass
from candid.reports.audit.content import digests, record, statement
from candid.reports.audit.fitness import comparisons, figures, fitness
from candid.reports.audit.grades import CRITERIA, Grade
from candid.reports.audit.pictures import Pictures
from candid.reports.audit.record import AuditedModel, AuditResult, grades_of, missing, results_by_class
from candid.reports.pages import environment
from candid.robustness.attacks.benchmark import NOTES, attack_tables
from candid.robustness.corruptions.metrics import table as corruption_table
from candid.trust.verdict import KINDS

PAGE, RECORD = "audit.html", "audit.json"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Nothing is loaded from anywhere, and no script runs."""
SIGNS = {"good": "✓", "fair": "~", "poor": "✗", "unknown": "?"}
WORDS = {"good": "good", "fair": "fair", "poor": "poor", "unknown": "not known"}
SECTIONS = {
    "decision": "Fit for what",
    "classes": "Classes and mistakes",
    "summary": "Grades",
    "models": "The models",
    "accuracy": "Accuracy",
    "calibration": "Calibration",
    "out-of-distribution": "Out of distribution",
    "accepted": "What is accepted",
    "corruptions": "Corruptions",
    "attacks": "Attacks",
    "explanations": "What the models have learned",
    "examples": "Some images, one by one",
    "statement": "For a reviewer",
    "criteria": "How grades are given",
}
OPEN = ("decision", "classes", "summary")
"""Sections that a reader who decides needs; the others are folded until they are opened or printed."""
GRADED = {
    "Accuracy": "accuracy",
    "Calibration": "calibration",
    "False alarms": "out-of-distribution",
    "Out of distribution": "out-of-distribution",
    "Corruptions": "corruptions",
    "Attacks": "attacks",
}
"""The section behind each grade."""
LIKELIHOOD = ("accuracy", "top5_accuracy", "cross_entropy", "bits_per_dim", "L_X", "L_Y")
CALIBRATION = ("ece", "mce", "oce", "top1_ece")
ATTACKS = ("model", "d", "images", "wrong", "success (%)", "L2 median", "RMS (levels)", "confidence (%)")
"""Columns that the page shows besides those of the two-tailed detection; the files have all columns."""


class Table(NamedTuple):
    """A table of the page; the first cell of each row is its head."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]


def write(result: AuditResult) -> tuple[dict[str, Any], list[Path]]:
    """Write one page and one JSON file; return what is in the JSON file, and the files."""
    grades = grades_of(result)
    content = record(result, grades)
    texts = {
        RECORD: json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n",
        PAGE: page(result, grades),
    }
    return content, write_texts(texts, result.options.out)


def page(result: AuditResult, grades: dict[str, list[Grade]]) -> str:
    """Return the audit as one HTML page that needs no other file."""
    templates = environment("candid.reports.audit")
    templates.filters |= {"marked": marked, "listed": listed, "percent": percent, "number": number}
    numbers = count(1)
    shown = result.examples or "examples" in result.absent
    return templates.get_template("page.html.j2").render(
        title=f"Audit of {listed(model.name for model in result.models)}",
        policy=POLICY,
        sections={key: title for key, title in SECTIONS.items() if shown or key != "examples"},
        open_sections=OPEN,
        graded=GRADED,
        likelihood=any("L_X" in evaluation.metrics for evaluation in result.evaluations),
        signs=SIGNS,
        words=WORDS,
        next_number=lambda: next(numbers),
        version=__version__,
        result=result,
        options=result.options,
        data=result.data,
        metrics=result.evaluations[0].metrics,
        grades=grades,
        missing=missing(result),
        criteria=Table("What the words mean", ["aspect", "rule"], list(CRITERIA.items())),
        commands=result.commands,
        sample=_sample(result),
        classes=result.evaluations[0].class_names,
        zip=zip,
        **_studies(result, Pictures(result)),
    )


def _sample(result: AuditResult) -> str | None:
    """Say of how many images the numbers are, if these are not all."""
    options = result.options
    if not (options.quick or options.images is not None or options.corruption_images):
        return None
    parts = [f"at most {options.images:,} images of each set"] if options.images else []
    parts += [f"{options.corruption_images:,} for each corruption"] if options.corruption_images else []
    parts += [f"{options.attack_images:,} attacked images"] if result.attacks else []
    kind = "A quick look" if options.quick else "A sample"
    return (
        f"{kind}: {listed(parts or ['few images'])}. Where there are more images, "
        "these numbers vary more than those of all images would; the intervals say by how much."
    )


def marked(text: str) -> Markup:
    """Return ``text`` escaped, with options such as --quick as code and no line break before a percent sign.

    >>> marked("a < b: see --ood")
    Markup('a &lt; b: see <code>--ood</code>')
    """
    text = re.sub(r"(?<!\S|-)(\(?)(--[a-z]+(?:-[a-z]+)*)", r"\1<code>\2</code>", str(escape(text)))
    return Markup(text.replace(" %", "&nbsp;%"))


def _studies(result: AuditResult, pictures: Pictures) -> dict[str, Any]:
    """Return the tables and pictures of all studies, drawn in the order of the page."""
    return {
        **_decision(result, pictures),
        "models": _models(result),
        "trade_off": pictures.trade_off(),
        "accuracy": _metrics(result, "On the test images", LIKELIHOOD),
        "ten_crop": _ten_crop(result),
        "calibration_curves": pictures.calibration(),
        "calibration": _calibration(result),
        "detection": _detection(result, pictures),
        "accepted": [
            (
                _accepted(name, evaluation.metrics),
                selective_sentences(evaluation.metrics["selective"]),
                picture,
            )
            for name, evaluation, picture in zip(
                _names(result), result.evaluations, pictures.accepted(), strict=True
            )
        ],
        "corruptions": _corruptions(result, pictures) if result.corruptions else None,
        "attacks": _attacks(result, pictures) if result.attacks else None,
        "explanations": {
            name: (list(pictures.explanations(name)), _closest_classes(result, name))
            for name in result.overviews
        },
        "receptive_fields": pictures.receptive_fields(),
        "examinations": list(pictures.examinations()),
    }


def _decision(result: AuditResult, pictures: Pictures) -> dict[str, Any]:
    """Return what stands on top, and the statement that is made from it."""
    fit = {name: fitness(result, i) for i, name in enumerate(_names(result))}
    caption = "What happens to 1,000 images (in brackets: 95 % interval)"
    classes = {}
    for i, (name, evaluation) in enumerate(zip(_names(result), result.evaluations, strict=True)):
        by_class = results_by_class(evaluation)
        most = f"the {MOST_SHOWN} weakest of {len(by_class.rows):,} classes"
        which = "classes, the weakest first" if len(by_class.rows) <= MOST_SHOWN else most
        classes[name] = {
            "table": Table(f"{name}: {which}", *by_class.table()),
            "confusions": Table(f"{name}: {_lowered(by_class.confusion_title)}", *_diagonal(by_class)),
            "sentences": by_class.sentences(),
            "mistakes": pictures.mistakes(i),
            "wrong": sum(row.wrong for row in by_class.rows),
        }
    common = [
        text for text in fit[_names(result)[0]].untested if all(text in own.untested for own in fit.values())
    ]
    return {
        "fit": fit,
        "untested": {
            "": common,
            **{name: [text for text in own.untested if text not in common] for name, own in fit.items()},
        },
        "figures": Table(caption, *figures(result)),
        "side_by_side": comparisons(result),
        "by_class": classes,
        "statements": {name: statement(result, i, fit[name]) for i, name in enumerate(_names(result))},
        "digests": Table(
            "What was audited: SHA-256",
            ["of", "name", "SHA-256", "computed from"],
            [[entry.of, entry.name, entry.sha256 or "–", entry.how] for entry in digests(result)],
        ),
    }


def _lowered(text: str) -> str:
    return text[0].lower() + text[1:]


def _diagonal(by_class: ByClass) -> tuple[list[str], list[list[Cell | str]]]:
    """Return the table of confusions; what is right is marked in a square one."""
    head, rows = by_class.confusion_table()
    if not by_class.is_square:
        return head, [list(row) for row in rows]
    marked_rows: list[list[Cell | str]] = []
    for i, row in enumerate(rows):
        cells: list[Cell | str] = [(cell, "good") if i == j - 1 else cell for j, cell in enumerate(row)]
        marked_rows.append(cells)
    return head, marked_rows


def _models(result: AuditResult) -> Table:
    rows = []
    traded = any("L_X" in evaluation.metrics for evaluation in result.evaluations)
    for model, evaluation in zip(result.models, result.evaluations, strict=True):
        rows.append(
            [
                model.name,
                evaluation.metrics["kind"] + _given(model, evaluation),
                *([("–" if model.beta is None else number(model.beta))] if traded else []),
                "–" if model.parameters is None else f"{model.parameters:,}",
                "–" if model.loaded is None else " x ".join(map(str, model.loaded.image_shape)),
                f"{len(evaluation.class_names):,}",
                f"{model.held_out:,}" if model.held_out else "none",
                model.path,
            ]
        )
    betas = ["beta"] if traded else []
    head = ["model", "kind", *betas, "parameters", "images", "classes", "held-out images", "path"]
    return Table("The audited models", head, rows)


def _given(model: AuditedModel, evaluation: EvaluationResult) -> str:
    """Return what is known of a classifier whose arrays are stored."""
    if model.loaded is not None:
        return ""
    return " of logits and features" if "features" in evaluation.predictions.columns else " of logits alone"


def _metrics(result: AuditResult, caption: str, keys: Sequence[str]) -> Table:
    """Return a row for each metric that any model has, with 95 % intervals."""
    rows = []
    likelihood = any("L_X" in evaluation.metrics for evaluation in result.evaluations)
    for key in keys:
        if key in ("L_X", "L_Y") and not likelihood:  # the paper's losses are of pixels
            continue
        metric = METRICS[key]
        cells = []
        for metrics in (evaluation.metrics for evaluation in result.evaluations):
            value, ends = metrics.get(key), metrics["intervals"].get(key)
            if value is None or ends is None:
                cells.append("never that confident" if key == "oce" else "–")
                continue
            cells.append(f"{metric.shown(value)} ({metric.interval(ends)})")
        if set(cells) != {"–"}:
            rows.append([metric.label, *cells])
    return Table(caption, ["metric", *_names(result)], rows)


def _ten_crop(result: AuditResult) -> Table | None:
    crops = [
        evaluation.metrics["ten_crop"]
        for evaluation in result.evaluations
        if "ten_crop" in evaluation.metrics
    ]
    row = ["top-1 accuracy, ten crops", *(percent(metrics["accuracy"]) for metrics in crops)]
    return Table("Posteriors averaged over ten crops", ["metric", *_names(result)], [row]) if crops else None


def _calibration(result: AuditResult) -> Table:
    table = _metrics(result, "Calibration errors", CALIBRATION)
    scaled = [evaluation.metrics.get("temperature_scaled") for evaluation in result.evaluations]
    cells = [
        "–" if metrics is None else f"{percent(metrics['top1_ece'], 2)} (T = {metrics['temperature']:.2f})"
        for metrics in scaled
    ]
    return table._replace(rows=[*table.rows, ["ECE, top class, with temperature", *cells]])


def _names(result: AuditResult) -> list[str]:
    return [model.name for model in result.models]


def _detection(result: AuditResult, pictures: Pictures) -> dict[str, Any] | None:
    """Return false alarms, ROC curves and verdicts; None if no model has held-out scores."""
    judged = [
        (model.name, evaluation.metrics)
        for model, evaluation in zip(result.models, result.evaluations, strict=True)
        if evaluation.detection is not None
    ]
    if not judged:
        return None
    alarms, verdicts, kinds = [], [], list(reversed(KINDS))
    for name, metrics in judged:
        score = metrics["verdicts"]["score"]
        rates = metrics["false_positives"][score]
        alarms.append(
            [f"{name}, {score}", *(percent(rates[level], sign=False) for level in ("0.01", "0.05", "0.1"))]
        )
        for images, shares in metrics["verdicts"]["sets"].items():
            verdicts.append([f"{name}, {images}", *(percent(shares[kind], sign=False) for kind in kinds)])
    roc = pictures.roc()
    return {
        "alarms": Table(
            "False alarms: share of the data's images with a p-value at most the level (%)",
            ["model, score", "level 1 %", "level 5 %", "level 10 %"],
            alarms,
        ),
        "roc": roc,
        "areas": [_areas(name, metrics) for name, metrics in judged] if roc else [],
        "zones": list(pictures.zones()) if roc else [],
        "verdicts": Table(
            "Verdicts on each set of images (%): accepted, ambiguous between several classes, or novel",
            ["model, images", *(KINDS[kind].word for kind in kinds)],
            verdicts,
        ),
        "promises": [
            f"{name}: {sentence}" for name, metrics in judged for sentence in metrics["verdicts"]["sentences"]
        ],
        "groups": [
            Table(f"{name}: {group_title(metrics['groups'])}", *group_table(metrics["groups"]))
            for name, metrics in judged
            if "groups" in metrics
        ],
    }


def _accepted(name: str, metrics: dict[str, Any]) -> Table | None:
    """Return what verdicts accept, next to a plain threshold; None for a model without verdicts."""
    selective = metrics["selective"]
    if "verdicts" not in selective:
        return None
    caption = f"{name}: accepted images, and how many of them are right (%; 95 % interval)"
    return Table(caption, ["", *RULES.values()], selective_table(selective, metrics["part"]))


def _areas(name: str, metrics: dict[str, Any]) -> Table:
    sets = metrics["ood"]
    rows = [
        [score, *(_area(areas[score]) for areas in sets.values()), percent(rates["0.05"], sign=False)]
        for score, rates in metrics["false_positives"].items()
    ]
    caption = (
        f"{name}: areas under the ROC curve (%; 95 % interval) of all scores, and false alarms at a level of "
        "5 % (%)"
    )
    return Table(caption, ["score", *sets, "false alarms"], rows)


def _area(metrics: dict[str, Any]) -> Cell:
    return area_cell(metrics["auc"], metrics["intervals"]["auc"])


def _corruptions(result: AuditResult, pictures: Pictures) -> dict[str, Any]:
    corrupted = result.corruptions
    assert corrupted is not None
    means = listed(f"{model.name} {percent(model.mean_error)}" for model in corrupted)
    (_, *head), rows = corruption_table(corrupted)
    relative = "" if corrupted.reference is None else f"; mCE relative to {corrupted.reference.name}"
    return {
        "chart": {
            "labels": [name.replace("_", " ") for name in corrupted.models[0].errors],
            "shares": {model.name: list(model.mean_errors.values()) for model in corrupted},
            "lines": {model.name: model.clean_error for model in corrupted},
            "alt": f"Errors by corruption. Means: {means}.",
        },
        "table": Table(
            f"Errors{relative}; below, areas under the ROC curve by corruption (%)",
            ["metric", *(row[0][0] for row in rows)],
            [[name, *(row[i] for row in rows)] for i, name in enumerate(head, 1)],
        ),
        "picture": pictures.corrupted(),
    }


def _attacks(result: AuditResult, pictures: Pictures) -> dict[str, Any]:
    assert result.attacks is not None
    tables = []
    for caption, (head, rows) in attack_tables(result.attacks).items():
        columns = [i for i, name in enumerate(head) if name in ATTACKS or i >= len(head) - 3]
        shown = [[row[i] for i in columns] for row in rows]
        tables.append(Table(f"Attacks with {caption}", [head[i] for i in columns], shown))
    return {"pictures": list(pictures.attacks()), "tables": tables, "notes": NOTES}


def _closest_classes(result: AuditResult, name: str) -> Table:
    rows = [
        [
            listed(pair["classes"]),
            f"{pair['distance']:.2f}",
            f"{100 * pair['expected_uncertainty']:.3g}",
            "–" if pair["measured_uncertainty"] is None else f"{100 * pair['measured_uncertainty']:.3g}",
        ]
        for pair in result.overviews[name].to_dict()["closest_pairs"]
    ]
    head = ["classes", "distance (σ)", "expected uncertainty (%)", "measured (%)"]
    return Table(f"{name}: the closest classes", head, rows)
