"""Tables of judged images: CSV, JSON lines or Parquet, with what verdicts promise once per file."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from candid._support.errors import CandidError, require_extra
from candid._support.files import ANY_NAME, replacing, write_text
from candid._support.text import no_formula
from candid.judging.columns import Table
from candid.trust.verdict import Examination, Promises, UnusableImage

ENDINGS = (".csv", ".jsonl", ".parquet")
COLUMNS = ("path", "label", "confidence", "p_value", "verdict", "classes", "class_count", "plain", "error")
"""Columns of CSV; the last says why an image can't be used. JSON lines have all of an examination, Parquet
has the columns of :func:`candid.table`."""
SHARED = "promises"
"""The entry of an examination that is equal in all rows: it is written once, next to the table."""
ROWS = 1000
"""Rows of a Parquet table that are in memory at a time."""
Write = Callable[[Examination | UnusableImage], object]


class TableFile:
    """A table that is written image by image, and takes its place when it is whole.

    Args:
        path: the file, ``.csv``, ``.jsonl`` or, with the extra ``bulk``, ``.parquet``.
    """

    def __init__(self, path: Path) -> None:
        self.path, ending = path, path.suffix.lower()
        if ending not in ENDINGS:
            raise CandidError(
                f"--out takes a folder or a file that ends with {', '.join(ENDINGS)}, not '{path}'."
            )
        self._writer = {".csv": _csv, ".jsonl": _lines, ".parquet": _parquet}[ending]
        if ending == ".parquet":
            require_extra("pyarrow.parquet", "bulk", "Writing Parquet")
        self._write: Write | None = None

    @contextmanager
    def open(self, promises: Promises | None) -> Iterator["TableFile"]:
        """Write the table; ``promises`` go into ``NAME.promises.json`` next to it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as temporary, self._writer(temporary) as self._write:
                yield self
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
        assert self._write is not None
        self._write(judged)


@contextmanager
def _csv(path: Path) -> Iterator[Write]:
    with path.open("w", encoding="utf-8", errors=ANY_NAME, newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)

        def write(judged: Examination | UnusableImage) -> None:
            values = record(judged)
            rows.writerow(_cell(values.get(column)) for column in COLUMNS)

        yield write


@contextmanager
def _lines(path: Path) -> Iterator[Write]:
    with path.open("w", encoding="utf-8", errors=ANY_NAME, newline="") as file:
        yield lambda judged: file.write(json.dumps(record(judged), allow_nan=False) + "\n")


@contextmanager
def _parquet(path: Path) -> Iterator[Write]:
    import pyarrow.parquet

    waiting: list[Examination | UnusableImage] = []
    with pyarrow.parquet.ParquetWriter(path, Table([]).to_arrow().schema) as file:

        def write(judged: Examination | UnusableImage) -> None:
            waiting.append(judged)
            if len(waiting) == ROWS:
                flush()

        def flush() -> None:
            file.write_table(Table(waiting).to_arrow())
            waiting.clear()

        yield write
        if waiting:
            flush()


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
