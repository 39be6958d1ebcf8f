"""A model on disk: a folder with ``model.json`` and the safetensors files that it names.

``model.json`` is replaced last and atomically, so at any moment the folder holds one whole model. It carries
a digest of itself, of each file, and of the model that the held-out scores were measured with.
Loading reads numbers and text; it runs no code from the files.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
from candid.models.flow.config import ClassifierConfig, Memory, checked_names
from candid.models.protocol import Model, weights_digest
from candid.models.resnet import ResNet, ResNetConfig

RECORD = "model.json"
FORMAT, FORMAT_VERSION = "candid-model", 2
READABLE = (1, FORMAT_VERSION)
"""Version 1 has no digests and calls the held-out scores "calibration"."""
OURS = re.compile(r"(weights|held_out|calibration)-[0-9a-f]{16}\.safetensors")
"""Files of tensors that were written here: no others are read or removed."""
PARTS = {"weights": "weights", "held_out": "held-out scores"}
"""What a model consists of: each in a file ``weights-<hash>.safetensors`` that the record names."""
FINGERPRINT = "fingerprint"
"""In the held-out scores: the fingerprint of the model that they were measured with begins it, in uint8."""
RUN = Path("model", "best")
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
}
"""All kinds by the name that :attr:`Model.kind` gives: a new one is one entry here."""


def save(model: Model, path: str | os.PathLike[str], half: bool = False) -> Path:
    """Write ``model`` into the folder ``path``; a model there is replaced only once this one is whole.

    One process saves to a folder at a time: of several, let the first do it.

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
    elif scores and not scores_belong(model):
        log.warning("The held-out scores are left out: the model has changed since. Calibrate it again.")
        scores = {}
    _write(folder, record, {"weights": weights, "held_out": scores})
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
    record = _read_json(folder)
    record.pop("calibration", None)
    _write(folder, record, {"held_out": model.held_out})


def scores_belong(model: Model) -> bool:
    """Return whether the held-out scores of ``model`` were measured with the model as it is now."""
    scores = model.held_out
    if FINGERPRINT in scores:
        return bytes(scores[FINGERPRINT].byte().flatten()[:32].tolist()).hex() == model.fingerprint()
    old = weights_digest(model)  # version 1: of the weights alone
    old.update(b"3")
    found = scores.get("weights")
    return found is not None and found.dtype == torch.uint8 and bytes(found.tolist()) == old.digest()


def _write(folder: Path, record: dict[str, Any], parts: dict[str, dict[str, Tensor]]) -> None:
    """Write new ``parts``, then the record that names them, then remove files that it doesn't name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part, tensors in parts.items():
            record.pop(part, None)
            if tensors:
                record[part] = {"file": _write_tensors(folder, part, tensors).name}
        for part in PARTS:
            if part in record:
                file = folder / record[part]["file"]
                record[part] = {"file": file.name, "bytes": file.stat().st_size, "sha256": _hash(file)}
        with replacing(folder / RECORD) as temporary:
            temporary.write_text(json.dumps(sealed(record), indent=1), encoding="utf-8")
        _remove_leftovers(folder, record)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"Can't save the model in '{folder}' (an earlier one there is unharmed): {error}"
        ) from error


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a model in the present format, with a digest of itself at the end."""
    content = {key: value for key, value in record.items() if key != "digest"}
    content["format_version"] = FORMAT_VERSION
    return {**content, "digest": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


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
    record = _read_record(folder)
    with torch.device("meta"):
        model = KINDS[record["kind"]].build(record["config"], record["class_names"], memory)
    model.metadata = record["metadata"]
    try:
        model.record  # noqa: B018  checks its types
    except CandidError as error:
        raise CheckpointError(f"'{folder / RECORD}' was edited: {error}") from error
    load_weights(model, _read_tensors(folder, "weights", record["weights"]), source=str(folder))
    model = model.float().eval().to(memory_format=torch.channels_last)
    if held_out and record.get("held_out") is not None:
        model.held_out = _read_tensors(folder, "held_out", record["held_out"])
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


def _read_json(folder: Path) -> dict[str, Any]:
    """Return the record, of a version that can be read, and unchanged since it was written."""
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"'{path}' can't be read as JSON (cut or overwritten?): {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"'{path}' was not written by candid: save a model with candid.save first.")
    version = record.get("format_version")
    if version not in READABLE or isinstance(version, bool):
        raise CheckpointError(
            f"'{path}' has format version {str(version)[:20]}, this candid {__version__} reads up to "
            f"{FORMAT_VERSION}: use the candid that wrote it ({str(record.get('library_version'))[:20]})."
        )
    if version > 1 and record.get("digest") != sealed(record)["digest"]:
        raise CheckpointError(
            f"'{path}' was edited since candid wrote it: restore it. To change a model, load it in Python, "
            "change it and save it; then calibrate again."
        )
    if version == 1 and folder not in _OLD and folder.parent != zoo.FOLDER:
        _OLD.add(folder)
        log.warning("'%s' is of an older format without digests: save it again to protect it.", folder)
    return record


_OLD: set[Path] = set()
"""Folders of version 1 that were mentioned."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key '{twice[:60]}' stands twice")
    return found


def _read_record(folder: Path) -> dict[str, Any]:
    record = _read_json(folder)
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


def _read_tensors(folder: Path, part: str, entry: dict[str, Any]) -> dict[str, Tensor]:
    name = str(entry.get("file"))
    path = folder / name
    if not OURS.fullmatch(name) or not path.is_file():
        raise CheckpointError(
            f"The file '{name[:60]}' with the {PARTS[part]} is missing from '{folder}': "
            "copy the whole folder."
        )
    if path.stat().st_size != entry.get("bytes"):
        raise CheckpointError(
            f"'{path}' has {path.stat().st_size} bytes instead of {str(entry.get('bytes'))[:20]}: "
            "copy it again."
        )
    try:
        found = _hash(path)
        if not path.stem.endswith(found[:16]) or entry.get("sha256", found) != found:
            raise CheckpointError(f"The content of '{path}' was changed since it was saved: copy it again.")
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' is not a whole safetensors file: {error}; copy it again.") from error


def _write_tensors(folder: Path, part: str, state: dict[str, Tensor]) -> Path:
    """Write tensors under a name made from their content, so that they never overwrite older ones."""
    with _temporary(folder) as temporary:
        write_tensors(state, temporary)
        _to_disk(temporary)
        return temporary.replace(folder / f"{part}-{_hash(temporary)[:16]}.safetensors")


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_leftovers(folder: Path, record: dict[str, Any]) -> None:
    """Remove what earlier models and killed processes left."""
    named = {record[part]["file"] for part in PARTS if part in record}
    for old in folder.glob("*.safetensors"):
        if OURS.fullmatch(old.name) and old.name not in named:
            old.unlink(missing_ok=True)
    remove_unfinished(folder)
