"""Tables with coloured areas under ROC curves, as Markdown, LaTeX, HTML and CSV."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from candid._support.text import hundredths

GOOD, SOME = 0.85, 0.55
"""AUC from which the paper calls a detection good, and above which it calls it partial."""
LATEX_COLOURS = {"good": "Green", "some": "YellowOrange", "poor": "Red"}
Cell = tuple[str, str]
"""The text of a cell, and its mark: good, some, poor or none."""
Grid = tuple[Sequence[str], Sequence[Sequence[Cell]]]
"""Head and rows."""


def area_cell(area: float | None, interval: Sequence[float] | None = None) -> Cell:
    """Return the cell of an area under the ROC curve, in percent, with its interval if there is one.

    >>> area_cell(0.9, (0.88, 0.92))
    ('90.0 (88.0 to 92.0)', 'good')
    """
    if area is None:
        return "–", ""
    mark = "good" if area >= GOOD else "some" if area > SOME else "poor"
    return with_interval(area, interval), mark


def with_interval(share: float | None, interval: Sequence[float] | None) -> str:
    """Return a share in percent, without the sign, and its interval if there is one."""
    ends = "" if interval is None else f" ({' to '.join(map(hundredths, interval))})"
    return hundredths(share) + ends


def as_csv(rows: Iterable[Sequence[object]]) -> str:
    """Return ``rows`` as CSV: numbers with six digits, an empty cell for None, text that is no formula."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        cells = (f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row)
        writer.writerow(["" if cell is None else no_formula(cell) for cell in cells])
    return text.getvalue()


def no_formula(cell: object) -> object:
    """Put a ' before text that a spreadsheet would run; numbers stay as they are.

    >>> no_formula("=1+2"), no_formula("-0.5"), no_formula("cat")
    ("'=1+2", '-0.5', 'cat')
    """
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def markdown(tables: Mapping[str, Grid], notes: Sequence[str] = ()) -> str:
    """Return ``tables`` by caption as Markdown; an empty caption is not shown."""
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
    """Return ``tables`` by caption as LaTeX."""
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
    """Return a page with ``tables`` by caption, in the paper's colours, and ``notes`` below them."""
    from jinja2 import Environment

    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE)
    return page.render(title=title, tables=tables, notes=notes) + "\n"


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
body { font: 14px sans-serif; }
table { border-collapse: collapse; margin-bottom: 24px; }
caption { text-align: left; font-weight: bold; padding: 4px 8px; }
td, th { padding: 4px 8px; text-align: right; border-bottom: 1px solid #ccc; }
td:first-child, th:first-child { text-align: left; }
.good { color: #00664d; font-weight: bold; }
.some { color: #8a5a00; }
.poor { color: #a33a00; }
</style>
</head>
<body>
{% for caption, (head, rows) in tables.items() %}
<table>
{% if caption %}
<caption>{{ caption }}</caption>
{% endif %}
<thead><tr>{% for name in head %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for text, mark in row %}<td{% if mark %} class="{{ mark }}"{% endif %}>{{ text }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
{% endfor %}
<p>AUC is the area under the ROC curve. Bold green: good detection (≥ 85 %); brown: some; red: random or worse
(≤ 55 %).</p>
{% for note in notes %}
<p>{{ note }}</p>
{% endfor %}
</body>
</html>"""
