"""Threads that wait for work until they are closed."""

import threading
from collections.abc import Callable, Sequence


class Threads:
    """What :class:`~candid.serve.turns.Turns` and :class:`~candid.serve.queue.Queue` share.

    Whoever adds work or takes it holds ``_changed``; a thread ends once ``_closed`` is set and nothing waits.
    """

    def __init__(self) -> None:
        self._changed, self._closed = threading.Condition(), False
        self._threads: list[threading.Thread] = []

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
