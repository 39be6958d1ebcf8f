"""A server and its connections: it ends when it is told to, once it has answered what it accepted."""

import asyncio
import http
import json
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from candid._support.errors import CandidError
from candid._support.processes import Started, begin_forking, ending_signals, return_memory, silent_libraries
from candid._support.text import listed, short_name
from candid.serve import Limits, ServeOptions
from candid.serve.app import guarded_app
from candid.serve.guard import (
    ACCEPTED,
    HEADERS,
    REQUEST,
    RETRY,
    Guard,
    encoded_problem,
    is_loopback,
    requests_log,
)
from candid.serve.sensor import Sensor
from candid.serve.served import Networks, Served, opened_here
from candid.serve.worker import working

log = logging.getLogger("candid.serve")
DECODING = ("candid.data.uploads", "candid.cli.app")
"""What processes that decode images need, and what the script of the command imports in each of them."""
GIVE_UP = 180.0
"""Seconds without a network after which the server ends."""
WAITING = 512
"""Connections that wait to be accepted."""
LAST = 5.0
"""Seconds that accepted requests wait for a network once the server has been told to end."""
SILENT = 10.0
"""Seconds until the headers of a request must be there, also those of the next one."""
BACKLOG = 16
"""Connections that are accepted at a time: each needs a descriptor before it can be refused."""
SPARE = 16
"""Descriptors for everything else, as starting a process."""
MOST = 1000
"""Connections at a time, at most."""


class JsonLines(logging.Formatter):
    """Writes each message as one JSON object on one line, with the X-Request-ID that it belongs to."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name}
        line["message"] = record.getMessage()
        if request := REQUEST.get():
            line["request"] = request
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


@contextmanager
def json_lines(wanted: bool) -> Iterator[None]:
    """Let all messages of this process, warnings included, be JSON on standard error."""
    if not wanted:
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    root, before = logging.getLogger(), requests_log.level
    root.addHandler(handler)
    requests_log.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        requests_log.setLevel(before)
        root.removeHandler(handler)


class Connection(H11Protocol):
    """A connection of a client: without a whole request it lasts only while there is room and time for it.

    In nginx, ``client_header_timeout``, ``send_timeout`` and ``worker_connections`` do the same.
    """

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


class Server(uvicorn.Server):
    """Told to end, it answers what it accepted and refuses the rest; told again, it ends at once."""

    def __init__(self, guard: Guard, ready: Callable[[], object] = lambda: None) -> None:
        self.guard, self.ready, self.gave_up = guard, ready, False
        self._told, self._complained = 0.0, -math.inf
        config = uvicorn.Config(
            guard,
            http=Connection,
            ws="none",
            lifespan="on",
            backlog=BACKLOG,
            log_config=None,  # its messages go where all others go
            log_level=logging.ERROR,
            access_log=False,
            server_header=False,
            timeout_keep_alive=round(SILENT),
            timeout_graceful_shutdown=round(guard.limits.timeout) + 1,
        )
        super().__init__(config)
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # what it warns of, the answer says

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so once requests are answered."""
        asyncio.get_running_loop().set_exception_handler(self._complain)
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(WAITING)
        self.ready()

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error outside of requests; that there are too few descriptors, once a minute."""
        if "out of system resource" not in context["message"]:
            loop.default_exception_handler(context)
        elif loop.time() > self._complained + 60:
            self._complained = loop.time()
            log.error("No connection can be accepted now: %s", context.get("exception"))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGTERM, SIGHUP and Ctrl-C."""
        if self.guard.stopping:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
            os._exit(128 + sig)  # the first process of a container is still there
        self.guard.stopping, self._told = True, time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        if counter % 10 == 0:
            now = asyncio.get_running_loop().time()
            for connection in [
                each for each in self.server_state.connections if isinstance(each, Connection)
            ]:
                connection.check(now)
        lost = self.guard.backend.seconds_lost()
        self.gave_up = lost > GIVE_UP
        if self.gave_up or (self.guard.stopping and lost and time.monotonic() > self._told + LAST):
            self.guard.backend.abandon()
        done = self.guard.stopping and self.guard.idle
        return await super().on_tick(counter) or done or self.gave_up


def serve(
    models: Sequence[str],
    options: ServeOptions,
    limits: Limits,
    ready: Callable[[str], object],
    ahead: list[Started] | None = None,
) -> None:
    """Answer requests about models until SIGTERM, SIGHUP or Ctrl-C.

    Args:
        models: model folders, run folders or names of bundled models; the first one answers those who name
            none.
        options: where to listen, and how the networks run.
        limits: what is refused.
        ready: is called with one line once requests are answered.
        ahead: processes for networks that were started already; they are taken out of the list.
    """
    return_memory()
    names = [short_name(Path(model)) for model in models]
    if len(names) != len(set(names)):
        raise CandidError(f"Two models have one name ({listed(names)}): rename a folder.")
    opener = partial(_opened, [] if ahead is None else ahead, options.workers, 2 * limits.timeout)
    with ExitStack() as stack:
        stack.enter_context(silent_libraries())
        stack.enter_context(json_lines(options.log == "json"))
        sock = stack.enter_context(listening(options.host, options.port))
        begin_forking(*DECODING)
        sensor = Sensor.of(options)
        served = []
        for model, name in zip(models, names, strict=True):
            networks, own = opener(model, name)
            stack.push(own)
            drift = sensor.drift(networks[0].description)
            served.append(Served(networks, limits, drift, own, model))
        if options.token is None and not is_local(sock):
            log.warning("Without a token, anyone who reaches this machine can ask: set CANDID_TOKEN.")
        line = f"{listed(names)} answer{'s' * (len(names) == 1)} at {address_of(sock)}; Ctrl-C ends it"
        guard = guarded_app(served, limits, options.token, sensor, opener)
        guard.most_connections = most_connections()
        server = Server(guard, lambda: ready(line))
        for number in ending_signals():
            stack.callback(signal.signal, number, signal.signal(number, server.handle_exit))
        server.run([sock])
    if server.gave_up:
        raise CandidError(
            f"No process for the network could be started for {GIVE_UP:g} s, so the server has ended: free "
            "some memory, look at the log, and start it again."
        )


def _opened(
    ahead: list[Started], workers: int | None, patience: float, model: str, name: str
) -> tuple[Networks, ExitStack]:
    """Load a model into processes of its own, or into this one."""
    if workers == 0:
        return opened_here(model, name)
    stack = ExitStack()
    started = ahead.pop() if ahead else None
    return stack.enter_context(working(model, name, workers, patience, started)), stack


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


def listening(host: str, port: int) -> socket.socket:
    """A socket that takes connections; port 0 is any free one."""
    try:
        (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        sock = socket.create_server((host, port), family=family)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its connections inherit it
        return sock
    except (OSError, OverflowError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CandidError(
            f"Can't listen at {host}, port {port} ({reason}): choose another --port, or 0 for any free one."
        ) from error


def address_of(sock: socket.socket) -> str:
    """For a browser."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_local(sock: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return is_loopback(sock.getsockname()[0])
