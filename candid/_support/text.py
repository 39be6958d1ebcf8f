"""How numbers, lists, names and tables are written for people: on pages, in files and in a terminal."""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from candid._support.errors import CandidError


class Metric(NamedTuple):
    """How a metric of an evaluation is shown."""

    label: str
    scale: float
    form: str

    def shown(self, value: float) -> str:
        """Return the value as text.

        >>> METRICS["accuracy"].shown(0.9123)
        '91.23 %'
        """
        return self.form.format(self.scale * value)

    def interval(self, ends: Sequence[float]) -> str:
        """Return an interval of values as text.

        >>> METRICS["accuracy"].interval((0.9, 0.92))
        '90.00 to 92.00'
        """
        low, high = (self.shown(end).removesuffix(" %") for end in ends)
        return f"{low} to {high}"


METRICS = {
    "accuracy": Metric("top-1 accuracy", 100, "{:.2f} %"),
    "top5_accuracy": Metric("top-5 accuracy", 100, "{:.2f} %"),
    "cross_entropy": Metric("cross-entropy (nats)", 1, "{:.3f}"),
    "bits_per_dim": Metric("bits/dim", 1, "{:.3f}"),
    "L_X": Metric("L_X (as in the paper)", 1, "{:.3f}"),
    "L_Y": Metric("L_Y (as in the paper)", 1, "{:.3f}"),
    "ece": Metric("ECE, all classes, 15 bins", 100, "{:.2f} %"),
    "mce": Metric("MCE, all classes, 15 bins", 100, "{:.2f} %"),
    "oce": Metric("OCE (confident: ≥ 99.7 %)", 1, "{:.2f}"),
    "top1_ece": Metric("ECE, top class, 15 bins", 100, "{:.2f} %"),
}
"""The metrics of an evaluation, in the order in which they are shown."""


def number(value: float) -> str:
    """Return a number as people write it.

    >>> number(0.01), number(1.0), number(float("inf"))
    ('0.01', '1', '∞')
    """
    return "∞" if value == math.inf else f"{value:g}"


def percent(share: float | None, digits: int = 1, sign: bool = True) -> str:
    """Return a share in percent; with the sign it is never rounded to 100 or 0. A dash stands for no share.

    Args:
        share: a share, or None if there is none.
        digits: the number of decimals.
        sign: whether it ends with %; a column of a table does without, and rounds as usual.

    >>> percent(0.5), percent(0.9995), percent(1.0), percent(0.0001), percent(0.98765, 2)
    ('50.0 %', '> 99.9 %', '100 %', '< 0.1 %', '98.77 %')
    >>> percent(0.12345, 2, sign=False), percent(None)
    ('12.35', '–')
    """
    if share is None:
        return "–"
    if not sign:
        return f"{100 * share:.{digits}f}"
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    least = 10**-digits
    if share >= 1 - least / 200:
        return f"> {100 - least:.{digits}f} %"
    return f"< {least:.{digits}f} %" if 0 < share < least / 200 else f"{100 * share:.{digits}f} %"


def span(low: float, high: float) -> str:
    """Return an interval of shares in percent."""
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def natural(name: object) -> tuple[list[str | int], str]:
    """Return a key that sorts names as people number them.

    >>> sorted(["apple 10", "apple 2", "apple"], key=natural)
    ['apple', 'apple 2', 'apple 10']
    """
    text = str(name)
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", text))], text


def listed(items: Iterable[str]) -> str:
    """Return ``items`` with commas, and with 'and' before the last.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *most, last = items
    return f"{', '.join(most)} and {last}" if most else last


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun: ``many``, or ``one`` with an s, unless the count is 1.

    >>> plural(1, "photo"), plural(1200, "photo"), plural(2, "class", "classes")
    ('1 photo', '1,200 photos', '2 classes')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def short_name(model: Path) -> str:
    """Return ``cifar10`` for runs/cifar10/model/best, ``cifar10-last`` for runs/cifar10/model/last."""
    parts = [part for part in model.resolve().parts[1:][-3:] if part not in ("model", "best")]
    return "-".join(parts[-2:] if parts[-1:] == ["last"] else parts[-1:]) or "model"


def short_names(models: Sequence[Path]) -> list[str]:
    """Return short names where these differ, and whole paths where they don't.

    >>> short_names([Path("a/cat/model/best"), Path("b/cat/model/best"), Path("dog")])
    ['a/cat/model/best', 'b/cat/model/best', 'dog']
    """
    short = [short_name(model) for model in models]
    return [str(model) if short.count(name) > 1 else name for model, name in zip(models, short, strict=True)]


def printable(text: str, breaks: bool = True) -> str:
    r"""Return ``text`` with control characters written out, so that a file name can't steer a terminal.

    Args:
        text: what is to be printed.
        breaks: whether line breaks and tabs stay; a single name has none.

    >>> printable("cat\x1b[2J.jpg"), printable("a\nb", breaks=False)
    ('cat\\x1b[2J.jpg', 'a\\nb')
    """
    kept = "\n\t" if breaks else ""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def without_controls(text: str) -> str:
    r"""Return ``text`` with control characters written out, except line breaks and tabs.

    >>> without_controls("cat\x1b[2J\x07.jpg\n")
    'cat\\x1b[2J\\x07.jpg\n'
    """
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda c: c[0].encode("unicode_escape").decode(), text)


def named_pairs(
    values: Iterable[str], flag: str, form: str = "NAME=PATH", alone: Iterable[str] = ()
) -> dict[str, str]:
    """Return values of the ``form`` NAME=PATH by their names; those in ``alone`` need no name.

    >>> named_pairs(["mnist=data/mnist", "constant"], "--ood", alone=("constant",))
    {'mnist': 'data/mnist', 'constant': 'constant'}
    """
    pairs: dict[str, str] = {}
    for value in values:
        name, _, path = (value, "", value) if value in alone else value.partition("=")
        if not name or not path:
            raise CandidError(f"{flag} takes {form}, not '{value}'.")
        if name in pairs:
            raise CandidError(f"{flag} has the name '{name}' twice: give each a name of its own.")
        pairs[name] = path
    return pairs


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
    ends = "" if interval is None else f" ({' to '.join(percent(end, sign=False) for end in interval)})"
    return percent(share, sign=False) + ends


def as_csv(rows: Iterable[Sequence[object]]) -> str:
    """Return ``rows`` as CSV: numbers with six digits, an empty cell for None, text that is no formula."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        cells = (f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row)
        writer.writerow(["" if cell is None else no_formula(cell) for cell in cells])
    return text.getvalue()


