"""A network in another process answers as one in this process, and is replaced if it ends."""

import json
import os
import signal
from pickle import UnpicklingError

import pytest

from candid import CandidError, GenerativeClassifier
from candid.data.images import decode_upload
from candid.serve.answers import Changed
from candid.serve.service import Asked, Service
from candid.serve.worker import Worker, working
from tests.serve.helpers import picture, without_rounding


def test_a_worker_answers_as_the_service_does_and_is_replaced(
    model: GenerativeClassifier, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("candid.serve.worker.LAST_SECONDS", 120.0)  # also on a machine that is busy
    images = [decode_upload(picture(i), service.preprocessing, 10_000) for i in range(3)]
    requests = [
        [Asked("0", images[0]), Asked("1", images[1], explain=True)],
        [Asked("2", images[2])],
    ]
    own = service.examine(requests)
    with working(model, "small", 1) as (worker,):

        def check() -> None:
            for found, expected in zip(worker.answer(requests), own, strict=True):
                assert not isinstance(found, Exception) and not isinstance(expected, Exception)
                right = [without_rounding(each.model_dump(by_alias=True)) for each in expected]
                assert [json.loads(each.json) for each in found] == right

        check()
        changed = worker.change(Asked("0", images[0], towards=1))
        assert isinstance(changed, Changed) and changed.class_ == "dog"
        with pytest.raises(AttributeError) as caught:
            worker.change("no image")  # type: ignore[arg-type]
        assert "in change" in caught.value.__notes__[0]  # where it went wrong in the other process
        first = worker.process.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        check()
        assert worker.process.pid != first and worker.ready
    assert worker.process.exitcode == 0


def test_a_worker_that_does_not_answer_is_ended(model: GenerativeClassifier, service: Service) -> None:
    asked = [[Asked("0", decode_upload(picture(), service.preprocessing, 10_000))]]
    with working(model, "small", 1, patience=0.2) as (worker,):
        first = worker.process.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            worker.answer(asked)
        assert worker.process.pid != first
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        worker._patience = 60.0
        (found,) = worker.answer([[Asked("another", asked[0][0].image)]])
        assert not isinstance(found, Exception)
        assert json.loads(found[0].json)["file"] == "another"  # not the late answer to the first question


def test_a_worker_that_cant_load_its_model_says_so() -> None:
    worker = Worker(b"no model", "none", 1, 1.0)
    with pytest.raises(UnpicklingError):
        worker.wait()
    assert not worker.ready
    worker.join()
    lost = Worker(b"no model", "none", 1, 1.0)
    lost.process.kill()
    with pytest.raises(CandidError, match="ended before it was ready"):
        lost.wait()
