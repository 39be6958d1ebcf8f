"""A network in a process of its own, which does not share Python's lock with the requests."""

import asyncio
import logging
import multiprocessing
import multiprocessing.process
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from candid._support.errors import CandidError
from candid._support.numbers import usable_cpus
from candid._support.processes import Started, start_process
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
log = logging.getLogger("candid.serve")


class Worker:
    """Answers as a :class:`Service` does, to one thread at a time, from a process of its own.

    Everything that is done with the process has a deadline: if it passes, the process is ended. A process
    that has ended is replaced by :meth:`prepare`.

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
        self._start(started)

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
            with self._within(START_SECONDS):
                self._connection.send_bytes(pickle.dumps((self._model, self._name, self._threads)))
                answer = pickle.loads(self._connection.recv_bytes())
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

    def hang_up(self) -> None:
        """Let the process end, once it has answered."""
        self._connection.close()

    def join(self) -> None:
        """Wait for its end, not for long."""
        self.process.join(LAST_SECONDS)
        self.process.kill()
        self.process.join()

    def _start(self, started: Started | None = None) -> None:
        """Start a process; :meth:`wait` tells it what to load: a process that ends at once blocks nothing."""
        self._connection, self.process = started or start_process(__name__, work.__name__)

    def _lose(self) -> None:
        """End the process: a late answer would be taken for that to the next question."""
        if self._loaded:
            self.lost_since = time.monotonic()
        self._loaded = False
        self.hang_up()
        self.process.kill()
        self.process.join()

    @contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        """End the process if this takes longer, which also ends a write or a read that waits for it."""
        late = threading.Event()
        process = self.process

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (EOFError, OSError) as error:
            self._lose()
            if late.is_set():
                raise TimeoutError("the network does not answer") from error
            raise LostError(blame=True) from error
        finally:
            timer.cancel()

    def _ask(self, method: str, argument: object, seconds: float | None = None) -> Any:
        """An error if the process has ended, ends or takes too long."""
        if not self.ready:
            raise LostError
        message = pickle.dumps((method, argument))
        with self._within(self._patience if seconds is None else seconds):
            self._connection.send_bytes(message)
            answer = pickle.loads(self._connection.recv_bytes())
        if isinstance(answer, Exception):
            raise answer
        return answer


class Errand:
    """Runs functions in processes of their own, one at a time and at low priority."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what ``function`` returns; it and its arguments can be pickled."""
        return await asyncio.to_thread(self._run, function, arguments)

    def stop(self) -> None:
        """End the function that runs."""
        if (process := self._process) is not None:  # the thread that waits for it may set this to None
            process.kill()

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        connection, process = start_process(__name__, run_errand.__name__)
        self._process = process
        try:
            connection.send_bytes(pickle.dumps((function, arguments)))
            in_time = connection.poll(ERRAND_SECONDS)
            answer = pickle.loads(connection.recv_bytes()) if in_time else None
        except (EOFError, OSError) as error:
            raise CandidError("The process for it has ended: free some memory, then try again.") from error
        finally:
            connection.close()
            process.kill()
            process.join()
            self._process = None
        if not in_time:
            raise CandidError(f"It took longer than {ERRAND_SECONDS:g} s, so it was ended.")
        if isinstance(answer, Exception):
            raise answer
        return answer


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
    """Answer until the other side is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):  # closed
        model, name, threads = pickle.loads(connection.recv_bytes())
        try:
            service = Service.load(model, name)
            service.use_threads(threads)
        except Exception as error:
            connection.send_bytes(_packed(error))
            return
        connection.send_bytes(_packed(service.description))
        while True:
            method, argument = pickle.loads(connection.recv_bytes())
            try:
                answer = getattr(service, method)(argument)
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = error
            connection.send_bytes(_packed(answer))


def run_errand(connection: Connection) -> None:
    """Answer one call."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(10)
    with suppress(EOFError, OSError):
        function, arguments = pickle.loads(connection.recv_bytes())
        try:
            answer = function(*arguments)
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = error
        connection.send_bytes(_packed(answer))


def _end_with_parent() -> None:
    """End this process when the server has ended, also in the middle of an answer."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _packed(answer: object) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:
        return pickle.dumps(RuntimeError(f"an answer can't be sent: {error!r}"))
