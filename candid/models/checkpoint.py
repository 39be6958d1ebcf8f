"""A model on disk: a folder with ``model.json`` and the safetensors files that it names.

``model.json`` is replaced last and atomically, so at any moment the folder holds one whole model. It carries
a digest of itself, of each file, and of the model that the held-out scores were measured with.
Loading reads numbers and text; it runs no code from the files.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from candid._support.config import from_dict, to_dict
from candid._support.errors import CandidError, CheckpointError, did_you_mean
from candid._support.version import __version__
from candid.models import eyes, zoo
from candid.models.flow.classifier import GenerativeClassifier
from candid.models.flow.config import ClassifierConfig, Memory, checked_names
from candid.models.heads.adopted import AdoptedConfig, AdoptedModel
from candid.models.heads.photo import PhotoConfig, PhotoModel
from candid.models.model_files import (
    FORMAT,
    FORMAT_VERSION,
    loaded_again,
    read_json,
    read_part,
    saving,
    write_parts,
)
from candid.models.model_files import (
    RECORD as RECORD,
)
from candid.models.protocol import Model, weights_digest
from candid.models.resnet import ResNet, ResNetConfig

FINGERPRINT = "fingerprint"
"""In the held-out scores: the fingerprint of the model that they were measured with begins it, in uint8."""
RUN = zoo.RUN
"""Where the folder of a training run has its model."""
log = logging.getLogger("candid")


class Kind(NamedTuple):
    """A kind of model that can be saved and loaded."""

    config: Any
    """The dataclass that rebuilds it."""
    build: Callable[[Any, list[str], Memory], Any]
    """From configuration, class names and how to save memory in training."""


KINDS: dict[str, Kind] = {
    "generative": Kind(ClassifierConfig, GenerativeClassifier),
    "resnet": Kind(ResNetConfig, lambda config, names, memory: ResNet(config, names)),
    "photo": Kind(PhotoConfig, lambda config, names, memory: PhotoModel(config, names)),
    "adopted": Kind(AdoptedConfig, lambda config, names, memory: AdoptedModel(config, names)),
}
"""All kinds by the name that :attr:`Model.kind` gives: a new one is one entry here."""


def save(model: Model, path: str | os.PathLike[str], half: bool = False) -> Path:
    """Write ``model`` into the folder ``path``; a model there is replaced only once this one is whole.

    One process saves to a folder at a time; another one waits.

    Args:
        model: of any kind in :data:`KINDS`. Held-out scores that were measured before its weights, classes
            or preprocessing changed are left out.
        path: the folder.
        half: whether to store the network's matrices and kernels in half precision. That halves the file and
            rounds them, so held-out scores are left out, too. Class means stay exact.

    Returns:
        The folder.

    >>> from tempfile import TemporaryDirectory
    >>> model = GenerativeClassifier.from_preset("digits")
    >>> with TemporaryDirectory() as folder:
    ...     load(save(model, folder)).config == model.config
    True
    """
    folder = Path(path)
    if folder.is_file():
        raise CheckpointError(f"'{folder}' is a file: name a folder to save the model in.")
    if getattr(model, "kind", None) not in KINDS:
        raise CheckpointError(
            f"A {type(model).__name__} is not a model of candid ({', '.join(KINDS)}): "
            "save it with torch.save."
        )
    if getattr(model, "is_frozen", False):
        raise CheckpointError("A frozen model can't be saved: save the one it was made from.")
    record = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "library_version": __version__,
        "kind": model.kind,
        "config": to_dict(model.config),
        "class_names": list(model.class_names),
        "metadata": model.metadata,
    }
    try:
        json.dumps(model.metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The metadata can't be written as JSON: {error}.") from error
    weights, scores = model.state_dict(), model.held_out
    if half:
        weights, scores = {name: _halved(name, tensor) for name, tensor in weights.items()}, {}
    elif scores.keys() - {"training_keys"} and not scores_belong(model):
        log.warning("The held-out scores are left out: the model has changed since. Calibrate it again.")
        scores = {}
    thumbnails = getattr(model, "thumbnails", {})
    with saving(folder):
        write_parts(folder, record, {"weights": weights, "held_out": scores, "thumbnails": thumbnails})
    return folder


EXACT = ("mixture.", "flow.span.")
"""Tensors that are never rounded to half precision: posteriors depend on them directly."""


def _halved(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor in half precision; vectors and numbers too large for it stay as they are."""
    if tensor.ndim < 2 or not tensor.is_floating_point() or name.startswith(EXACT):
        return tensor
    rounded = tensor.half()
    return rounded if rounded.isfinite().all() else tensor


def save_held_out(model: Model, path: str | os.PathLike[str]) -> None:
    """Write the held-out scores of ``model`` into the folder it was loaded from; its weights stay there."""
    folder = own_folder(path)
    with saving(folder):
        record = read_json(folder)
        record.pop("calibration", None)
        write_parts(folder, record, {"held_out": model.held_out})


def scores_belong(model: Model) -> bool:
    """Return whether the held-out scores of ``model`` were measured with the model as it is now."""
    scores = model.held_out
    if FINGERPRINT in scores:
        return bytes(scores[FINGERPRINT].byte().flatten()[:32].tolist()).hex() == model.fingerprint()
    old = weights_digest(model)  # version 1: of the weights alone
    old.update(b"3")
    found = scores.get("weights")
    return found is not None and found.dtype == torch.uint8 and bytes(found.tolist()) == old.digest()


