"""Jobs of many requests take turns, and clients get equal shares."""

import threading
from contextlib import ExitStack
from functools import partial

from candid.serve.queue import Turns


def order(*requests: tuple[str, list[int]]) -> list[str]:
    """Who is served in which order if all of these wait: a client and the costs of its jobs."""
    turns, may, begun = Turns([0]), threading.Event(), threading.Event()
    found: list[str] = []

    def busy(_: int) -> None:
        begun.set()
        assert may.wait(60)

    def note(client: str, _: int) -> None:
        found.append(client)

    with ExitStack() as stack:
        first = stack.enter_context(turns.request("first"))(1, busy)
        assert begun.wait(60)
        submits = [stack.enter_context(turns.request(client)) for client, _ in requests]
        for (client, costs), submit in zip(requests, submits, strict=True):
            for cost in costs:
                submit(cost, partial(note, client))
        may.set()
        first.result(60)
        turns.close()
    return found


def test_requests_take_turns() -> None:
    assert order(("a", [10] * 4), ("b", [10] * 3)) == ["a", "b", "a", "b", "a", "b", "a"]


def test_a_cheap_job_comes_before_dear_ones_that_wait_already() -> None:
    assert order(*[("loud", [1000] * 16)] * 4, ("quiet", [1]))[0] == "quiet"


def test_many_requests_of_a_client_get_the_share_of_one() -> None:
    found = order(("many", [10] * 3), ("many", [10] * 3), ("many", [10] * 3), ("one", [10] * 3))
    assert found.index("one") == 0 and found[:6].count("one") >= 2


def test_a_cancelled_job_is_never_done_and_an_error_reaches_who_waits() -> None:
    turns, both, done = Turns([0]), threading.Barrier(2, timeout=60), list[int]()
    with turns.request("a") as submit:
        submit(1, lambda _: both.wait() + both.wait())
        both.wait()
        cancelled, wrong = submit(1, lambda _: done.append(1)), submit(1, lambda decoder: 1 // decoder)
        assert cancelled.cancel()
        both.wait()
        assert isinstance(wrong.exception(60), ZeroDivisionError)
        assert submit(1, lambda _: 3).result(60) == 3 and not done
    turns.close()
