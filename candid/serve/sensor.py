"""A server as a sensor: it watches the images that it judges for drift and, if asked, stores them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import FastAPI, Query, Response, UploadFile
from starlette.exceptions import HTTPException

from candid.data.images import BadImageError, to_png
from candid.data.uploads import decode_upload
from candid.serve import schemas
from candid.serve.drift import Drift
from candid.serve.limits import Limits, ServeOptions
from candid.serve.schemas import EncodedResponse
from candid.serve.service import Description
from candid.serve.storage import Storage

MOST = 1000
"""Verdicts in one answer."""


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

    async def see(self, files: Sequence[UploadFile], found: Sequence[EncodedResponse]) -> None:
        """Watch judged images, and store them if that was asked for."""
        names: list[str | None] = [None] * len(found)
        if self.storage is not None:
            names = await asyncio.to_thread(self._store, self.storage, files, found)
        self.drift.see(found, names)

    def _store(
        self, storage: Storage, files: Sequence[UploadFile], found: Sequence[EncodedResponse]
    ) -> list[str | None]:
        names: list[str | None] = []
        for file, each in zip(files, found, strict=True):
            if each.kind == "unusable":
                names.append(None)
                continue
            file.file.seek(0)
            names.append(storage.add(file.file.read(), each.kind, _record(each.json)))
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
            """Stored images: novel ones of any age first, then ambiguous ones, then others, newest first."""
            found = await asyncio.to_thread(storage.last, limit)
            rows = [
                schemas.StoredResponse(
                    id=each.id, file=each.file, verdict=each.kind, **json.loads(each.result)
                )
                for each in found
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
                found = await asyncio.get_running_loop().run_in_executor(self.decoder, thumbnail, id)
            except BadImageError:
                found = None
            if found is None:
                raise HTTPException(404)
            return Response(found, media_type="image/png")


def _record(answer: bytes) -> str:
    """Return what a list of verdicts shows of an answer."""
    found = json.loads(answer)
    return json.dumps({name: found[name] for name in ("label", "confidence", "p_value")})
