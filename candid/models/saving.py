"""Writing the folder of a model, which :mod:`candid.models.checkpoint` reads, and uploading it to the Hub.

The record is replaced last and atomically, so at any moment the folder holds one whole model.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from candid._support import __version__
from candid._support.errors import CandidError, CheckpointError
from candid._support.files import SAVE_SECONDS, file_hash, locked, remove_unfinished, replacing, write_by_hash
from candid._support.numbers import Array
from candid._support.options import to_dict
from candid.models import hub
from candid.models.checkpoint import (
    FORMAT,
    FORMAT_VERSION,
    KINDS,
    OURS,
    PARTS,
    RECORD,
    load,
    model_folder,
    own_folder,
    read_json,
    scores_belong,
    sealed,
)
from candid.models.photo.eye import PREPROCESSOR
from candid.models.protocol import Model
from candid.models.zoo import HUB, as_readme

CARD = "README.md"
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


# to the Hugging Face Hub


@dataclass(frozen=True)
class PushResult:
    """What :func:`candid.push` uploads, or would upload."""

    name: str
    """``hf:OWNER/NAME``; with the commit once it is uploaded."""
    files: dict[str, int]
    """Bytes of each file."""
    card: str
    """The README.md, with the YAML that the Hub reads."""
    licence: str
    notes: tuple[str, ...]
    """What a person should know before everyone can see it."""
    uploaded: bool = False


def push(
    model: str | os.PathLike[str],
    name: str,
    licence: str | None = None,
    private: bool = False,
    upload: bool = False,
) -> PushResult:
    """Upload a model to the Hugging Face Hub, or say what would be uploaded.

    ``candid.load(name)`` loads it then, and ``candid examine NAME`` uses it.

    Args:
        model: the folder of a model or of a run, or a bundled name.
        name: ``hf:OWNER/NAME``; the repository is made if there is none.
        licence: the licence of the model, as the Hub writes it, such as ``apache-2.0``.
        private: whether only you see a repository that is made.
        upload: without it, nothing is sent and no network is needed.

    Returns:
        What is uploaded, or would be.

    Raises:
        CandidError: if the name is wrong, the model is not whole, its eye can't be had by others, or the Hub
            refuses it.

    Example:
        >>> plan = push("waste", "hf:me/waste")
        >>> plan.licence, plan.uploaded, "model.json" in plan.files
        ('mit', False, True)
    """
    match = hub.NAME.fullmatch(name)
    if match is None or match["revision"] or match["file"]:
        raise CandidError(f"'{name}' is no repository to upload to: write hf:OWNER/NAME.")
    folder = model_folder(model)
    loaded, record = load(folder), read_json(folder)
    parts = {part: folder / record[part]["file"] for part in PARTS if isinstance(record.get(part), dict)}
    paths = [folder / RECORD, *parts.values(), *_eye_files(loaded, folder)]
    card = hub.card_in(folder)
    if card.startswith("---") and licence is not None:
        raise CandidError(f"'{folder / CARD}' states a licence: change it there, and leave --licence out.")
    if not card.startswith("---"):
        card = card_of(loaded, name, licence, card)
    files = {path.name: path for path in paths}
    sizes = {CARD: len(card.encode()), **{file: path.stat().st_size for file, path in files.items()}}
    plan = PushResult(name, sizes, card, hub.licence_of(card), tuple(_notes(loaded, card)))
    if not upload:
        return plan
    commit = hub.upload(match["repo"], {**files, CARD: card.encode()}, private)
    return replace(plan, name=f"{name}@{commit}", uploaded=True)


def _eye_files(model: Any, folder: Path) -> list[Path]:
    """Return the files of an eye that others can't have from elsewhere; they go with the model."""
    from candid.models.photo.opening import moved

    found: list[Path] = []
    for part in model.config.eye.split("+") if "eye" in model.can else ():
        path = Path(moved(part, folder))
        if part.startswith(HUB) or not (path.suffix in (".onnx", ".pt2") or path.is_absolute()):
            if part == "module":
                raise CandidError("Its network was given in Python: adopt an ONNX file of it instead.")
            continue
        if path.suffix != ".onnx":
            raise CandidError(f"Its eye '{path}' can't be uploaded: train with an ONNX file of this network.")
        near = (hub.near(path, each) for each in (PREPROCESSOR, "config.json"))
        graph = [each for each in sorted(path.parent.iterdir()) if each.name.startswith(path.name)]
        found += [*graph, *(each for each in near if each is not None)]
    wrong = [each for each in found if not hub.OF_MODELS.fullmatch(each.name)]
    if wrong or len({each.name for each in found}) < len({*found}):
        raise CandidError("The files of its eyes have names that the Hub can't hold together: rename them.")
    return found


def _notes(model: Any, card: str) -> Iterator[str]:
    """Return what a person should know before everyone can see the model."""
    if hub.licence_of(card).startswith("unknown"):
        yield "It states no licence, so others may not use it: add one, such as --licence apache-2.0."
    if "eye" in model.can:
        eye = f"Its eye '{model.config.eye}' ({model.eye.licence})"
        if HUB in model.config.eye:
            yield f"{eye} is not uploaded: others get it with 'candid eyes {model.config.eye}'."
        elif model.config.eye.endswith(".onnx"):
            yield f"{eye} is uploaded: its licence must allow that."
        else:
            yield f"{eye} is not uploaded: it is installed with candid, or by its package."
    if photos := len(model.thumbnails.get("labels", ())):
        yield f"It shows {photos} small photos of its training: 'candid train --no-thumbnails' keeps none."
    if data := model.metadata.get("training", {}).get("config", {}).get("data"):
        yield f"{RECORD} names the data of its training: '{data}'."


def card_of(model: Any, name: str, licence: str | None, text: str = "") -> str:
    """Return the README.md of a model that was made here; ``text`` follows its YAML if there is one."""
    from scipy.stats import binomtest

    rows = model.metadata.get("by_class", {}).get("classes", [])
    right, images = (sum(row[key] for row in rows) for key in ("right", "images"))
    figures: dict[str, Any] = {}
    if images:
        low, high = binomtest(right, images).proportion_ci()
        figures = {"accuracy": right / images, "intervals": {"accuracy": (low, high)}}
    card = {
        "name": name.rpartition("/")[2],
        "licence": licence,
        "summary": "An image classifier that says when not to trust it.",
        "classes": list(model.class_names),
        "data": ["The data are those of its author."],
        "training": [f"A model of the kind '{model.kind}', made with candid-vision {__version__}."],
        "storage": [
            f"`pip install 'candid-vision[hub]'`, then `candid examine {name} photo.jpg`.",
            "Loading it runs no code from the files.",
        ],
        "measured": f"On {images:,} images of its author that it had not seen.",
        "tested_on": "images of its author",
        "figures": figures,
        "more_figures": {},
        "limits": [
            "It knows its classes only. What looks like one of them may be accepted.",
            "The p-values hold for images like those that were held out.",
        ],
        "not_for": ["Security: it does not withstand an adversary."],
    }
    made = as_readme(card)
    return made if not text else made[: made.index("---\n", 4) + 4] + "\n" + text
