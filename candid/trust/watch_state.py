"""The state of a watch over files: which images were counted, and the watch itself, in one SQLite file.

Both change in one transaction. So a process that is killed at any moment has counted an image with all that
follows from it, or not at all.
"""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from candid._support.errors import CandidError, CheckpointError
from candid.trust.watch import Watch

SCHEMA = """
CREATE TABLE IF NOT EXISTS watch (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counted (name BLOB PRIMARY KEY) WITHOUT ROWID;
"""
APPLICATION = 0x63616E64
"""The application id of our files: 'cand'."""


class WatchState:
    """A watch on disk, and the names of the images that it has counted.

    Args:
        path: the SQLite file; None to keep nothing.
        model: the identity of the model and its held-out scores; a state of another one is refused.
        watch: the watch to start with if there is no state yet.
    """

    def __init__(self, path: Path | None, model: str, watch: Watch) -> None:
        self.path, self.watch = path, watch
        with self._readable():
            self._database = sqlite3.connect(path or ":memory:", timeout=0, isolation_level=None)
        try:
            with self._readable():
                kept = self._opened()
                self.counted = {name for (name,) in self._database.execute("SELECT name FROM counted")}
            if kept:
                self._take(kept, model)
            else:
                self._write([("model", model)], ())
        except CandidError:
            self.close()
            raise

    def _opened(self) -> dict[str, str]:
        """Lock the file, and return what it holds."""
        self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._database.execute("BEGIN IMMEDIATE")
        if self._number("application_id") != APPLICATION and self._number("schema_version") > 0:
            raise CheckpointError(
                f"'{self.path}' was not written by candid watch: name another file with --state."
            )
        for statement in SCHEMA.split(";"):
            self._database.execute(statement)
        self._database.execute(f"PRAGMA application_id = {APPLICATION}")
        self._database.execute("COMMIT")
        return dict(self._database.execute("SELECT key, value FROM watch"))

    def _take(self, kept: dict[str, str], model: str) -> None:
        if kept.get("model") != model:
            raise CandidError(
                f"'{self.path}' is the state of a watch over another model, or the model was changed or "
                "calibrated since: name another file with --state to start again."
            )
        if "state" not in kept:
            return
        found = Watch.from_json(kept["state"], self.path)
        if found.level != self.watch.level:
            raise CandidError(
                f"'{self.path}' was started with --alarm {found.level:g}, and a level can't be changed: "
                "use the same, or name another file with --state to start again."
            )
        if found.among != self.watch.among:
            raise CandidError(
                f"'{self.path}' was started with --among {found.among}: use the same, or name another file "
                "with --state to start again."
            )
        found.proven = self.watch.proven  # states of earlier versions don't say it
        self.watch = found

    def count(self, names: Sequence[str]) -> None:
        """Store the watch together with the images that it has just seen."""
        encoded = [os.fsencode(name) for name in names]
        self.counted.update(encoded)
        self._write([("state", self.watch.to_json())], encoded)

    def is_counted(self, name: str) -> bool:
        """Return whether an image was counted before."""
        return os.fsencode(name) in self.counted

    def close(self) -> None:
        """Let others open the file."""
        self._database.close()

    def _write(self, values: Sequence[tuple[str, str]], names: Sequence[bytes]) -> None:
        try:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany("INSERT OR REPLACE INTO watch VALUES (?, ?)", values)
            self._database.executemany(
                "INSERT OR IGNORE INTO counted VALUES (?)", [(name,) for name in names]
            )
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            raise CandidError(
                f"Can't write the state of the watch to '{self.path}' ({error}): free some space, or name "
                "another file with --state."
            ) from error

    def _number(self, pragma: str) -> int:
        return int(self._database.execute(f"PRAGMA {pragma}").fetchone()[0])

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            hint = "another process uses it" if "locked" in str(error) else str(error)
            raise CandidError(
                f"Can't open the state of the watch '{self.path}' ({hint}): name another file with --state."
            ) from error
        except sqlite3.DatabaseError as error:
            raise CheckpointError(
                f"'{self.path}' holds no state of a watch ({error}): name another file with --state."
            ) from error
