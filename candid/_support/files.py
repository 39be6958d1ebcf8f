"""Files that are written whole or not at all, their names, and digests of what they hold."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from candid._support.errors import CandidError
from candid._support.numbers import Array, as_array, digest, header_of, tensors_of
from candid._support.text import without_controls

TEMPORARY = ".writing-"
ANY_NAME = "surrogateescape"
"""How file names that are no text are written to files and read from them."""


SEAL = "candid"
"""The entry of a safetensors file's metadata for notes and a digest of notes and tensors, as JSON."""
LOCK_SECONDS = 2.0
"""How long to wait for another process by default."""
SAVE_SECONDS = 60.0
"""How long a process waits for another one that saves to the same folder."""
T = TypeVar("T")
_held: set[int] = set()
"""Folders that this process holds open and locked."""


def write_tensors(tensors: Mapping[str, Any], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write arrays or tensors to a safetensors file with the usual permissions.

    safetensors would let only its owner read it.
    """
    from safetensors.numpy import save_file

    path.touch()
    usual_mode = path.stat().st_mode
    save_file({name: as_array(values) for name, values in tensors.items()}, path, metadata)
    path.chmod(usual_mode)


def write_sealed(tensors: Mapping[str, Any], path: Path, **notes: str) -> None:
    """Write a safetensors file with ``notes`` and a digest of both, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        entry = json.dumps({**notes, "sha256": _seal(tensors, notes)}, sort_keys=True)
        write_tensors(tensors, temporary, {SEAL: entry})


def read_sealed(path: Path) -> tuple[dict[str, Array], dict[str, str] | None]:
    """Return the arrays and the notes of a file of :func:`write_sealed`; no notes if it has no digest.

    Raises:
        ValueError: if the file is cut, foreign or changed.
    """
    from safetensors import SafetensorError

    try:
        content = path.read_bytes()
        tensors = tensors_of(content)
        header = header_of(content)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"'{path}' is not a whole safetensors file: {error}") from error
    entry = header.get("__metadata__", {}).get(SEAL)
    if entry is None:
        return tensors, None
    notes = json.loads(entry)
    seal = notes.pop("sha256", None) if isinstance(notes, dict) else None
    if seal is None or seal != _seal(tensors, notes):
        raise ValueError(f"'{path}' was changed since it was written")
    return tensors, notes


def _seal(tensors: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    parts: list[Any] = [dict(notes)]
    for name, values in sorted(tensors.items()):
        array = as_array(values)
        parts += [[name, f"torch.{array.dtype.name}", list(array.shape)], array]
    return digest(*parts).hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write instead of ``path``; it takes its place once it is whole and on the disk.

    Errors of the operating system name ``path``.
    """
    try:
        with _temporary(path.parent) as temporary:
            yield temporary
            _to_disk(temporary)
            temporary.replace(path)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) if error.errno else error from error


@contextmanager
def locked(folder: Path, doing: str, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold the lock of ``folder``, so that one process at a time writes there.

    The lock leaves no file and ends with the process. Where the system has no such locks, nothing is locked.

    Args:
        folder: it must exist.
        doing: what the process that holds it does, such as "saves a model in", for the error.
        seconds: how long to wait for another process.
    """
    place = None
    try:
        place = _lock(folder, time.monotonic() + seconds)
    except BlockingIOError:
        raise CandidError(
            f"Another process {doing} '{folder}': wait until it has ended, or choose another folder."
        ) from None
    try:
        yield
    finally:
        if place is not None:
            _held.discard(place)
            os.close(place)


def _forget_locks() -> None:
    """Let go of the locks in a new process: they end with the one that took them."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def _lock(folder: Path, deadline: float) -> int | None:
    """Return the open folder, locked; None where there are no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    place = os.open(folder, os.O_RDONLY)
    while True:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            os.close(place)
            raise
        except OSError:  # some network file systems
            os.close(place)
            return None
        _held.add(place)
        return place


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


def remove_unfinished(folder: Path, older: float = 0) -> None:
    """Remove what a killed process left half-written in ``folder``.

    Args:
        folder: the folder.
        older: leave what was begun within this many seconds; other processes may write to the folder, too.
    """
    for room in folder.glob(f"{TEMPORARY}*"):
        with suppress(OSError):
            if not older or time.time() - room.stat().st_mtime >= older:
                shutil.rmtree(room, ignore_errors=True)


def write_text(text: str, path: Path) -> None:
    """Write a text file, whole or not at all; in tables and pages control characters are written out."""
    if path.suffix in (".csv", ".html"):
        text = without_controls(text)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors=ANY_NAME)


def write_texts(texts: Mapping[str, str], out: Path) -> list[Path]:
    """Write each text under its file name into the folder ``out``, and return the files."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text(text, out / name)
    except OSError as error:
        raise CandidError(f"Can't write to '{out}' ({error}): free some space, or change --out.") from error
    return [out / name for name in texts]


def system_error(error: OSError) -> str:
    """Return one sentence on an error of the operating system: which file, and what to do.

    >>> system_error(OSError(errno.ENOSPC, "No space left on device", "a.png"))
    "'a.png' can't be written, the disk is full: free some space, then run the command again."
    """
    place = "A file" if error.filename is None else f"'{os.fsdecode(error.filename)}'"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{place} can't be written, the disk is full: free some space, then run the command again."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{place} can't be used ({error.strerror}): change its permissions, or choose another place."
    problem = (error.strerror or str(error)).lower()
    return f"{place} can't be used ({problem}): check the name, or choose another place."


def safe_name(name: str) -> str:
    """Return ``name`` without characters that a file name can't have everywhere.

    >>> safe_name("runs/my model, β = ∞"), safe_name("..")
    ('runs-my-model-β-∞', 'model')
    """
    return re.sub(r"[^\w.∞-]+", "-", name).strip(".-") or "model"


def cache_file(folder: Path, name: str, key: "hashlib._Hash") -> Path:
    """Return the file in ``folder`` for what has the digest ``key``; ``name`` is for people."""
    ending = f"-{key.hexdigest()[:16]}.safetensors"
    return next(folder.glob(f"*{ending}"), folder / f"{safe_name(name)}{ending}")


def write_by_hash(folder: Path, part: str, state: Mapping[str, Array]) -> Path:
    """Write tensors under a name made from their content, so that they never overwrite older ones."""
    with _temporary(folder) as temporary:
        write_tensors(state, temporary)
        _to_disk(temporary)
        return temporary.replace(folder / f"{part}-{file_hash(temporary)[:16]}.safetensors")


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
