"""Tables of judged images for spreadsheets: CSV or JSON lines, with what verdicts promise once per file."""

import csv
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from candid._support.errors import CandidError
from candid._support.files import ANY_NAME, replacing, write_text
from candid._support.text import no_formula
from candid.judging.examine import UnusableImage
from candid.trust.verdict import Examination, Promises

ENDINGS = (".csv", ".jsonl")
COLUMNS = ("path", "label", "confidence", "p_value", "verdict", "classes", "class_count", "plain", "error")
"""Columns of CSV; the last says why an image can't be used. JSON lines have all of an examination."""
SHARED = "promises"
"""The entry of an examination that is equal in all rows: it is written once, next to the table."""


class TableFile:
    """A table that is written image by image, and takes its place when it is whole.

    Args:
        path: the file, ``.csv`` or ``.jsonl``.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix.lower() not in ENDINGS:
            raise CandidError(f"--out takes a file that ends with {' or '.join(ENDINGS)}, not '{path}'.")
        self.path, self.is_csv = path, path.suffix.lower() == ".csv"
        self._file: TextIO | None = None

    @contextmanager
    def open(self, promises: Promises | None) -> Iterator["TableFile"]:
        """Write the table; ``promises`` go into ``NAME.promises.json`` next to it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with (
                replacing(self.path) as temporary,
                temporary.open("w", encoding="utf-8", errors=ANY_NAME, newline="") as file,
            ):
                self._file = file
                if self.is_csv:
                    csv.writer(file, lineterminator="\n").writerow(COLUMNS)
                yield self
                file.flush()
            if promises is not None:
                text = json.dumps(promises.to_dict(), indent=1, allow_nan=False) + "\n"
                write_text(text, self.path.with_suffix(".promises.json"))
        except BrokenPipeError:  # the reader of what is printed stopped, as in '| head'
            raise
        except OSError as error:
            raise CandidError(
                f"Can't write '{self.path}' ({error}): free some space, or name another file."
            ) from error

    def add(self, judged: Examination | UnusableImage) -> None:
        """Write one row."""
        assert self._file is not None
        values = record(judged)
        if not self.is_csv:
            self._file.write(json.dumps(values, allow_nan=False) + "\n")
            return
        cells = (_cell(values.get(column)) for column in COLUMNS)
        csv.writer(self._file, lineterminator="\n").writerow(cells)


def record(judged: Examination | UnusableImage) -> dict[str, Any]:
    """Return what was said of an image, without the promises, which all images share."""
    if isinstance(judged, UnusableImage):
        return {"path": judged.path, "error": judged.reason}
    return {name: value for name, value in judged.to_dict().items() if name != SHARED}


def _cell(value: Any) -> object:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return no_formula("; ".join(value))
    return "" if value is None else no_formula(value)


def verdict_places(examinations: Iterable[Examination]) -> dict[str, str]:
    """Return the folder that each image is sorted into, by its path: its verdict, and its class if accepted.

    >>> verdict_places([Examination("a.png", {"cat": 1.0}, verdict="accept")])
    {'a.png': 'accepted/cat'}
    """
    return {examined.path: _place(examined) for examined in examinations}


def _place(examined: Examination) -> str:
    if examined.verdict == "accept" or examined.verdict is None:
        return f"accepted/{examined.node or examined.label}"
    return str(examined.verdict)
