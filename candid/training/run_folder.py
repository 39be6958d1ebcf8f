"""The folder of a run: what people read, and what a killed run resumes from.

::

    config.toml     everything that decides what the run computes
    metrics.csv     one line an epoch
    curves.png      the same as a picture
    model/last      the model after the last epoch
    model/best      the one with the lowest validation loss
    results.json    figures of the finished run
    skipped.txt     images that were left out
    state.pt        weights, optimiser and position, for --resume

Every file is replaced as a whole, so a run that is killed at any moment leaves whole files.
"""

import csv
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from candid._support.config import from_dict
from candid._support.errors import CandidError, CheckpointError
from candid._support.files import ANY_NAME, replacing
from candid.models import checkpoint
from candid.models.flow.classifier import GenerativeClassifier
from candid.models.resnet import ResNet
from candid.training.options import TrainConfig, read_toml, write_toml

Row = dict[str, float]


@dataclass
class State:
    """Where a run stands after ``step`` steps."""

    model: dict[str, Tensor]
    optimiser: dict[str, Any]
    step: int
    rows: list[Row]
    """Figures of the finished epochs."""
    tally: list[float]
    """Sums over the steps of the epoch that is under way."""
    best: float
    """The lowest validation loss."""
    class_names: list[str] = field(default_factory=list)
    images: int = 0
    """Of the training data."""

    def check_data(self, class_names: list[str], images: int) -> None:
        """Whether the data are still the same."""
        if (self.class_names or class_names) != class_names or (self.images or images) != images:
            raise CandidError(
                f"The run was started with {self.images:,} training images of {len(self.class_names)} "
                f"classes; the data now has {images:,} of {len(class_names)}, or others: restore it, or "
                "start a new run with another --out."
            )


class RunFolder:
    """Reads and writes the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last, self.best = path / "model" / "last", path / "model" / "best"

    @property
    def exists(self) -> bool:
        return (self.path / "config.toml").is_file()

    def create(self, config: TrainConfig) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise CandidError(f"'{self.path}' is not a folder: choose another --out.") from error
        self.write_text("config.toml", write_toml(config))

    def config(self) -> TrainConfig:
        if not self.exists:
            raise CandidError(f"There is no run to resume in '{self.path}': leave --resume out to start one.")
        # runs of versions without this field were started on shuffled images
        return from_dict(TrainConfig, {"split": "shuffled", **read_toml(self.path / "config.toml")})

    def write_text(self, name: str, text: str) -> None:
        with _saving(self.path), replacing(self.path / name) as temporary:
            temporary.write_text(text, encoding="utf-8", errors=ANY_NAME)

    def write_rows(self, rows: list[Row]) -> None:
        table = io.StringIO()
        writer = csv.DictWriter(table, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: f"{value:.6g}" for key, value in row.items()} for row in rows)
        self.write_text("metrics.csv", table.getvalue())

    def write_results(self, results: dict[str, Any]) -> None:
        self.write_text("results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")

    @property
    def results(self) -> dict[str, Any] | None:
        """Of a finished run."""
        path = self.path / "results.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    @property
    def has_state(self) -> bool:
        return (self.path / "state.pt").is_file()

    def save_state(self, state: State) -> None:
        with _saving(self.path), replacing(self.path / "state.pt") as path, path.open("wb") as file:
            torch.save(vars(state), file)

    def load_state(self) -> State | None:
        path = self.path / "state.pt"
        if not self.has_state:
            return None
        try:
            return State(**torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # torch raises many kinds for a damaged file
            raise CheckpointError(
                f"'{path}' can't be read ({str(error)[:80]}): restore it, or start anew with another --out."
            ) from error

    def save_model(self, model: GenerativeClassifier | ResNet, *, is_best: bool) -> None:
        for folder in [self.best, self.last] if is_best else [self.last]:
            checkpoint.save(model, folder)


class _saving:  # noqa: N801 - reads as a verb
    """Turns what a full or broken disk raises into one sentence."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError | RuntimeError):
            raise CheckpointError(
                f"Can't write to '{self.path}' ({error}); what was saved earlier is unharmed: free some "
                f"space, then go on with: candid train --resume --out {self.path}"
            ) from error
