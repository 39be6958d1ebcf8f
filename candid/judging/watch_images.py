"""Watches over image files: which images were counted, and what they say of drift."""

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from candid._support.errors import CandidError, CheckpointError
from candid._support.files import ANY_NAME
from candid._support.numbers import digest
from candid.data.formats import images_in
from candid.data.images import EXTENSIONS
from candid.judging.examine import Examiner
from candid.judging.watched import WatchedScore
from candid.models.protocol import Model
from candid.trust.drift import CLASSES, SCORES, Watch
from candid.trust.promises import WatchOptions
from candid.trust.verdict import UnusableImage

STATE = ".candid-watch.sqlite"
SECONDS = 1.0
"""Between two looks at a folder."""


class Counted(NamedTuple):
    """What happened to the watch with some more images."""

    watch: Watch
    images: int
    """Images that were counted."""
    rang: bool
    """Whether the alarm rang among them."""
    unusable: list[UnusableImage]
    """Images that can't be used; they are not counted, and looked at again if they change."""


class FileWatch:
    """A watch over image files.

    Args:
        model: the model that judges them.
        name: what users call it.
        source: a folder, or a text file that names one image per line.
        options: the level of the alarm, and where the state is.
    """

    def __init__(self, model: Model, name: str, source: str, options: WatchOptions) -> None:
        self.source, self.folder = source, Path(source) if Path(source).is_dir() else None
        self.once = options.once or self.folder is None
        if not Path(source).exists():
            raise CandidError(f"There is no folder or list '{source}': check the name.")
        first = [] if not self.once else self._files()
        if self.once and not first:
            raise CandidError(f"'{source}' names no images: there is nothing to watch.")
        score = WatchedScore.of(model, name, options.score)
        self.examiner = Examiner(model, name, watched=score)
        path = options.state
        if path is None and not self.once:
            assert self.folder is not None
            path = self.folder / STATE
        if path is None and options.acknowledge:
            raise CandidError("There is no state to acknowledge an alarm in: name it with --state.")

        def started() -> Watch:
            return score.watch(model.class_names, options.alarm, options.among, options.watch)

        self.state = WatchState(path, score.identity(model), started())
        self.acknowledged: Watch | None = None
        """The watch whose alarm was acknowledged, and which a new one took the place of."""
        if options.acknowledge and self.watch.alarm:
            self.acknowledged = self.watch
            self.state.start_again(started())

    @property
    def watch(self) -> Watch:
        """The watch, with all images so far."""
        return self.state.watch

    def run(self) -> Iterator[Counted]:
        """Yield what happened after each batch of new images; without end unless it watches once."""
        sizes: dict[Path, tuple[int, int]] = {}
        broken: dict[str, tuple[int, int] | None] = {}
        while True:
            paths = [path for path in self._files() if not self.state.is_counted(self._name(path))]
            if not self.once:  # a file that is still being written changes between two looks
                now = {path: size for path in paths if (size := _size(path)) is not None}
                paths = [
                    path
                    for path, size in now.items()
                    if sizes.get(path) == size and broken.get(str(path)) != size
                ]
                sizes = now
            batch = self.examiner.batch
            for start in range(0, len(paths), batch):
                counted = self._count(paths[start : start + batch])
                broken |= {image.path: sizes.get(Path(image.path)) for image in counted.unusable}
                yield counted
            if self.once:
                return
            time.sleep(SECONDS)

    def _count(self, paths: list[Path]) -> Counted:
        watch, before, rang = self.watch, self.watch.images, self.watch.alarm
        unusable: dict[str, UnusableImage] = {}
        for examined in self.examiner.examine(paths):
            if isinstance(examined, UnusableImage):
                unusable[examined.path] = examined
                continue
            assert examined.sighting is not None
            score, predicted, confidence = examined.sighting
            seen = score if SCORES in watch.watched else None
            watch.update(seen, predicted if CLASSES in watch.watched else None, confidence, [examined.path])
        self.state.count([self._name(path) for path in paths if str(path) not in unusable])
        return Counted(watch, watch.images - before, watch.alarm and not rang, [*unusable.values()])

    def _name(self, path: Path) -> str:
        """Return the name under which a file is counted: within the folder, wherever that is moved."""
        return str(path.resolve() if self.folder is None else path.relative_to(self.folder))

    def _files(self) -> list[Path]:
        """Return all image files, in the order in which they are watched."""
        if self.folder is not None:
            try:
                return in_order(images_in(self.folder), self.folder)
            except FileNotFoundError:  # a folder went away while we looked: look again later
                return []
        if Path(self.source).suffix.lower() in EXTENSIONS:
            return [Path(self.source)]
        lines = Path(self.source).read_text(encoding="utf-8", errors=ANY_NAME).splitlines()
        return list(dict.fromkeys(Path(line.strip()) for line in lines if line.strip()))


