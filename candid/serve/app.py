"""The addresses of the JSON API and of the page."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

import numpy as np
from fastapi import FastAPI, File, Form, Query, Request, Response, Security, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartParser
from starlette.routing import Route

from candid._support import __version__
from candid.data.images import BadImageError, Preprocessing, to_png
from candid.data.uploads import decode_small, decode_upload, decoding_cost, upload_as_jpeg
from candid.serve import FILES, Limits, schemas
from candid.serve.guard import CONTENT_TYPE, NOTHING, RETRY, Addresses, Guard, Metrics, failure, is_trouble
from candid.serve.queue import HarmfulError, LostError, Turns
from candid.serve.schemas import ImageRequest
from candid.serve.sensor import Decoded, Sensor, Teaching, add_lesson_routes, add_routes, chosen, model_query
from candid.serve.served import Models, Opener, Served, opened_here
from candid.serve.service import unusable
from candid.serve.worker import Decoder

DECODERS = 2
"""Images that are decoded at a time."""
PATIENCE = 5.0
"""Seconds that one image may take, at least; half of the time of a request if that is more."""
LOOK = 250_000
"""Pixels that are decoded as soon as the header is read; larger images wait for another turn."""
BUDGET = 8
"""The pixels of all images of a request, in largest images."""
MANY_PIXELS = "the images before it have as many pixels as one request may have; send fewer images at a time"
SHOWN = 1600
"""Most pixels on a side of an image that the server shows instead of the browser."""
PAGE = Path(__file__).parent / "page"
ADDRESSES = {
    file: "/" if file.name == "index.html" else f"/{file.name.removesuffix('.html')}"
    for file in PAGE.iterdir()
}
"""Where each file of the page is."""
PUBLIC = frozenset(ADDRESSES.values()) | {"/healthz", "/readyz", "/openapi.json"}
"""What needs no token: the page without what it shows, whether the server runs, and what it can be asked."""
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
WORK_PROBLEMS = (400, 403, 404, 408, 413, 415, 422, 429, 500, 503)
MEANINGS = {
    400: "The body is not what its header says.",
    401: "The token is missing or wrong.",
    403: "Cross-site request, or unknown host name.",
    404: "There is no such image or model.",
    408: "The request came too slowly.",
    409: "The server teaches, groups or loads a model already.",
    413: "The request is too large.",
    415: "The body has a Content-Encoding.",
    422: "A field is missing or wrong.",
    429: "Too many requests wait already; the header Retry-After says when to ask again.",
    500: "Something went wrong on the server.",
    503: "The server is about to stop, or the answer took too long.",
}
NO_TELEMETRY: Any = dict.fromkeys(("tracing", "metrics", "logs", "operation_spans", "auto_configure"), False)
"""Whatever the environment says: nothing is sent anywhere."""
log = logging.getLogger("candid.serve")
DESCRIPTION = (
    "What a generative image classifier says of images: class, posterior, p-value, verdict, and why. "
    "Every error is a JSON object with one sentence."
)


def guarded_app(
    served: Sequence[Served],
    limits: Limits,
    token: str | None = None,
    sensor: Sensor | None = None,
    opener: Opener = opened_here,
) -> Guard:
    """Return the whole application as a server runs it, with one model or several."""
    metrics = Metrics()
    api = _Api(Models(served), limits, metrics, token, sensor or Sensor(), opener)
    return Guard(api.app, _addresses(api.app), limits, metrics, token, api.models)


class _Api:
    """The routes, and the threads behind them."""

    def __init__(
        self,
        models: Models,
        limits: Limits,
        metrics: Metrics,
        token: str | None,
        sensor: Sensor,
        opener: Opener,
    ) -> None:
        self.limits, self.metrics, self.models, self.sensor = limits, metrics, models, sensor
        metrics.watch(models)
        self.teaching = None if sensor.storage is None else Teaching(sensor, models, opener, limits)
        self.examples = {photo.name: photo for each in models for photo in each.model.examples}
        self.app = FastAPI(
            title="Candid",
            version=__version__,
            description=DESCRIPTION,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,  # a redirect would repeat any host name
            telemetry=NO_TELEMETRY,
            lifespan=self._lifespan,
        )
        MultiPartParser.spool_max_size = 0  # bodies are in memory already: nothing is written to a file
        MultiPartParser.on_header_end = _header_end  # type: ignore[assignment, method-assign]
        for kind in (RequestValidationError, HTTPException, Exception):
            self.app.add_exception_handler(kind, _problem)
        security = [] if token is None else [Security(HTTPBearer(auto_error=False))]
        self._add_work_routes(security, token is not None)
        self._add_status_routes(security, token is not None)
        problems = partial(_problems, token is not None)
        add_routes(self.app, security, problems, sensor, self.models, self._decoded)
        if self.teaching is not None:
            add_lesson_routes(self.app, security, problems, self.teaching, models)
        for file, address in ADDRESSES.items():
            _add_file(self.app, file, address)

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self.models.start()
        patience = max(PATIENCE, self.limits.timeout / 2)
        decoders = [Decoder(self.limits.max_pixels, patience) for _ in range(DECODERS)]
        self.turns = Turns(decoders)
        try:
            with self.turns.request("") as submit:
                await _all(submit(LOOK, Decoder.started) for _ in decoders)
            await self._warm_up()
            async with self.sensor.running(self.models):
                if self.teaching is not None:
                    self.teaching.resume()
                yield
        finally:
            await asyncio.to_thread(self.turns.close)
            for decoder in decoders:
                decoder.end()
            await self.models.close()

    async def _warm_up(self) -> None:
        """Decode an image and refuse a request, which loads what the first user would wait for."""
        first = self.models.first
        grey = to_png(np.full(first.model.info.image_shape, 128, dtype=np.uint8))
        await self._decoded(first, [UploadFile(BytesIO(grey))])
        part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
        body = {"type": "http.request", "body": part + grey + b"\r\n--x--\r\n", "more_body": False}
        headers = [(b"content-type", b"multipart/form-data; boundary=x")]
        wrong = {"type": "http", "method": "POST", "path": "/v1/examine", "query_string": b"explain=maybe"}
        await self.app({**wrong, "headers": headers}, _returning(body), _returning(None))

    def _add_work_routes(self, security: list[Any], secret: bool) -> None:
        work: dict[str, Any] = {"responses": _problems(secret, *WORK_PROBLEMS), "dependencies": security}
        named = model_query(self.models, secret)
        towards = Form(description="A class of the model.", json_schema_extra=self._classes(secret))

        @self.app.post("/v1/examine", response_model=schemas.ExamineResponse, **work)
        async def examine(
            request: Request,
            file: Annotated[
                list[UploadFile], File(description="One or more images.", min_length=1, max_length=FILES)
            ],
            explain: Annotated[bool, Query(description="Add heatmaps, decision space and more.")] = False,
            again: Annotated[
                bool,
                Query(description="It was judged before: it is neither counted, watched nor stored again."),
            ] = False,
            model: Annotated[str | None, named] = None,
        ) -> Response:
            """Class, posterior, p-value and verdict of each file, in their order.

            A file that can't be used gets a sentence in place of a judgement; the others are judged.
            """
            numbers: list[int | None] = [None] * len(file)
            with chosen(self.models, model).used() as served:
                answers = await self._examine(served, file, explain, request)
                if not again:
                    self.metrics.judged(answer.kind for answer in answers)
                    numbers = await self.sensor.see(served, file, answers)
            stored = None if self.sensor.storage is None else numbers
            head = {"model": served.name, "version": served.version, "stored": stored}
            results = b",".join(answer.json for answer in answers)
            content = b'%b,"results":[%b]}' % (json.dumps(head).encode()[:-1], results)
            return Response(content, media_type="application/json")

        @self.app.post("/v1/counterfactual", **work)
        async def counterfactual(
            request: Request,
            file: Annotated[UploadFile, File(description="An image.")],
            towards: Annotated[str, towards],
            target: Annotated[
                float, Form(gt=0, lt=1, description="The posterior that the class should reach.")
            ] = 0.5,
            model: Annotated[str | None, named] = None,
        ) -> schemas.CounterfactualResponse:
            """The image, changed along the class means until 'towards' has the posterior 'target'."""
            with chosen(self.models, model).used() as served:
                classes = served.model.info.classes
                if towards not in classes:
                    raise HTTPException(422, "The model has no such class: GET /v1/models lists them.")
                changed = await self._change(served, file, classes.index(towards), target, request)
            return schemas.CounterfactualResponse(model=served.name, result=changed)

        @self.app.post("/v1/picture", response_class=_Jpeg, **work)
        async def picture(
            request: Request, file: Annotated[UploadFile, File(description="An image.")]
        ) -> Response:
            """The whole image as a JPEG of at most 1600 pixels a side, for browsers that can't show it."""
            with self.turns.request(_client(request)) as submit:
                (pixels,) = await _all([submit(LOOK, partial(self._cost, file))])
                return _Jpeg(*await _all([submit(pixels, partial(self._as_jpeg, file))]))

    def _classes(self, secret: bool) -> dict[str, Any] | None:
        """Return the classes for the description, if they are no secret and always the same."""
        fixed = self.teaching is None and len([*self.models]) == 1
        return {"enum": self.models.first.model.info.classes} if fixed and not secret else None

    def _add_status_routes(self, security: list[Any], secret: bool) -> None:
        missing = _problems(secret, 403, 404, 422, 500, 503)

        @self.app.get("/v1/example", response_class=_Jpeg, responses=missing, dependencies=security)
        async def example(name: Annotated[str, Query(description="See GET /v1/models.")]) -> Response:
            """A photo to try the model with; only bundled models have some."""
            if name not in self.examples:
                raise HTTPException(404, NOTHING)
            return _Jpeg(await asyncio.to_thread(self.examples[name].read_bytes))

        @self.app.get("/v1/models", responses=_problems(secret, 403, 500, 503), dependencies=security)
        async def models() -> schemas.ModelsResponse:
            """The models, their classes, the scores of held-out images, and the limits of this server."""
            stores = self.sensor.storage is not None
            return schemas.ModelsResponse(models=[each.info(self.limits, stores) for each in self.models])

        @self.app.get("/healthz", responses=_problems(False, 503))
        async def health() -> schemas.HealthResponse:
            """Whether the server works; if not, it should be started again."""
            late = 2 * self.limits.timeout
            lost = self.models.seconds_lost() > late
            if lost or self.turns.is_stuck(late) or any(each.queue.is_stuck(late) for each in self.models):
                raise HTTPException(503, f"Nothing was decoded or judged for {late:g} s: start it again.")
            return schemas.HealthResponse(needs_token=secret)

        @self.app.get("/readyz", responses=_problems(False, 503))
        async def ready() -> schemas.ReadyResponse:
            """Whether the server should be sent requests: every model is loaded, and it is not stopping."""
            if self.models.seconds_lost():
                raise HTTPException(503, "The network is being loaded again: ask again later.", RETRY)
            return schemas.ReadyResponse()

        scraped = _problems(secret, 403, 500)

        @self.app.get("/metrics", response_class=PlainTextResponse, responses=scraped, dependencies=security)
        async def metrics() -> Response:
            """Counts and latencies, in the text format of Prometheus."""
            return Response(self.metrics.as_text(), headers={"content-type": CONTENT_TYPE})

    async def _examine(
        self, served: Served, files: Sequence[UploadFile], explain: bool, request: Request
    ) -> list[schemas.EncodedResponse]:
        images = await self._decoded(served, files, request)
        asked = [
            ImageRequest(_name(file), image, explain)
            for file, image in zip(files, images, strict=True)
            if not isinstance(image, schemas.UnusableResponse)
        ]
        judged = iter(
            await self._from_network(served.queue.together(asked, len(asked)), asked) if asked else ()
        )
        return [
            schemas.EncodedResponse.of(image) if isinstance(image, schemas.UnusableResponse) else next(judged)
            for image in images
        ]

    async def _change(
        self, served: Served, file: UploadFile, towards: int, target: float, request: Request
    ) -> Any:
        (image,) = await self._decoded(served, [file], request)
        if isinstance(image, schemas.UnusableResponse):
            return image
        asked = ImageRequest(_name(file), image, towards=towards, target=target)
        return await self._from_network(served.queue.alone(lambda network: network.change(asked)), [asked])

    async def _from_network(self, answer: Future[Any], asked: Sequence[ImageRequest]) -> Any:
        try:
            return await asyncio.wrap_future(answer)
        except LostError as error:
            raise HTTPException(503, "The network has ended: ask again later.", RETRY) from error
        except HarmfulError as error:
            log.error("A request ended the process of the network again and again; it is refused.")
            names = ", ".join(f"'{each.path}'" for each in asked)
            raise HTTPException(
                422, f"The network can't survive this request and refuses it: {names}."
            ) from error

    async def _decoded(
        self, served: Served, files: Sequence[UploadFile], request: Request | None = None
    ) -> list[Decoded]:
        """Return each image as the model sees it, or why it can't be used; large ones wait for their turn."""
        with self.turns.request("" if request is None else _client(request)) as submit:
            looked = await _all(submit(LOOK, partial(self._look, served, file)) for file in files)
            left = BUDGET * self.limits.max_pixels
            jobs: list[Future[Decoded]] = []
            for file, decoded in zip(files, looked, strict=True):
                if isinstance(decoded, int) and decoded > left:
                    decoded = unusable(_name(file), MANY_PIXELS)
                if isinstance(decoded, int):
                    left -= decoded
                    jobs.append(submit(decoded, partial(self._decode, served, file)))
                else:
                    jobs.append(Future())
                    jobs[-1].set_result(decoded)
            return await _all(jobs)

    def _look(self, served: Served, file: UploadFile, decoder: Decoder) -> Decoded | int:
        """Return a small image as the model sees it, the pixels of a large one, or what is wrong."""
        return self._tried(file, decoder, decode_small, served.model.preprocessing, LOOK)

    def _decode(self, served: Served, file: UploadFile, decoder: Decoder) -> Decoded:
        decoded: Decoded = self._tried(file, decoder, decode_upload, served.model.preprocessing)
        return decoded

    def _tried(
        self, file: UploadFile, decoder: Decoder, function: Any, seen: Preprocessing, *more: int
    ) -> Any:
        try:
            return decoder(function, _content(file), seen, self.limits.max_pixels, *more)
        except BadImageError as error:
            return unusable(_name(file), error)

    def _cost(self, file: UploadFile, decoder: Decoder) -> int:
        with _refused(file):
            return int(decoder(decoding_cost, _content(file), self.limits.max_pixels))

    def _as_jpeg(self, file: UploadFile, decoder: Decoder) -> bytes:
        with _refused(file):
            jpeg = decoder(upload_as_jpeg, _content(file), self.limits.max_pixels, SHOWN)
        return bytes(jpeg)


