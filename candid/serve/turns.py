"""Threads that decode images, and whose turn it is."""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from candid.serve.threads import Threads


class Turns(Threads):
    """Threads that take turns between clients and their requests (start-time fair queueing).

    Every job has a cost. A request's jobs count one after the other, those of different requests next to each
    other, so a cheap job of a new request comes before the dear ones of requests that wait already. The more
    requests a client has at a time, the dearer are its jobs: clients get equal shares.

    >>> turns = Turns(1)
    >>> with turns.request("client") as submit:
    ...     submit(1, lambda: 6 * 7).result()
    42
    >>> turns.close()
    """

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._waiting: list[tuple[float, int, float, Callable[[], Any], Future[Any]]] = []
        self._clients: Counter[str] = Counter()
        self._number = itertools.count()
        self._now = 0.0
        self._start("decoder", [self._work] * threads)

    @contextmanager
    def request(self, client: str) -> Iterator[Callable[[float, Callable[[], Any]], "Future[Any]"]]:
        """Give a function ``submit(cost, job)`` for one request; jobs that wait can be cancelled."""
        self._clients[client] += 1
        end = self._now

        def submit(cost: float, job: Callable[[], Any]) -> "Future[Any]":
            nonlocal end
            future: Future[Any] = Future()
            with self._changed:
                start = max(self._now, end)
                end = start + cost * self._clients[client]
                heapq.heappush(self._waiting, (end, next(self._number), start, job, future))
                self._changed.notify()
            return future

        try:
            yield submit
        finally:
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._closed):
                    self._changed.wait()
                if not self._waiting:
                    return
                _, _, start, job, future = heapq.heappop(self._waiting)
                self._now = max(self._now, start)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except Exception as error:
                    future.set_exception(error)
            del job, future
