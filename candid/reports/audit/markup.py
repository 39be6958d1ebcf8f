"""HTML by hand: escaped text, tables that scroll in their box, figures with alternative text, one style."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count

from candid._support.tables import Cell

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Nothing is loaded from anywhere, and no script runs."""
SIGNS = {"good": "✓", "fair": "~", "poor": "✗", "unknown": "?"}
WORDS = {"good": "good", "fair": "fair", "poor": "poor", "unknown": "not known"}


@dataclass(frozen=True)
class Picture:
    """A figure as an address that contains it."""

    address: str
    width: int
    height: int
    """In pixels, as it is shown."""
    alt: str
    caption: str


class Page:
    """Collects the parts of a page; every table has an id of its own."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts: list[str] = []
        self.sections: list[tuple[str, str]] = []
        self._numbers = count(1)

    def add(self, *html: str) -> None:
        self.parts += html

    def section(self, anchor: str, title: str) -> None:
        """Everything that is added from now on is below this heading."""
        if self.sections:
            self.parts.append("</section>")
        self.sections.append((anchor, title))
        self.add(f'<section id="{anchor}" aria-labelledby="{anchor}-title">')
        self.add(f'<h2 id="{anchor}-title">{escape(title)}</h2>')

    def heading(self, title: str) -> None:
        self.add(f"<h3>{escape(title)}</h3>")

    def paragraph(self, text: str, kind: str = "") -> None:
        self.add(f"<p{_class(kind)}>{marked(text)}</p>")

    def how_to_read(self, text: str) -> None:
        self.add(f'<p class="reading"><strong>How to read it.</strong> {marked(text)}</p>')

    def commands(self, lines: Iterable[str]) -> None:
        shown = "".join(f"<code>{escape(line)}</code>" for line in lines)
        if shown:
            self.add('<p class="label">To repeat it:</p>', f"<pre>{shown}</pre>")

    def items(self, texts: Iterable[str]) -> None:
        self.add("<ul>", *(f"<li>{marked(text)}</li>" for text in texts), "</ul>")

    def table(
        self, caption: str, head: Sequence[str], rows: Iterable[Sequence[Cell | str]], kind: str = ""
    ) -> None:
        """The first cell of a row is its head; a cell may have a mark, which becomes its class."""
        name = f"table-{next(self._numbers)}"
        top = "".join(f'<th scope="col">{escape(each)}</th>' for each in head)
        body = "\n".join(f"<tr>{''.join(_cells(row))}</tr>" for row in rows)
        self.add(
            f'<div class="wide" role="region" aria-labelledby="{name}" tabindex="0">',
            f'<table{_class(kind)}><caption id="{name}"><span>{marked(caption)}</span></caption>',
            f"<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>",
        )

    def picture(self, picture: Picture) -> None:
        name = f"figure-{next(self._numbers)}"
        self.add(
            f'<figure><div class="wide card" role="region" aria-labelledby="{name}" tabindex="0">',
            f'<img src="{picture.address}" width="{picture.width}" height="{picture.height}" '
            f'alt="{escape(picture.alt)}"></div>',
            f'<figcaption id="{name}">{escape(picture.caption)}</figcaption></figure>',
        )

    def drawing(self, svg: str, caption: str) -> None:
        """An SVG that is a part of the page, in its colours."""
        name = f"figure-{next(self._numbers)}"
        self.add(
            f'<figure><div class="wide" role="region" aria-labelledby="{name}" tabindex="0">{svg}</div>',
            f'<figcaption id="{name}">{marked(caption)}</figcaption></figure>',
        )

    def text(self) -> str:
        """The whole page."""
        links = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title in self.sections)
        return "\n".join(
            (
                '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
                f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                '<meta name="color-scheme" content="light dark">',
                f"<title>{escape(self.title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>",
                f"<header><h1>{escape(self.title)}</h1></header>",
                f'<nav aria-label="Contents"><ul>{links}</ul></nav>\n<main>',
                *self.parts,
                "</section>\n</main>\n<footer><p>Made by <code>candid audit</code>. This page loads "
                "nothing from anywhere and runs no script.</p></footer>\n</body>\n</html>\n",
            )
        )


def marked(text: str) -> str:
    """Escaped, with options such as --quick as code, and no line break before a %.

    >>> marked("a < b: see --ood")
    'a &lt; b: see <code>--ood</code>'
    """
    return re.sub(r"(?<!\S|-)(\(?)(--[a-z]+(?:-[a-z]+)*)", r"\1<code>\2</code>", escape(text)).replace(
        " %", "&nbsp;%"
    )


def badge(grade: str) -> str:
    """The grade as a word with a sign, not by colour alone."""
    return f'<span class="badge {grade}"><span aria-hidden="true">{SIGNS[grade]}</span> {WORDS[grade]}</span>'


def _cells(row: Sequence[Cell | str]) -> Iterable[str]:
    first, *others = (cell if isinstance(cell, tuple) else (cell, "") for cell in row)
    yield f'<th scope="row"{_class(first[1])}>{escape(first[0])}</th>'
    for text, mark in others:
        yield f"<td{_class(mark)}>{escape(text)}</td>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


LIGHT = """
--page: #ffffff; --text: #1c2128; --soft: #525c68; --line: #d3d9e0; --panel: #f4f6f9; --link: #0b57b0;
--good: #0b5a36; --good-back: #dcf3e6; --fair: #664400; --fair-back: #fdf0cd;
--poor: #90190f; --poor-back: #fce3e0;
--unknown: #424a53; --unknown-back: #e8ecf1;
--c0: #0068a3; --c1: #bb4e00; --c2: #007a59; --c3: #8f5f00; --c4: #a84a80; --c5: #2b7fb0;
"""
DARK = """
--page: #14181d; --text: #e4e8ee; --soft: #a5b0bd; --line: #3a434e; --panel: #1d232a; --link: #7db8ff;
--good: #8ee0b3; --good-back: #12382a; --fair: #f2cd7a; --fair-back: #3d2f0c;
--poor: #ffb3a8; --poor-back: #4b1c17;
--unknown: #c1cad4; --unknown-back: #2d353f;
--c0: #5db7f0; --c1: #ff9a55; --c2: #3fd0a2; --c3: #f0c14b; --c4: #ee9cc8; --c5: #9ad4f5;
"""
STYLE = (
    ":root { color-scheme: light dark;"
    + LIGHT
    + "}\n@media screen and (prefers-color-scheme: dark) { :root {"
    + DARK
    + "} }\n"
    + """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--text); font: 1rem/1.55 system-ui, sans-serif; }
