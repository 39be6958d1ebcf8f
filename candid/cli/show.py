"""How commands show results: tables on standard output."""

from collections.abc import Iterable, Sequence

from candid._support.text import printable


def show_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, tight: bool = False
) -> None:
    """Print a table; its first ``left`` columns are text, the others numbers; ``tight`` saves width.

    Names may come from data, so control characters are written out and markup is not interpreted. Numbers may
    have their interval on a second line.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(title)), title_justify="left")
    if tight:
        table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)
    for i, column in enumerate(columns):
        table.add_column(
            Text(printable(column)),
            justify="left" if i < left else "right",
            overflow="fold",
            no_wrap=(i > 0) != tight,
        )
    for row in rows:
        table.add_row(*(Text(printable(cell, breaks=i >= left)) for i, cell in enumerate(row)))
    Console().print(table)


def safe(text: object) -> str:
    """Return a name for rich: without control characters, and with markup written out."""
    from rich.markup import escape

    return escape(printable(str(text), breaks=False))
