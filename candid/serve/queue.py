"""What waits: images for their turn to be decoded, and requests for a network."""

import heapq
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

Network = TypeVar("Network")
Item = TypeVar("Item")
Answer = TypeVar("Answer")
LONG = 0.5
"""Seconds after which what waits begins, even if it is little: another batch may be stuck."""
LOOK = 1.0
"""Seconds after which a thread without work looks whether its network has ended."""
ENDS = 2
"""Networks that an item may end, each time alone, before it is given up."""


class Threads:
    """Threads that wait for work until they are closed: what :class:`Turns` and :class:`Queue` share.

    Whoever adds work or takes it holds ``_changed``; a thread ends once ``_closed`` is set and nothing waits.
    """

    def __init__(self) -> None:
        self._changed, self._closed = threading.Condition(), False
        self._threads: list[threading.Thread] = []
        self._began: dict[int, float] = {}
        """When each thread that works began what it is at."""

    def is_stuck(self, seconds: float) -> bool:
        """Return whether every thread has been at one thing for longer than this."""
        began = [*self._began.values()]
        return len(began) == len(self._threads) > 0 and max(began) < time.monotonic() - seconds

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self._began[threading.get_ident()] = time.monotonic()
        try:
            yield
        finally:
            del self._began[threading.get_ident()]

    def _start(self, name: str, work: Sequence[Callable[[], None]]) -> None:
        self._threads = [threading.Thread(target=each, name=name, daemon=True) for each in work]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Do what waits, then end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()


class Turns(Threads, Generic[Network]):
    """Decoders that take turns between clients and their requests (start-time fair queueing).

    Every job has a cost. A request's jobs count one after the other, those of different requests next to each
    other, so a cheap job of a new request comes before the expensive ones of requests that wait already. The
    more requests a client has at a time, the more expensive are its jobs: clients get equal shares. In nginx,
    ``limit_req`` and ``limit_conn`` by address do something similar.

    Args:
        decoders: what jobs are called with; each has its own thread.

    >>> turns = Turns([6])
    >>> with turns.request("client") as submit:
    ...     submit(1, lambda decoder: decoder * 7).result()
    42
    >>> turns.close()
    """

    def __init__(self, decoders: Sequence[Network]) -> None:
        super().__init__()
        self._waiting: list[tuple[float, int, float, Callable[[Network], Any], Future[Any]]] = []
        self._clients: Counter[str] = Counter()
        self._number = itertools.count()
        self._now = 0.0
        self._start("decoder", [partial(self._work, decoder) for decoder in decoders])

    @contextmanager
    def request(self, client: str) -> Iterator[Callable[[float, Callable[[Network], Any]], "Future[Any]"]]:
        """Give a function ``submit(cost, job)`` for one request; jobs that wait can be cancelled."""
        self._clients[client] += 1
        end = self._now

        def submit(cost: float, job: Callable[[Network], Any]) -> "Future[Any]":
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

    def _work(self, decoder: Network) -> None:
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
                    with self._at_work():
                        answer = job(decoder)
                    future.set_result(answer)
                except Exception as error:
                    future.set_exception(error)
                else:
                    del answer
            del job, future


class LostError(Exception):
    """A network ended before it answered, or there is none."""

    def __init__(self, blame: bool = False) -> None:
        super().__init__("the network ended before it answered")
        self.blame = blame
        """Whether it was alive when it was asked."""


class HarmfulError(Exception):
    """Every process that was asked about this item alone has crashed."""


