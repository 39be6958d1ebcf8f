"""Tables in a terminal, without broken words."""

from collections.abc import Iterable, Sequence

from candid._support.text import printable


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
