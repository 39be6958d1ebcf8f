"""Fine-tune a model whose means lie in a plane, so that its whole decision space can be drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from candid._support.config import from_dict, to_dict
from candid._support.errors import CandidError
from candid._support.progress import is_first_process
from candid.models import checkpoint
from candid.models.flow.classifier import GenerativeClassifier
from candid.models.flow.plane import planar_model
from candid.models.protocol import Model
from candid.training.display import TrainingDisplay
from candid.training.loop import AfterEpoch
from candid.training.options import PlaneOptions, TrainOptions, renamed
from candid.training.recipes import load_options
from candid.training.run_folder import RunFolder
from candid.training.train import TrainResult, run

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
    folder = RunFolder(Path(out))
    planar = planar_model(model, classes)
    start = folder.path / "start"
    changes = to_dict(options or PlaneOptions()) | {"start": str(start), "only": planar.class_names}
    changes["skip_bad"] = changes["skip_bad"] or None
    chosen = plane_options(planar, data, changes)
    if not folder.exists and is_first_process():  # else the run says what is wrong
        checkpoint.save(planar, start)
    return run(chosen, folder, devices=devices, display=display, after_epoch=after_epoch)


def plane_options(model: GenerativeClassifier, data: str, changes: dict[str, Any]) -> TrainOptions:
    """Return how to fine-tune: as ``model`` was trained, with one cycle of AdamW and ``changes``.

    Changes that are None are left out. A model without a record of its training is fine-tuned as models of
    photos are.
    """
    recorded = renamed(model.record.config)
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