def _content(file: UploadFile) -> bytes:
    file.file.seek(0)
    return file.file.read()


@contextmanager
def _refused(file: UploadFile) -> Iterator[None]:
    """Let a file that can't be used be the error of its request."""
    try:
        yield
    except BadImageError as error:
        raise HTTPException(422, unusable(_name(file), error).error) from error


def _header_end(
    parser: MultiPartParser,
    end: Callable[[MultiPartParser], None] = MultiPartParser.on_header_end,
) -> None:
    """Turn a lone ``filename*`` into a ``filename``: the parser drops it, and then there is no file."""
    value = bytes(parser._current_partial_header_value)
    if b"filename*" in value and not re.search(rb";\s*filename=", value):
        named = re.sub(rb";\s*filename\*=(?:[\w-]*'[\w-]*')?([^;\s]*)", _plain_name, value)
        parser._current_partial_header_value = named
    end(parser)


def _plain_name(found: re.Match[bytes]) -> bytes:
    return b'; filename="%b"' % unquote_to_bytes(found[1]).replace(b"\\", b"").replace(b'"', b"")


class _Jpeg(Response):
    media_type = "image/jpeg"


async def _all(futures: Iterable[Future[Any]]) -> list[Any]:
    """Wait for all; if nobody waits for them any more, those that have not begun never do."""
    return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))


