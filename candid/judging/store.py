"""What a server stores: judged images, what was said of them, and what people say that they are."""

import hashlib
import json
import logging
import re
import sqlite3
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from candid._support.errors import CandidError
from candid._support.files import remove_unfinished, replacing, write_text
from candid._support.text import listed
from candid.trust.verdict import KINDS

log = logging.getLogger("candid.serve")
IMAGES, RECORDS, CORRECTIONS = "images", "verdicts.sqlite", "corrections.json"
LONGEST = 100
"""Characters of the name of a class that a person gives."""
DIGITS = 32
"""Of the digest of a photo."""
SCHEMA = """CREATE TABLE IF NOT EXISTS verdicts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, file TEXT NOT NULL, bytes INTEGER NOT NULL, kind TEXT NOT NULL,
    result TEXT NOT NULL, model TEXT NOT NULL)"""
PLACES = " ".join(f"WHEN '{kind}' THEN {place}" for place, kind in enumerate(KINDS))
FIRST = f"CASE kind {PLACES} ELSE {len(KINDS)} END"
"""What needs attention comes first."""
BEGINNINGS = {
    b"\x89PNG": "png",
    b"\xff\xd8": "jpg",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
    b"RIFF": "webp",
}
OTHERS = ("heic", "ppm", "avif")
NAME = re.compile(rf"(\d{{9,}})\.(?:{'|'.join({*BEGINNINGS.values(), *OTHERS})})")
"""The names of stored images."""


class Stored(NamedTuple):
    """An image that was judged."""

    id: int
    file: str
    kind: str
    result: str
    """What the API answered, as JSON."""


class Correction(NamedTuple):
    """What a person says that a stored image shows."""

    file: str
    """In the folder of the images."""
    name: str
    """The class: one that the model knows, or a new one."""
    said: str
    """The class that the model named."""
    model: str
    """The name of the model that judged it."""
    digest: str
    """Of the content of the file."""

    @property
    def id(self) -> int:
        """The number of the image."""
        return int(Path(self.file).stem)


