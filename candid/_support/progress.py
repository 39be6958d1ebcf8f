"""What a person sees while a model trains: a bar in a terminal, one line an epoch elsewhere."""

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from candid.training.run_folder import Row


class Progress:
    """Shows where a run is; ``quiet`` shows nothing."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, quiet=quiet)
        self.bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
            speed_estimate_period=120,
        )
        self.task: TaskID | None = None
        self.epochs = self.steps = self.step = self.batch = 0
        self.started = self.first_step = 0.0

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def track(self, iterable: Iterable[Any], description: str, total: int, images: int = 1) -> Iterable[Any]:
        """Goes through ``iterable``, each item of so many ``images``, with a bar if there is a terminal."""
        with self.bar:
            task = self.bar.add_task(description, total=total, figures="")
            start = time.monotonic()
            for done, item in enumerate(iterable, 1):
                yield item
                rate = done * images / max(1e-6, time.monotonic() - start)
                self.bar.update(task, completed=done, figures=f"{rate:,.0f} images/s")
            self.bar.remove_task(task)

    def begin(self, epochs: int, steps: int, step: int, batch: int) -> None:
        self.epochs, self.steps, self.step, self.batch = epochs, steps, step, batch
        self.started, self.first_step = time.monotonic(), step
        self.task = self.bar.add_task("training", total=steps, completed=step, figures="")

    def advance(self, figures: Row) -> None:
        """One step is done; ``figures`` are its losses."""
        self.step += 1
        if self.task is not None:
            epoch = min(self.epochs, 1 + self.step * self.epochs // self.steps)
            self.bar.update(
                self.task,
                completed=self.step,
                description=f"epoch {epoch}/{self.epochs}",
                figures=f"{_losses(figures)}  {self._rate():,.0f} images/s",
            )

    def epoch(self, row: Row) -> None:
        """One line for an epoch that is over."""
        val = {key.removeprefix("val_"): value for key, value in row.items() if key.startswith("val_")}
        train = {key.removeprefix("train_"): value for key, value in row.items() if key.startswith("train_")}
        left = (self.steps - self.step) * (time.monotonic() - self.started) / (self.step - self.first_step)
        self.say(
            f"epoch {int(row['epoch'])}/{self.epochs}  {_losses(train)}  |  validation: "
            f"accuracy {100 * val['accuracy']:.2f} %  {_losses(val)}  |  "
            f"{row['images_per_second']:,.0f} images/s, {timedelta(seconds=round(left))} left"
        )

    def _rate(self) -> float:
        return (self.step - self.first_step) * self.batch / (time.monotonic() - self.started)


def _losses(figures: Row) -> str:
    bits = f"{figures['bits_per_dim']:.3f} bits/dim, " if "bits_per_dim" in figures else ""
    return f"{bits}cross-entropy {figures['cross_entropy']:.3f}"
