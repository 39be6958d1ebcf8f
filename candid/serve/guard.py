"""What stands between the network and the application: limits, token, headers, errors."""

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from candid.serve.limits import Limits
from candid.serve.metrics import Metrics

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
WORK = ("/v1/examine", "/v1/counterfactual")
SECRET = (*WORK, "/v1/models", "/metrics")
"""What needs the token, if there is one."""
KNOWN = (*SECRET, "/healthz", "/openapi.json", "/")
"""What is counted by its own name."""
LOOPBACK = ("127.0.0.1", "[::1]", "localhost")
RETRY = {"retry-after": "1"}
NOTHING = "There is nothing at this address: /api lists those that there are."
LINGER = 1.0
"""Seconds for which the rest of a refused request is read."""
log = logging.getLogger("candid.serve")


class _RefusedError(Exception):
    """An answer in place of that of the application."""

    def __init__(
        self, status: int, reason: str, sentence: str, headers: dict[str, str] | None = None
    ) -> None:
        self.status, self.reason, self.sentence, self.headers = status, reason, sentence, headers or {}


class _GoneError(Exception):
    """The client went away before it had sent everything."""


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: App, limits: Limits, metrics: Metrics, token: str | None = None) -> None:
        self.app, self.limits, self.metrics = app, limits, metrics
        self.token = None if token is None else token.encode()
        self.stopping = False

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
        request, answer = _Request(receive), _Answer(send)
        try:
            await self._answered(scope, request, answer)
        except _RefusedError as refusal:
            self.metrics.refused(refusal.reason)
            if "expect" not in _headers(scope):  # else its sender waits for the answer before it sends more
                await request.discard(self.limits.max_bytes)
            await answer.problem(refusal.status, refusal.sentence, refusal.headers, close=not request.whole)
        except _GoneError:
            self.metrics.refused("gone")
            return
        except Exception:
            log.exception("A request failed.")
            await answer.problem(500, "Something went wrong on the server: its log has the details.")
        path = scope["path"] if scope["path"] in KNOWN else "other"
        self.metrics.answered(path, answer.status, time.monotonic() - started)

    async def _answered(self, scope: Message, request: "_Request", answer: "_Answer") -> None:
        path = scope["path"]
        if not path.isprintable():  # to the routes, a line break at the end is nothing
            raise _RefusedError(404, "address", NOTHING)
        if self.stopping and path != "/metrics":
            raise _RefusedError(503, "stopping", "The server is about to stop: ask again later.", RETRY)
        if path in SECRET:
            self._check_sender(scope, _headers(scope))
        if path not in WORK or scope["method"] != "POST":
            await self.app(scope, request, answer)
            return
        async with self._accepted():
            deadline = asyncio.get_running_loop().time() + self.limits.timeout
            again = _again(await self._body(_headers(scope), request, deadline), request)
            try:
                async with asyncio.timeout_at(deadline):
                    await self.app(scope, again, answer)
            except TimeoutError as error:
                raise _RefusedError(
                    503, "slow", "The answer took too long: ask again later.", RETRY
                ) from error

    def _check_sender(self, scope: Message, headers: dict[str, str]) -> None:
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise _RefusedError(403, "site", "The page of another site can't ask this server: open its own.")
        if self.token is None:
            host = re.sub(r":\d+$", "", headers.get("host", ""))
            own = scope["server"][0]
            if is_loopback(own) and host not in (*LOOPBACK, own):  # a name that was led here
                sentence = "Without a token, this server answers to 127.0.0.1 and localhost alone."
                raise _RefusedError(403, "host", sentence)
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("latin-1"), self.token)
        if scheme.lower() != "bearer" or not right:
            sentence = "This server needs a token: send it as 'Authorization: Bearer TOKEN'."
            raise _RefusedError(401, "token", sentence, {"www-authenticate": "Bearer"})

    @asynccontextmanager
    async def _accepted(self) -> AsyncIterator[None]:
        if self.metrics.accepted >= self.limits.max_queue:
            raise _RefusedError(429, "queue", "Too many requests wait already: ask again in a second.", RETRY)
        self.metrics.accepted += 1
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
        try:
            async with asyncio.timeout_at(deadline):
                async for chunk in request.chunks():
                    body += chunk
                    if len(body) > self.limits.max_bytes:
                        raise too_large
        except TimeoutError as error:
            raise _RefusedError(408, "slow", "The request came too slowly: send it again.") from error
        return bytes(body)


class _Request:
    """What a client sends, and whether that was all of it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.whole = False

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self.whole = True
        return message

    async def chunks(self) -> AsyncIterator[bytes]:
        """Of the body, until its end."""
        while not self.whole:
            message = await self()
            if message["type"] == "http.disconnect":
                raise _GoneError
            yield message.get("body", b"")

    async def discard(self, most: int) -> None:
        """Read some of what is left, so that the sender has an ear for the answer."""
        size = 0
        try:
            async with asyncio.timeout(LINGER):
                async for chunk in self.chunks():
                    size += len(chunk)
                    if size > most:
                        return
        except (TimeoutError, _GoneError):
            return


class _Answer:
    """Sends on what the application answers, with the headers that every answer has."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = {name.lower() for name, _ in message.get("headers", ())}
            more = [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in own]
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await self._send(message)

    async def problem(
        self, status: int, sentence: str, headers: dict[str, str] | None = None, close: bool = False
    ) -> None:
        """One sentence, unless an answer has begun already."""
        if self.status:
            return
        body = json.dumps({"error": sentence}).encode()
        given = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        if close:
            given["connection"] = "close"
        encoded = [(name.encode(), value.encode()) for name, value in given.items()]
        await self({"type": "http.response.start", "status": status, "headers": encoded})
        await self({"type": "http.response.body", "body": body})


def is_loopback(address: str) -> bool:
    """Whether only this machine can connect to it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _headers(scope: Message) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _again(body: bytes, receive: Receive) -> Receive:
    """``receive`` for a body that was read already."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def read() -> Message:
        return waiting.pop() if waiting else await receive()

    return read
