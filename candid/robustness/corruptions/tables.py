"""The paper's table of corruptions, as Markdown, CSV, LaTeX and HTML."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from candid._support.files import write_texts
from candid._support.tables import Cell, area_cell, as_csv, html_page, latex, markdown
from candid._support.text import hundredths
from candid.robustness.corruptions.apply import CORRUPTIONS
from candid.robustness.corruptions.benchmark import Reference, Sweep


def write_tables(sweeps: Sequence[Sweep], reference: Reference | None, out: Path) -> list[Path]:
    """``corruptions`` as .json (everything), .csv (a line a model and corruption), .md, .tex and .html."""
    tables = {"": table(sweeps, reference)}
    return write_texts(
        {
            "corruptions.json": json.dumps(
                [each.record(reference) for each in sweeps], indent=1, allow_nan=False
            )
            + "\n",
            "corruptions.csv": as_csv(_lines(sweeps, reference)),
            "corruptions.md": markdown(tables),
            "corruptions.tex": latex(tables),
            "corruptions.html": html_page("Corruptions", tables),
        },
        out,
    )


def table(sweeps: Sequence[Sweep], reference: Reference | None) -> tuple[list[str], list[list[Cell]]]:
    """Head and rows as in the paper's table; areas under the ROC curve are those of each model's own test."""
    corruptions = list(sweeps[0].errors)
    head = ["model", "clean error (%)", "mCE (%)", "rel. mCE (%)", "Δ entropy (nats)", "mean AUC (%)"]
    rows = []
    for each in sweeps:
        record = each.record(reference)
        areas = each.auc.get(each.test or "", {})
        rows.append(
            [
                (each.name, ""),
                (f"{100 * each.clean_error:.2f}", ""),
                (hundredths(record.get("mce")), ""),
                (hundredths(record.get("relative_mce")), ""),
                (f"{each.entropy_increase:+.2f}", ""),
                area_cell(record["mean_auc"].get(each.test or "")),
                *(area_cell(areas.get(name)) for name in corruptions),
            ]
        )
    return head + [CORRUPTIONS[name].short for name in corruptions], rows


def _lines(sweeps: Sequence[Sweep], reference: Reference | None) -> Iterator[Sequence[object]]:
    """A line a model and corruption."""
    tests = list(dict.fromkeys(test for each in sweeps for test in each.auc))
    yield [
        "model",
        "corruption",
        *(f"error_{i}" for i in sweeps[0].severities),
        "ce",
        *(f"auc_{test}" for test in tests),
    ]
    for each in sweeps:
        ratios = {} if reference is None else each.corruption_errors(reference)
        for name, errors in each.errors.items():
            areas = (each.auc.get(test, {}).get(name) for test in tests)
            yield [each.name, name, *errors, ratios.get(name), *areas]
