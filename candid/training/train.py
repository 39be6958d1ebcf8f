"""Training as one call: from data to a run folder with a model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from candid._support.errors import CandidError, require_extra
from candid._support.files import remove_unfinished
from candid._support.old_formats import renamed_options
from candid._support.options import from_dict, named_option, to_dict
from candid._support.processes import launch, stopping_on_signals
from candid._support.progress import SILENT, Progress, Row, TrainingDisplay, is_first_process
from candid._support.text import percent
from candid.data.datasets import held_out_share
from candid.models import checkpoint, saving
from candid.models.protocol import Model
from candid.training.options import PlaneOptions, TrainOptions, check_call
from candid.training.photos import train_photos
from candid.training.recipes import (
    are_photos,
    load_options,
    network_named_by,
    photo_options,
    read_toml,
    vector_options,
)
from candid.training.run_folder import AfterEpoch, RunFolder

if TYPE_CHECKING:
    from candid.models.flow.classifier import GenerativeClassifier


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
        return checkpoint.load(self.best)


def train(
    data: str | None = None,
    *,
    out: str | Path | None = None,
    recipe: str | Path | None = None,
    resume: bool = False,
    keep_old: bool = False,
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
        keep_old: Whether to keep a photo model that is trained again: a copy of ``out`` gets the name OUT.1.
        devices: The number of processes on this machine; all GPUs, or one on a CPU, by default.
        progress: What shows the epochs; nothing by default.
        after_epoch: Gets the run folder and the metrics of all epochs: at most every ten seconds, and at the
            end.
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
    vectors = vector_options(given, recipe, Path(out) if resume and out is not None else None)
    if vectors is not None:
        require_extra("torch", "paper", "Training a network")
        from candid.training.vectors import train_vectors

        folder = RunFolder(Path("runs") / vectors.preset if out is None else Path(out))
        rows, results = train_vectors(vectors, folder, resume, devices, progress or SILENT)
        return TrainResult(folder.path, True, rows, results)
    run = Path("runs/photos" if out is None else out)
    again = not resume and network_named_by(given, recipe) is None and _has_photo_model(run)
    photos = photo_options(given, recipe, run if again or (resume and out is not None) else None)
    if photos is not None:
        folder = RunFolder(Path("runs/photos") if out is None else Path(out))
        results = train_photos(photos, folder, resume, devices, progress or SILENT, keep_old)
        return TrainResult(folder.path, True, [], results)
    if keep_old:
        raise CandidError(f"{named_option('keep_old')} is for photo models: leave it out.")
    require_extra("torch", "paper", "Training a network")  # before the data is read
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
        chosen = _with_enough_held_out(chosen, display)
    return train_network(chosen, folder, resume, devices, display, after_epoch)


def _with_enough_held_out(options: TrainOptions, display: TrainingDisplay) -> TrainOptions:
    """Return the options with a larger share of held-out images, where there are few."""
    share = held_out_share(options.data, options.holdout)
    if share > options.holdout:
        display.log(
            f"{percent(share)} of the training images are held out, since there are few: p-values come from "
            "them; --holdout sets another share"
        )
        options = replace(options, holdout=share)
    return options


def _has_photo_model(run: Path) -> bool:
    """Return whether a run made a photo model, whose options a training in its folder keeps."""
    if not RunFolder(run).has_best or not (run / "config.toml").is_file():
        return False
    recorded = read_toml(run / "config.toml")
    return "eye" in recorded and "preset" not in recorded


def train_network(
    options: TrainOptions,
    folder: RunFolder,
    resume: bool = False,
    devices: int | None = None,
    display: TrainingDisplay | None = None,
    after_epoch: AfterEpoch | None = None,
) -> TrainResult:
    """Train a network on pixels with ``options`` into ``folder``; see :func:`train`."""
    require_extra("torch", "paper", "Training a network")
    from candid.training.loop import Run
    from candid.training.setup import Setup, start_actnorm

    folder.check_new(resume)
    fabric = launch(devices, options.precision)
    first, path = fabric.is_global_zero, folder.path
    show = display if first and display is not None else TrainingDisplay(quiet=True)
    with folder.held(fabric, resume):
        setup = Setup.of(options, fabric, show)
        state = folder.load_state(options, show) if resume else None
        if state is None and options.actnorm_from_data and options.start is None:
            start_actnorm(setup)
        if first:
            remove_unfinished(path)
            folder.create(options)
            folder.write_skipped(setup.data.skipped, "image", show)
        run = Run(setup, folder, show, after_epoch if first else None)
        if state is not None:
            run.restore(state)
            results = folder.results
            if run.is_over and results is not None and results.get("step", run.step) == run.step:
                show.log(f"this run is finished: {path}")
                return TrainResult(path, True, run.rows, results)
        with stopping_on_signals() as stop, show:
            finished = run.train(stop)
            results = run.finish() if finished else {}
            if not finished:
                again = f"candid train --resume --out {quote(str(path))}"
                show.log(f"stopped after step {run.step}; go on with: {again}")
        return TrainResult(path, finished, run.rows, results)


OF_CLASSES = ("classes", "rank", "priors", "planar")
"""Keys of a model's configuration for which its plane has values of its own."""


def fit_plane(
    model: Model,
    data: str,
    classes: Sequence[int],
    out: str | Path,
    options: PlaneOptions | None = None,
    devices: int | None = None,
    display: TrainingDisplay | None = None,
    after_epoch: AfterEpoch | None = None,
) -> TrainResult:
    """Fine-tune :func:`planar_model` on the images of its classes in ``data``, into the run folder ``out``.

    The model is trained as ``model`` was, with the same held-out images, for a few more epochs.
    ``out/model/best`` is then a model like any other, and ``out/start`` is what it was before.
    """
    require_extra("torch", "paper", "Training a network")
    from candid.models.flow.means import planar_model

    folder = RunFolder(Path(out))
    planar = planar_model(model, classes)
    start = folder.path / "start"
    changes = to_dict(options or PlaneOptions()) | {"start": str(start), "only": planar.class_names}
    changes["skip_bad"] = changes["skip_bad"] or None
    chosen = plane_options(planar, data, changes)
    if not folder.exists and is_first_process():  # else the run says what is wrong
        saving.save(planar, start)
    return train_network(chosen, folder, devices=devices, display=display, after_epoch=after_epoch)


def plane_options(model: "GenerativeClassifier", data: str, changes: dict[str, Any]) -> TrainOptions:
    """Return how to fine-tune: as ``model`` was trained, with one cycle of AdamW and ``changes``.

    Changes that are None are left out. A model without a record of its training is fine-tuned as models of
    photos are.
    """
    recorded = renamed_options(model.record.config)
    if "preset" in recorded:
        base = recorded | {"beta": float(recorded["beta"]), "val_data": None, "epoch_images": None}
    else:
        layout = {**to_dict(model.config.flow), "mean": model.config.mean, "std": model.config.std}
        base = to_dict(load_options("imagenet", data=data, model=layout))
        base |= {"batch": 128, "beta": float(model.metadata.get("beta", base["beta"]))}
    base["model"] = {key: value for key, value in base["model"].items() if key not in OF_CLASSES}
    cycle = {"optimiser": "adamw", "schedule": "one-cycle", "warmup": 0.15, "means_rate": 1.0}
    given = {key: value for key, value in changes.items() if value is not None}
    options = from_dict(TrainOptions, base | cycle | {"data": data} | given)
    if options.beta == 0:
        raise CandidError("At beta 0 a model does not separate classes: give a --beta above 0.")
    return options
