"""Tables in Markdown: the rows are records, each column is a head and what makes its cell of a record."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from candid._support.text import GOOD, markdown_table, number

Results = Mapping[str, Any]
"""What was measured, as it is in a JSON file."""
Cell = Callable[[Any], str]
"""Makes a cell of a record."""


def table(records: Iterable[Any], columns: Iterable[tuple[str, Cell]]) -> str:
    """Return a table with a row for each record.

    Args:
        records: what is measured, one for each row.
        columns: the head of each column, and what makes its cell of a record.

    Example:
        >>> print(table([0.25, 0.5], [("share", str), ("%", lambda share: decimal(share, 1, 100))]))
        | share | % |
        | --- | ---: |
        | 0.25 | 25.0 |
        | 0.5 | 50.0 |
    """
    heads, cells = zip(*columns, strict=True)
    return markdown(heads, ([cell(record) for cell in cells] for record in records))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of text."""
    return markdown_table(head, rows)


def filled(page: str, found: Mapping[str, str]) -> str:
    r"""Return ``page`` with each table ``found`` between its marks, ``<!-- name -->`` and ``<!-- /name -->``.

    >>> filled("<!-- a -->old<!-- /a -->", {"a": "new"})
    '<!-- a -->\n\nnew\n\n<!-- /a -->'
    """
    for name, lines in found.items():
        before, begin, rest = page.partition(f"<!-- {name} -->")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if not end:
            raise ValueError(f"The page has no place for the table '{name}'.")
        page = f"{before}{begin}\n\n{lines}\n\n{end}{after}"
    return page


def title(name: str) -> str:
    """Return how a table calls the model ``name``.

    >>> title("cifar10-betainf"), title("cifar10-resnet-unsmoothed"), title("cifar10-beta1-seed1")
    ('β = ∞', 'ResNet, hard labels', 'β = 1, second seed')
    """
    if not name.startswith("cifar10"):
        return f"`{name}`"
    beta = re.search(r"beta(\d+|inf)", name)
    kind = "ResNet" if beta is None else f"β = {number(float(beta[1]))}"
    if "unsmoothed" in name:
        return f"{kind}, hard labels"
    return f"{kind}, second seed" if second_seed(name) else kind


def second_seed(name: str) -> bool:
    """Return whether this model was trained only to see what chance does."""
    return name.endswith("-seed1")


def decimal(value: float | str | None, digits: int, factor: float = 1) -> str:
    """Return a value with this number of digits; infinities may be text, as in JSON."""
    if value is None:
        return "–"
    return "∞" if float(value) == math.inf else f"{factor * float(value):.{digits}f}"


def percent(share: float | None) -> str:
    """Return a share, or a ratio above one, with its sign of percent."""
    return "–" if share is None else f"{100 * share:.1f} %"


def area(share: float, ends: Sequence[float] | None = None) -> str:
    """Return an AUC in percent with half the width of its interval; good ones are bold, as in the paper."""
    shown = f"**{100 * share:.1f}**" if share >= GOOD else f"{100 * share:.1f}"
    return shown if ends is None else f"{shown} ± {50 * (ends[1] - ends[0]):.1f}"


def between(share: float | None, ends: Sequence[float] | None) -> str:
    """Return a share in percent, with its interval if there is one."""
    if share is None or ends is None:
        return decimal(share, 1, 100)
    return f"{100 * share:.1f} ({100 * ends[0]:.1f} to {100 * ends[1]:.1f})"


def with_interval(record: Results, key: str, factor: float, digits: int) -> str:
    """Return a metric of ``record`` with its interval."""
    if record.get(key) is None:
        return "never sure" if key == "oce" else "–"
    low, high = (decimal(end, digits, factor) for end in record["intervals"][key])
    return f"{decimal(record[key], digits, factor)} ({low} to {high})"


def at(record: Any, *keys: str) -> Any:
    """Return what is in a record below these keys; None if it was not measured.

    >>> at({"a": {"b": 1}}, "a", "b"), at({"a": None}, "a", "b")
    (1, None)
    """
    for key in keys:
        record = None if record is None else record.get(key)
    return record


def text(*keys: str) -> Cell:
    """Return the cell that has what is below these keys as it is."""
    return lambda record: str(at(record, *keys))


def bold(*keys: str) -> Cell:
    """Return the cell that has a name in bold."""
    return lambda record: f"**{at(record, *keys)}**"


def shown(digits: int, factor: float, *keys: str) -> Cell:
    """Return the cell that has the number below these keys."""
    return lambda record: decimal(at(record, *keys), digits, factor)


def interval(key: str, factor: float, digits: int, *path: str) -> Cell:
    """Return the cell that has a metric with its interval, of the record below ``path``."""
    return lambda record: with_interval(at(record, *path) or {}, key, factor, digits)


def ranged(*keys: str) -> Cell:
    """Return the cell that has a share in percent with its interval; these are next to the first key's end.

    The interval of ``record["a"]["b"]`` is ``record["a"]["intervals"]["b"]``.
    """
    *path, last = keys
    return lambda record: between(at(record, *keys), at(record, *path, "intervals", last))
