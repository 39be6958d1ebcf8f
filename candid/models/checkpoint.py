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
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors import SafetensorError

from candid._support import __version__
from candid._support.errors import CandidError, CheckpointError, missing_extra
from candid._support.numbers import Array, tensors_of
from candid._support.old_formats import first_fingerprint, version_1_belongs, whole_record
from candid._support.options import checked_names, from_dict, loaded_again, without_repeats
from candid.models import zoo
from candid.models.protocol import ModelBase
from candid.trust.tree import Tree

if TYPE_CHECKING:
    from candid.models.flow.config import ClassifierConfig, Memory


RECORD = zoo.RECORD
FORMAT, FORMAT_VERSION = "candid-model", 2
READABLE = (1, FORMAT_VERSION)
"""Version 1 has no digests and calls the held-out scores "calibration"."""
PARTS = {"weights": "weights", "held_out": "held-out scores", "thumbnails": "thumbnails"}
"""What a model consists of: each in a file ``weights-<hash>.safetensors`` that the record names."""
OURS = re.compile(rf"({'|'.join(PARTS)}|calibration)-[0-9a-f]{{16}}\.safetensors")
"""Files of tensors that were written here: no others are read or removed."""
_OLD: set[Path] = set()
"""Folders of version 1 that were mentioned."""
_HIDDEN: set[str] = set()
"""Bundled models that were mentioned, because a folder of other things has their name."""

FINGERPRINT = "fingerprint"
"""In the held-out scores: the fingerprint of the model that they were measured with begins it, in uint8."""
RUN = zoo.RUN
"""Where the folder of a training run has its model."""
log = logging.getLogger("candid")


class Kind(NamedTuple):
    """Where the classes of a kind of model are; they are imported when such a model is loaded."""

    module: str
    config: str
    """The dataclass that rebuilds the model."""
    model: str
    network: bool = False
    """Whether it needs torch."""

    def imported(self, name: str) -> Any:
        """Return the class of this name: ``config`` or ``model``."""
        try:
            return getattr(import_module(self.module), name)
        except ModuleNotFoundError as error:
            raise missing_extra(error, f"A {self.model}") or error from error


KINDS: dict[str, Kind] = {
    "generative": Kind("candid.models.flow.classifier", "ClassifierConfig", "GenerativeClassifier", True),
    "vector": Kind("candid.models.flow.vector", "VectorConfig", "VectorClassifier", True),
    "resnet": Kind("candid.models.resnet", "ResNetConfig", "ResNet", True),
    "photo": Kind("candid.models.photo.model", "PhotoConfig", "PhotoModel"),
    "adopted": Kind("candid.models.photo.adopted", "AdoptedConfig", "AdoptedModel"),
}
"""All kinds by the name that :attr:`Model.kind` gives: a new one is one entry here."""


def scores_belong(model: Any) -> bool:
    """Return whether the held-out scores of ``model`` were measured with the model as it is now."""
    scores = model.held_out
    if FINGERPRINT in scores:
        return _fingerprint_in(scores) == model.fingerprint()
    return version_1_belongs(scores, model.weights_digest())


def _fingerprint_in(scores: Mapping[str, Array]) -> str:
    return bytes(scores[FINGERPRINT].astype(np.uint8).ravel()[:32]).hex()


