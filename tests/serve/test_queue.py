"""What waits together is answered together, in order, and whatever goes wrong is told to whom it concerns."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest

from candid.serve.queue import HarmfulError, LostError, Queue


class Slow:
    """Answers with the size of the batch, once it may."""

    def __init__(self) -> None:
        self.may, self.began = threading.Event(), threading.Event()
        self.batches: list[list[int]] = []

    def __call__(self, network: int, items: Sequence[int]) -> list[int | Exception]:
        self.batches.append(list(items))
        self.began.set()
        assert self.may.wait(60)
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
    assert slow.began.wait(60)
    return first


def test_what_waits_together_is_answered_together_up_to_the_batch(
    queue: Queue[int, int, int], slow: Slow
) -> None:
    first = busy(queue, slow)
    others = [queue.together(i) for i in range(1, 7)]
    slow.may.set()
    assert first.result(60) == 1
    assert [each.result(60) for each in others] == [4, 4, 4, 4, 2, 2]
    assert slow.batches == [[0], [1, 2, 3, 4], [5, 6]]


def test_a_batch_that_is_stuck_holds_up_no_other_network() -> None:
    stuck, ended = threading.Event(), threading.Event()

    def answer(network: int, items: Sequence[int]) -> list[int | Exception]:
        if 0 in items:
            stuck.set()
            assert ended.wait(60)
        return list(items)

    queue = Queue[int, int, int]([0, 1], answer, batch=64)
    first = queue.together(0)
    assert stuck.wait(60)
    assert queue.together(1).result(60) == 1 and not first.done()
    ended.set()
    queue.close()


def test_a_large_item_takes_its_places_of_a_batch_and_is_never_divided(
    queue: Queue[int, int, int], slow: Slow
) -> None:
    busy(queue, slow)
    others = [queue.together(i, size) for i, size in ((1, 2), (2, 2), (3, 3), (4, 1), (5, 9), (6, 1))]
    slow.may.set()
    assert [each.result(60) for each in others] == [2, 2, 2, 2, 1, 1]
    assert slow.batches == [[0], [1, 2], [3, 4], [5], [6]]


def test_two_threads_answer_two_batches_at_a_time() -> None:
    both = threading.Barrier(2, timeout=60)
    queue = Queue[int, int, int](
        [1, 2], lambda network, items: [(both.wait() and 0) or network for _ in items], batch=1
    )
    assert {each.result(60) for each in [queue.together(0), queue.together(0)]} == {1, 2}
    queue.close()


def test_beside_a_batch_a_small_one_waits_for_it() -> None:
    slow = Slow()
    queue = Queue[int, int, int]([0, 0], slow, batch=8)
    busy(queue, slow)
    slow.began.clear()
    queue.together(1)
    assert not slow.began.wait(0.1)
    queue.together(2)  # now it is a quarter full
    assert slow.began.wait(60) and slow.batches == [[0], [1, 2]]
    slow.may.set()
    queue.close()


def test_what_is_answered_alone_keeps_its_turn(queue: Queue[int, int, int], slow: Slow) -> None:
    busy(queue, slow)
    before, alone, after = queue.together(1), queue.alone(lambda network: 200 + network), queue.together(3)
    slow.may.set()
    assert (before.result(60), alone.result(60), after.result(60)) == (1, 200, 1)
    assert slow.batches == [[0], [1], [3]]


def test_a_cancelled_item_is_never_answered(queue: Queue[int, int, int], slow: Slow) -> None:
    busy(queue, slow)
    cancelled, kept = queue.together(1), queue.together(2)
    assert cancelled.cancel()
    slow.may.set()
    assert kept.result(60) == 1 and slow.batches == [[0], [2]]


def test_an_error_concerns_its_own_item_or_the_batch_that_failed(
    queue: Queue[int, int, int], slow: Slow
) -> None:
    busy(queue, slow)
    bad, good = queue.together(-1), queue.together(1)
    broken = queue.alone(lambda network: 1 // network)
    slow.may.set()
    with pytest.raises(ValueError, match="-1"):
        bad.result(60)
    assert good.result(60) == 2
    with pytest.raises(ZeroDivisionError):
        broken.result(60)
    assert queue.together(5).result(60) == 1  # the thread lives on


def test_closing_answers_what_waits_and_takes_no_more(slow: Slow) -> None:
    queue = Queue[int, int, int]([0], slow, batch=1)
    waiting = [queue.together(i) for i in range(3)]
    slow.may.set()
    queue.close()
    assert [each.result(0) for each in waiting] == [1, 1, 1]
    with pytest.raises(RuntimeError, match="closed"):
        queue.together(4)


def test_what_ends_networks_is_given_up_and_the_rest_of_its_batch_is_answered() -> None:
    asked: list[list[int]] = []
    prepared: list[int] = []
    begun, may = threading.Event(), threading.Event()

    def answer(network: int, items: Sequence[int]) -> list[int | Exception]:
        asked.append(list(items))
        begun.set()
        assert may.wait(60)
        if 13 in items:
            raise LostError(blame=True)
        return list(items)

    queue = Queue[int, int, int]([0], answer, 8, prepared.append)
    queue.together(0)
    assert begun.wait(60)
    waiting = {item: queue.together(item) for item in (1, 13, 3)}
    may.set()
    assert (waiting[1].result(60), waiting[3].result(60)) == (1, 3)
    with pytest.raises(HarmfulError):
        waiting[13].result(60)
    queue.close()
    assert asked == [[0], [1, 13, 3], [1], [13], [13], [3]] and len(prepared) >= len(asked)


def test_a_network_that_had_ended_before_is_nobodys_fault() -> None:
    ends = iter([True] * 5)

    def answer(network: int, items: Sequence[int]) -> list[int | Exception]:
        if next(ends, False):
            raise LostError
        return list(items)

    queue = Queue[int, int, int]([0], answer, 8)
    assert queue.together(7).result(60) == 7
    queue.close()


def test_what_waits_can_be_abandoned(queue: Queue[int, int, int], slow: Slow) -> None:
    busy(queue, slow)
    waiting = queue.together(1)
    queue.abandon()
    with pytest.raises(LostError):
        waiting.result(60)
