"""What stands between the network and the application: limits, token, headers, errors."""

import asyncio
import errno
import hmac
import ipaddress
import json
import logging
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from candid.serve import Limits

if TYPE_CHECKING:
    from candid.serve.served import Models

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
"""On every answer."""
ACCEPTED = "candid.accepted"
"""Is in the scope of a request that has come whole and has its place in the queue."""
LOOPBACK = ("127.0.0.1", "[::1]", "localhost")
RETRY = {"retry-after": "1"}
NOTHING = "There is nothing at this address: /api lists those that there are."
LINGER, LEFT = 1.0, 100_000
"""Seconds for which the rest of a refused request is read, and how many bytes where none belong."""
GRACE, RATE = 5.0, 1000.0
"""A body may come at this many bytes a second or more; its first seconds are free."""
LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EAGAIN)
SANE_ID = re.compile(r"[\w.:+/=-]{1,128}", re.ASCII)
"""An X-Request-ID that is taken over; any other one is replaced."""
REQUEST: ContextVar[str] = ContextVar("REQUEST", default="")
"""The X-Request-ID of the request that is being answered."""
log = logging.getLogger("candid.serve")
requests_log = logging.getLogger("candid.serve.requests")
"""One message for each request, at a level that is shown with ``--log json`` alone."""
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper ends of the buckets of latencies."""
prometheus_client.disable_created_metrics()


class _RefusedError(Exception):
    """An answer in place of that of the application."""

    def __init__(
        self, status: int, reason: str, sentence: str, headers: dict[str, str] | None = None
    ) -> None:
        self.status, self.reason, self.sentence, self.headers = status, reason, sentence, headers or {}


class _GoneError(Exception):
    """The client went away before it had sent everything."""


class Backend(Protocol):
    """What a server asks about the networks behind the application."""

    def seconds_lost(self) -> float:
        """Return for how long no network has been ready; 0 if one is."""

    def abandon(self) -> None:
        """Let all requests fail that wait for a network."""


class Addresses(NamedTuple):
    """The addresses of an application, by how they are guarded."""

    public: frozenset[str]
    """Those that need no token; every other one does, whether it exists or not."""
    work: frozenset[str]
    """Those that take a body and wait in the queue."""
    pages: frozenset[str]
    """Those that a link on another site may lead to."""
    counted: frozenset[str]
    """Those that are counted by their own name."""


class Metrics:
    """Counts what happened since the start of the server; any thread may count.

    >>> metrics = Metrics()
    >>> metrics.answered("/v1/examine", 200, 0.04)
    >>> metrics.judged(["accept"])
    >>> print(metrics.as_text().splitlines()[2])
    candid_requests_total{path="/v1/examine",status="200"} 1.0
    """

    def __init__(self) -> None:
        self.accepted = 0
        """Requests that are waiting or being answered."""
        self._registry = own = CollectorRegistry()
        self._requests = Counter("candid_requests", "Answered requests.", ("path", "status"), registry=own)
        self._images = Counter("candid_images", "Images by verdict.", ("verdict",), registry=own)
        self._refusals = Counter("candid_refusals", "Refused requests by reason.", ("reason",), registry=own)
        queue = Gauge("candid_queue_length", "Requests waiting or being answered.", registry=own)
        queue.set_function(lambda: self.accepted)
        self._seconds = Histogram(
            "candid_request_seconds",
            "Seconds from the first byte of a request to its answer.",
            buckets=SECONDS,
            registry=own,
        )

    def watch(self, models: "Models") -> None:
        """Show what the watches for drift have found; of several models the largest."""
        for name, text in (
            ("evidence", "Evidence that images changed; it rings at 100."),
            ("alarm", "1 if the alarm has rung."),
            ("images", "Images that were watched."),
        ):
            gauge = Gauge(f"candid_drift_{name}", text, registry=self._registry)
            gauge.set_function(lambda name=name: max(float(getattr(each.drift, name)) for each in models))  # type: ignore[misc]

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests.labels(path, status).inc()
        self._seconds.observe(seconds)

    def judged(self, kinds: Iterable[str]) -> None:
        """Count images by their verdict, or as ``unusable`` or ``no verdict``."""
        for kind in kinds:
            self._images.labels(kind).inc()

    def refused(self, reason: str) -> None:
        """Count a request that was refused before anything was computed."""
        self._refusals.labels(reason).inc()

    def as_text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()


class Guard:
    """An ASGI application around another one.

    In nginx, ``client_max_body_size``, ``client_body_timeout`` and ``proxy_read_timeout`` do some of it, too.
    """

    def __init__(
        self,
        app: App,
        addresses: Addresses,
        limits: Limits,
        metrics: Metrics,
        token: str | None,
        backend: Backend,
    ) -> None:
        self.app, self.limits, self.metrics, self.backend = app, limits, metrics, backend
        self.addresses = addresses
        self.token = None if token is None else token.encode()
        self.stopping = False
        self.most_connections = 1000
        self._held = 0
        """Bytes of all bodies."""
        own = socket.gethostname().lower()
        self._hosts = {*LOOPBACK, own, f"{own}.local", *map(str.lower, limits.allow_host)}
        """The names that lead here; the address of a connection is one, too."""

    @property
    def idle(self) -> bool:
        """Every accepted request is answered."""
        return self.metrics.accepted == 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request, or the start and end of the server."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        given = _headers(scope).get("x-request-id", "")
        name = given if SANE_ID.fullmatch(given) else uuid.uuid4().hex
        REQUEST.set(name)  # each request is a task, with variables of its own
        request, answer = _Request(receive), _Answer(send, name)
        try:
            await self._answered(scope, request, answer)
        except _RefusedError as refusal:
            self.metrics.refused(refusal.reason)
            if "expect" not in _headers(scope):  # else its sender waits for the answer before it sends more
                await request.discard(self.limits.max_bytes if scope["path"] in self.addresses.work else LEFT)
            close = not request.whole or refusal.reason == "framing"  # what follows may be of another request
            await answer.problem(refusal.status, refusal.sentence, refusal.headers, close)
        except _GoneError:
            self.metrics.refused("gone")
            return
        except Exception as error:
            if not is_trouble(error):
                log.exception("A request failed.")
            if not answer.status:
                await answer.problem(*failure(error))
        finally:
            self._held -= request.held
        path = scope["path"] if scope["path"] in self.addresses.counted else "other"
        seconds = time.monotonic() - started
        self.metrics.answered(path, answer.status, seconds)
        facts = {"method": scope["method"], "path": path, "status": answer.status, "seconds": seconds}
        requests_log.info("answered", extra={"facts": facts})

    async def _answered(self, scope: Message, request: "_Request", answer: "_Answer") -> None:
        path, headers = scope["path"], _headers(scope)
        if not path.isprintable():  # to the routes, a line break at the end is nothing
            raise _RefusedError(404, "address", NOTHING)
        if self.stopping and path != "/metrics":
            raise self._stopping()
        if "content-length" in headers and "transfer-encoding" in headers:
            raise _RefusedError(400, "framing", "A request has a length or is chunked, not both.")
        self._check_site(scope, headers)
        if path not in self.addresses.public:
            self._check_token(headers)
        if path in self.addresses.work and scope["method"] == "POST":
            await self._work(scope, headers, request, answer)
            return
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            raise _RefusedError(413, "body", "This address takes no body with this method.")
        if scope["method"] == "HEAD":  # the server leaves the content out
            scope = {**scope, "method": "GET"}
        await self.app(scope, request, answer)

    async def _work(
        self, scope: Message, headers: dict[str, str], request: "_Request", answer: "_Answer"
    ) -> None:
        deadline = asyncio.get_running_loop().time() + self.limits.timeout
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise _RefusedError(415, "encoding", "Send the request without Content-Encoding.")
        self._check_room(self.metrics.accepted)
        again = _again(await self._body(headers, request, deadline), request)
        if self.stopping:
            raise self._stopping()
        async with self._accepted(scope):
            try:
                async with asyncio.timeout_at(deadline):
                    await self.app(scope, again, answer)
            except TimeoutError as error:
                raise _RefusedError(
                    503, "slow", "The answer took too long: ask again later.", RETRY
                ) from error

    def _stopping(self) -> _RefusedError:
        return _RefusedError(503, "stopping", "The server is about to stop: ask again later.", RETRY)

    def _check_site(self, scope: Message, headers: dict[str, str]) -> None:
        """Refuse host names that were led here, and what pages of other sites ask."""
        host, own = _host(headers.get("host", "")), scope["server"][0].partition("%")[0]
        name = re.sub(r":\d+$", "", host).rstrip(".")
        if self.token is None and name not in self._hosts and name.strip("[]") != own:
            sentence = (
                "Without a token, this server answers to its own addresses and name alone (--allow-host)."
            )
            raise _RefusedError(403, "host", sentence)
        if any(sum(key == each for key, _ in scope["headers"]) > 1 for each in (b"origin", b"referer")):
            raise _RefusedError(403, "site", "A request has one Origin and one Referer.")
        sites = [value for key, value in scope["headers"] if key == b"sec-fetch-site"]
        is_link = scope["path"] in self.addresses.pages and scope["method"] in ("GET", "HEAD")
        if sites:
            foreign = sites not in ([b"none"], [b"same-origin"])
            is_link &= len(sites) == 1 and headers.get("sec-fetch-mode") == "navigate"
        else:
            named = [headers[each] for each in ("origin", "referer") if each in headers]
            foreign = any(_site(each) != host for each in named)
            is_link &= "origin" not in headers
        if foreign and not is_link:
            raise _RefusedError(403, "site", "The page of another site can't ask this server: open its own.")

    def _check_token(self, headers: dict[str, str]) -> None:
        if self.token is None:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("latin-1"), self.token)
        if scheme.lower() != "bearer" or not right:
            sentence = "This server needs a token: send it as 'Authorization: Bearer TOKEN'."
            raise _RefusedError(401, "token", sentence, {"www-authenticate": "Bearer"})

    def _check_room(self, waiting: int) -> None:
        if waiting >= self.limits.max_queue or self._held > self.limits.held_bytes:
            raise _RefusedError(429, "queue", "Too many requests wait already: ask again in a second.", RETRY)

    @asynccontextmanager
    async def _accepted(self, scope: Message) -> AsyncIterator[None]:
        self._check_room(self.metrics.accepted)
        self.metrics.accepted += 1
        scope[ACCEPTED] = True
        try:
            yield
        finally:
            self.metrics.accepted -= 1

    async def _body(self, headers: dict[str, str], request: "_Request", deadline: float) -> bytes:
        """All of it, if it is small enough and comes in time."""
        too_large = _RefusedError(
            413, "size", f"A request has at most {self.limits.max_megabytes:g} MB: send less at a time."
        )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self.limits.max_bytes:
            raise too_large
        body = bytearray()
        started = asyncio.get_running_loop().time() + GRACE
        try:
            while not request.whole:
                async with asyncio.timeout_at(min(deadline, started + len(body) / RATE)):
                    chunk = await request.chunk()
                body += chunk
                request.held += len(chunk)
                self._held += len(chunk)
                if len(body) > self.limits.max_bytes:
                    raise too_large
                self._check_room(0)
        except TimeoutError as error:
            raise _RefusedError(408, "slow", "The request came too slowly: send it again.") from error
        return bytes(body)


class _Request:
    """What a client sends, and whether that was all of it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.whole = False
        self.held = 0
        """Bytes of the body that were read and are kept."""

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self.whole = True
        return message

    async def chunk(self) -> bytes:
        """The next part of the body."""
        message = await self()
        if message["type"] == "http.disconnect":
            raise _GoneError
        return bytes(message.get("body", b""))

    async def discard(self, most: int) -> None:
        """Read some of what is left, so that the sender has an ear for the answer."""
        size = 0
        try:
            async with asyncio.timeout(LINGER):
                while not self.whole and size <= most:
                    size += len(await self.chunk())
        except (TimeoutError, _GoneError):
            return


