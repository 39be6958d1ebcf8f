"""The folder of a run: what people read, and what a killed run resumes from.

::

    config.toml     everything that decides what the run computes
    metrics.csv     one line per epoch
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
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candid._support.errors import CandidError, CheckpointError
from candid._support.files import locked, replacing, write_text
from candid._support.numbers import digest
from candid._support.old_formats import NO_DIGEST, recorded_options
from candid._support.options import from_dict, named_option
from candid._support.processes import Processes, first_error
from candid._support.progress import Progress, Row
from candid._support.text import plural
from candid.data.datasets import Dataset
from candid.data.splits import ArraySplit, FileSplit, Split
from candid.models import saving
from candid.models.checkpoint import RECORD, read_json
from candid.models.protocol import Model
from candid.training.options import PhotoOptions, TrainOptions, VectorOptions
from candid.training.recipes import read_toml, write_toml

if TYPE_CHECKING:
    from torch import Tensor

MOST_READ = 20_000
"""Files of a data set whose bytes are compared when a run is resumed."""
RESTORE = "restore it, or start a new run in another folder."


@dataclass
class State:
    """Where a run stands after ``step`` steps."""

    model: "dict[str, Tensor]"
    optimiser: dict[str, Any]
    step: int
    rows: list[Row]
    """Metrics of the finished epochs."""
    tally: list[float]
    """Sums over the steps of the current epoch."""
    best: float
    """The lowest validation loss."""
    class_names: list[str] = field(default_factory=list)
    images: int = 0
    """Number of training images."""
    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the options and the data of the run, and of the state with these. Older states have none."""

    def sealed(self, options: TrainOptions, data: str) -> dict[str, Any]:
        """Return everything as a dictionary with its digests."""
        self.digests = {"options": state_digest(options.deciding()), "data": data}
        return vars(self) | {"digests": self.digests | {"state": state_digest(vars(self))}}

    def check_data(self, data: Dataset, digest_of_data: str) -> None:
        """Raise an error unless the data, whose digest is ``digest_of_data``, are those of the run."""
        names, images = list(data.class_names), len(data.train)
        if (self.class_names or names) != names or (self.images or images) != images:
            raise CandidError(
                f"The run was started with {self.images:,} training images of {len(self.class_names)} "
                f"classes; the data now has {images:,} of {len(names)}, or different ones: {RESTORE}"
            )
        if self.digests and self.digests["data"] != digest_of_data:
            raise CandidError(f"The images or labels are not those that the run was started with: {RESTORE}")


def state_digest(value: Any) -> str:
    """Return the SHA-256 of nested dictionaries, lists, arrays, tensors and plain values.

    >>> import numpy as np
    >>> state_digest({"a": [1, np.zeros(2)]}) == state_digest({"a": [1, np.array([0.0, -0.0])]})
    False
    """
    return digest(*_parts(value)).hexdigest()


def _parts(value: Any) -> Iterator[Any]:
    if hasattr(value, "dtype"):
        yield f"torch.{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
        yield value
    elif isinstance(value, Mapping):
        yield f"{len(value)} entries"
        for key, entry in value.items():
            yield repr(key)
            yield from _parts(entry)
    elif isinstance(value, list | tuple):
        yield f"{len(value)} items"
        for entry in value:
            yield from _parts(entry)
    else:
        yield repr(value)


def data_digest(data: Dataset) -> str:
    """Return the SHA-256 of what the run learns from: the same wherever the data lies.

    Images in memory count with every pixel, files with their bytes, or with names and sizes if they are many.
    """
    return splits_digest(data.class_names, (data.train, data.val))


def splits_digest(class_names: Sequence[str], splits: Iterable[Split]) -> str:
    """Return the SHA-256 of class names and images; see :func:`data_digest`."""
    return state_digest([class_names, [_described(split) for split in splits]])


def _described(split: Split) -> Any:
    if isinstance(split, ArraySplit):
        return [split.images, split.labels]
    if isinstance(split, FileSplit) and len(split) <= MOST_READ:
        return [split.digests(), split.labels]
    if isinstance(split, FileSplit):
        root = os.path.commonpath([path.parent for path in split.paths]) if split.paths else ""
        return [[(os.path.relpath(p, root), p.stat().st_size) for p in split.paths], split.labels]
    return len(split)


