"""A server that ends when it is told to, and not before it has answered what it accepted."""

import logging
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import uvicorn

from candid._support.errors import CandidError
from candid._support.text import short_name
from candid.serve.app import guarded_app
from candid.serve.guard import Guard, is_loopback
from candid.serve.limits import Limits, ServeOptions
from candid.serve.service import Service
from candid.serve.worker import Worker, working

log = logging.getLogger("candid.serve")


class Server(uvicorn.Server):
    """Told to end, it answers what it accepted and refuses the rest; told again, it ends at once."""

    def __init__(self, guard: Guard, ready: Callable[[], object] = lambda: None) -> None:
        self.guard, self.ready = guard, ready
        config = uvicorn.Config(
            guard,
            ws="none",
            lifespan="on",
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=round(guard.limits.timeout) + 1,
        )
        super().__init__(config)
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # what it warns of, the answer says

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so once requests are answered."""
        await super().startup(sockets)
        self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGTERM and Ctrl-C."""
        if self.guard.stopping:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self.guard.stopping = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        return await super().on_tick(counter) or (self.guard.stopping and self.guard.idle)


def serve(model: str, options: ServeOptions, limits: Limits, ready: Callable[[str], object]) -> None:
    """Answer requests about ``model`` until SIGTERM or Ctrl-C.

    Args:
        model: a model folder, a run folder or the name of a bundled model.
        options: where to listen, and how the network runs.
        limits: what is refused.
        ready: is called with one line once requests are answered.
    """
    name = short_name(Path(model))
    with listening(options.host, options.port) as sock, ExitStack() as stack:
        networks: Sequence[Service | Worker]
        if options.workers == 0:
            service = Service.load(model, name)
            service.warm_up()
            networks = [service]
        else:
            networks = stack.enter_context(working(model, name, options.workers, 2 * limits.timeout))
        if options.token is None and not is_local(sock):
            log.warning("Without a token, anyone who reaches this machine can ask: set CANDID_TOKEN.")
        line = f"{name} answers at {address_of(sock)}; Ctrl-C ends it"
        Server(guarded_app(networks, limits, options.token), lambda: ready(line)).run([sock])


def listening(host: str, port: int) -> socket.socket:
    """A socket that takes connections; port 0 is any free one."""
    try:
        (family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server((host, port), family=family)
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
