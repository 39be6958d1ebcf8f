"""The paper's table of corruptions, as Markdown, CSV, LaTeX and HTML."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from candid._support.files import write_texts
from candid._support.tables import Cell, area_cell, as_csv, html_page, latex, markdown
from candid._support.text import hundredths
from candid.robustness.corruptions.apply import CORRUPTIONS
from candid.robustness.corruptions.benchmark import CorruptionResults


def write_tables(results: CorruptionResults, out: Path) -> list[Path]:
    """Write ``corruptions`` as .json (all), .csv (a row per model and corruption), .md, .tex and .html."""
    tables = {"": table(results)}
    return write_texts(
        {
            "corruptions.json": json.dumps(results.to_dict(), indent=1, allow_nan=False) + "\n",
            "corruptions.csv": as_csv(_lines(results)),
            "corruptions.md": markdown(tables),
            "corruptions.tex": latex(tables),
            "corruptions.html": html_page("Corruptions", tables),
        },
        out,
    )


def table(results: CorruptionResults) -> tuple[list[str], list[list[Cell]]]:
    """Return head and rows as in the paper's table; areas under the ROC curve are those of one score."""
    score, corruptions = results.options.score, list(results.models[0].errors)
    head = ["model", "clean error (%)", "mCE (%)", "rel. mCE (%)", "Δ entropy (nats)"]
    head += [f"mean AUC, {score} (%)", *(CORRUPTIONS[name].short for name in corruptions)]
    rows = []
    for each in results:
        record = each.to_dict(results.reference)
        areas = each.auc.get(score, {})
        rows.append(
            [
                (each.name, ""),
                (f"{100 * each.clean_error:.2f}", ""),
                (hundredths(record.get("mce")), ""),
                (hundredths(record.get("relative_mce")), ""),
                (f"{each.entropy_increase:+.2f}", ""),
                area_cell(record["mean_auc"].get(score)),
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
    ]
    for each in results:
        ratios = {} if results.reference is None else each.corruption_errors(results.reference)
        for name, errors in each.errors.items():
            areas = (each.auc.get(score, {}).get(name) for score in scores)
            yield [each.name, name, *errors, ratios.get(name), *areas]
