"""A model on disk: a folder with ``model.json`` and the safetensors files that it names.

``model.json`` is replaced last and atomically, so at any moment the folder holds one whole model.
Loading reads numbers and text; it runs no code from the files.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from candid._support.config import from_dict, to_dict
from candid._support.errors import CandidError, CheckpointError, did_you_mean
from candid._support.files import _temporary, _to_disk, remove_unfinished, replacing, write_tensors
from candid._support.version import __version__
from candid.models import zoo
from candid.models.flow.classifier import GenerativeClassifier
from candid.models.flow.invertible import Memory
from candid.models.flow.presets import ClassifierConfig
from candid.models.protocol import Model
from candid.models.resnet import ResNet, ResNetConfig

RECORD = "model.json"
FORMAT, FORMAT_VERSION = "candid-model", 1
TENSORS = ("weights", "calibration")
OURS = re.compile(rf"({'|'.join(TENSORS)})-[0-9a-f]{{16}}\.safetensors")
"""Files of tensors that were written here: no others are removed."""
"""What a model consists of: each in a file ``weights-<hash>.safetensors`` that the record names."""
CONFIGS: dict[str, Any] = {"generative": ClassifierConfig, "resnet": ResNetConfig}


def save(model: GenerativeClassifier | ResNet, path: str | os.PathLike[str], half: bool = False) -> Path:
    """Write ``model`` into the folder ``path``; a model there is replaced only once this one is whole.

    With ``half``, matrices and kernels are stored in half precision, which halves the file and rounds them:
    the scores of held-out images, if it carries any, are then of another model and left out.

    One process saves to a folder at a time: of several, let the first do it.

    >>> from tempfile import TemporaryDirectory
    >>> model = GenerativeClassifier.from_preset("digits")
    >>> with TemporaryDirectory() as folder:
    ...     load(save(model, folder)).config == model.config
    True
    """
    folder = Path(path)
    if folder.is_file():
        raise CheckpointError(f"'{folder}' is a file: name a folder to save the model in.")
    if isinstance(model, GenerativeClassifier) and model.is_frozen:
        raise CheckpointError("A frozen model can't be saved: save the one it was made from.")
    record = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "library_version": __version__,
        "kind": "resnet" if isinstance(model, ResNet) else "generative",
        "config": to_dict(model.config),
        "class_names": list(model.class_names),
        "metadata": model.metadata,
    }
    try:
        json.dumps(model.metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The metadata can't be written as JSON: {error}.") from error
    weights, calibration = model.state_dict(), model.held_out
    if half:
        weights = {name: _halved(tensor) for name, tensor in weights.items()}
        calibration = {}
    _write(folder, record, {"weights": weights, "calibration": calibration})
    return folder


def _halved(tensor: Tensor) -> Tensor:
    """In half precision; vectors, which are small, and what is too large for it stay as they are."""
    if tensor.ndim < 2 or not tensor.is_floating_point():
        return tensor
    rounded = tensor.half()
    return rounded if rounded.isfinite().all() else tensor


def save_calibration(model: Model, path: str | os.PathLike[str]) -> None:
    """Put the calibration of ``model`` into the folder it was loaded from; the weights stay as they are."""
    folder = own_folder(path)
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    _write(folder, record, {"calibration": model.held_out})


def _write(folder: Path, record: dict[str, Any], parts: dict[str, dict[str, Tensor]]) -> None:
    """New ``parts``, then the record that names them, then away with files that it doesn't name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part, tensors in parts.items():
            record.pop(part, None)
            if tensors:
                file = _write_tensors(folder, part, tensors)
                record[part] = {"file": file.name, "bytes": file.stat().st_size}
        with replacing(folder / RECORD) as temporary:
            temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
        _remove_leftovers(folder, record)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"Can't save the model in '{folder}' (an earlier one there is unharmed): {error}"
        ) from error


def load(path: str | os.PathLike[str], memory: Memory = "plain") -> GenerativeClassifier:
    """The model saved in the folder ``path``: in float32, in evaluation mode, on the CPU.

    Where there is no such folder, ``path`` may name a model that comes with candid: :mod:`candid.models.zoo`.
    """
    model = load_any(path, memory)
    if isinstance(model, ResNet):
        raise CheckpointError(f"'{path}' is a ResNet baseline, not a generative classifier: use load_any.")
    return model


