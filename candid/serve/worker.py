"""Processes that work for a server: they hold a network, decode images, or run a long job.

None of them shares Python's lock with the requests, and none takes the server with it when it ends.
"""

import asyncio
import errno
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from candid._support.errors import CandidError
from candid._support.numbers import usable_cpus
from candid._support.processes import Started, answer_calls, packed, start_process
from candid.data import uploads
from candid.data.images import BadImageError
from candid.serve.queue import LostError
from candid.serve.schemas import ChangedResponse, EncodedResponse, ImageRequest, ImpossibleResponse
from candid.serve.service import Description, Service

LAST_SECONDS = 5.0
"""For a process to end by itself."""
START_SECONDS = 120.0
"""For a process to load the model."""
ERRAND_SECONDS = 1800.0
"""For a function in a process of its own."""
PAUSES = (0.2, 10.0)
"""Seconds before the second attempt to start a process, and at most; they double in between."""
TRIES = 2
"""Decoders that an image may end before it is given up."""
STARTS = 5
"""Attempts to start a decoder."""
STACKS = 16_000_000
"""Bytes for the thread that a decoder may start on each core."""
AT_ONCE = 65_536
"""Bytes that fit into the pipe to a process that waits."""
log = logging.getLogger("candid.serve")


class Remote:
    """A process that answers calls of one thread at a time, each within a deadline.

    Args:
        module: where the function is that the process runs, see :func:`start_process`.
        function: its name.
        forked: whether the process is forked.
        started: a process that was started already, to save time.
    """

    def __init__(
        self, module: str, function: str, forked: bool = False, started: Started | None = None
    ) -> None:
        self._place = module, function, forked
        self._start(started)

    def call(self, seconds: float, function: Any, *arguments: Any) -> Any:
        """Return the answer to a call.

        Raises:
            LostError: the process has ended before it answered.
            TimeoutError: it has not answered after this number of seconds, and was ended.
            Exception: whatever the function raised.
        """
        answer = self.exchange(seconds, (function, arguments))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def exchange(self, seconds: float, message: object) -> Any:
        """Return the answer to a message: see :meth:`call`."""
        content = pickle.dumps(message)
        late = threading.Event()
        timer = threading.Timer(seconds, self._end_late, (self.process, late))
        timer.daemon = True
        if len(content) > AT_ONCE:  # a process that reads nothing would let the write wait
            timer.start()
        try:
            self._connection.send_bytes(content)
            if not self._connection.poll(seconds):
                late.set()
                raise EOFError
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            self._lose()
            if late.is_set():
                raise TimeoutError("the process does not answer") from error
            raise LostError(blame=True) from error
        finally:
            timer.cancel()

    @staticmethod
    def _end_late(process: Any, late: threading.Event) -> None:
        late.set()
        process.kill()  # which ends a write that waits for it

    def hang_up(self) -> None:
        """Let the process end, once it has answered."""
        self._connection.close()

    def join(self) -> None:
        """Wait for its end, not for long."""
        self.process.join(LAST_SECONDS)
        self.end()

    def end(self) -> None:
        """End the process now."""
        self.hang_up()
        self.process.kill()
        self.process.join()

    def _start(self, started: Started | None = None) -> None:
        self._connection, self.process = started or start_process(*self._place)

    def _lose(self) -> None:
        """End the process: a late answer would be taken for that to the next question."""
        self.end()