@dataclass(frozen=True)
class _Waiting(Generic[Network, Item, Answer]):
    alone: Callable[[Network], Answer] | None
    """How to answer it; None if it is answered together with others."""
    item: Item | None = None
    size: int = 1
    apart: bool = False
    """Whether it shares no batch: one that it was in has ended its network."""
    ends: int = 0
    """How many networks ended while they worked on nothing else."""
    future: "Future[Answer]" = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class Queue(Threads, Generic[Network, Item, Answer]):
    """Answers items in batches, with a thread for each network: what waits together is answered together.

    If a network ends (:class:`LostError`), each item of its batch is asked again alone. An item that then
    ends two networks fails with :class:`HarmfulError`; the others are answered.

    Args:
        networks: what answers; each has its own thread.
        answer: returns the answers of a network to items, in their order.
        batch: the most places of a batch.
        prepare: is called with a network before it is asked, and every second; it may take its time.

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
        prepare: Callable[[Network], object] = lambda network: None,
    ) -> None:
        super().__init__()
        self._answer, self._batch, self._prepare = answer, batch, prepare
        self._waiting: deque[_Waiting[Network, Item, Answer]] = deque()
        self._passing = 0
        self._start("network", [partial(self._work, network) for network in networks])

    def together(self, item: Item, size: int = 1) -> "Future[Answer]":
        """The answer to ``item``, which fills ``size`` places; while it waits, it can be cancelled."""
        return self._put(_Waiting(None, item, size))

    def alone(self, answer: Callable[[Network], Answer]) -> "Future[Answer]":
        """``answer(network)``, when it is its turn."""
        return self._put(_Waiting(answer))

    def abandon(self) -> None:
        """Let everything that waits fail with :class:`LostError`."""
        with self._changed:
            waiting = [*self._waiting]
            self._waiting.clear()
        for each in waiting:
            if each.future.running() or each.future.set_running_or_notify_cancel():
                each.future.set_exception(LostError())

    def _put(self, waiting: _Waiting[Network, Item, Answer]) -> "Future[Answer]":
        with self._changed:
            if self._closed:
                raise RuntimeError("the queue is closed")
            self._waiting.append(waiting)
            self._changed.notify()
        return waiting.future

    def _work(self, network: Network) -> None:
        while True:
            self._prepare(network)
            batch = self._next()
            if batch is None:
                return
            if not batch:
                continue
            started = [
                each for each in batch if each.future.running() or each.future.set_running_or_notify_cancel()
            ]
            try:
                with self._at_work():
                    answers = self._answers(network, started)
            except LostError as error:
                self._again(started, error.blame)
            else:
                for each, answer in zip(started, answers, strict=True):
                    if isinstance(answer, Exception):
                        each.future.set_exception(answer)
                    else:
                        each.future.set_result(answer)
            with self._changed:
                self._passing -= batch[0].alone is None
                self._changed.notify()  # what was not worth starting next to this batch may be now
            del batch, started

    def _again(self, batch: Sequence[_Waiting[Network, Item, Answer]], blame: bool) -> None:
        """Put items back to the front, each for itself; give up one that has ended networks alone."""
        alone = blame and len(batch) == 1
        with self._changed:
            for each in reversed(batch):
                ends = each.ends + alone
                if ends >= ENDS:
                    each.future.set_exception(HarmfulError())
                elif self._closed:
                    each.future.set_exception(LostError())
                else:
                    again = replace(each, apart=each.apart or blame, ends=ends)
                    self._waiting.appendleft(again)
            self._changed.notify()

    def _next(self) -> list[_Waiting[Network, Item, Answer]] | None:
        """The first that waits, with those behind it that may share its batch.

        Nothing if nothing came for a while; None once the queue is closed and empty.
        """
        with self._changed:
            patient = True
            while not (self._closed or self._is_worthwhile()):
                if not patient and not self._waiting:
                    return []
                patient = self._changed.wait(LONG if self._waiting else LOOK)
            batch: list[_Waiting[Network, Item, Answer]] = []
            room = self._batch
            while self._waiting:
                first = self._waiting[0]
                if batch and (_is_apart(batch[0]) or _is_apart(first) or first.size > room):
                    break
                room -= first.size
                batch.append(self._waiting.popleft())
            self._passing += bool(batch) and batch[0].alone is None
            if self._waiting:
                self._changed.notify()
            return batch or None

    def _is_worthwhile(self) -> bool:
        """Return whether to begin: next to another batch, a nearly empty one costs more than it gains."""
        if not self._waiting or _is_apart(self._waiting[0]) or not self._passing:
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
        except LostError:
            raise
        except Exception as error:
            return [error] * len(batch)


def _is_apart(waiting: _Waiting[Network, Item, Answer]) -> bool:
    return waiting.apart or waiting.alone is not None