class RunFolder:
    """Reads and writes the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last, self.best = path / "model" / "last", path / "model" / "best"

    @property
    def exists(self) -> bool:
        return (self.path / "config.toml").is_file()

    @property
    def has_anything(self) -> bool:
        """Whether a run got as far as a model or a state; one that did not is no run."""
        return self.has_best or self.has_state or self.last.exists() or (self.path / "results.json").exists()

    def check_new(self, resume: bool) -> None:
        """Raise an error if there is a run already that is not to be resumed."""
        if self.exists and self.has_anything and not resume:
            raise CandidError(
                f"'{self.path}' already has a run: add {named_option('resume')} to continue it, or "
                f"choose another folder with {named_option('out')}."
            )

    @contextmanager
    def held(self, processes: Processes, resume: bool) -> Iterator[None]:
        """Make the folder and hold its lock in the first process; an error there is raised in all.

        A folder that stays empty is removed.
        """
        error = None
        with ExitStack() as lock:
            try:
                if processes.is_global_zero:
                    self._make()
                    lock.enter_context(locked(self.path, "trains in"))
                    self.check_new(resume)
            except CandidError as problem:
                error = problem
            error = first_error(processes, error)
            if error is not None:
                raise error
            try:
                yield
            finally:
                if processes.is_global_zero:
                    with suppress(OSError):  # it has files
                        self.path.rmdir()

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise CandidError(f"'{self.path}' is not a folder: choose another one.") from error
        except OSError as error:
            raise CandidError(f"'{self.path}' can't be made ({error}): choose another one.") from error

    def create(self, options: TrainOptions | PhotoOptions | VectorOptions) -> None:
        self.write_text("config.toml", write_toml(options))

    def options(self) -> TrainOptions:
        """Return the options of the run, also of one that an older version wrote."""
        if not self.exists:
            resume = named_option("resume")
            raise CandidError(f"There is no run to resume in '{self.path}': leave {resume} out to start one.")
        return from_dict(TrainOptions, recorded_options(read_toml(self.path / "config.toml")))

    def write_text(self, name: str, text: str) -> None:
        with self._saving():
            write_text(text, self.path / name)

    def write_skipped(self, skipped: Sequence[str], what: str, progress: Progress) -> None:
        """List images that were left out, each with its reason, if there are any."""
        (self.path / "skipped.txt").unlink(missing_ok=True)  # of an earlier training
        if skipped:
            self.write_text("skipped.txt", "\n".join(skipped) + "\n")
            left_out, listed_in = plural(len(skipped), what), self.path / "skipped.txt"
            progress.log(f"left out {left_out} that can't be used: {listed_in}")

    def write_rows(self, rows: list[Row]) -> None:
        table = io.StringIO()
        writer = csv.DictWriter(table, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: f"{value:.6g}" for key, value in row.items()} for row in rows)
        self.write_text("metrics.csv", table.getvalue())

    def write_results(self, results: dict[str, Any]) -> None:
        sealed = results | {"sha256": digest(results).hexdigest()}
        self.write_text("results.json", json.dumps(sealed, indent=1, allow_nan=False) + "\n")

    @property
    def results(self) -> dict[str, Any] | None:
        """The results of a finished run; None for an unfinished one."""
        path = self.path / "results.json"
        if not path.is_file():
            return None
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            results = None
        seal = results.pop("sha256", None) if isinstance(results, dict) else None
        changed = seal is not None and seal != digest(results).hexdigest()  # older ones have none
        if changed or not isinstance(results, dict) or not isinstance(results.get("val"), dict):
            raise CheckpointError(
                f"'{path}' is damaged: restore it, or delete it to measure the model again with "
                f"'candid train --resume --out {self.path}'."
            )
        return results

    @property
    def has_best(self) -> bool:
        return (self.best / "model.json").is_file()

    @property
    def has_state(self) -> bool:
        return (self.path / "state.pt").is_file()

    def save_state(self, state: State, options: TrainOptions, data: str) -> None:
        import torch

        with self._saving(), replacing(self.path / "state.pt") as path, path.open("wb") as file:
            torch.save(state.sealed(options, data), file)

    def load_state(self, options: TrainOptions, progress: Progress) -> State | None:
        """Return the state to resume from, checked against its digests; None if nothing was saved yet."""
        import torch

        path = self.path / "state.pt"
        if not self.has_state:
            if (self.path / "results.json").exists() or self._saved_epochs() > 1:
                raise CheckpointError(f"'{path}' is missing, so that the run can't be resumed: {RESTORE}")
            return None
        try:
            values = torch.load(path, map_location="cpu", weights_only=True)
            seal = values.get("digests", {}).pop("state", None)
            state = State(**values)
        except Exception as error:  # torch raises many kinds for a damaged file
            raise CheckpointError(f"'{path}' can't be read ({str(error)[:80]}): {RESTORE}") from error
        if seal is None:
            progress.log(NO_DIGEST % path)
        elif state_digest(vars(state)) != seal:
            raise CheckpointError(f"'{path}' is damaged, its digest does not fit: {RESTORE}")
        elif state.digests["options"] != state_digest(options.deciding()):
            raise CheckpointError(
                f"'{self.path / 'config.toml'}' was changed after the run had started: {RESTORE}"
            )
        if state.rows and not self.has_best:
            raise CheckpointError(f"The run's best model '{self.best}' is missing: {RESTORE}")
        return state

    def _saved_epochs(self) -> int:
        """Return after how many epochs the last model was saved: one, if the first save was killed."""
        if not (self.last / RECORD).is_file():
            return 0
        training = read_json(self.last)["metadata"].get("training", {})
        return int(training.get("epoch", 2))

    def save_model(self, model: Model, *, is_best: bool) -> None:
        for folder in [self.best, self.last] if is_best else [self.last]:
            saving.save(model, folder)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Turn what a full or broken disk raises into one sentence."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"Can't write to '{self.path}' ({error}); what was saved earlier is unharmed: free some "
                f"space, then go on with: candid train --resume --out {self.path}"
            ) from error


AfterEpoch = Callable[[RunFolder, list[Row]], object]
"""A function that is called with the folder of a run and the metrics of its epochs."""