def load(path: str | os.PathLike[str], memory: Memory = "plain", held_out: bool = True) -> Any:
    """Return the model saved in the folder ``path``: in float32, in evaluation mode, on the CPU.

    Args:
        path: the folder of a saved model or of a training run (then its ``model/best``), or the name of a
            bundled model: :mod:`candid.models.zoo`.
        memory: ``"inverse"`` lets a generative classifier recompute activations in training.
        held_out: whether to load the held-out scores, which p-values come from.

    Returns:
        A model of any kind in :data:`KINDS`: a :class:`~candid.GenerativeClassifier`, a
        :class:`~candid.ResNet`, ...

    >>> load("cifar10-beta1").class_names[:2]
    ('airplane', 'automobile')
    """
    folder = model_folder(path)
    return loaded_again(folder / RECORD, lambda: _load(folder, memory, held_out))


def _load(folder: Path, memory: Memory, held_out: bool) -> Any:
    record = _read_record(folder)
    with torch.device("meta"):
        model = KINDS[record["kind"]].build(record["config"], record["class_names"], memory)
    model.metadata, model.folder = record["metadata"], folder
    try:
        model.record  # noqa: B018  checks its types
    except CandidError as error:
        raise CheckpointError(f"'{folder / RECORD}' was edited: {error}") from error
    load_weights(model, read_part(folder, "weights", record["weights"]), source=str(folder))
    model = model.float().eval().to(memory_format=torch.channels_last)
    if isinstance(record.get("thumbnails"), dict):
        model.thumbnails = read_part(folder, "thumbnails", record["thumbnails"])
    if held_out and record.get("held_out") is not None:
        model.held_out = read_part(folder, "held_out", record["held_out"])
        if FINGERPRINT in model.held_out and not scores_belong(model):
            raise CheckpointError(
                f"The held-out scores in '{folder}' were measured with a different model (its weights, "
                "configuration, classes or preprocessing): calibrate it again with 'candid calibrate'."
            )
    return model


load_any = load
"""The name that :func:`load` had for all kinds of models."""


def resolve(model: Any) -> Any:
    """Return ``model`` if it is one, else the model that :func:`load` finds under this name or path.

    >>> resolve(resolve("cifar10-resnet")).kind
    'resnet'
    """
    if isinstance(model, str | os.PathLike):
        return load(model)
    if not hasattr(model, "outputs"):
        raise CandidError(
            f"A {type(model).__name__} is not a model of candid: give one, its folder, or a bundled name."
        )
    return model


def load_config(path: str | os.PathLike[str]) -> ClassifierConfig:
    """Return the configuration of the generative classifier in the folder ``path``, without its weights."""
    config = _read_record(model_folder(path))["config"]
    if not isinstance(config, ClassifierConfig):
        raise CheckpointError(
            f"'{path}' has no invertible network: name a pixel model, such as 'cifar10-beta1'."
        )
    return config


def load_weights(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Put ``state`` into ``model`` after every name and shape was found right."""
    expected = model.state_dict()
    for name in sorted(expected.keys() ^ state.keys()):
        problem = "lacks" if name in expected else "has an unknown"
        raise CheckpointError(f"'{source}' {problem} tensor '{name}': it was made for another network.")
    for name, tensor in state.items():
        if tensor.is_floating_point() != expected[name].is_floating_point():
            raise CheckpointError(f"Tensor '{name}' of '{source}' has the wrong type, {tensor.dtype}.")
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"Tensor '{name}' of '{source}' has the shape {tuple(tensor.shape)} where the network "
                f"has {tuple(expected[name].shape)}: it was made for another network."
            )
    model.load_state_dict(state, assign=True)


def own_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a model that may be changed; a bundled model may not."""
    folder = model_folder(path)
    if folder.parent == zoo.FOLDER:
        raise CheckpointError(
            f"'{path}' comes with candid and stays as it is: save a copy with candid.save and change that."
        )
    return folder


def model_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder with the ``model.json`` that ``path`` means: see :func:`load`."""
    path = Path(path)
    if path.is_dir():
        for folder in (path, path / RUN):
            if (folder / RECORD).is_file():
                return folder
        raise CheckpointError(
            f"The folder '{path}' has no {RECORD}, and no {RUN}: name the folder of a saved model "
            "or of a training run."
        )
    if not path.exists():
        bundled = zoo.folder(str(path))
        if bundled is None:
            raise CheckpointError(
                f"There is no model at '{path}': name the folder of a saved model, or one that comes with "
                f"candid: {did_you_mean(str(path), zoo.names())}"
            )
        return bundled
    if path.name == RECORD:
        return path.parent
    raise CheckpointError(
        f"'{path}' is a file, but a model is a folder with a {RECORD}: name that folder, or bring a released "
        "checkpoint in with 'candid import'."
    )


def _read_record(folder: Path) -> dict[str, Any]:
    record = read_json(folder)
    path = folder / RECORD
    record["held_out"] = record.get("held_out", record.get("calibration"))
    types = {"config": dict, "class_names": list, "metadata": dict, "weights": dict}
    for key, kind in types.items() | ({("held_out", dict)} if record["held_out"] is not None else set()):
        if not isinstance(record.get(key), kind):
            raise CheckpointError(f"'{path}' lacks a proper '{key}': it was cut or edited; restore it.")
    kind = record.setdefault("kind", "generative")
    if not isinstance(kind, str) or kind not in KINDS:
        shown = repr(kind)[:60]
        raise CheckpointError(f"'{path}' holds a model of the unknown kind {shown}: use a newer candid.")
    try:
        record["config"] = from_dict(KINDS[kind].config, record["config"])
        checked_names(record["class_names"], len(record["class_names"]))
    except CandidError as error:
        raise CheckpointError(f"'{path}' doesn't describe a model: {error}") from error
    return record


def _named_model(name: str) -> Model | None:
    """Return a bundled model, or one in a folder; None if there is nothing of this name."""
    if not name or (not Path(name).exists() and zoo.folder(name) is None):
        return None
    return load(name, held_out=False)


eyes.LOADERS.append(_named_model)