def load(path: str | os.PathLike[str], memory: "Memory" = "plain", held_out: bool = True) -> Any:
    """Return the model saved in the folder ``path``: in float32, in evaluation mode, on the CPU.

    Args:
        path: the folder of a saved model or of a training run (then its ``model/best``), or the name of a
            bundled model: :mod:`candid.models.zoo`. ``hf:OWNER/NAME[@REVISION]`` is a model of the Hugging
            Face Hub, which is downloaded if the Hub's cache does not have it.
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


def _load(folder: Path, memory: "Memory", held_out: bool) -> Any:
    record = _read_record(folder)
    written = record.pop("written")
    model = _without_weights(KINDS[record["kind"]], record["config"], record["class_names"])
    if "invert" in model.can:
        model.memory = memory
    model.metadata, model.folder = record["metadata"], folder
    try:
        if "tree" in record:
            model.tree = Tree.from_dict(record["tree"], len(model.class_names))
        model.record  # noqa: B018  checks its types
    except CandidError as error:
        raise CheckpointError(f"'{folder / RECORD}' was edited: {error}") from error
    load_weights(model, read_part(folder, "weights", record["weights"]), source=str(folder))
    if isinstance(record.get("thumbnails"), dict):
        model.thumbnails = read_part(folder, "thumbnails", record["thumbnails"])
    if held_out and record.get("held_out") is not None:
        model.held_out = read_part(folder, "held_out", record["held_out"])
        if FINGERPRINT in model.held_out and not scores_belong(model):
            if _fingerprint_in(model.held_out) == first_fingerprint(model, written):
                present = np.frombuffer(bytes.fromhex(model.fingerprint()), np.uint8)
                model.held_out = {**model.held_out, FINGERPRINT: present}
                return model
            made_by = str(record.get("library_version"))[:20]
            if made_by != __version__:
                raise CheckpointError(
                    f"The model in '{folder}' was made by version {made_by}, and this one ({__version__}) "
                    "computes another digest of it: measure held-out scores again with 'candid calibrate'."
                )
            raise CheckpointError(
                f"The held-out scores in '{folder}' were measured with a different model (its weights, "
                "configuration, classes or preprocessing): calibrate it again with 'candid calibrate'."
            )
    return model


def _without_weights(kind: Kind, config: Any, class_names: list[str]) -> Any:
    """Return a new model; the weights of a network have no memory yet."""
    model_class = kind.imported(kind.model)
    if not kind.network:
        return model_class(config, class_names)
    import torch

    with torch.device("meta"):
        return model_class(config, class_names)


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


def load_config(path: str | os.PathLike[str]) -> "ClassifierConfig":
    """Return the configuration of the generative classifier in the folder ``path``, without its weights."""
    record = _read_record(model_folder(path))
    if record["kind"] != "generative":
        raise CheckpointError(
            f"'{path}' has no invertible network: name a pixel model, such as 'cifar10-beta1'."
        )
    config: ClassifierConfig = record["config"]
    return config


def named_model(name: str) -> Any:
    """Return a bundled model, or one in a folder, without held-out scores; None if there is none."""
    if not name or not (Path(name).exists() or is_bundled(name)):
        return None
    return load(name, held_out=False)


def load_weights(model: ModelBase, state: Mapping[str, Array], source: str) -> None:
    """Put ``state`` into ``model`` after every name, type and shape was found right."""
    layout = model.layout()
    for name in sorted(layout.keys() ^ state.keys()):
        problem = "lacks" if name in layout else "has an unknown"
        raise CheckpointError(f"'{source}' {problem} tensor '{name}': it was made for another network.")
    for name, weights in state.items():
        shape, floating = layout[name]
        if (weights.dtype.kind == "f") != floating:
            raise CheckpointError(f"Tensor '{name}' of '{source}' has the wrong type, {weights.dtype}.")
        if weights.shape != shape:
            raise CheckpointError(
                f"Tensor '{name}' of '{source}' has the shape {weights.shape} where the network "
                f"has {shape}: it was made for another network."
            )
    model.load_state(state)


def own_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a model that may be changed; a bundled model may not."""
    if is_on_hub(path):
        raise CheckpointError(
            f"'{path}' is on the Hub and stays as it is: write the changed model to a folder of your own "
            "(--out), or save a copy with candid.save and change that."
        )
    folder = model_folder(path)
    if folder.parent == zoo.FOLDER:
        raise CheckpointError(
            f"'{path}' comes with candid and stays as it is: save a copy with candid.save and change that."
        )
    return folder


def is_bundled(name: str | os.PathLike[str]) -> bool:
    """Return whether ``name`` means a bundled model: no folder of this name has a model.

    A folder of photos may have the name of a model, such as ``waste``; ``./waste`` always means the folder.
    """
    folder = Path(name)
    is_model = (folder / RECORD).is_file() or (folder / RUN / RECORD).is_file() or folder.is_file()
    return os.fspath(name) in zoo.MODELS and not is_model


