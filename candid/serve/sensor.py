"""What a server does with judged images: it watches them for drift, and stores and learns from them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Annotated, Any

from fastapi import FastAPI, Form, Query, Request, Response, UploadFile
from pydantic import Field
from starlette.exceptions import HTTPException

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.data.images import to_png
from candid.judging.store import LONGEST, Storage, class_name
from candid.serve import Limits, ServeOptions, schemas
from candid.serve.lessons import BusyError, Job, Lessons, fresh, too_few
from candid.serve.schemas import EncodedResponse
from candid.serve.served import Drift, Models, Opener, Served
from candid.serve.service import Description
from candid.serve.worker import Errand

MOST = 1000
"""Verdicts in one answer, and corrections in one request."""
SECONDS = 1.0
"""Between two looks at whether the state must be written."""
BUSY = "The server teaches, groups or loads a model already: ask again when it is done."
Id = Annotated[int, Field(ge=1, le=2**62)]
Decoded = Array | schemas.UnusableResponse
Decoding = Callable[[Served, Sequence[UploadFile], Request], Awaitable[list[Decoded]]]
"""Returns images as a model sees them, or why they can't be used."""
Problems = Callable[..., dict[int | str, dict[str, Any]]]


@dataclass(frozen=True)
class Sensor:
    """What a server does with images beyond the answer."""

    options: ServeOptions = field(default_factory=ServeOptions)
    storage: Storage | None = None
    lessons: Lessons | None = None
    errand: Errand = field(default_factory=Errand)

    @classmethod
    def of(cls, options: ServeOptions) -> "Sensor":
        """Return what the options ask for; by default everything is in memory and nothing is stored."""
        if options.store is None:
            return cls(options)
        storage, errand = Storage(options.store, int(options.store_megabytes * 1_000_000)), Errand()
        return cls(options, storage, Lessons(storage, errand), errand)

    def drift(self, model: Description) -> Drift:
        """Return the watch over the images of a model."""
        return Drift(model.watch, model.fingerprint, self.options.state)

    @asynccontextmanager
    async def running(self, models: Models) -> AsyncIterator[None]:
        """Keep the states on disk while the server runs, and close everything at its end."""
        keeping = asyncio.create_task(self._keep(models))
        try:
            yield
        finally:
            keeping.cancel()
            self.errand.stop()
            if self.lessons is not None:
                await self.lessons.close()
            await asyncio.gather(keeping, return_exceptions=True)
            if self.storage is not None:
                self.storage.close()

    async def _keep(self, models: Models) -> None:
        while True:
            await asyncio.sleep(SECONDS)
            for served in models:
                await served.drift.store()

    async def see(
        self, served: Served, files: Sequence[UploadFile], answers: Sequence[EncodedResponse]
    ) -> list[int | None]:
        """Watch judged images, and store them if that was asked for; return the numbers of stored ones."""
        names: list[str | None] = [None] * len(answers)
        if self.storage is not None:
            names = await asyncio.to_thread(self._store, self.storage, served.name, files, answers)
        served.drift.see(answers, names)
        return [None if name is None else int(name.partition(".")[0]) for name in names]

    def _store(
        self, storage: Storage, model: str, files: Sequence[UploadFile], answers: Sequence[EncodedResponse]
    ) -> list[str | None]:
        names: list[str | None] = []
        for file, answer in zip(files, answers, strict=True):
            if answer.record is None:
                names.append(None)
                continue
            file.file.seek(0)
            names.append(storage.add(file.file.read(), answer.kind, json.dumps(answer.record), model))
        return names


