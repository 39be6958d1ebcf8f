"""The files of a model folder: a record as JSON and the safetensors files that it names, with digests.

The record is replaced last and atomically, so at any moment the folder holds one whole model.
"""

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from candid._support.errors import CheckpointError
from candid._support.files import (
    _temporary,
    _to_disk,
    locked,
    remove_unfinished,
    replacing,
    tensors_of,
    write_tensors,
)
from candid._support.version import __version__
from candid.models import zoo

RECORD = zoo.RECORD
FORMAT, FORMAT_VERSION = "candid-model", 2
READABLE = (1, FORMAT_VERSION)
"""Version 1 has no digests and calls the held-out scores "calibration"."""
PARTS = {"weights": "weights", "held_out": "held-out scores", "thumbnails": "thumbnails"}
"""What a model consists of: each in a file ``weights-<hash>.safetensors`` that the record names."""
OURS = re.compile(rf"({'|'.join(PARTS)}|calibration)-[0-9a-f]{{16}}\.safetensors")
"""Files of tensors that were written here: no others are read or removed."""
T = TypeVar("T")
TRIES = 100
"""How often a folder that others save to at the same time is read again."""
SAVE_SECONDS = 60.0
"""How long a process waits for another one that saves to the same folder."""
log = logging.getLogger("candid")


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Make and lock the folder; turn what a full or broken disk raises into one sentence."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, "saves a model in", SAVE_SECONDS):
            yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"Can't save the model in '{folder}' (an earlier one there is unharmed): {error}; free some "
            "space, or choose another folder."
        ) from error


def write_parts(folder: Path, record: dict[str, Any], parts: dict[str, dict[str, Tensor]]) -> None:
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


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a model in the present format, with a digest of itself at the end."""
    content = {key: value for key, value in record.items() if key != "digest"}
    content["format_version"] = FORMAT_VERSION
    return {**content, "digest": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def loaded_again(record: Path, read: Callable[[], T]) -> T:
    """Return what ``read`` finds; if it fails and ``record`` was replaced meanwhile, it reads again."""

    def content() -> bytes | None:
        return record.read_bytes() if record.is_file() else None

    for _ in range(TRIES):
        before = content()
        try:
            return read()
        except CheckpointError:
            if content() == before:
                raise
        time.sleep(0.02)
    return read()


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


_OLD: set[Path] = set()
"""Folders of version 1 that were mentioned."""


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a JSON file as a dictionary, or raise a ValueError if a key stands twice."""
    if len(found := dict(pairs)) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key '{twice[:60]}' stands twice")
    return found


def read_part(folder: Path, part: str, entry: dict[str, Any]) -> dict[str, Tensor]:
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
        found = hashlib.sha256(content).hexdigest()
        if not path.stem.endswith(found[:16]) or entry.get("sha256", found) != found:
            raise CheckpointError(f"The content of '{path}' was changed since it was saved: copy it again.")
        return tensors_of(content)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' is not a whole safetensors file: {error}; copy it again.") from error


def write_by_hash(folder: Path, part: str, state: dict[str, Tensor]) -> Path:
    """Write tensors under a name made from their content, so that they never overwrite older ones."""
    with _temporary(folder) as temporary:
        write_tensors(state, temporary)
        _to_disk(temporary)
        return temporary.replace(folder / f"{part}-{file_hash(temporary)[:16]}.safetensors")


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_leftovers(folder: Path, record: dict[str, Any]) -> None:
    """Remove what earlier models and killed processes left."""
    named = {record[part]["file"] for part in PARTS if part in record}
    for old in folder.glob("*.safetensors"):
        if OURS.fullmatch(old.name) and old.name not in named:
            old.unlink(missing_ok=True)
    remove_unfinished(folder)
