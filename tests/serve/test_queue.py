"""What waits together is answered together, in order, and whatever goes wrong is told to whom it concerns."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest

from candid.serve.queue import Queue


class Slow:
    """Answers with the size of the batch, once it may."""

    def __init__(self) -> None:
        self.may, self.began = threading.Event(), threading.Event()
        self.batches: list[list[int]] = []

    def __call__(self, network: int, items: Sequence[int]) -> list[int | Exception]:
        self.batches.append(list(items))
        self.began.set()
        assert self.may.wait(10)
        return [ValueError(str(item)) if item < 0 else len(items) for item in items]


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def queue(slow: Slow) -> Iterator[Queue[int, int, int]]:
    queue = Queue[int, int, int]([0], slow, batch=4)
    yield queue
    slow.may.set()
    queue.close()


def busy(queue: Queue[int, int, int], slow: Slow) -> "Future[int]":
    """The thread works on a first item."""
    first = queue.together(0)
    assert slow.began.wait(10)
    return first


def test_what_waits_together_is_answered_together_up_to_the_batch(
    queue: Queue[int, int, int], slow: Slow
) -> None:
    first = busy(queue, slow)
    others = [queue.together(i) for i in range(1, 7)]
    slow.may.set()
    assert first.result(10) == 1
    assert [each.result(10) for each in others] == [4, 4, 4, 4, 2, 2]
    assert slow.batches == [[0], [1, 2, 3, 4], [5, 6]]


def test_a_batch_that_is_stuck_holds_up_no_other_network() -> None:
    stuck, ended = threading.Event(), threading.Event()

    def answer(network: int, items: Sequence[int]) -> list[int | Exception]:
        if 0 in items:
            stuck.set()
            assert ended.wait(10)
        return list(items)

    queue = Queue[int, int, int]([0, 1], answer, batch=64)
    first = queue.together(0)
    assert stuck.wait(10)
    assert queue.together(1).result(10) == 1 and not first.done()
    ended.set()
    queue.close()


def test_a_large_item_takes_its_places_of_a_batch_and_is_never_divided(
    queue: Queue[int, int, int], slow: Slow
) -> None:
    busy(queue, slow)
    others = [queue.together(i, size) for i, size in ((1, 2), (2, 2), (3, 3), (4, 1), (5, 9), (6, 1))]
    slow.may.set()
    assert [each.result(10) for each in others] == [2, 2, 2, 2, 1, 1]
    assert slow.batches == [[0], [1, 2], [3, 4], [5], [6]]


def test_two_threads_answer_two_batches_at_a_time() -> None:
    both = threading.Barrier(2, timeout=10)
    queue = Queue[int, int, int](
        [1, 2], lambda network, items: [(both.wait() and 0) or network for _ in items], batch=1
    )
    assert {each.result(10) for each in [queue.together(0), queue.together(0)]} == {1, 2}
    queue.close()


def test_beside_a_batch_a_small_one_waits_for_it() -> None:
    slow = Slow()
    queue = Queue[int, int, int]([0, 0], slow, batch=8)
    busy(queue, slow)
    slow.began.clear()
    queue.together(1)
    assert not slow.began.wait(0.1)
    queue.together(2)  # now it is a quarter full
    assert slow.began.wait(10) and slow.batches == [[0], [1, 2]]
    slow.may.set()
    queue.close()


def test_what_is_answered_alone_keeps_its_turn(queue: Queue[int, int, int], slow: Slow) -> None:
    busy(queue, slow)
    before, alone, after = queue.together(1), queue.alone(lambda network: 200 + network), queue.together(3)
    slow.may.set()
    assert (before.result(10), alone.result(10), after.result(10)) == (1, 200, 1)
    assert slow.batches == [[0], [1], [3]]


def test_a_cancelled_item_is_never_answered(queue: Queue[int, int, int], slow: Slow) -> None:
    busy(queue, slow)
    cancelled, kept = queue.together(1), queue.together(2)
    assert cancelled.cancel()
    slow.may.set()
    assert kept.result(10) == 1 and slow.batches == [[0], [2]]


def test_an_error_concerns_its_own_item_or_the_batch_that_failed(
    queue: Queue[int, int, int], slow: Slow
) -> None:
    busy(queue, slow)
    bad, good = queue.together(-1), queue.together(1)
    broken = queue.alone(lambda network: 1 // network)
    slow.may.set()
    with pytest.raises(ValueError, match="-1"):
        bad.result(10)
    assert good.result(10) == 2
    with pytest.raises(ZeroDivisionError):
        broken.result(10)
    assert queue.together(5).result(10) == 1  # the thread lives on


def test_closing_answers_what_waits_and_takes_no_more(slow: Slow) -> None:
    queue = Queue[int, int, int]([0], slow, batch=1)
    waiting = [queue.together(i) for i in range(3)]
    slow.may.set()
    queue.close()
    assert [each.result(0) for each in waiting] == [1, 1, 1]
    with pytest.raises(RuntimeError, match="closed"):
        queue.together(4)
