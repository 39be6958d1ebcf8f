"""One HTML page that needs no other file: chapters with photos, verdicts, tables, figures and commands."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from candid._support.version import __version__
from candid.data.thumbnails import data_uri, inline_thumbnail
from candid.trust.verdict import Examination

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Nothing is loaded from anywhere, and no script runs."""
SIZE = 168
"""Pixels of a photo on the page."""
TONES = {"accept": "good", "ambiguous": "fair", "novel": "poor", None: "unknown"}


@dataclass(frozen=True)
class Card:
    """A photo and what a model says of it."""

    photo: str
    """As a data URI."""
    name: str
    examination: Examination

    @classmethod
    def of(cls, examination: Examination) -> "Card":
        """Return the card of a file that was examined."""
        path = Path(examination.path)
        return cls(inline_thumbnail(path, SIZE) or "", path.name, examination)

    @property
    def tone(self) -> str:
        """The colour of the verdict."""
        return TONES[self.examination.verdict]

    @property
    def says(self) -> str:
        """The class set of an ambiguous image, else the most probable class."""
        named = self.examination.classes or ()
        if self.examination.verdict == "ambiguous" and len(named) > 1:
            return " or ".join(named[:2]) + (" …" if len(named) > 2 else "")
        return self.examination.label


@dataclass(frozen=True)
class Chapter:
    """One step of the demonstration."""

    title: str
    text: Sequence[str] = ()
    """Paragraphs."""
    cards: Sequence[Card] = ()
    figures: Sequence[tuple[Path, str]] = ()
    """Files and their captions."""
    commands: Sequence[str] = ()


def page(chapters: Sequence[Chapter], next_steps: Sequence[tuple[str, str]]) -> str:
    """Return the page.

    Args:
        chapters: what was done.
        next_steps: commands that can be copied, each with what it does.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("candid.reports.demo"), PackageLoader("candid.reports.audit")]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["data_uri"] = lambda path: data_uri(Path(path).read_bytes(), "png")
    template = environment.get_template("demo.html.j2")
    return template.render(chapters=chapters, next_steps=next_steps, policy=POLICY, version=__version__)