header, nav, main, footer { max-width: 68rem; margin: 0 auto; padding: 0 1rem; }
h1, h3, p, li, dd, figcaption { overflow-wrap: anywhere; }
h1 { font-size: clamp(1.5rem, 4vw, 2.1rem); line-height: 1.2; margin: 2rem 0 0.6rem; }
h2 { font-size: 1.45rem; line-height: 1.25; margin: 0 0 0.7rem; }
h3 { font-size: 1.1rem; margin: 1.8rem 0 0.5rem; }
section { border-top: 1px solid var(--line); padding: 1.8rem 0 0.6rem; margin-top: 1.6rem; }
section:first-child { border-top: 0; margin-top: 0; padding-top: 0.8rem; }
p, li { max-width: 46rem; }
a { color: var(--link); }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: 0.35rem 1.1rem; padding: 0.6rem 0; margin: 0;
  border-top: 1px solid var(--line); border-bottom: 1px solid var(--line); }
ul { padding-left: 1.3rem; }
code { font: 0.88em/1.5 ui-monospace, monospace; white-space: nowrap; }
.label + pre { margin-top: 0.3rem; }
pre code { display: block; padding-left: 1.4em; text-indent: -1.4em; white-space: pre-wrap; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 0.6rem 0.8rem;
  overflow-wrap: anywhere; white-space: normal; margin: 0 0 1.4rem; max-width: 100%; }
.label { margin: 1.2rem 0 0; color: var(--soft); font-size: 0.9rem; }
.soft { color: var(--soft); }
.note { background: var(--fair-back); color: var(--fair); border-radius: 6px; padding: 0.7rem 0.9rem; }
.reading { border-left: 4px solid var(--c0); padding-left: 0.8rem; }
.wide { overflow-x: auto; max-width: 100%; margin: 1.1rem 0; }
.wide:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
.card { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 0.6rem; }
figure { margin: 1.3rem 0; }
figure .wide { margin: 0; }
figcaption, caption { color: var(--soft); font-size: 0.92rem; text-align: left; }
figcaption { margin-top: 0.4rem; max-width: 46rem; }
caption { padding-bottom: 0.4rem; }
caption span { display: inline-block; position: sticky; left: 0;
  max-width: min(46rem, calc(100vw - 2rem)); }
img { display: block; height: auto; max-width: max(100%, 34rem); margin: 0 auto; }
svg { display: block; height: auto; width: 100%; min-width: 30rem; max-width: 52rem; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; }
table { border-collapse: collapse; min-width: min(100%, 28rem); font-size: 0.92rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.34rem 0.7rem; text-align: right; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
thead th { background: var(--panel); vertical-align: bottom; }
th:first-child { text-align: left; }
tbody th { font-weight: 500; white-space: nowrap; }
td { white-space: nowrap; }
td.good { color: var(--good); font-weight: 600; }
td.some { color: var(--fair); }
td.poor { color: var(--poor); font-style: italic; }
.prose td, .prose th { text-align: left; }
.prose td { white-space: normal; min-width: 17rem; max-width: 40rem; overflow-wrap: anywhere; }
.summary { width: 100%; }
.summary td, .summary th { text-align: left; }
.summary td { white-space: normal; min-width: 8.5rem; }
.badge { display: inline-block; border-radius: 999px; padding: 0.05rem 0.65rem; white-space: nowrap;
  font-weight: 600; font-size: 0.88rem; }
.badge.good { color: var(--good); background: var(--good-back); }
.badge.fair { color: var(--fair); background: var(--fair-back); }
.badge.poor { color: var(--poor); background: var(--poor-back); }
.badge.unknown { color: var(--unknown); background: var(--unknown-back); }
.figure { display: block; margin-top: 0.15rem; }
dl { margin: 0.6rem 0 1.2rem; }
dt { font-weight: 600; margin-top: 0.8rem; }
dd { margin: 0.15rem 0 0; max-width: 46rem; }
footer { color: var(--soft); font-size: 0.9rem; padding-bottom: 2rem; margin-top: 2rem; }
@media print {
  body { font-size: 10pt; }
  nav, footer { display: none; }
  section { break-inside: auto; }
  h2, h3, dt, .label { break-after: avoid; }
  figure, tr, pre, dd { break-inside: avoid; }
  .wide { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding: 0.15rem 0.3rem; }
  img, svg { max-width: 100%; min-width: 0; }
  img { width: auto; max-height: 22cm; }
  .badge { border: 1px solid; }
}
"""
)
