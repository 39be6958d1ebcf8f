"""Tables of judged images: columns for data frames of any library, and files (CSV, JSON lines, Parquet)."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from candid._support.errors import CandidError, require_extra
from candid._support.files import ANY_NAME, replacing, write_text
from candid._support.text import no_formula
from candid.trust.verdict import Examination, Promises, UnusableImage

ENDINGS = (".csv", ".jsonl", ".parquet")
CSV_COLUMNS = (
    "path",
    "label",
    "confidence",
    "p_value",
    "verdict",
    "classes",
    "class_count",
    "plain",
    "error",
)
"""Columns of CSV; the last says why an image can't be used. JSON lines have all of an examination, Parquet
has the columns of :func:`candid.table`."""
SHARED = "promises"
"""The entry of an examination that is equal in all rows: it is written once, next to the table."""
ROWS = 1000
"""Rows of a Parquet table that are in memory at a time."""
Write = Callable[[Examination | UnusableImage], object]
LIBRARIES = {"pandas": "pandas", "polars": "polars", "pyarrow": "Arrow"}
FROM_RECORD = ("path", "label", "node", "confidence", "p_value", "verdict", "classes", "class_count")
"""Columns that are entries of the record of an examination."""
COLUMNS = (*FROM_RECORD, "top_classes", "top_posteriors", "error")
"""All columns; the last says why an image can't be judged."""


class Table(Mapping[str, list[Any]]):
    """What was said of images, a list for each column.

    >>> examined = Examination("cat.png", {"cat": 0.9, "dog": 0.1}, 0.4, 0.5, "accept", ("cat",))
    >>> columns = Table([examined])
    >>> columns["label"], columns["top_classes"], len(columns)
    (['cat'], [['cat', 'dog']], 11)
    """

    def __init__(self, examinations: Iterable[Examination | UnusableImage]) -> None:
        rows = [_row(examined) for examined in examinations]
        self._columns = {name: [row[name] for row in rows] for name in COLUMNS}

    def __getitem__(self, name: str) -> list[Any]:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Table of {len(self['path'])} images: {', '.join(self)}"

    def to_pandas(self) -> Any:
        """Return a data frame of pandas."""
        return self._frame("pandas")

    def to_polars(self) -> Any:
        """Return a data frame of polars."""
        return self._frame("polars")

    def to_arrow(self) -> Any:
        """Return a table of Arrow."""
        return self._frame("pyarrow")

    def _frame(self, library: Literal["pandas", "polars", "pyarrow"]) -> Any:
        import narwhals

        try:
            schema = None if library == "pandas" else _schema()  # pandas has no columns of lists
            return narwhals.from_dict(self._columns, schema, backend=library).to_native()
        except ModuleNotFoundError as error:
            raise CandidError(
                f"A table of {LIBRARIES[library]} needs the package {library}: install it with "
                f"pip install {library}."
            ) from error


def table(examinations: Iterable[Examination | UnusableImage]) -> Table:
    """Return what was said of images as a table.

    The columns are those of :meth:`Examination.to_dict <candid.Examination.to_dict>`: ``path``, ``label``,
    ``node``, ``confidence``, ``p_value``, ``verdict``, ``classes`` (the first five of the class set) and
    ``class_count``; the five most probable classes in ``top_classes``, with ``top_posteriors``; and
    ``error``, why an image can't be judged.

    Args:
        examinations: what :func:`candid.examine`, :func:`candid.examine_stream` or ``Monitor.examine`` gives.

    Returns:
        A mapping of columns, with ``to_pandas()``, ``to_polars()`` and ``to_arrow()``.

    Example:
        >>> import candid
        >>> examined = candid.Examination("cat.png", {"cat": 0.9, "dog": 0.1}, 0.4, 0.5, "accept", ("cat",))
        >>> candid.table([examined])["verdict"]
        ['accept']
    """
    return Table(examinations)


def _schema() -> dict[str, Any]:
    """Return the types of the columns, so that those of empty tables are known, too."""
    import narwhals

    text, number = narwhals.String(), narwhals.Float64()
    texts, numbers = narwhals.List(narwhals.String()), narwhals.List(narwhals.Float64())
    types: dict[str, Any] = {"confidence": number, "p_value": number, "class_count": narwhals.Int64()}
    types |= {"classes": texts, "top_classes": texts, "top_posteriors": numbers}
    return {name: types.get(name, text) for name in COLUMNS}


def _row(examined: Examination | UnusableImage) -> dict[str, Any]:
    if isinstance(examined, UnusableImage):
        return dict.fromkeys(COLUMNS) | {"path": examined.path, "error": examined.reason}
    record = examined.to_dict()
    top = record["posterior"]
    row = {name: record[name] for name in FROM_RECORD}
    return row | {"top_classes": list(top), "top_posteriors": list(top.values()), "error": None}


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
        rows.writerow(CSV_COLUMNS)

        def write(judged: Examination | UnusableImage) -> None:
            values = record(judged)
            rows.writerow(_cell(values.get(column)) for column in CSV_COLUMNS)

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
