"""A server as a sensor: it watches the images that it judges for drift and, if asked, stores them."""

import asyncio
import json
import logging
import re
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from fastapi import FastAPI, Query, Response, UploadFile
from starlette.exceptions import HTTPException

from candid._support.errors import CandidError
from candid._support.files import remove_unfinished, replacing
from candid.data.images import BadImageError, to_png
from candid.data.uploads import decode_upload
from candid.judging.watch_images import WatchState
from candid.serve import Limits, ServeOptions, schemas
from candid.serve.schemas import DriftResponse, EncodedResponse
from candid.serve.service import Description
from candid.trust.drift import Watch
from candid.trust.verdict import KINDS

MOST = 1000
"""Verdicts in one answer."""
SECONDS = 1.0
"""Between two looks at whether the state must be written."""
log = logging.getLogger("candid.serve")
IMAGES, RECORDS = "images", "verdicts.sqlite"
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
OTHERS = ("heic", "ppm")
NAME = re.compile(rf"(\d{{9,}})\.(?:{'|'.join({*BEGINNINGS.values(), *OTHERS})})")
"""The names of stored images."""


class Drift:
    """The watch of a server. Only the thread that answers requests uses it.

    Args:
        start: a watch that has seen the held-out images, as text; None if the model has no held-out scores.
        model: the fingerprint of the model and its held-out scores.
        folder: where the state is read and written; None to keep it in memory.
    """

    def __init__(self, start: str | None, model: str, folder: Path | None) -> None:
        self.state = None
        if start is not None:
            file = None if folder is None else folder / f"drift-{model[:16]}.sqlite"
            earlier = None if file is None else file.with_suffix(".json")  # until 0.3
            self.state = WatchState(file, model, Watch.from_json(start), earlier)

    @property
    def watch(self) -> Watch | None:
        """The watch, with all images so far."""
        return None if self.state is None else self.state.watch

    def see(self, answers: Sequence[EncodedResponse], names: Sequence[str | None]) -> None:
        """Count judged images; a name is only for those that are stored."""
        if self.watch is None:
            return
        for answer, name in zip(answers, names, strict=True):
            if answer.sighting is not None:
                score, predicted, confidence = answer.sighting
                rang = self.watch.alarm
                called = None if name is None else [name]
                self.watch.update(score, predicted, confidence, called)
                if self.watch.alarm and not rang:
                    log.warning(self.watch.sentence())

    @property
    def evidence(self) -> float:
        """The largest evidence so far."""
        return 0.0 if self.watch is None else self.watch.evidence

    @property
    def images(self) -> int:
        """The images so far."""
        return 0 if self.watch is None else self.watch.images

    @property
    def alarm(self) -> bool:
        """Whether the alarm has rung."""
        return self.watch is not None and self.watch.alarm

    def response(self) -> DriftResponse:
        """Return the answer of the API."""
        if self.watch is None:
            sentence = "This model has no held-out scores, so its images can't be watched."
            return DriftResponse(watching=False, sentence=sentence)
        return DriftResponse(watching=True, sentence=self.watch.sentence(), **self.watch.report())

    async def keep(self) -> None:
        """Write the state once a second while there are new images, until it is cancelled."""
        trouble = False
        while True:
            await asyncio.sleep(SECONDS)
            if self.state is None or self.state.is_written:
                continue
            text, images = self.state.watch.to_json(), self.state.watch.images
            try:
                await asyncio.to_thread(self.state.store, text, images)
                trouble = False
            except CandidError as error:  # the answers go on
                if not trouble:
                    log.error(str(error))
                trouble = True

    def close(self) -> None:
        """Write the state for the last time, and let others use it."""
        if self.state is None:
            return
        try:
            self.state.count([])
        except CandidError as error:
            log.error(str(error))
        self.state.close()


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


@dataclass(frozen=True)
class Sensor:
    """What a server does with images beyond the answer."""

    drift: Drift
    storage: Storage | None = None
    decoder: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "stored"))
    """Decodes stored images, one at a time."""

    @classmethod
    def of(cls, model: Description, options: ServeOptions | None = None) -> "Sensor":
        """Return the sensor of a model; without options it keeps everything in memory and stores nothing."""
        options = options or ServeOptions()
        drift = Drift(model.watch, model.fingerprint, options.state)
        if options.store is None:
            return cls(drift)
        most = int(options.store_megabytes * 1_000_000)
        return cls(drift, Storage(options.store, most, model.info.name))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the state on disk while the server runs, and close everything at its end."""
        keeping = asyncio.create_task(self.drift.keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            self.drift.close()
            self.decoder.shutdown()
            if self.storage is not None:
                self.storage.close()

    async def see(self, files: Sequence[UploadFile], answers: Sequence[EncodedResponse]) -> None:
        """Watch judged images, and store them if that was asked for."""
        names: list[str | None] = [None] * len(answers)
        if self.storage is not None:
            names = await asyncio.to_thread(self._store, self.storage, files, answers)
        self.drift.see(answers, names)

    def _store(
        self, storage: Storage, files: Sequence[UploadFile], answers: Sequence[EncodedResponse]
    ) -> list[str | None]:
        names: list[str | None] = []
        for file, answer in zip(files, answers, strict=True):
            if answer.record is None:
                names.append(None)
                continue
            file.file.seek(0)
            names.append(storage.add(file.file.read(), answer.kind, json.dumps(answer.record)))
        return names

    def add_routes(
        self,
        app: FastAPI,
        security: list[Any],
        problems: Callable[..., dict[int | str, dict[str, Any]]],
        model: Description,
        limits: Limits,
    ) -> None:
        """Add the addresses that tell what it has found."""
        common: dict[str, Any] = {"responses": problems(403, 500, 503), "dependencies": security}

        @app.get("/v1/drift", **common)
        async def drift() -> schemas.DriftResponse:
            """Whether the judged images have changed, since when and in which direction."""
            return self.drift.response()

        if self.storage is None:
            return
        storage = self.storage
        common = {"responses": problems(403, 422, 500, 503), "dependencies": security}

        @app.get("/v1/verdicts", **common)
        async def verdicts(
            limit: Annotated[int, Query(ge=1, le=MOST, description="The most verdicts to return.")] = 100,
        ) -> schemas.VerdictsResponse:
            """Stored images by verdict, those that need attention first, of any age; then newest first."""
            rows = [
                schemas.StoredResponse(
                    id=image.id, file=image.file, verdict=image.kind, **json.loads(image.result)
                )
                for image in await asyncio.to_thread(storage.last, limit)
            ]
            return schemas.VerdictsResponse(stored=await asyncio.to_thread(storage.counts), verdicts=rows)

        def thumbnail(number: int) -> bytes | None:
            content = storage.content(number)
            return (
                None
                if content is None
                else to_png(decode_upload(content, model.preprocessing, limits.max_pixels))
            )

        pictures = {200: {"content": {"image/png": {}}}, **problems(403, 404, 422, 500, 503)}

        @app.get("/v1/verdicts/image", response_class=Response, responses=pictures, dependencies=security)
        async def image(
            id: Annotated[int, Query(ge=1, le=2**62, description="The number of a stored image.")],
        ) -> Response:
            """A stored image as the model sees it."""
            try:
                png = await asyncio.get_running_loop().run_in_executor(self.decoder, thumbnail, id)
            except BadImageError:
                png = None
            if png is None:
                raise HTTPException(404)
            return Response(png, media_type="image/png")