def load_any(path: str | os.PathLike[str], memory: Memory = "plain") -> GenerativeClassifier | ResNet:
    """Like :func:`load`, for a generative classifier or a baseline."""
    folder = _model_folder(Path(path))
    record = _read_record(folder)
    model: GenerativeClassifier | ResNet
    with torch.device("meta"):
        if isinstance(record["config"], ResNetConfig):
            model = ResNet(record["config"], record["class_names"])
        else:
            model = GenerativeClassifier(record["config"], record["class_names"], memory)
    load_weights(model, _read_tensors(folder, "weights", record["weights"]), source=str(folder))
    model.metadata = record["metadata"]
    if isinstance(record.get("calibration"), dict):
        model.held_out = _read_tensors(folder, "calibration", record["calibration"])
    return model.float().eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def load_config(path: str | os.PathLike[str]) -> ClassifierConfig:
    """The configuration of the model saved in the folder ``path``, without its weights."""
    config = _read_record(_model_folder(Path(path)))["config"]
    if not isinstance(config, ClassifierConfig):
        raise CheckpointError(f"'{path}' is a ResNet baseline: name a generative classifier.")
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
    """The folder of a model that may be changed: not one that comes with candid."""
    folder = _model_folder(Path(path))
    if folder.parent == zoo.FOLDER:
        raise CheckpointError(
            f"'{path}' comes with candid and stays as it is: save a copy with candid.save and change that."
        )
    return folder


def _model_folder(path: Path) -> Path:
    if path.is_dir():
        if not (path / RECORD).is_file():
            raise CheckpointError(f"The folder '{path}' has no {RECORD}: name the folder of a saved model.")
        return path
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
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"'{path}' can't be read as JSON (cut or overwritten?): {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"'{path}' was not written by candid: save a model with candid.save first.")
    if record.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"'{path}' has format version {record.get('format_version')}, this candid {__version__} reads "
            f"{FORMAT_VERSION}: use the candid that wrote it ({record.get('library_version')})."
        )
    types = {"config": dict, "class_names": list, "metadata": dict, "weights": dict}
    for key, kind in types.items():
        if not isinstance(record.get(key), kind):
            raise CheckpointError(f"'{path}' lacks a proper '{key}': it was cut or edited; restore it.")
    kind = record.get("kind", "generative")
    if kind not in CONFIGS:
        raise CheckpointError(f"'{path}' holds a model of the unknown kind {kind!r}: use a newer candid.")
    try:
        record["config"] = from_dict(CONFIGS[kind], record["config"])
    except CandidError as error:
        raise CheckpointError(f"'{path}' doesn't describe a model: {error}") from error
    return record


def _read_tensors(folder: Path, part: str, entry: dict[str, Any]) -> dict[str, Tensor]:
    name = str(entry.get("file"))
    path = folder / name
    if Path(name).name != name or not path.is_file():
        raise CheckpointError(
            f"The file '{name}' with the {part} is missing from '{folder}': copy the whole folder."
        )
    if path.stat().st_size != entry.get("bytes"):
        raise CheckpointError(
            f"'{path}' has {path.stat().st_size} bytes instead of {entry.get('bytes')}: copy it again."
        )
    try:
        if path.name != _name(path, part):
            raise CheckpointError(f"The content of '{path}' was changed since it was saved: copy it again.")
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' is not a whole safetensors file: {error}; copy it again.") from error


def _write_tensors(folder: Path, part: str, state: dict[str, Tensor]) -> Path:
    """Under a name made from its content, so that it never overwrites what an older record names."""
    with _temporary(folder) as temporary:
        write_tensors(state, temporary)
        _to_disk(temporary)
        return temporary.replace(folder / _name(temporary, part))


def _name(path: Path, part: str) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{part}-{digest[:16]}.safetensors"


def _remove_leftovers(folder: Path, record: dict[str, Any]) -> None:
    """What earlier models and killed processes left."""
    named = {record[part]["file"] for part in TENSORS if part in record}
    for old in folder.glob("*.safetensors"):
        if OURS.fullmatch(old.name) and old.name not in named:
            old.unlink(missing_ok=True)
    remove_unfinished(folder)
