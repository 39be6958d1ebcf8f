"""Examinations as a table: columns for data frames of any library."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from candid._support.errors import CandidError
from candid.trust.verdict import Examination, UnusableImage

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
