"""A network in a process of its own, which does not share Python's lock with the requests."""

import multiprocessing
import pickle
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from candid import checkpoint
from candid.serve.answers import Changed, Impossible, Judged, Unusable
from candid.serve.service import Asked, Service


class Worker:
    """Answers as a :class:`Service` does, to one thread at a time; if its process ends, it starts another."""

    def __init__(self, model: Path, name: str, threads: int) -> None:
        self._start_with = (model, name, threads)
        self._start()

    def wait(self) -> None:
        """Until the model is loaded."""
        self._connection.recv_bytes()

    def examine(self, requests: Sequence[Sequence[Asked]]) -> list[list[Judged | Unusable] | Exception]:
        """As :meth:`Service.examine`."""
        return self._ask("examine", requests)

    def change(self, asked: Asked) -> Changed | Impossible:
        """As :meth:`Service.change`."""
        return self._ask("change", asked)

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self.process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, *self._start_with), daemon=True)
        self.process.start()
        other.close()

    def _ask(self, method: str, argument: object) -> Any:
        try:
            self._connection.send_bytes(pickle.dumps((method, argument)))
            found = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.close()
            self._start()
            self.wait()
            raise RuntimeError("the process of the network ended; another one was started") from error
        if isinstance(found, Exception):
            raise found
        return found


@contextmanager
def working(model: Path, name: str, n: int) -> Iterator[list[Worker]]:
    """``n`` workers that share the cores."""
    threads = max(1, torch.get_num_threads() // max(1, n))
    workers = [Worker(model, name, threads) for _ in range(n)]
    try:
        for worker in workers:
            worker.wait()
        yield workers
    finally:
        for worker in workers:
            worker.close()


def _work(connection: Connection, model: Path, name: str, threads: int) -> None:
    """Answer until the other side is closed: it decides when all is answered, no signal does."""
    for sent in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent, signal.SIG_IGN)
    torch.set_num_threads(threads)
    service = Service(checkpoint.load_any(model), name)
    with suppress(EOFError, OSError):  # closed
        connection.send_bytes(b"ready")
        while True:
            method, argument = pickle.loads(connection.recv_bytes())
            try:
                answer = getattr(service, method)(argument)
            except Exception as error:
                answer = error
            connection.send_bytes(pickle.dumps(answer))
