"""Judged images and results on disk: a folder of images and an SQLite file, bounded, oldest first out.

The images are the files as they were sent, with numbers as names in the order in which they came. So
``candid watch MODEL DIR/images``, ``candid group`` and ``candid teach`` can start from what a server saw.
"""

import logging
import re
import sqlite3
import threading
from pathlib import Path
from typing import NamedTuple

from candid._support.errors import CandidError
from candid._support.files import remove_unfinished, replacing

IMAGES, RECORDS = "images", "verdicts.sqlite"
SCHEMA = """CREATE TABLE IF NOT EXISTS verdicts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, file TEXT NOT NULL, bytes INTEGER NOT NULL, kind TEXT NOT NULL,
    result TEXT NOT NULL, model TEXT NOT NULL)"""
FIRST = "CASE kind WHEN 'novel' THEN 0 WHEN 'ambiguous' THEN 1 ELSE 2 END"
"""Unknown images come first."""
BEGINNINGS = {
    b"\x89PNG": "png",
    b"\xff\xd8": "jpg",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
    b"RIFF": "webp",
}
OTHERS = ("heic", "ppm")
NAME = re.compile(rf"(\d{{9,}})\.(?:{'|'.join({*BEGINNINGS.values(), *OTHERS})})")
"""The names of stored images."""
log = logging.getLogger("candid.serve")


class Stored(NamedTuple):
    """An image that was judged."""

    id: int
    file: str
    kind: str
    result: str
    """What the API answered, as JSON."""


class Storage:
    """What a server stores; any thread may use it.

    Args:
        folder: the folder; it may exist already.
        most: bytes of all images together; the oldest are removed first.
        model: the name of the model, for the records.
    """

    def __init__(self, folder: Path, most: int, model: str) -> None:
        self.folder, self.most, self.model = folder, most, model
        self._lock, self._trouble = threading.Lock(), False
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
            self._repair()
        except (OSError, sqlite3.Error) as error:
            reason = "another process uses it" if "locked" in str(error) else error
            raise CandidError(f"Can't use '{folder}' as --store ({reason}): name another folder.") from error

    def add(self, content: bytes, kind: str, result: str) -> str | None:
        """Store one image and what was said of it; return its file, or None if it can't be stored."""
        with self._lock:
            try:
                file = f"{1 + self._last():09d}.{_ending(content)}"
                with replacing(self.folder / IMAGES / file) as temporary:
                    temporary.write_bytes(content)
                row = file, len(content), kind, result, self.model
                self._database.execute(
                    "INSERT INTO verdicts (file, bytes, kind, result, model) VALUES (?, ?, ?, ?, ?)", row
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
        """Return some images: novel ones of any age first, then ambiguous ones, then others, newest first."""
        with self._lock:
            rows = self._database.execute(
                f"SELECT id, file, kind, result FROM verdicts ORDER BY {FIRST}, id DESC LIMIT ?", (limit,)
            )
            return [Stored(*row) for row in rows]

    def counts(self) -> dict[str, int]:
        """Return the number of stored images by verdict."""
        with self._lock:
            return dict(self._database.execute("SELECT kind, count(*) FROM verdicts GROUP BY kind"))

    def content(self, number: int) -> bytes | None:
        """Return a stored image as it was sent; None if there is none with this number."""
        with self._lock:
            row = self._database.execute("SELECT file FROM verdicts WHERE id = ?", (number,)).fetchone()
        try:
            return None if row is None else (self.folder / IMAGES / row[0]).read_bytes()
        except FileNotFoundError:
            return None

    def close(self) -> None:
        """Let others open it."""
        with self._lock:
            self._database.close()

    def _remove_oldest(self) -> None:
        """Remove images until the others fit, records first: a start removes files without a record."""
        while self._bytes > self.most:
            number, file, size = self._database.execute(
                "SELECT id, file, bytes FROM verdicts ORDER BY id LIMIT 1"
            ).fetchone()
            self._database.execute("DELETE FROM verdicts WHERE id = ?", (number,))
            self._bytes -= size
            (self.folder / IMAGES / file).unlink(missing_ok=True)

    def _repair(self) -> None:
        """Remove what a killed process left: files without a record, and records without a file."""
        remove_unfinished(self.folder / IMAGES)
        known = {file: number for number, file in self._database.execute("SELECT id, file FROM verdicts")}
        there = {path.name for path in (self.folder / IMAGES).iterdir()}
        last = self._last()
        for file in there - known.keys():
            ours = NAME.fullmatch(file)
            if ours is not None and int(ours[1]) <= last:
                (self.folder / IMAGES / file).unlink(missing_ok=True)
        lost = [(known[file],) for file in known.keys() - there]
        self._database.executemany("DELETE FROM verdicts WHERE id = ?", lost)
        self._bytes = self._number("SELECT coalesce(sum(bytes), 0) FROM verdicts")
        self._remove_oldest()

    def _last(self) -> int:
        """Return the highest number that an image ever had; 0 if there was none."""
        return self._number("SELECT coalesce(max(seq), 0) FROM sqlite_sequence")

    def _number(self, query: str) -> int:
        return int(self._database.execute(query).fetchone()[0])


def _ending(content: bytes) -> str:
    if content[4:8] == b"ftyp":
        return OTHERS[0]
    return next((ending for start, ending in BEGINNINGS.items() if content.startswith(start)), OTHERS[1])
