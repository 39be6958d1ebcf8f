"""The threads in which the network runs, and what waits for them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Network = TypeVar("Network")
Item = TypeVar("Item")
Answer = TypeVar("Answer")
LONG = 0.5
"""Seconds after which what waits begins, even if it is little: another batch may be stuck."""


@dataclass(frozen=True)
class _Waiting(Generic[Network, Item, Answer]):
    alone: Callable[[Network], Answer] | None
    """How to answer it; None if it is answered together with others."""
    item: Item | None = None
    size: int = 1
    future: "Future[Answer]" = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class Queue(Generic[Network, Item, Answer]):
    """Answers items in batches, with a thread for each network: what waits together is answered together.

    >>> queue = Queue[int, int, int]([10], lambda network, items: [network + item for item in items], batch=8)
    >>> queue.together(1).result(), queue.alone(lambda network: network - 1).result()
    (11, 9)
    >>> queue.close()
    """

    def __init__(
        self,
        networks: Sequence[Network],
        answer: Callable[[Network, Sequence[Item]], Sequence[Answer | Exception]],
        batch: int,
    ) -> None:
        self._answer, self._batch = answer, batch
        self._waiting: deque[_Waiting[Network, Item, Answer]] = deque()
        self._changed = threading.Condition()
        self._closed, self._passing = False, 0
        self._threads = [
            threading.Thread(target=self._work, args=(network,), name="network", daemon=True)
            for network in networks
        ]
        for thread in self._threads:
            thread.start()

    def together(self, item: Item, size: int = 1) -> "Future[Answer]":
        """The answer to ``item``, which fills ``size`` places; while it waits, it can be cancelled."""
        return self._put(_Waiting(None, item, size))

    def alone(self, answer: Callable[[Network], Answer]) -> "Future[Answer]":
        """``answer(network)``, when it is its turn."""
        return self._put(_Waiting(answer))

    def close(self) -> None:
        """Answer what waits, then end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _put(self, waiting: _Waiting[Network, Item, Answer]) -> "Future[Answer]":
        with self._changed:
            if self._closed:
                raise RuntimeError("the queue is closed")
            self._waiting.append(waiting)
            self._changed.notify()
        return waiting.future

    def _work(self, network: Network) -> None:
        while batch := self._next():
            started = [each for each in batch if each.future.set_running_or_notify_cancel()]
            for each, answer in zip(started, self._answers(network, started), strict=True):
                if isinstance(answer, Exception):
                    each.future.set_exception(answer)
                else:
                    each.future.set_result(answer)
            with self._changed:
                self._passing -= batch[0].alone is None
                self._changed.notify()  # what was not worth starting next to this batch may be now
            del batch, started

    def _next(self) -> list[_Waiting[Network, Item, Answer]]:
        """The first that waits, with those behind it that may share its batch; none once it is closed."""
        with self._changed:
            while not (self._closed or self._is_worthwhile()):
                self._changed.wait(LONG if self._waiting else None)
            batch: list[_Waiting[Network, Item, Answer]] = []
            room = self._batch
            while self._waiting:
                first = self._waiting[0]
                if batch and (batch[0].alone or first.alone or first.size > room):
                    break
                room -= first.size
                batch.append(self._waiting.popleft())
            self._passing += bool(batch) and batch[0].alone is None
            if self._waiting:
                self._changed.notify()
            return batch

    def _is_worthwhile(self) -> bool:
        """Return whether to begin: next to another batch, a nearly empty one costs more than it gains."""
        if not self._waiting or self._waiting[0].alone or not self._passing:
            return bool(self._waiting)
        waited = time.monotonic() - self._waiting[0].since
        return waited > LONG or 4 * sum(each.size for each in self._waiting) >= self._batch

    def _answers(
        self, network: Network, batch: Sequence[_Waiting[Network, Item, Answer]]
    ) -> Sequence[Answer | Exception]:
        if not batch:
            return ()
        try:
            if batch[0].alone is not None:
                return [batch[0].alone(network)]
            return self._answer(network, [each.item for each in batch if each.item is not None])
        except Exception as error:
            return [error] * len(batch)