class Decoder:
    """Decodes images of senders who are not trusted, for one thread at a time, in a process with limits.

    A process that ends is replaced for the next image: whatever happens in a decoder costs one image. An
    image is tried again if its process was ended from outside, as where memory is short.

    Args:
        max_pixels: of the largest image.
        patience: seconds of the clock that a call may take; CPU time has a limit of its own.
    """

    def __init__(self, max_pixels: int, patience: float) -> None:
        self._memory = uploads.BYTES_PER_PIXEL * max_pixels + STACKS * usable_cpus()
        self._patience = patience
        self._remote: Remote | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function of :mod:`candid.data.uploads` returns.

        Raises:
            BadImageError: the image can't be used; its decoder may have crashed, or had no memory or time.
            OSError, MemoryError: this machine lacks something.
        """
        for _ in range(TRIES):
            remote = self.started()
            try:
                return remote.call(self._patience, uploads.limited, self._memory, function, *arguments)
            except TimeoutError as error:
                raise BadImageError("it takes too long to decode") from error
            except LostError:
                if remote.process.exitcode == -signal.SIGPROF:
                    raise BadImageError("it takes too long to decode") from None
        raise BadImageError("it makes its decoder crash")

    def started(self) -> Remote:
        """Return the process, once it answers.

        Raises:
            OSError: this machine lacks what a process needs.
        """
        if self._remote is not None and self._remote.process.is_alive():
            return self._remote
        self.end()
        for _ in range(STARTS):
            try:
                self._remote = Remote(uploads.__name__, uploads.decode_for.__name__, forked=True)
                self._remote.call(START_SECONDS, len, b"")
                return self._remote
            except (LostError, TimeoutError, EOFError, ConnectionError) as error:  # it was killed meanwhile
                ended = error
        raise OSError(errno.EAGAIN, "A process that decodes images can't be started") from ended

    def end(self) -> None:
        """End the process."""
        if self._remote is not None:
            self._remote.end()


class Worker(Remote):
    """Answers as a :class:`Service` does, to one thread at a time, from a process of its own.

    A process that has ended is replaced by :meth:`prepare`.

    Args:
        model: a model folder or the name of a bundled model; only the process holds the network.
        name: what users call the model.
        threads: how many threads the network may use.
        patience: seconds that an answer may take before the process is ended.
        started: a process that was started already, to save time.
    """

    def __init__(
        self, model: str, name: str, threads: int, patience: float, started: Started | None = None
    ) -> None:
        self._model, self._name, self._threads, self._patience = model, name, threads, patience
        self._description: Description | None = None
        self._loaded = False
        self._stopped = threading.Event()
        self.lost_since = time.monotonic()
        """When the process ended or began to start."""
        super().__init__(__name__, work.__name__, started=started)

    @property
    def ready(self) -> bool:
        """Whether the process answers."""
        return self._loaded and self.process.is_alive()

    @property
    def description(self) -> Description:
        """What the model is, once the process is ready."""
        assert self._description is not None
        return self._description

    def wait(self) -> None:
        """Wait until the model is loaded."""
        try:
            answer = self.exchange(START_SECONDS, (self._model, self._name, self._threads))
        except (LostError, TimeoutError) as ended:
            raise CandidError(
                "A process for the network ended before it was ready: free some memory, or lower --workers."
            ) from ended
        if isinstance(answer, Exception):
            raise answer
        if self._description is not None and answer.fingerprint != self._description.fingerprint:
            raise CandidError("The files of the model have changed since the server started: start it again.")
        self._description = answer
        self._loaded = True

    def prepare(self) -> None:
        """Replace a process that has ended; try until there is one, or until :meth:`stop`."""
        pause, longest = PAUSES
        while not (self.ready or self._stopped.is_set()):
            try:
                self._lose()
                self._start()
                self.wait()
            except Exception as error:
                if not self._stopped.is_set():
                    log.warning("A process for the network can't be started (%s); trying again.", error)
                self._stopped.wait(pause)
                pause = min(2 * pause, longest)

    def stop(self) -> None:
        """Let :meth:`prepare` return, if need be without a process."""
        self._stopped.set()
        if not self._loaded:
            self.process.kill()

    def use_threads(self, threads: int) -> None:
        """Let the network use this number of threads from now on."""
        self._threads = threads
        self._ask("use_threads", threads, START_SECONDS)

    def answer(self, requests: Sequence[Sequence[ImageRequest]]) -> list[list[EncodedResponse] | Exception]:
        """See :meth:`Service.answer`."""
        return self._ask("answer", requests)

    def change(self, asked: ImageRequest) -> ChangedResponse | ImpossibleResponse:
        """See :meth:`Service.change`."""
        return self._ask("change", asked)

    def _lose(self) -> None:
        if self._loaded:
            self.lost_since = time.monotonic()
        self._loaded = False
        super()._lose()

    def _ask(self, method: str, argument: object, seconds: float | None = None) -> Any:
        """An error if the process has ended, ends or takes too long."""
        if not self.ready:
            raise LostError
        return self.call(self._patience if seconds is None else seconds, method, argument)


class Errand:
    """Runs functions in processes of their own, one at a time and at low priority."""

    def __init__(self) -> None:
        self._remote: Remote | None = None

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what ``function`` returns; it and its arguments can be pickled."""
        return await asyncio.to_thread(self._run, function, arguments)

    def stop(self) -> None:
        """End the function that runs."""
        if (remote := self._remote) is not None:  # the thread that waits for it may set this to None
            remote.process.kill()

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        self._remote = remote = Remote(__name__, run_errand.__name__)
        try:
            return remote.call(ERRAND_SECONDS, function, *arguments)
        except TimeoutError as error:
            raise CandidError(f"It took longer than {ERRAND_SECONDS:g} s, so it was ended.") from error
        except LostError as error:
            raise CandidError("The process for it has ended: free some memory, then try again.") from error
        finally:
            remote.end()
            self._remote = None


@contextmanager
def working(
    model: str, name: str, n: int | None = None, patience: float = 60.0, started: Started | None = None
) -> Iterator[list[Worker]]:
    """Start ``n`` workers that share the cores, by default as many as suit the model; one may be started."""
    cpus = usable_cpus()
    workers = [Worker(model, name, max(1, cpus // (n or 1)), patience, started)]
    try:
        workers[0].wait()
        n = n or workers[0].description.workers
        threads = max(1, cpus // n)
        workers += [Worker(model, name, threads, patience) for _ in range(n - 1)]
        with suppress(LostError):  # it is replaced later
            workers[0].use_threads(threads)
        for worker in workers[1:]:
            worker.wait()
        yield workers
    finally:
        for worker in workers:
            worker.stop()
            worker.hang_up()
        for worker in workers:
            worker.join()


def work(connection: Connection) -> None:
    """Load a model and answer about it, until the other side is closed."""
    with suppress(EOFError, OSError):  # closed
        model, name, threads = pickle.loads(connection.recv_bytes())
        try:
            service = Service.load(model, name)
            service.use_threads(threads)
        except Exception as error:
            connection.send_bytes(packed(error))
            return
        connection.send_bytes(packed(service.description))
        answer_calls(connection, lambda method, argument: getattr(service, method)(argument))


def run_errand(connection: Connection) -> None:
    """Answer calls at low priority."""
    if hasattr(os, "nice"):
        os.nice(10)
    answer_calls(connection)
