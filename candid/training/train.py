"""Training as one call: from data to a run folder with a model."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candid._support.distributed import launch, stopping_on_signals
from candid._support.files import remove_unfinished
from candid._support.progress import SILENT, Progress
from candid._support.text import percent, plural
from candid.data.datasets import held_out_share
from candid.models import checkpoint
from candid.training.display import TrainingDisplay
from candid.training.loop import AfterEpoch, Run
from candid.training.options import TrainOptions, check_call
from candid.training.photos import train_photos
from candid.training.recipes import are_photos, load_options, network_named_by, photo_options
from candid.training.run_folder import Row, RunFolder
from candid.training.setup import Model, Setup, start_actnorm

if TYPE_CHECKING:
    from lightning_fabric import Fabric

OF_PHOTOS = ("eye", "priors", "thumbnails")
"""Options that only photo models have."""


@dataclass(frozen=True)
class TrainResult:
    """The result of :func:`candid.train`: how a run ended, and where its files are."""

    folder: Path
    """The run folder: config.toml, metrics.csv, model/best, model/last, results.json."""
    finished: bool
    """False if the run was stopped by a signal; ``resume=True`` continues it."""
    metrics: list[Row]
    """One row for each epoch, as in metrics.csv."""
    results: dict[str, Any]
    """Metrics of the best model on the validation and test images; empty if the run was stopped."""

    @property
    def best(self) -> Path:
        """The folder of the model with the lowest validation loss."""
        return RunFolder(self.folder).best

    def model(self) -> Model:
        """Load the best model."""
        return checkpoint.load_any(self.best)


def train(
    data: str | None = None,
    *,
    out: str | Path | None = None,
    recipe: str | Path | None = None,
    resume: bool = False,
    devices: int | None = None,
    progress: Progress | None = None,
    after_epoch: AfterEpoch | None = None,
    **options: Any,
) -> TrainResult:
    """Train a classifier on images and write it to a run folder.

    A run that was stopped or killed continues with ``resume=True``, and ends with the same bits as one that
    was not (on the same machine, with the same number of processes).

    Args:
        data: ``"digits"``, a folder of images, idx files or CIFAR-10 batches, or tar shards. A resumed run
            has its own.
        out: The run folder; ``runs/PRESET`` by default.
        recipe: The name or TOML file of a recipe, which ``options`` override; the preset's own by default.
        resume: Whether to continue the run in ``out``.
        devices: The number of processes on this machine; all GPUs, or one on a CPU, by default.
        progress: What shows the epochs; nothing by default.
        after_epoch: A function that gets the run folder and the metrics of all epochs: after the last epoch,
            and before at most every ten seconds.
        **options: The fields of :class:`candid.training.options.TrainOptions`, such as ``epochs=5``.

    Returns:
        The run folder, the metrics of every epoch, and the results of the best model.

    Raises:
        CandidError: If an option is wrong, the data can't be used, or the training diverges.

    Example:
        >>> import tempfile
        >>> result = train("digits", epochs=1, out=tempfile.mkdtemp() + "/run", model={"blocks": [1, 1, 1]})
        >>> result.model().class_names
        ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9')
    """
    check_call(data, out, recipe, resume)
    given = {"data": data, **options}
    photos = photo_options(given, recipe, Path(out) if resume and out is not None else None)
    if photos is not None:
        folder = RunFolder(Path("runs/photos") if out is None else Path(out))
        results = train_photos(photos, folder, resume, devices, progress or SILENT)
        return TrainResult(folder.path, True, [], results)
    given = {key: value for key, value in given.items() if key not in OF_PHOTOS or value is not None}
    chosen = RunFolder(Path(out or "")).options().resumed(given) if resume else load_options(recipe, **given)
    folder = RunFolder(Path("runs") / chosen.preset if out is None else Path(out))
    display = progress if isinstance(progress, TrainingDisplay) else TrainingDisplay(quiet=progress is None)
    if not resume and are_photos(chosen.data):
        display.log(
            f"{network_named_by(given, recipe)} asks for a network that is trained on pixels; without it, "
            "these photos get a photo model in seconds to minutes"
        )
    if not resume and "holdout" not in options:
        share = held_out_share(chosen.data, chosen.holdout)
        if share > chosen.holdout:
            display.log(
                f"{percent(share)} of the training images are held out, since there are few: p-values come "
                "from them; --holdout sets another share"
            )
            chosen = replace(chosen, holdout=share)
    return run(chosen, folder, resume, devices, display, after_epoch)


def run(
    options: TrainOptions,
    folder: RunFolder,
    resume: bool = False,
    devices: int | None = None,
    display: TrainingDisplay | None = None,
    after_epoch: AfterEpoch | None = None,
) -> TrainResult:
    """Train with ``options`` into ``folder``; see :func:`train`."""
    folder.check_new(resume)
    fabric = launch(devices, options.precision)
    show = display if fabric.is_global_zero and display is not None else TrainingDisplay(quiet=True)
    with folder.held(fabric, resume):
        return _run(options, folder, resume, fabric, show, after_epoch)


def _run(
    options: TrainOptions,
    folder: RunFolder,
    resume: bool,
    fabric: "Fabric",
    show: TrainingDisplay,
    after_epoch: AfterEpoch | None,
) -> TrainResult:
    path, first = folder.path, fabric.is_global_zero
    setup = Setup.of(options, fabric, show)
    state = folder.load_state(options, show) if resume else None
    if state is None and options.actnorm_from_data and options.start is None:
        start_actnorm(setup)
    if first:
        remove_unfinished(path)
        folder.create(options)
    if first and setup.data.skipped:
        folder.write_text("skipped.txt", "\n".join(setup.data.skipped) + "\n")
        left_out = plural(len(setup.data.skipped), "image")
        show.log(f"left out {left_out} that can't be used: {path / 'skipped.txt'}")
    current = Run(setup, folder, show, after_epoch if first else None)
    if state is not None:
        current.restore(state)
        results = folder.results
        if current.is_over and results is not None and results.get("step", current.step) == current.step:
            show.log(f"this run is finished: {path}")
            return TrainResult(path, True, current.rows, results)
    with stopping_on_signals() as stop, show:
        finished = current.train(stop)
        results = current.finish() if finished else {}
        if not finished:
            show.log(f"stopped after step {current.step}; go on with: candid train --resume --out {path}")
    return TrainResult(path, finished, current.rows, results)
