"""Files that are written whole or not at all, their names, and digests of what they hold."""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candid._support.errors import CandidError

if TYPE_CHECKING:  # commands use this module before they need torch
    from torch import Tensor

TEMPORARY = ".writing-"
ANY_NAME = "surrogateescape"
"""How file names that are no text are written to files and read from them."""


def write_tensors(tensors: "Mapping[str, Tensor]", path: Path) -> None:
    """Write a safetensors file with the usual permissions; safetensors would let only its owner read it."""
    from safetensors.torch import save_file

    path.touch()
    usual_mode = path.stat().st_mode
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)
    path.chmod(usual_mode)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write instead of ``path``; it takes its place once it is whole and on the disk."""
    with _temporary(path.parent) as temporary:
        yield temporary
        _to_disk(temporary)
        temporary.replace(path)


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Return a file to be renamed, in its own folder: safetensors puts more files next to it."""
    room = folder / f"{TEMPORARY}{secrets.token_hex(8)}"
    room.mkdir()
    try:
        yield room / "file"
    finally:
        shutil.rmtree(room, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left half-written in ``folder``."""
    for room in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(room, ignore_errors=True)


def write_texts(texts: Mapping[str, str], out: Path) -> list[Path]:
    """Write each text under its file name into the folder ``out``, and return the files."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with replacing(out / name) as temporary:
                temporary.write_text(text, encoding="utf-8", errors=ANY_NAME)
    except OSError as error:
        raise CandidError(f"Can't write to '{out}' ({error}): free some space, or change --out.") from error
    return [out / name for name in texts]


def safe_name(name: str) -> str:
    """Return ``name`` without characters that a file name can't have everywhere.

    >>> safe_name("runs/my model, β = ∞"), safe_name("..")
    ('runs-my-model-β-∞', 'model')
    """
    return re.sub(r"[^\w.∞-]+", "-", name).strip(".-") or "model"


def digest(*parts: Any) -> "hashlib._Hash":
    """Return the SHA-256 of ``parts``: the bytes of tensors, arrays and bytes, the JSON of everything else.

    >>> digest(b"a", {"beta": 1}).hexdigest() == digest(b"a", {"beta": 1}).hexdigest()
    True
    """
    found = hashlib.sha256()
    for part in parts:
        if hasattr(part, "untyped_storage"):  # a tensor
            from torch import uint8

            part = part.cpu().contiguous().view(-1).view(uint8).numpy().data
        elif isinstance(part, dict | list | tuple | str | int | float | None):
            part = json.dumps(part, sort_keys=True).encode()
        found.update(part)
    return found


def cache_file(folder: Path, name: str, key: "hashlib._Hash") -> Path:
    """Return the file in ``folder`` for what has the digest ``key``; ``name`` is for people."""
    ending = f"-{key.hexdigest()[:16]}.safetensors"
    return next(folder.glob(f"*{ending}"), folder / f"{safe_name(name)}{ending}")
