"""Files that are written whole or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

TEMPORARY = ".writing-"


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """As a safetensors file with the usual permissions: safetensors would let only its owner read it."""
    path.touch()
    usual_mode = path.stat().st_mode
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)
    path.chmod(usual_mode)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write instead of ``path``; it takes its place once it is whole and on the disk."""
    with _temporary(path.parent) as temporary:
        yield temporary
        _to_disk(temporary)
        temporary.replace(path)


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """A file to be renamed, in a folder of its own: safetensors puts more files beside it."""
    room = folder / f"{TEMPORARY}{secrets.token_hex(8)}"
    room.mkdir()
    try:
        yield room / "file"
    finally:
        shutil.rmtree(room, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """What a killed process left half-written in ``folder``."""
    for room in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(room, ignore_errors=True)