def corrections_in(folder: Path, model: str | None = None) -> list[Correction]:
    """Return the corrections of a store by their images, also while a server uses it.

    Args:
        folder: the store.
        model: the name of a model: of corrections of several models, only its own are returned.

    Raises:
        CandidError: if there are none, or the file is damaged.
    """
    file = folder / CORRECTIONS
    try:
        records = json.loads(file.read_text(encoding="utf-8"))
        corrections = [Correction(**record) for record in records]
    except FileNotFoundError:
        raise CandidError(
            f"'{folder}' has no corrections: name the folder of 'candid serve --store', and correct photos "
            "on the page."
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise CandidError(f"'{file}' can't be read ({error}): restore it or remove it.") from error
    names = sorted({each.model for each in corrections})
    if model is None or len(names) < 2:
        return corrections
    if model not in names:
        raise CandidError(
            f"'{folder}' has corrections of models named {listed(names)}: give the model's folder one of "
            f"these names, not '{model}'."
        )
    return [each for each in corrections if each.model == model]


def class_name(text: str) -> str:
    """Return the name of a class as a person gave it, without spaces around it.

    >>> class_name(" red panda ")
    'red panda'
    """
    name = text.strip()
    if not name or not name.isprintable() or len(name) > LONGEST:
        raise CandidError(f"The name of a class has 1 to {LONGEST} characters that can be printed.")
    return name


class _Orphan(NamedTuple):
    """A stored image without a record."""

    number: int
    file: str
    bytes: int


class Storage:
    """What a server stores; any thread may use it.

    Images with a correction are never removed: they are what a model can be taught from.

    Args:
        folder: the folder; it may exist already.
        most: bytes of all images together; the oldest are removed first.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        self._lock, self._trouble = threading.Lock(), False
        self._bytes, self._highest = 0, 0
        """Of all images, and the highest number of one when this began or that was given since."""
        self._orphans: deque[_Orphan] = deque()
        try:
            (folder / IMAGES).mkdir(parents=True, exist_ok=True)
            if not (folder / RECORDS).exists() and any((folder / IMAGES).iterdir()):
                raise CandidError(
                    f"'{folder / IMAGES}' has files that no server stored: name another folder with --store."
                )
            self._database = sqlite3.connect(
                folder / RECORDS, isolation_level=None, check_same_thread=False, timeout=0
            )
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(SCHEMA)
            there = (folder / CORRECTIONS).exists()
            self._corrections = {each.file: each for each in (corrections_in(folder) if there else ())}
            self._repair()
        except (OSError, sqlite3.Error) as error:
            reason = "another process uses it" if "locked" in str(error) else error
            raise CandidError(f"Can't use '{folder}' as --store ({reason}): name another folder.") from error

    def add(self, content: bytes, kind: str, result: str, model: str = "") -> str | None:
        """Store one image and what a model said of it; return its file, or None if it can't be stored."""
        with self._lock:
            try:
                number = 1 + max(self._last(), self._highest)
                file = f"{number:09d}.{_ending(content)}"
                with replacing(self.folder / IMAGES / file) as temporary:
                    temporary.write_bytes(content)
                self._highest = number
                row = number, file, len(content), kind, result, model
                self._database.execute(
                    "INSERT INTO verdicts (id, file, bytes, kind, result, model) VALUES (?, ?, ?, ?, ?, ?)",
                    row,
                )
                self._bytes += len(content)
                self._remove_oldest()
            except (OSError, sqlite3.Error) as error:  # the answers go on
                if not self._trouble:
                    log.error("Can't store images in '%s' (%s): free some space.", self.folder, error)
                self._trouble = True
                return None
            self._trouble = False
            return file

    def last(self, limit: int) -> list[Stored]:
        """Return some images by verdict, those that need attention first, of any age; then newest first."""
        with self._lock:
            rows = self._database.execute(
                f"SELECT id, file, kind, result FROM verdicts ORDER BY {FIRST}, id DESC LIMIT ?", (limit,)
            )
            return [Stored(*row) for row in rows]

    def counts(self) -> dict[str, int]:
        """Return the number of stored images by verdict."""
        with self._lock:
            return dict(self._database.execute("SELECT kind, count(*) FROM verdicts GROUP BY kind"))

    def content(self, number: int) -> tuple[bytes, str] | None:
        """Return a stored image as it was sent and the model that judged it; None if there is none."""
        with self._lock:
            row = self._database.execute(
                "SELECT file, model FROM verdicts WHERE id = ?", (number,)
            ).fetchone()
        try:
            return None if row is None else ((self.folder / IMAGES / row[0]).read_bytes(), row[1])
        except FileNotFoundError:
            return None

    def novel(self, model: str, limit: int) -> list[str]:
        """Return the files of novel images without a correction, as one model judged them; newest first."""
        with self._lock:
            rows = self._database.execute(
                "SELECT file FROM verdicts WHERE kind = 'novel' AND model = ? ORDER BY id DESC", (model,)
            )
            return [file for (file,) in rows if file not in self._corrections][:limit]

    def correct(self, numbers: Iterable[int], name: str | None) -> int:
        """Note that images show a class, or, without a name, that nobody says what they show.

        Returns:
            The number of images that there are.

        Raises:
            OSError: if it can't be written.
        """
        with self._lock:
            corrections = dict(self._corrections)
            images = 0
            for number in dict.fromkeys(numbers):
                row = self._database.execute(
                    "SELECT file, result, model FROM verdicts WHERE id = ?", (number,)
                ).fetchone()
                if row is None:
                    continue
                file, result, model = row
                images += 1
                if name is None:
                    corrections.pop(file, None)
                    continue
                digest = hashlib.sha256((self.folder / IMAGES / file).read_bytes()).hexdigest()[:DIGITS]
                said = json.loads(result).get("label", "")
                corrections[file] = Correction(file, name, said, model, digest)
            self._write(corrections)
            return images

    def corrections(self, model: str | None = None) -> list[Correction]:
        """Return what people said of images, of all models or of one, by the number of the image."""
        with self._lock:
            chosen = [each for each in self._corrections.values() if model in (None, each.model)]
        return sorted(chosen, key=lambda each: each.id)

    def _write(self, corrections: Mapping[str, Correction]) -> None:
        records = [each._asdict() for each in corrections.values()]
        write_text(json.dumps(records, indent=1), self.folder / CORRECTIONS)
        self._corrections = dict(corrections)

    def close(self) -> None:
        """Let others open it."""
        with self._lock:
            self._database.close()

    def _remove_oldest(self) -> None:
        """Remove images until the others fit, records first: what is left of a killed process is a file."""
        while self._bytes > self.most:
            rows = self._database.execute(
                "SELECT id, file, bytes FROM verdicts ORDER BY id LIMIT ?", (1 + len(self._corrections),)
            ).fetchall()
            oldest = next((row for row in rows if row[1] not in self._corrections), None)
            if self._orphans and (oldest is None or self._orphans[0].number <= oldest[0]):
                orphan = self._orphans.popleft()
                self._bytes -= orphan.bytes
                (self.folder / IMAGES / orphan.file).unlink(missing_ok=True)
                continue
            if oldest is None:
                return
            number, file, size = oldest
            self._database.execute("DELETE FROM verdicts WHERE id = ?", (number,))
            self._bytes -= size
            (self.folder / IMAGES / file).unlink(missing_ok=True)

    def _repair(self) -> None:
        """Remove what a killed process left half-written, and records without a file.

        A file without a record is left of a killed process, or its record was lost in a power cut, or because
        a copy of the folder has no write-ahead log. It counts as any other one, and is removed by its age.
        """
        remove_unfinished(self.folder / IMAGES)
        known = {file: number for number, file in self._database.execute("SELECT id, file FROM verdicts")}
        there = {path.name for path in (self.folder / IMAGES).iterdir()}
        self._highest = max((int(ours[1]) for ours in map(NAME.fullmatch, there) if ours), default=0)
        lost = [(known[file],) for file in known.keys() - there]
        self._database.executemany("DELETE FROM verdicts WHERE id = ?", lost)
        if gone := self._corrections.keys() - there:
            self._write({file: each for file, each in self._corrections.items() if file not in gone})
        orphans = [
            _Orphan(int(ours[1]), file, (self.folder / IMAGES / file).stat().st_size)
            for file in there - known.keys()
            if (ours := NAME.fullmatch(file))
        ]
        if orphans:
            log.warning(
                "%d images in '%s' have no record: they are removed by their age.", len(orphans), self.folder
            )
        self._bytes = self._number("SELECT coalesce(sum(bytes), 0) FROM verdicts")
        self._bytes += sum(each.bytes for each in orphans)
        self._orphans = deque(sorted(each for each in orphans if each.file not in self._corrections))
        self._remove_oldest()

    def _last(self) -> int:
        """Return the highest number that a record ever had; 0 if there was none."""
        return self._number("SELECT coalesce(max(seq), 0) FROM sqlite_sequence")

    def _number(self, query: str) -> int:
        return int(self._database.execute(query).fetchone()[0])


def _ending(content: bytes) -> str:
    if content[4:8] == b"ftyp":
        return OTHERS[2 if content[8:11] == b"avi" else 0]
    return next((ending for start, ending in BEGINNINGS.items() if content.startswith(start)), OTHERS[1])
