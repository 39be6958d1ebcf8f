"""What a user sees while a model trains: a bar in a terminal, one line for each epoch elsewhere."""

import time
from datetime import timedelta
from typing import Self

from rich.progress import TaskID

from candid._support.progress import TerminalProgress
from candid.training.run_folder import Row


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