def _returning(value: Any) -> Callable[..., Awaitable[Any]]:
    async def answer(*_: object) -> Any:
        return value

    return answer


def _problems(secret: bool, *codes: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a route; those of a server with a token include 401."""
    listed = sorted((*codes, 401) if secret else codes)
    return {code: {"model": schemas.ErrorResponse, "description": MEANINGS[code]} for code in listed}


def _client(request: Request) -> str:
    return "" if request.client is None else request.client.host


def _name(file: UploadFile) -> str:
    """Return the name as text that can be sent back."""
    return (file.filename or "").encode("utf-8", "replace").decode()


def _addresses(app: FastAPI) -> Addresses:
    """Return the addresses of an application, by how they are guarded."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    listed = {route.path for route in routes if route.include_in_schema}
    return Addresses(
        public=PUBLIC,
        work=frozenset(route.path for route in routes if "POST" in (route.methods or ())),
        pages=frozenset(address for file, address in ADDRESSES.items() if file.suffix == ".html"),
        counted=frozenset({*listed, "/", "/openapi.json"}),
    )


def _add_file(app: FastAPI, file: Path, address: str) -> None:
    """Add a file of the page, from memory."""
    content = file.read_bytes()
    kind = TYPES[file.suffix]

    async def answer() -> Response:
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    app.get(address, include_in_schema=False)(answer)


async def _problem(request: Request, error: Exception) -> Response:
    """What went wrong, in one sentence."""
    headers: Mapping[str, str] | None = None
    if is_trouble(error) or is_trouble(error.__cause__):  # the framework calls it an error of the body
        status, sentence, headers = failure(error if is_trouble(error) else error.__cause__ or error)
    elif isinstance(error, RequestValidationError):
        status, sentence = 422, _wrong_field(error)
    elif isinstance(error, HTTPException):
        status, sentence, headers = error.status_code, str(error.detail), error.headers
        if status == 404 and sentence == "Not Found":
            sentence = NOTHING
        if status == 405:
            sentence = "This address takes no such method: /api lists those that it takes."
    else:
        status, sentence, headers = failure(error)
    return JSONResponse({"error": sentence}, status, headers)


def _wrong_field(error: RequestValidationError) -> str:
    first = error.errors()[0]
    field = str(first["loc"][1]) if len(first["loc"]) > 1 else "the request"
    if field == "file":
        return f"Send an image as the multipart field 'file', at most {FILES} a request."
    return f"The field '{field}' is wrong: {first['msg']}."
