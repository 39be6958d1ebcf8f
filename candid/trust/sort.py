"""Copy judged images into folders by what was found; originals stay where they are."""

import hashlib
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from candid._support.errors import CandidError
from candid._support.files import remove_unfinished, replacing


def sort_into(places: Mapping[str, str], folder: Path) -> Counter[str]:
    """Copy images into subfolders of ``folder``.

    No file is moved, removed or overwritten. An image that is there already is not copied again, so that an
    interrupted run can be repeated; a different image of the same name gets a number.

    Args:
        places: the subfolder of each image, by its path; parts of it are joined by ``/``.
        folder: where the subfolders are made.

    Returns:
        The number of images of each subfolder, by its name on the disk.

    Raises:
        CandidError: if the disk is full, or a folder can't be written.
    """
    try:
        names = _names_on_disk(places.values())
        for name in names.values():
            (folder / name).mkdir(parents=True, exist_ok=True)
            remove_unfinished(folder / name)
        known: dict[Path, list[bytes]] = {}
        for path, place in places.items():
            _copy(Path(path), folder / names[place], known)
    except OSError as error:
        raise CandidError(
            f"Can't copy images into '{folder}' ({error}): free some space, or name another folder."
        ) from error
    return Counter(names[place] for place in places.values())


def _names_on_disk(places: Iterable[str]) -> dict[str, str]:
    """Return a name for each place that every file system takes; different places never share one.

    >>> _names_on_disk(["accepted/a b", "accepted/a?b", "accepted/a:b"])
    {'accepted/a b': 'accepted/a b', 'accepted/a:b': 'accepted/a-b', 'accepted/a?b': 'accepted/a-b-2'}
    """
    found: dict[str, str] = {}
    taken = set()
    for place in sorted(set(places)):
        parts = [re.sub(r'[\x00-\x1f<>:"/\\|?*]+', "-", part).strip(" .") for part in place.split("/", 1)]
        name, number = "/".join(part or "unnamed" for part in parts), 1
        own = name
        while own.casefold() in taken:
            number += 1
            own = f"{name}-{number}"
        taken.add(own.casefold())
        found[place] = own
    return found


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
