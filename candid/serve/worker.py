"""A network in a process of its own, which does not share Python's lock with the requests."""

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from multiprocessing.connection import Connection
from typing import Any

import torch

from candid._support.errors import CandidError
from candid.models.protocol import Model
from candid.serve.answers import Changed, Impossible, Sent
from candid.serve.service import Asked, Service

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAST_SECONDS = 5.0
"""For a process to end by itself."""


class Worker:
    """Answers as a :class:`Service` does, to one thread at a time; if its process ends, it starts another.

    ``model`` is one that torch saved. ``patience`` is how many seconds an answer may take before the process
    is ended.
    """

    def __init__(self, model: bytes, name: str, threads: int, patience: float) -> None:
        self._start_with, self._patience = (model, name, threads), patience
        self.ready = False
        self._start()

    def wait(self) -> None:
        """Until the model is loaded."""
        try:
            error = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as ended:
            raise CandidError(
                "A process for the network ended before it was ready: free some memory, or lower --workers."
            ) from ended
        if error is not None:
            raise error
        self.ready = True

    def answer(self, requests: Sequence[Sequence[Asked]]) -> list[list[Sent] | Exception]:
        """As :meth:`Service.answer`."""
        return self._ask("answer", requests)

    def change(self, asked: Asked) -> Changed | Impossible:
        """As :meth:`Service.change`."""
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
        self.process = context.Process(target=_work, args=(other, *self._start_with), daemon=True)
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
def working(model: Model, name: str, n: int, patience: float = 60.0) -> Iterator[list[Worker]]:
    """``n`` workers that share the cores. All have ``model`` as it is now, whatever becomes of its files."""
    threads = max(1, torch.get_num_threads() // max(1, n))
    saved = _saved(model) if n else b""
    workers = [Worker(saved, name, threads, patience) for _ in range(n)]
    try:
        for worker in workers:
            worker.wait()
        yield workers
    finally:
        for worker in workers:
            worker.hang_up()
        for worker in workers:
            worker.join()


def _saved(model: Model) -> bytes:
    content = BytesIO()
    torch.save(model, content)
    return content.getvalue()


@contextmanager
def _without_signals() -> Iterator[None]:
    """A process that is started now gets none: who started it decides when it ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: Connection, model: bytes, name: str, threads: int) -> None:
    """Answer until the other side is closed."""
    torch.set_num_threads(threads)
    with suppress(EOFError, OSError):  # closed
        try:
            service = Service(torch.load(BytesIO(model), weights_only=False), name)
        except Exception as error:
            connection.send_bytes(_packed(error))
            return
        connection.send_bytes(_packed(None))
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
