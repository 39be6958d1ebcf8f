"""What a user sees while something runs: messages, and a bar if there is a terminal."""

import os
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from candid._support.text import printable

T = TypeVar("T")


class Progress:
    """Receives messages and the progress of loops. This base class shows nothing.

    >>> list(SILENT.track(range(3), "counting", 3))
    [0, 1, 2]
    """

    def log(self, text: str) -> None:
        """Show one message."""

    def track(self, iterable: Iterable[T], description: str, total: int, images: int = 1) -> Iterable[T]:
        """Yield the items of ``iterable`` and show how many of ``total`` are done.

        Args:
            iterable: what to go through.
            description: what is being done, such as ``"reading images"``.
            total: number of items.
            images: images in each item, for the rate in images/s.
        """
        return iterable


SILENT = Progress()
"""The progress that shows nothing: the default of every function."""


def is_first_process() -> bool:
    """Return whether this is the one of several processes that shows messages.

    This is known before the processes are connected.
    """
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


class TerminalProgress(Progress):
    """Shows messages on standard error, and bars if that is a terminal.

    Args:
        quiet: whether to show nothing.
        stdout: whether to write to standard output instead.
    """

    def __init__(self, quiet: bool = False, stdout: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.console = Console(stderr=not stdout, quiet=quiet)
        self.bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
            speed_estimate_period=120,
        )

    def log(self, text: str) -> None:
        self.console.print(printable(text), soft_wrap=True, highlight=False, markup=False)

    def track(self, iterable: Iterable[T], description: str, total: int, images: int = 1) -> Iterator[T]:
        with self.bar:
            task = self.bar.add_task(printable(description), total=total, rate="")
            start = time.monotonic()
            for done, item in enumerate(iterable, 1):
                yield item
                rate = done * images / max(1e-6, time.monotonic() - start)
                self.bar.update(task, completed=done, rate=f"{rate:,.0f} images/s")
            self.bar.remove_task(task)
