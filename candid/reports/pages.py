"""Pages of HTML: what all templates share, and the page of grouped images with a contact sheet for each."""

from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from candid._support.files import write_texts
from candid.data.thumbnails import inline_thumbnail
from candid.judging.group import GroupResult
from candid.trust.verdict import Examination

MOST = 60
"""Images of a contact sheet; the CSV names all of them."""
SIDE = 112
"""Pixels of a thumbnail."""


def environment(*packages: str) -> Environment:
    """Return what renders the templates of some packages: text is escaped, and unknown names are errors."""
    return Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def write_groups(result: GroupResult, out: Path) -> list[Path]:
    """Write ``groups.csv`` and ``groups.html`` into the folder ``out``, and return the files."""
    return write_texts({"groups.csv": result.csv(), "groups.html": groups_page(result)}, out)


def groups_page(result: GroupResult) -> str:
    """Return the page as HTML that needs no other file."""
    page = environment("candid.reports").get_template("groups.html.j2")
    sheets: list[tuple[str, str | None, tuple[Examination, ...]]]
    sheets = [(group.name, group.nearest, group.members) for group in result.groups]
    if result.singles:
        sheets.append(("single images", None, result.singles))
    return page.render(result=result, sheets=sheets, thumbnail=_thumbnail, short=_short, most=MOST)


def _short(examined: Examination) -> str:
    return "/".join(Path(examined.path).parts[-2:])


def _thumbnail(examined: Examination) -> str | None:
    return inline_thumbnail(Path(examined.path), SIDE)