class Teaching:
    """Models that are made from corrections while the server runs, and switched to."""

    def __init__(self, sensor: Sensor, models: Models, opener: Opener, limits: Limits) -> None:
        assert sensor.storage is not None and sensor.lessons is not None
        self.sensor, self.models, self.opener, self.limits = sensor, models, opener, limits
        self.storage, self.lessons = sensor.storage, sensor.lessons

    async def state(self, served: Served) -> schemas.LessonsResponse:
        """Return everything that a page about lessons shows."""
        storage, name, start = self.storage, served.name, self.models.starts[served.name]
        corrections = await asyncio.to_thread(storage.corrections, name)
        waiting = fresh(corrections, served.model.learned)
        groups = self.lessons.groups.get(name)
        corrected = {each.id for each in corrections}
        return schemas.LessonsResponse(
            model=name,
            version=served.version,
            cannot=self._cannot(served),
            busy=self.lessons.busy,
            problem=self.lessons.problem,
            waiting=len(waiting),
            few=too_few(corrections, start.model.info.classes),
            corrections=[
                schemas.CorrectionResponse(
                    id=each.id, said=each.said, class_=each.name, waiting=each in waiting
                )
                for each in corrections
            ],
            novel=len(await asyncio.to_thread(storage.novel, name, MOST)),
            groups=None
            if groups is None
            else [
                schemas.GroupResponse(name=group, ids=left, nearest=nearest)
                for group, ids, nearest in groups.groups
                if (left := [number for number in ids if number not in corrected])
            ],
            singles=[] if groups is None else [each for each in groups.singles if each not in corrected],
            lessons=[
                schemas.LessonResponse(
                    version=each.version,
                    made=each.made,
                    photos=each.photos,
                    classes=each.classes,
                    sentences=each.sentences,
                    recalls=[
                        schemas.RecallResponse(class_=name, before=before, after=after)
                        for name, (before, after) in each.recalls.items()
                    ],
                    in_use=each.version == served.version,
                )
                for each in self.lessons.of(name, start.model.fingerprint)
            ],
        )

    def _cannot(self, served: Served) -> str | None:
        """Return why a model can't be taught; None if it can."""
        if "teach" not in served.model.info.abilities:
            return "Only photo models can be taught. Corrections are stored: train the model again with them."
        return None if self.models.starts[served.name].source else "This model is in no folder."

    async def correct(self, ids: Sequence[int], name: str) -> None:
        """Store or take back what a person says that images show."""
        try:
            found = await asyncio.to_thread(self.storage.correct, ids, class_name(name) if name else None)
        except CandidError as error:
            raise HTTPException(422, str(error)) from error
        if not found:
            raise HTTPException(404)
        self.lessons.problem = None

    def teach(self, served: Served) -> None:
        """Begin to make a model from all corrections."""
        if reason := self._cannot(served):
            raise HTTPException(422, reason)
        start = self.models.starts[served.name]
        self._begin("teaching", self.lessons.teach(served.name, start.model.fingerprint, start.source or ""))

    def group(self, served: Served) -> None:
        """Begin to group the stored images that the model does not know."""
        source = self._folder(served, served.version)
        if source is None or served.model.info.held_out is None:
            raise HTTPException(422, "Only a model in a folder that has held-out scores can group images.")
        self._begin("grouping", self.lessons.group(served.name, source))

    def use(self, served: Served, version: int) -> None:
        """Begin to answer with another version."""
        start = self.models.starts[served.name]
        known = {each.version for each in self.lessons.of(served.name, start.model.fingerprint)}
        if version not in known | {0} or self._folder(served, version) is None:
            raise HTTPException(404)
        self._begin("loading", self._switch({served.name: version}))

    def resume(self) -> None:
        """Go on with the versions that answered before the server was stopped."""
        used = {each.name: self.lessons.in_use(each.name, each.model.fingerprint) for each in self.models}
        versions = {name: each for name, each in used.items() if each and self.lessons.folder(each).exists()}
        if versions:
            self.lessons.begin("loading", self._switch(versions))

    def _begin(self, what: Job, job: Any) -> None:
        try:
            self.lessons.begin(what, job)
        except BusyError as error:
            raise HTTPException(409, BUSY) from error

    def _folder(self, served: Served, version: int) -> str | None:
        return str(self.lessons.folder(version)) if version else self.models.starts[served.name].source

    async def _switch(self, versions: Mapping[str, int]) -> None:
        """Answer with these versions of models, by name, once those that were replaced before are closed."""
        for name, version in versions.items():
            served = self.models.get(name)
            assert served is not None
            if version != served.version:
                await self.models.retired()  # the state of a watch is open only once
                start, source = self.models.starts[name], self._folder(served, version)
                networks, stack = await asyncio.to_thread(self.opener, source or "", name)
                with stack:
                    drift = self.sensor.drift(networks[0].description)
                    new = Served(networks, self.limits, drift, stack.pop_all(), source, version)
                new.model = replace(new.model, examples=start.model.examples)
                self.models.switch(new)
            self.lessons.use(name, version)


