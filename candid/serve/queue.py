"""The thread in which the network runs, and what waits for it."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class _Waiting(Generic[Item, Answer]):
    item: Item
    alone: Callable[[Item], Answer] | None
    """How to answer it; None if it may be answered together with others."""
    future: "Future[Answer]" = field(default_factory=Future)


class Queue(Generic[Item, Answer]):
    """Answers items one batch after the other: what waits together is answered together.

    >>> queue = Queue[int, int](lambda items: [item + 1 for item in items], batch=8)
    >>> queue.together(1).result(), queue.alone(1, lambda item: item - 1).result()
    (2, 0)
    >>> queue.close()
    """

    def __init__(self, answer: Callable[[Sequence[Item]], Sequence[Answer | Exception]], batch: int) -> None:
        self._answer, self._batch = answer, batch
        self._waiting: deque[_Waiting[Item, Answer]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="network", daemon=True)
        self._thread.start()

    def together(self, item: Item) -> "Future[Answer]":
        """The answer to ``item``, in a batch; while it waits, the future can be cancelled."""
        return self._put(_Waiting(item, None))

    def alone(self, item: Item, answer: Callable[[Item], Answer]) -> "Future[Answer]":
        """``answer(item)``, when it is its turn."""
        return self._put(_Waiting(item, answer))

    def close(self) -> None:
        """Answer what waits, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _put(self, waiting: _Waiting[Item, Answer]) -> "Future[Answer]":
        with self._changed:
            if self._closed:
                raise RuntimeError("the queue is closed")
            self._waiting.append(waiting)
            self._changed.notify()
        return waiting.future

    def _work(self) -> None:
        while batch := self._next():
            started = [each for each in batch if each.future.set_running_or_notify_cancel()]
            for each, answer in zip(started, self._answers(started), strict=True):
                if isinstance(answer, Exception):
                    each.future.set_exception(answer)
                else:
                    each.future.set_result(answer)
            del batch, started

    def _next(self) -> list[_Waiting[Item, Answer]]:
        """The first that waits, with those behind it that may share its batch; none once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            batch: list[_Waiting[Item, Answer]] = []
            while self._waiting and len(batch) < self._batch:
                if batch and (batch[0].alone or self._waiting[0].alone):
                    break
                batch.append(self._waiting.popleft())
            return batch

    def _answers(self, batch: Sequence[_Waiting[Item, Answer]]) -> Sequence[Answer | Exception]:
        if not batch:
            return ()
        try:
            if batch[0].alone is not None:
                return [batch[0].alone(batch[0].item)]
            return self._answer([each.item for each in batch])
        except Exception as error:
            return [error] * len(batch)
