"""A network in another process answers as one in this process, and is replaced if it ends."""

import os
import signal
from pathlib import Path

import pytest

import candid
from candid import GenerativeClassifier
from candid.serve.answers import Changed
from candid.serve.limits import decoded
from candid.serve.service import Asked, Service
from candid.serve.worker import working
from tests.serve.helpers import picture, without_rounding


def test_a_worker_answers_as_the_service_does_and_is_replaced(
    model: GenerativeClassifier, service: Service, tmp_path: Path
) -> None:
    images = [decoded(picture(i), service.view, 10_000) for i in range(3)]
    requests = [
        [Asked("0", images[0]), Asked("1", images[1], explain=True)],
        [Asked("2", images[2])],
    ]
    own = service.examine(requests)
    with working(candid.save(model, tmp_path / "model"), "small", 1) as (worker,):

        def check() -> None:
            for found, expected in zip(worker.examine(requests), own, strict=True):
                assert not isinstance(found, Exception) and not isinstance(expected, Exception)
                right = [without_rounding(each.model_dump()) for each in expected]
                assert [each.model_dump() for each in found] == right

        check()
        changed = worker.change(Asked("0", images[0], towards=1))
        assert isinstance(changed, Changed) and changed.class_ == "dog"
        with pytest.raises(AttributeError):
            worker.change("no image")  # type: ignore[arg-type]
        first = worker.process.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="another one was started"):
            worker.examine(requests)
        check()
        assert worker.process.pid != first
    assert worker.process.exitcode == 0
