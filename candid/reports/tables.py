"""A table with coloured areas under ROC curves, as Markdown, LaTeX and HTML."""

import csv
import html
import io
from collections.abc import Iterable, Mapping, Sequence

GOOD, SOME = 0.85, 0.55
"""The paper's limits of good detection, and of some."""
HTML_COLOURS = {"good": "#00664d", "some": "#8a5a00", "poor": "#a33a00"}
LATEX_COLOURS = {"good": "Green", "some": "YellowOrange", "poor": "Red"}
Cell = tuple[str, str]
"""Text, and what its colour says: good, some, poor or nothing."""
Grid = tuple[Sequence[str], Sequence[Sequence[Cell]]]
"""Head and rows."""


def area_cell(area: float | None) -> Cell:
    """An area under the ROC curve, in percent."""
    if area is None:
        return "–", ""
    return f"{100 * area:.1f}", "good" if area >= GOOD else "some" if area > SOME else "poor"


def as_csv(rows: Iterable[Sequence[object]]) -> str:
    """Numbers with six digits, nothing for None."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        cells = (f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row)
        writer.writerow(["" if cell is None else cell for cell in cells])
    return text.getvalue()


def markdown(tables: Mapping[str, Grid], notes: Sequence[str] = ()) -> str:
    """Tables by caption; an empty one is not shown."""
    marks = {"good": "**{}**", "poor": "*{}*"}
    text = ""
    for caption, (head, rows) in tables.items():
        lines = [list(head), ["---", *["---:"] * (len(head) - 1)]]
        lines += [
            [marks.get(mark, "{}").format(cell.replace("|", "\\|")) for cell, mark in row] for row in rows
        ]
        text += f"**{caption}**\n\n" if caption else ""
        text += "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"
    legend = "AUC: **good detection** (≥ 85 %), some, *random or worse* (≤ 55 %)."
    return text + " ".join((legend, *notes)) + "\n"


def latex(tables: Mapping[str, Grid]) -> str:
    """Tables by caption."""
    text = "% needs \\usepackage[dvipsnames]{xcolor}\n"
    for caption, (head, rows) in tables.items():
        body = "".join(f"{' & '.join(_latex_cell(*cell) for cell in row)} \\\\\n" for row in rows)
        text += f"% {caption}\n" if caption else ""
        text += (
            f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}\n\\hline\n"
            f"{' & '.join(map(_escaped, head))} \\\\\n\\hline\n{body}\\hline\n\\end{{tabular}}\n"
        )
    return text


def _latex_cell(text: str, mark: str) -> str:
    marks = {"good": r"\textcolor{%s!60!black}{\textbf{%s}}", "poor": r"\textcolor{%s!70!black}{\textit{%s}}"}
    if not mark:
        return _escaped(text)
    return marks.get(mark, r"\textcolor{%s!90!black}{%s}") % (LATEX_COLOURS[mark], _escaped(text))


def _escaped(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "–": "--", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {"Δ": r"$\Delta$", "κ": r"$\kappa$", "∞": r"$\infty$", "β": r"$\beta$", "→": r"$\to$"}
    special |= {c: f"\\{c}" for c in "%_&#{}$"}
    return "".join(special.get(c, c) for c in text)


def html_page(title: str, tables: Mapping[str, Grid], notes: Sequence[str] = ()) -> str:
    """Tables by caption, with the paper's colours."""

    def cell(text: str, mark: str) -> str:
        weight = "bold" if mark == "good" else "normal"
        style = f' style="color:{HTML_COLOURS[mark]};font-weight:{weight}"' if mark else ""
        return f"<td{style}>{html.escape(text)}</td>"

    css = "table{border-collapse:collapse;font:14px sans-serif;margin-bottom:24px}caption{text-align:left;"
    css += "font-weight:bold;padding:4px 8px}td,th{padding:4px 8px;text-align:right;"
    css += (
        "border-bottom:1px solid #ccc}td:first-child,th:first-child{text-align:left}p{font:14px sans-serif}"
    )
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title>\n<style>{css}</style></head><body>\n"
    )
    for caption, (head, rows) in tables.items():
        top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
        body = "\n".join(f"<tr>{''.join(cell(*each) for each in row)}</tr>" for row in rows)
        shown = f"<caption>{html.escape(caption)}</caption>" if caption else ""
        page += f"<table>{shown}<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody></table>\n"
    legend = (
        "AUC, area under the ROC curve: bold green: good detection (≥ 85 %); brown: some; red: random or "
    )
    legend += "worse (≤ 55 %)."
    return page + "".join(f"<p>{html.escape(note)}</p>\n" for note in (legend, *notes)) + "</body></html>\n"
