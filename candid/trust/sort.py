"""Copy judged images into folders by what was found; originals stay where they are."""

import hashlib
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from candid._support.errors import CandidError
from candid._support.files import remove_unfinished, replacing, safe_name


def sort_into(places: Mapping[str, str], folder: Path) -> Counter[str]:
    """Copy images into subfolders of ``folder``.

    No file is moved, removed or overwritten. An image that is there already is not copied again, so that an
    interrupted run can be repeated; a different image of the same name gets a number.

    Args:
        places: the subfolder of each image, by its path; parts of it are joined by ``/``.
        folder: where the subfolders are made.

    Returns:
        The number of images of each subfolder.

    Raises:
        CandidError: if the disk is full, or a folder can't be written.
    """
    try:
        targets = {each: folder.joinpath(*map(safe_name, each.split("/", 1))) for each in places.values()}
        for target in targets.values():
            target.mkdir(parents=True, exist_ok=True)
            remove_unfinished(target)
        known: dict[Path, list[bytes]] = {}
        for path, place in places.items():
            _copy(Path(path), targets[place], known)
    except OSError as error:
        raise CandidError(
            f"Can't copy images into '{folder}' ({error}): free some space, or name another folder."
        ) from error
    return Counter(places.values())


def _copy(path: Path, folder: Path, known: dict[Path, list[bytes]]) -> None:
    """Copy a file unless its content is there already under its name, or its name with a number.

    ``known`` has the digests of files that are there, in the order of their numbers, by the name without one.
    """
    own, taken = _digest(path), known.setdefault(folder / path.name, [])
    if own in taken:
        return
    while (target := _numbered(folder / path.name, len(taken) + 1)).exists():
        taken.append(_digest(target) if target.is_file() else b"")
        if taken[-1] == own:
            return
    with replacing(target) as temporary:
        shutil.copyfile(path, temporary)
    shutil.copystat(path, target)
    taken.append(own)


def _numbered(path: Path, number: int) -> Path:
    return path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