class _Answer:
    """Sends on what the application answers, with the headers that every answer has."""

    def __init__(self, send: Send, request: str) -> None:
        self._send, self._headers = send, {**HEADERS, "x-request-id": request}
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = {name.lower() for name, _ in message.get("headers", ())}
            more = [(n.encode(), v.encode()) for n, v in self._headers.items() if n.encode() not in own]
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await self._send(message)

    async def problem(
        self, status: int, sentence: str, headers: dict[str, str] | None = None, close: bool = False
    ) -> None:
        """One sentence, unless an answer has begun already."""
        if self.status:
            return
        more = {"connection": "close"} if close else {}
        encoded, body = encoded_problem(sentence, {**(headers or {}), **more})
        await self({"type": "http.response.start", "status": status, "headers": encoded})
        await self({"type": "http.response.body", "body": body})


def encoded_problem(sentence: str, headers: dict[str, str]) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return headers and body of an answer that says what is wrong."""
    body = json.dumps({"error": sentence}).encode()
    given = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    return [(name.encode(), value.encode()) for name, value in given.items()], body


def is_trouble(error: BaseException | None) -> bool:
    """Return whether this machine lacks something: neither the request nor the program is to blame."""
    if isinstance(error, OSError):
        return error.errno in LACKS
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def failure(error: BaseException) -> tuple[int, str, dict[str, str]]:
    """Return the answer to a request that failed on the server, and log what this machine lacks."""
    if is_trouble(error):
        log.error("A request got 503: %s", error or type(error).__name__)
        return 503, "The server lacks memory, space or files: ask again later.", RETRY
    return 500, "Something went wrong on the server: its log has the details.", {}


def is_loopback(address: str) -> bool:
    """Whether only this machine can connect to it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _host(host: str) -> str:
    """Return a host with its port in the one way that they are compared; names have no case."""
    return re.sub(r":(80|443)?$", "", host.lower())


def _site(address: str) -> str | None:
    """Return the host that an address names; None if it is no address."""
    try:
        return _host(urlsplit(address).netloc)
    except ValueError:  # such as 'http://['
        return None


def _headers(scope: Message) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _again(body: bytes, receive: Receive) -> Receive:
    """``receive`` for a body that was read already."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Message:
        return waiting.pop() if waiting else await receive()

    return read
