"""The paper's table of corruptions, as Markdown, CSV, LaTeX and HTML."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from candid._support.files import write_texts
from candid._support.tables import Cell, area_cell, as_csv, html_page, latex, markdown, with_interval
from candid.robustness.corruptions.apply import CORRUPTIONS
from candid.robustness.corruptions.benchmark import CorruptionResults


def write_tables(results: CorruptionResults, out: Path) -> list[Path]:
    """Write ``corruptions`` as .json (all), .csv (a row per model and corruption), .md, .tex and .html."""
    tables = {"": table(results)}
    note = ["Brackets show 95 % intervals."]
    return write_texts(
        {
            "corruptions.json": json.dumps(results.to_dict(), indent=1, allow_nan=False) + "\n",
            "corruptions.csv": as_csv(_lines(results)),
            "corruptions.md": markdown(tables, note),
            "corruptions.tex": latex(tables),
            "corruptions.html": html_page("Corruptions", tables, note),
        },
        out,
    )


def table(results: CorruptionResults, intervals: bool = True) -> tuple[list[str], list[list[Cell]]]:
    """Return head and rows as in the paper's table; areas under the ROC curve are those of one score.

    The means over corruptions have their 95 % intervals if ``intervals``.
    """
    score, corruptions = results.options.score, list(results.models[0].errors)
    head = ["model", "clean error (%)", "mCE (%)", "rel. mCE (%)", "Δ entropy (nats)"]
    head += [f"mean AUC, {score} (%)", *(CORRUPTIONS[name].short for name in corruptions)]
    rows = []
    for each, record in zip(results, results.records, strict=True):
        areas = each.auc.get(score, {})
        ends = record["intervals"] if intervals else {}
        rows.append(
            [
                (each.name, ""),
                (f"{100 * each.clean_error:.2f}", ""),
                (with_interval(record.get("mce"), ends.get("mce")), ""),
                (with_interval(record.get("relative_mce"), ends.get("relative_mce")), ""),
                (f"{each.entropy_increase:+.2f}", ""),
                area_cell(record["mean_auc"].get(score), ends.get("mean_auc", {}).get(score)),
                *(area_cell(areas.get(name)) for name in corruptions),
            ]
        )
    return head, rows


def _lines(results: CorruptionResults) -> Iterator[Sequence[object]]:
    """Yield one line per model and corruption."""
    scores = list(dict.fromkeys(score for each in results for score in each.auc))
    yield [
        "model",
        "corruption",
        *(f"error_{i}" for i in results.options.severities),
        "ce",
        *(f"auc_{score}" for score in scores),
        *(f"auc_{score}_{end}" for score in scores for end in ("low", "high")),
    ]
    for each in results:
        ratios = {} if results.reference is None else each.corruption_errors(results.reference)
        for name, errors in each.errors.items():
            areas = (each.auc.get(score, {}).get(name) for score in scores)
            known = (each.auc_intervals.get(score, {}) for score in scores)
            ends = (end for intervals in known for end in intervals.get(name, (None, None)))
            yield [each.name, name, *errors, ratios.get(name), *areas, *ends]
