"""Writing the folder of a model, which :mod:`candid.models.checkpoint` reads.

The record is replaced last and atomically, so at any moment the folder holds one whole model.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from candid._support import __version__
from candid._support.errors import CheckpointError
from candid._support.files import SAVE_SECONDS, file_hash, locked, remove_unfinished, replacing, write_by_hash
from candid._support.numbers import Array
from candid._support.options import to_dict
from candid.models.checkpoint import (
    FORMAT,
    FORMAT_VERSION,
    KINDS,
    OURS,
    PARTS,
    RECORD,
    own_folder,
    read_json,
    scores_belong,
    sealed,
)
from candid.models.protocol import Model

EXACT = ("mixture.", "flow.span.")
"""Tensors that are never rounded to half precision: posteriors depend on them directly."""

log = logging.getLogger("candid")


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Make and lock the folder; turn what a full or broken disk raises into one sentence."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, "saves a model in", SAVE_SECONDS):
            try:
                yield
            except (OSError, SafetensorError):
                _remove_failed(folder)
                raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"Can't save the model in '{folder}' (an earlier one there is unharmed): {error}; free some "
            "space, or choose another folder."
        ) from error


def write_parts(folder: Path, record: dict[str, Any], parts: dict[str, dict[str, Array]]) -> None:
    """Write new ``parts``, then the record that names them, then remove files that it doesn't name."""
    for part, tensors in parts.items():
        record.pop(part, None)
        if tensors:
            record[part] = {"file": write_by_hash(folder, part, tensors).name}
    for part in PARTS:
        if part in record:
            file = folder / record[part]["file"]
            record[part] = {"file": file.name, "bytes": file.stat().st_size, "sha256": file_hash(file)}
    with replacing(folder / RECORD) as temporary:
        temporary.write_text(json.dumps(sealed(record), indent=1), encoding="utf-8")
    _remove_leftovers(folder, record)


def _remove_leftovers(folder: Path, record: dict[str, Any]) -> None:
    """Remove what earlier models and killed processes left."""
    named = {record[part]["file"] for part in PARTS if part in record}
    for old in folder.glob("*.safetensors"):
        if OURS.fullmatch(old.name) and old.name not in named:
            old.unlink(missing_ok=True)
    remove_unfinished(folder)


def _remove_failed(folder: Path) -> None:
    """Remove what a save wrote that could not end, so that it takes no space on a full disk."""
    with suppress(OSError, CheckpointError):
        record = read_json(folder) if (folder / RECORD).exists() else {"format_version": FORMAT_VERSION}
        if record["format_version"] == FORMAT_VERSION:
            _remove_leftovers(folder, record)


def record_hash(folder: Path) -> str:
    """Return a hash of the record in a folder, which names everything else there; "" if there is none."""
    try:
        return file_hash(folder / RECORD)
    except OSError:
        return ""


def check_unchanged(folder: Path, expected: str | None) -> None:
    """Raise an error if the model in a folder is another one than ``expected``, its earlier record hash."""
    if expected is not None and record_hash(folder) != expected:
        raise CheckpointError(
            f"Another process has saved a model in '{folder}' in the meantime, and this one is not saved: "
            "look at that model, then run the command again, or choose another folder."
        )


def save(model: Model, path: str | os.PathLike[str], half: bool = False, expected: str | None = None) -> Path:
    """Write ``model`` into the folder ``path``; a model there is replaced only once this one is whole.

    One process saves to a folder at a time; another one waits.

    Args:
        model: of any kind in :data:`KINDS`. Held-out scores that were measured before its weights, classes
            or preprocessing changed are left out.
        path: the folder.
        half: whether to store the network's matrices and kernels in half precision. That halves the file and
            rounds them, so held-out scores are left out, too. Class means stay exact.
        expected: :func:`record_hash` of the folder when the work began; if another process has saved a model
            there since, it stays, and an error says so.

    Returns:
        The folder.

    >>> from tempfile import TemporaryDirectory
    >>> from candid import GenerativeClassifier, load
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
        **({} if model.tree is None else {"tree": model.tree.to_dict()}),
    }
    try:
        json.dumps(model.metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The metadata can't be written as JSON: {error}.") from error
    weights, scores = model.state(), model.held_out
    if half:
        weights, scores = {name: _halved(name, values) for name, values in weights.items()}, {}
    elif scores.keys() - {"training_keys"} and not scores_belong(model):
        log.warning("The held-out scores are left out: the model has changed since. Calibrate it again.")
        scores = {}
    parts = {"weights": weights, "held_out": scores, "thumbnails": model.thumbnails}
    with saving(folder):
        check_unchanged(folder, expected)
        write_parts(folder, record, parts)
    return folder


def _halved(name: str, weights: Array) -> Array:
    """Return weights in half precision; vectors and numbers too large for it stay as they are."""
    if weights.ndim < 2 or weights.dtype.kind != "f" or name.startswith(EXACT):
        return weights
    with np.errstate(over="ignore"):
        rounded = weights.astype(np.float16)
    return rounded if np.isfinite(rounded).all() else weights


def save_held_out(model: Model, path: str | os.PathLike[str]) -> None:
    """Write the held-out scores of ``model`` into the folder it was loaded from; its weights stay there."""
    folder = own_folder(path)
    with saving(folder):
        record = read_json(folder)
        record.pop("calibration", None)
        write_parts(folder, record, {"held_out": model.held_out})