def is_on_hub(name: str | os.PathLike[str]) -> bool:
    """Return whether ``name`` means a model of the Hugging Face Hub: it begins with ``hf:``."""
    return os.fspath(name).startswith(zoo.HUB)


def model_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder with the ``model.json`` that ``path`` means: see :func:`load`."""
    if is_on_hub(path):
        from candid.models.hub import fetched_model

        return fetched_model(os.fspath(path)).path
    if is_bundled(path):
        name = os.fspath(path)
        if Path(name).exists() and name not in _HIDDEN:
            _HIDDEN.add(name)
            log.warning("The folder '%s' has no model: the bundled model of this name is used.", name)
        return zoo.MODELS[name]
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
        raise CheckpointError(
            f"There is no model at '{path}': name the folder of a saved model, or one that comes with "
            f"candid: {zoo.hint(str(path))}"
        )
    if path.name == RECORD:
        return path.parent
    raise CheckpointError(
        f"'{path}' is a file, but a model is a folder with a {RECORD}: name that folder, or bring a released "
        "checkpoint in with 'candid import'."
    )


def _read_record(folder: Path) -> dict[str, Any]:
    record, path = read_json(folder), folder / RECORD
    if record["format_version"] == 1:
        record = whole_record(record)
    types = {"config": dict, "class_names": list, "metadata": dict, "weights": dict}
    for key, kind in types.items() | ({("held_out", dict)} if record.get("held_out") is not None else set()):
        if not isinstance(record.get(key), kind):
            raise CheckpointError(f"'{path}' lacks a proper '{key}': it was cut or edited; restore it.")
    name = record.get("kind")
    if not isinstance(name, str) or name not in KINDS:
        shown = repr(name)[:60]
        raise CheckpointError(f"'{path}' holds a model of the unknown kind {shown}: use a newer candid.")
    config_class = KINDS[name].imported(KINDS[name].config)
    try:
        record["written"] = record["config"]
        record["config"] = from_dict(config_class, record["config"])
        checked_names(record["class_names"], len(record["class_names"]))
    except CandidError as error:
        raise CheckpointError(f"'{path}' doesn't describe a model: {error}") from error
    return record


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a model in the present format, with a digest of itself at the end."""
    content = {key: value for key, value in record.items() if key != "digest"}
    content["format_version"] = FORMAT_VERSION
    return {**content, "digest": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def read_json(folder: Path) -> dict[str, Any]:
    """Return the record, of a version that can be read, and unchanged since it was written."""
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_repeats)
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
    if version == 1 and "digest" in record:
        raise CheckpointError(f"'{path}' was edited since candid wrote it: restore it.")
    if version == 1 and folder not in _OLD and folder.parent != zoo.FOLDER:
        _OLD.add(folder)
        log.warning("'%s' is of an older format without digests: save it again to protect it.", folder)
    return record


def read_part(folder: Path, part: str, entry: dict[str, Any]) -> dict[str, Array]:
    """Return the tensors of a part of the model, unchanged since they were saved."""
    name = str(entry.get("file"))
    path = folder / name
    if not OURS.fullmatch(name) or not path.is_file():
        raise CheckpointError(
            f"The file '{name[:60]}' with the {PARTS[part]} is missing from '{folder}': "
            "copy the whole folder."
        )
    try:
        if (size := path.stat().st_size) != entry.get("bytes"):
            raise CheckpointError(
                f"'{path}' has {size} bytes instead of {str(entry.get('bytes'))[:20]}: copy it again."
            )
        content = path.read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        if not path.stem.endswith(sha256[:16]) or entry.get("sha256", sha256) != sha256:
            raise CheckpointError(f"The content of '{path}' was changed since it was saved: copy it again.")
        return tensors_of(content)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' is not a whole safetensors file: {error}; copy it again.") from error
