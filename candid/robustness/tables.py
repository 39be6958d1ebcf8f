"""The paper's table of corruptions, as Markdown, CSV, LaTeX and HTML."""

import csv
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path

from candid.checkpoint import replacing
from candid.errors import CandidError
from candid.robustness.sweep import Reference, Sweep

GOOD, SOME = 0.85, 0.55
"""The paper's limits of good detection, and of some."""
HTML_COLOURS = {"good": "#00664d", "some": "#8a5a00", "poor": "#a33a00"}
LATEX_COLOURS = {"good": "Green", "some": "YellowOrange", "poor": "Red"}
SHORT = {
    "gaussian_noise": "Gauss.",
    "shot_noise": "Shot",
    "impulse_noise": "Impulse",
    "defocus_blur": "Defocus",
    "glass_blur": "Glass",
    "motion_blur": "Motion",
    "zoom_blur": "Zoom",
    "snow": "Snow",
    "frost": "Frost",
    "fog": "Fog",
    "brightness": "Bright",
    "contrast": "Contrast",
    "elastic_transform": "Elastic",
    "pixelate": "Pixel",
    "jpeg_compression": "JPEG",
}
Cell = tuple[str, str]
"""Text, and what its colour says: good, some, poor or nothing."""


def write_tables(sweeps: Sequence[Sweep], reference: Reference | None, out: Path) -> list[Path]:
    """``corruptions`` as .json (everything), .csv (a line a model and corruption), .md, .tex and .html."""
    head, rows = table(sweeps, reference)
    texts = {
        "json": json.dumps([each.record(reference) for each in sweeps], indent=1, allow_nan=False) + "\n",
        "csv": _csv(sweeps, reference),
        "md": _markdown(head, rows),
        "tex": _latex(head, rows),
        "html": _html(head, rows),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for ending, text in texts.items():
            with replacing(out / f"corruptions.{ending}") as temporary:
                temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CandidError(f"Can't write to '{out}' ({error}): free some space, or change --out.") from error
    return [out / f"corruptions.{ending}" for ending in texts]


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
                (_percent(record.get("mce")), ""),
                (_percent(record.get("relative_mce")), ""),
                (f"{each.entropy_increase:+.2f}", ""),
                _area(record["mean_auc"].get(each.test or "")),
                *(_area(areas.get(name)) for name in corruptions),
            ]
        )
    return head + [SHORT[name] for name in corruptions], rows


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _area(area: float | None) -> Cell:
    if area is None:
        return "–", ""
    return f"{100 * area:.1f}", "good" if area >= GOOD else "some" if area > SOME else "poor"


def _csv(sweeps: Sequence[Sweep], reference: Reference | None) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    tests = list(dict.fromkeys(test for each in sweeps for test in each.auc))
    severities = range(1, 1 + max(len(values) for values in sweeps[0].errors.values()))
    writer.writerow(
        ["model", "corruption", *(f"error_{i}" for i in severities), "ce", *(f"auc_{test}" for test in tests)]
    )
    for each in sweeps:
        ratios = {} if reference is None else each.corruption_errors(reference)
        for name, errors in each.errors.items():
            areas = (each.auc.get(test, {}).get(name) for test in tests)
            numbers = [*errors, ratios.get(name), *areas]
            writer.writerow([each.name, name, *("" if n is None else f"{n:.6g}" for n in numbers)])
    return text.getvalue()


def _markdown(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    marks = {"good": "**{}**", "poor": "*{}*"}
    lines += [[marks.get(mark, "{}").format(text.replace("|", "\\|")) for text, mark in row] for row in rows]
    body = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{body}\nAUC: **good detection** (≥ 85 %), some, *random or worse* (≤ 55 %).\n"


def _latex(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    def escaped(text: str) -> str:
        special = {"\\": r"\textbackslash{}", "Δ": r"$\Delta$", "–": "--", "~": r"\textasciitilde{}"}
        special |= {c: f"\\{c}" for c in "%_&#{}$"} | {"^": r"\textasciicircum{}"}
        return "".join(special.get(c, c) for c in text)

    marks = {"good": r"\textcolor{%s!60!black}{\textbf{%s}}", "poor": r"\textcolor{%s!70!black}{\textit{%s}}"}
    lines = [" & ".join(map(escaped, head))]
    for row in rows:
        cells = (
            marks.get(mark, r"\textcolor{%s!90!black}{%s}") % (LATEX_COLOURS[mark], text)
            if mark
            else escaped(text)
            for text, mark in row
        )
        lines.append(" & ".join(cells))
    body = (
        " \\\\\n\\hline\n".join(lines[:1])
        + " \\\\\n\\hline\n"
        + "".join(f"{line} \\\\\n" for line in lines[1:])
    )
    comment = "% needs \\usepackage[dvipsnames]{xcolor}\n"
    return (
        f"{comment}\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}\n\\hline\n{body}\\hline\n\\end{{tabular}}\n"
    )


def _html(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    weights = {"good": "bold", "some": "normal", "poor": "normal"}

    def cell(text: str, mark: str) -> str:
        style = "" if not mark else f' style="color:{HTML_COLOURS[mark]};font-weight:{weights[mark]}"'
        return f"<td{style}>{html.escape(text)}</td>"

    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "\n".join(f"<tr>{''.join(cell(*each) for each in row)}</tr>" for row in rows)
    css = "table{border-collapse:collapse;font:14px sans-serif}td,th{padding:4px 8px;text-align:right;"
    css += "border-bottom:1px solid #ccc}td:first-child,th:first-child{text-align:left}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Corruptions</title>\n'
        f"<style>{css}</style></head><body>\n<table><thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody></table>\n"
        "<p>Area under the ROC curve: bold green: good detection (≥ 85 %); brown: some; red: random or worse "
        "(≤ 55 %).</p>\n</body></html>\n"
    )
