"""A network in a process of its own, which does not share Python's lock with the requests."""

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from candid._support.errors import CandidError
from candid._support.threads import usable_cpus
from candid.serve.schemas import ChangedResponse, EncodedResponse, ImageRequest, ImpossibleResponse
from candid.serve.service import Description, Service

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAST_SECONDS = 5.0
"""For a process to end by itself."""


class Worker:
    """Answers as a :class:`Service` does, to one thread at a time; if its process ends, it starts another.

    Args:
        model: a model folder or the name of a bundled model; only the process holds the network.
        name: what users call the model.
        threads: how many threads the network may use.
        patience: seconds that an answer may take before the process is ended.
    """

    def __init__(self, model: str, name: str, threads: int, patience: float) -> None:
        self._model, self._name, self._threads, self._patience = model, name, threads, patience
        self._description: Description | None = None
        self.ready = False
        self._start()

    @property
    def description(self) -> Description:
        """What the model is, once the process is ready."""
        assert self._description is not None
        return self._description

    def wait(self) -> None:
        """Wait until the model is loaded."""
        try:
            found = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as ended:
            raise CandidError(
                "A process for the network ended before it was ready: free some memory, or lower --workers."
            ) from ended
        if isinstance(found, Exception):
            raise found
        if self._description is not None and found.fingerprint != self._description.fingerprint:
            raise CandidError("The files of the model have changed since the server started: start it again.")
        self._description = found
        self.ready = True

    def use_threads(self, threads: int) -> None:
        """Let the network use this number of threads from now on."""
        self._threads = threads
        self._ask("use_threads", threads)

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

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self.process = context.Process(
            target=_work, args=(other, self._model, self._name, self._threads), daemon=True
        )
        with _without_signals():
            self.process.start()
        other.close()

    def _ask(self, method: str, argument: object) -> Any:
        """From another process if this one ends; an error if that ends, too, or if it takes too long."""
        message = pickle.dumps((method, argument))
        try:
            found = self._answer(message)
        except TimeoutError:
            raise
        except (EOFError, OSError):
            found = self._answer(message)
        if isinstance(found, Exception):
            raise found
        return found

    def _answer(self, message: bytes) -> Any:
        """With a new process after a failure: a late answer would be taken for that to the next question."""
        try:
            self._connection.send_bytes(message)
            if not self._connection.poll(self._patience):
                raise TimeoutError("the network does not answer")
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self.ready = False
            self.hang_up()
            self.process.kill()
            self.process.join()
            self._start()
            self.wait()
            raise


@contextmanager
def working(model: str, name: str, n: int | None = None, patience: float = 60.0) -> Iterator[list[Worker]]:
    """Start ``n`` workers that share the cores, by default as many as suit the model."""
    cpus = usable_cpus()
    workers = [Worker(model, name, max(1, cpus // (n or 1)), patience)]
    try:
        workers[0].wait()
        n = n or workers[0].description.workers
        threads = max(1, cpus // n)
        workers += [Worker(model, name, threads, patience) for _ in range(n - 1)]
        workers[0].use_threads(threads)
        for worker in workers[1:]:
            worker.wait()
        yield workers
    finally:
        for worker in workers:
            worker.hang_up()
        for worker in workers:
            worker.join()


@contextmanager
def _without_signals() -> Iterator[None]:
    """A process that is started now gets none: who started it decides when it ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: Connection, model: str, name: str, threads: int) -> None:
    """Answer until the other side is closed."""
    with suppress(EOFError, OSError):  # closed
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


def _packed(answer: object) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:
        return pickle.dumps(RuntimeError(f"an answer can't be sent: {error!r}"))
