"""The threads in which the network runs, and what waits for them."""

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
    answer: Callable[[], Answer] | None
    """None if it is answered together with others."""
    item: Item | None = None
    size: int = 1
    future: "Future[Answer]" = field(default_factory=Future)


class Queue(Generic[Item, Answer]):
    """Answers items in batches, one at a time in each thread: what waits together is answered together.

    >>> queue = Queue[int, int](lambda items: [item + 1 for item in items], batch=8)
    >>> queue.together(1).result(), queue.alone(lambda: 0).result()
    (2, 0)
    >>> queue.close()
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Item]], Sequence[Answer | Exception]],
        batch: int,
        threads: int = 1,
    ) -> None:
        self._answer, self._batch = answer, batch
        self._waiting: deque[_Waiting[Item, Answer]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"network {i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def together(self, item: Item, size: int = 1) -> "Future[Answer]":
        """The answer to ``item``, which fills ``size`` places; while it waits, it can be cancelled."""
        return self._put(_Waiting(None, item, size))

    def alone(self, answer: Callable[[], Answer]) -> "Future[Answer]":
        """``answer()``, when it is its turn."""
        return self._put(_Waiting(answer))

    def close(self) -> None:
        """Answer what waits, then end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

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
            room = self._batch
            while self._waiting:
                first = self._waiting[0]
                if batch and (batch[0].answer or first.answer or first.size > room):
                    break
                room -= first.size
                batch.append(self._waiting.popleft())
            return batch

    def _answers(self, batch: Sequence[_Waiting[Item, Answer]]) -> Sequence[Answer | Exception]:
        if not batch:
            return ()
        try:
            if batch[0].answer is not None:
                return [batch[0].answer()]
            return self._answer([each.item for each in batch if each.item is not None])
        except Exception as error:
            return [error] * len(batch)
