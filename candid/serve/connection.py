"""Connections: how many there may be, how long each may take, and answers to what is no HTTP."""

import asyncio
import http
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from candid.serve.guard import ACCEPTED, HEADERS, RETRY, Guard, encoded_problem

SILENT = 10.0
"""Seconds until the headers of a request must be there, also those of the next one."""
BACKLOG = 16
"""Connections that are accepted at a time: each needs a descriptor before it can be refused."""
SPARE = 16
"""Descriptors for everything else, as starting a process."""
MOST = 1000
"""Connections at a time, at most."""


class Connection(H11Protocol):
    """A connection of a client: without a whole request it lasts only while there is room and time for it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since, self.fresh = self.loop.time(), False
        if len(self.connections) > self.guard.most_connections:
            self._make_room()

    @property
    def guard(self) -> Guard:
        return self.config.app  # type: ignore[return-value]

    @property
    def idle(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def accepted(self) -> bool:
        """A whole request waits for its answer."""
        return not self.idle and ACCEPTED in self.scope

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        if self.fresh:  # the first bytes of the next request
            self.since, self.fresh = self.loop.time(), False
        super().data_received(data)
        if self.cycle is not cycle:
            self.since = self.loop.time()

    def on_response_complete(self) -> None:
        self.since, self.fresh = self.loop.time(), True
        super().on_response_complete()

    def check(self, now: float) -> None:
        """Close the connection if it is overdue."""
        waited = now - self.since
        unread = self.transport.get_write_buffer_size() > 0
        if unread or not self.idle or self.transport.is_closing():
            if waited > 2 * self.guard.limits.timeout + SILENT:  # nobody reads the answer
                self.transport.abort()
        elif waited > SILENT:
            if self.conn.trailing_data[0]:
                self.refuse(408, "The headers of the request came too slowly: send it again.")
            self.transport.close()

    def refuse(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        """Answer with one sentence and close the connection."""
        given, body = encoded_problem(sentence, {**HEADERS, **(headers or {}), "connection": "close"})
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            first = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}".encode()
            lines = [first, *(name + b": " + value for name, value in given)]
            self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            self.guard.metrics.answered("other", status, 0.0)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP as everything else is answered."""
        self.guard.metrics.refused("malformed")
        self.refuse(400, "This is not a valid HTTP request.")

    def _make_room(self) -> None:
        """Close the connection that has waited longest without a whole request; if all have one, this one."""
        others: Iterable[Any] = self.connections - {self}
        waiting = [each for each in others if not each.accepted and not each.transport.is_closing()]
        self.guard.metrics.refused("connections")
        if waiting:
            min(waiting, key=lambda each: (not each.idle, each.since)).transport.abort()
        else:
            self.refuse(503, "Too many connections are open: ask again later.", RETRY)


def most_connections() -> int:
    """Raise the limit of descriptors as far as it goes, and return how many connections it allows."""
    try:
        import resource
    except ImportError:  # there is no such limit on this system
        return MOST
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * MOST if hard == resource.RLIM_INFINITY else hard
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(1, min(MOST, wanted - _open_descriptors() - BACKLOG - SPARE))


def _open_descriptors() -> int:
    try:
        return sum(1 for _ in Path("/dev/fd").iterdir())
    except OSError:
        return SPARE