def add_routes(
    app: FastAPI,
    security: list[Any],
    problems: Problems,
    sensor: Sensor,
    models: Models,
    decoded: Decoding,
) -> None:
    """Add the addresses that tell what it has found."""
    common: dict[str, Any] = {"responses": problems(403, 404, 422, 500, 503), "dependencies": security}
    named = model_query(models, bool(security))

    @app.get("/v1/drift", **common)
    async def drift(model: Annotated[str | None, named] = None) -> schemas.DriftResponse:
        """Whether the judged images have changed, since when and in which direction."""
        return chosen(models, model).drift.response()

    if sensor.storage is None:
        return
    storage = sensor.storage
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

    pictures = {200: {"content": {"image/png": {}}}, **problems(403, 404, 422, 500, 503)}

    @app.get("/v1/verdicts/image", response_class=Response, responses=pictures, dependencies=security)
    async def image(
        request: Request,
        id: Annotated[int, Query(ge=1, le=2**62, description="The number of a stored image.")],
    ) -> Response:
        """A stored image as the model that judged it sees it."""
        stored = await asyncio.to_thread(storage.content, id)
        if stored is None:
            raise HTTPException(404)
        content, model = stored
        file = UploadFile(BytesIO(content), filename=str(id))
        (seen,) = await decoded(models.get(model) or models.first, [file], request)
        if isinstance(seen, schemas.UnusableResponse):
            raise HTTPException(404)
        return Response(await asyncio.to_thread(to_png, seen), media_type="image/png")


def add_lesson_routes(
    app: FastAPI, security: list[Any], problems: Problems, teaching: Teaching, models: Models
) -> None:
    """Add the addresses that correct and teach."""
    named = model_query(models, bool(security))
    asked: dict[str, Any] = {"responses": problems(403, 404, 422, 500, 503), "dependencies": security}
    codes = (400, 403, 404, 408, 409, 413, 415, 422, 429, 500, 503)
    done: dict[str, Any] = {"responses": problems(*codes), "dependencies": security}

    @app.get("/v1/lessons", **asked)
    async def lessons(model: Annotated[str | None, named] = None) -> schemas.LessonsResponse:
        """Corrections, groups of unknown images, and the models that were taught from corrections."""
        return await teaching.state(chosen(models, model))

    @app.post("/v1/corrections", **done)
    async def corrections(
        ids: Annotated[
            list[Id], Form(min_length=1, max_length=MOST, description="Numbers of stored images.")
        ],
        name: Annotated[
            str, Form(max_length=LONGEST, description="The class that they show; empty takes it back.")
        ] = "",
        model: Annotated[str | None, named] = None,
    ) -> schemas.LessonsResponse:
        """Say what stored images show: a class of the model or a new one."""
        served = chosen(models, model)
        await teaching.correct(ids, name)
        return await teaching.state(served)

    @app.post("/v1/groups", **done)
    async def groups(model: Annotated[str | None, named] = None) -> schemas.LessonsResponse:
        """Begin to group the stored novel images; ask ``GET /v1/lessons`` until it is no longer busy."""
        served = chosen(models, model)
        teaching.group(served)
        return await teaching.state(served)

    @app.post("/v1/lessons", **done)
    async def teach(model: Annotated[str | None, named] = None) -> schemas.LessonsResponse:
        """Begin to make a model from all corrections; it answers only after ``POST /v1/lessons/use``."""
        served = chosen(models, model)
        teaching.teach(served)
        return await teaching.state(served)

    @app.post("/v1/lessons/use", **done)
    async def use(
        version: Annotated[int, Form(ge=0, le=2**31, description="0 is the model as it was started.")],
        model: Annotated[str | None, named] = None,
    ) -> schemas.LessonsResponse:
        """Begin to answer with a model that was taught, or with the one before; no request is lost."""
        served = chosen(models, model)
        teaching.use(served, version)
        return await teaching.state(served)


def model_query(models: Models, secret: bool) -> Any:
    """Return the description of the field that names a model; with a token, names are secret."""
    names = None if secret else {"enum": [each.name for each in models]}
    return Query(description="See GET /v1/models; the first one by default.", json_schema_extra=names)


def chosen(models: Models, name: str | None) -> Served:
    """Return the model that a request names."""
    served = models.get(name)
    if served is None:
        raise HTTPException(404, "This server has no such model: GET /v1/models lists them.")
    return served