def no_formula(cell: object) -> object:
    """Put a ' before text that a spreadsheet would run, write out control characters; numbers stay.

    >>> no_formula("=1+2"), no_formula("-0.5"), no_formula("cat")
    ("'=1+2", '-0.5', 'cat')
    """
    if not isinstance(cell, str):
        return cell
    cell = without_controls(cell)
    if not cell.startswith(("=", "+", "-", "@", "\t")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown.

    >>> print(markdown_table(("name", "n"), [("cat", 3)]))
    | name | n |
    | --- | ---: |
    | cat | 3 |
    """
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, ruler, *rows))


def markdown(tables: Mapping[str, Grid], notes: Sequence[str] = ()) -> str:
    """Return ``tables`` by caption as Markdown; an empty caption is not shown."""
    marks = {"good": "**{}**", "poor": "*{}*"}
    text = ""
    for caption, (head, rows) in tables.items():
        cells = [
            [marks.get(mark, "{}").format(cell.replace("|", "\\|")) for cell, mark in row] for row in rows
        ]
        text += f"**{caption}**\n\n" if caption else ""
        text += markdown_table(head, cells) + "\n\n"
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


def in_all_formats(
    title: str,
    record: object,
    rows: Iterable[Sequence[object]],
    tables: Mapping[str, Grid],
    notes: Sequence[str],
) -> dict[str, str]:
    """Return what is written of a study, by file name: a record, rows, and tables as people read them."""
    texts = {
        "json": json.dumps(record, indent=1, allow_nan=False) + "\n",
        "csv": as_csv(rows),
        "md": markdown(tables, notes),
        "tex": latex(tables),
        "html": html_page(title, tables, notes),
    }
    return {f"{title.lower()}.{ending}": text for ending, text in texts.items()}


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


def show_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, tight: bool = False
) -> None:
    """Print a table; its first ``left`` columns are text, the others numbers; ``tight`` saves width.

    Names may come from data, so control characters are written out and markup is not interpreted. Numbers may
    have their interval on a second line. No word is broken: a table that is too wide becomes several, each
    with the first column.
    """
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    texts = [[printable(cell, breaks=i >= left) for i, cell in enumerate(row)] for row in (columns, *rows)]
    console = Console()
    cells = list(zip(*texts, strict=True))
    longest = [max(max(map(cell_len, cell.split()), default=0) for cell in column) for column in cells]
    whole = [max(max(map(cell_len, cell.split("\n"))) for cell in column) for column in cells]
    tight = tight or sum(whole) + 3 * len(whole) >= console.width
    extra = 2 if tight else 3
    for part in parts_of_width([width + extra for width in longest], console.width - 1):
        room = console.width - 1 - extra * len(part)
        widths = narrowed([whole[i] for i in part], [longest[i] for i in part], room)
        table = Table(title=Text(printable(title)), title_justify="left")
        if tight:
            table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)
        for i, width in zip(part, widths, strict=True):
            table.add_column(Text(texts[0][i]), justify="left" if i < left else "right", width=width)
        for row in texts[1:]:
            table.add_row(*(Text(row[i]) for i in part))
        needed = sum(widths) + extra * len(part) + 1
        console.width = max(console.width, needed)
        console.print(table)
        title = ""


def narrowed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return widths whose sum is at most ``room``: the widest are reduced first, none below its ``least``.

    >>> narrowed([30, 10, 12], [5, 10, 12], 40), narrowed([30, 10], [25, 10], 20)
    ([18, 10, 12], [25, 10])
    """
    narrow = list(widths)
    while sum(narrow) > room and (wide := [i for i, width in enumerate(narrow) if width > least[i]]):
        narrow[max(wide, key=narrow.__getitem__)] -= 1
    return narrow


def parts_of_width(widths: Sequence[int], room: int) -> list[list[int]]:
    """Return the columns of tables that have ``room``: each has the first one, and at least one other.

    >>> parts_of_width([10, 20, 20, 20], 55)
    [[0, 1, 2], [0, 3]]
    """
    parts = [[0]]
    for i in range(1, len(widths)):
        if len(parts[-1]) > 1 and sum(widths[j] for j in parts[-1]) + widths[i] > room:
            parts.append([0])
        parts[-1].append(i)
    return parts


def safe(text: object) -> str:
    """Return a name for rich: without control characters, and with markup written out."""
    from rich.markup import escape

    return escape(printable(str(text), breaks=False))
