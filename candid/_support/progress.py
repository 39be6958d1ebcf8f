"""What a user sees while something runs: messages, and a bar if there is a terminal."""

import os
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Self, TypeVar

from candid._support.text import plural, printable

if TYPE_CHECKING:
    from rich.progress import TaskID

T = TypeVar("T")
Row = dict[str, float]
"""Figures of an epoch or a step, by name."""


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


class ShardDisplay(TerminalProgress):
    """Shows how many shards of images are done, the rate and the time that is left."""

    def __init__(self, shards: int, quiet: bool = False) -> None:
        super().__init__(quiet)
        self.shards, self.finished, self.images = shards, 0, 0
        self.current: dict[str, tuple[int, float]] = {}
        self.start = time.monotonic()

    def __enter__(self) -> Self:
        self.bar.start()
        self.task = self.bar.add_task("examining", total=max(1, self.shards), rate="")
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def seen(self, name: str, images: int, share: float) -> None:
        """Show how far a shard is: its images, and the share that is read."""
        self.current[name] = images, share
        done = self.finished + sum(share for _, share in self.current.values())
        self.bar.update(self.task, completed=done, rate=f"{self._rate():,.0f} images/s")

    def done(self, name: str, images: int) -> None:
        """Count a shard, and write one line about it."""
        self.current.pop(name, None)
        self.finished, self.images = self.finished + 1, self.images + images
        self.bar.update(self.task, completed=self.finished)
        passed = time.monotonic() - self.start
        left = timedelta(seconds=round(passed / self.finished * (self.shards - self.finished)))
        self.log(
            f"{name}: {plural(images, 'image')}; {self.finished} of {self.shards} shards, "
            f"{self._rate():,.0f} images/s, {left} left"
        )

    def _rate(self) -> float:
        images = self.images + sum(images for images, _ in self.current.values())
        return images / max(1e-6, time.monotonic() - self.start)


class TrainingDisplay(TerminalProgress):
    """Shows epochs, losses, rate and remaining time of a training run."""

    def __init__(self, quiet: bool = False, stdout: bool = False) -> None:
        super().__init__(quiet, stdout)
        self.task: TaskID | None = None
        self.epochs = self.steps = self.step = self.batch = 0
        self.started = self.first_step = 0.0

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def begin(self, epochs: int, steps: int, step: int, batch: int) -> None:
        """Start a run of ``steps`` steps at ``step``."""
        self.epochs, self.steps, self.step, self.batch = epochs, steps, step, batch
        self.started, self.first_step = time.monotonic(), step
        self.task = self.bar.add_task("training", total=steps, completed=step, rate="")

    def advance(self, losses: Row) -> None:
        """Count one step that had these ``losses``."""
        self.step += 1
        if self.task is not None:
            epoch = min(self.epochs, 1 + self.step * self.epochs // self.steps)
            self.bar.update(
                self.task,
                completed=self.step,
                description=f"epoch {epoch}/{self.epochs}",
                rate=f"{_losses(losses)}  {self._rate():,.0f} images/s",
            )

    def epoch(self, row: Row) -> None:
        """Write one line for an epoch that is over."""
        val = {key.removeprefix("val_"): value for key, value in row.items() if key.startswith("val_")}
        train = {key.removeprefix("train_"): value for key, value in row.items() if key.startswith("train_")}
        left = (self.steps - self.step) * (time.monotonic() - self.started) / (self.step - self.first_step)
        self.log(
            f"epoch {int(row['epoch'])}/{self.epochs}  {_losses(train)}  |  validation: "
            f"accuracy {100 * val['accuracy']:.2f} %  {_losses(val)}  |  "
            f"{row['images_per_second']:,.0f} images/s, {timedelta(seconds=round(left))} left"
        )

    def _rate(self) -> float:
        return (self.step - self.first_step) * self.batch / (time.monotonic() - self.started)


def _losses(row: Row) -> str:
    bits = f"{row['bits_per_dim']:.3f} bits/dim, " if "bits_per_dim" in row else ""
    return f"{bits}cross-entropy {row['cross_entropy']:.3f}"