def in_order(files: list[Path], folder: Path) -> list[Path]:
    """Return files that arrived together in a random order, which is a function of their names.

    Names often go by class, and all images of a class after each other would look like a change.
    """
    return sorted(files, key=lambda path: digest(os.fsencode(path.relative_to(folder))).digest())


def _size(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


SCHEMA = """
CREATE TABLE IF NOT EXISTS watch (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counted (name BLOB PRIMARY KEY) WITHOUT ROWID;
"""
APPLICATION = 0x63616E64
"""The application id of our files: 'cand'."""
OTHER = "name another place with --state"


class WatchState:
    """A watch on disk, and the names of the images that it has counted.

    Args:
        path: the SQLite file; None to keep nothing.
        model: the identity of the model and its held-out scores; a state of another one is refused.
        watch: the watch to start with if there is no state yet.
        earlier: a JSON file that an earlier version kept instead.
    """

    def __init__(self, path: Path | None, model: str, watch: Watch, earlier: Path | None = None) -> None:
        self.path, self.watch, self._writing = path, watch, threading.Lock()
        with self._readable():
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                path or ":memory:", timeout=0, isolation_level=None, check_same_thread=False
            )
        try:
            with self._readable():
                kept = self._opened()
                self.counted = {name for (name,) in self._database.execute("SELECT name FROM counted")}
            if not kept and earlier is not None and earlier.exists():
                kept = {"model": model, "state": earlier.read_text(encoding="utf-8")}
            if kept:
                self._take(kept, model)
            self._written = self.watch.images
            state = [("state", self.watch.to_json())] if self.watch.images else []
            self._write([("model", model), *state], ())
        except CandidError:
            self.close()
            raise

    def _opened(self) -> dict[str, str]:
        """Lock the file, and return what it holds."""
        self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._database.execute("BEGIN IMMEDIATE")
        if self._number("application_id") != APPLICATION and self._number("schema_version") > 0:
            raise CheckpointError(f"'{self.path}' was not written by candid watch: {OTHER}.")
        for statement in SCHEMA.split(";"):
            self._database.execute(statement)
        self._database.execute(f"PRAGMA application_id = {APPLICATION}")
        self._database.execute("COMMIT")
        return dict(self._database.execute("SELECT key, value FROM watch"))

    def _take(self, kept: dict[str, str], model: str) -> None:
        if kept.get("model") != model:
            raise CandidError(
                f"'{self.path}' is the state of a watch over another model, or the model was changed or "
                f"calibrated since: {OTHER} to start again."
            )
        if "state" not in kept:
            return
        watch = Watch.from_json(kept["state"], self.path, self.watch.proven)
        if watch.level != self.watch.level:
            raise CandidError(
                f"'{self.path}' was started with --alarm {watch.level:g}, and a level can't be changed: "
                f"use the same, or {OTHER} to start again."
            )
        if watch.among != self.watch.among:
            raise CandidError(
                f"'{self.path}' was started with --among {watch.among}: use the same, or {OTHER} to start "
                "again."
            )
        if watch.watched != self.watch.watched:
            raise CandidError(
                f"'{self.path}' was started with another --watch: use the same, or {OTHER} to start again."
            )
        if watch.score != self.watch.score:
            raise CandidError(
                f"'{self.path}' watches another score of this model: use the same --score, or {OTHER} to "
                "start a new watch."
            )
        self.watch = watch

    def count(self, names: Sequence[str]) -> None:
        """Store the watch together with the images that it has just seen."""
        encoded = [os.fsencode(name) for name in names]
        self.counted.update(encoded)
        self.store(self.watch.to_json(), self.watch.images, encoded)

    def start_again(self, watch: Watch) -> None:
        """Go on with a new watch; the images that were counted stay counted."""
        with self._writing:
            report = json.dumps(self.watch.report())
            self._write([("acknowledged", report), ("state", watch.to_json())], ())
            self.watch, self._written = watch, 0

    def store(self, text: str, images: int, names: Sequence[bytes] = ()) -> None:
        """Store the watch as it was after some images, unless a newer one is stored; any thread may do so."""
        with self._writing:
            if images >= self._written:
                self._write([("state", text)], names)
                self._written = images

    @property
    def is_written(self) -> bool:
        """Whether all images of the watch are stored."""
        return self.watch.images == self._written

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
                f"Can't write the state of the watch to '{self.path}' ({error}): free some space, or {OTHER}."
            ) from error

    def _number(self, pragma: str) -> int:
        return int(self._database.execute(f"PRAGMA {pragma}").fetchone()[0])

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:
            hint = "another process uses it" if "locked" in str(error) else str(error)
            raise CandidError(
                f"Can't open the state of the watch '{self.path}' ({hint}): {OTHER}."
            ) from error
        except sqlite3.DatabaseError as error:
            raise CheckpointError(f"'{self.path}' holds no state of a watch ({error}): {OTHER}.") from error
