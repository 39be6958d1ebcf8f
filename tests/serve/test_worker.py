"""A network in another process answers as one in this process, and is replaced if it ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import candid
from candid import CandidError
from candid.data.uploads import decode_upload
from candid.serve import Limits, ServeOptions
from candid.serve.queue import LostError
from candid.serve.schemas import ChangedResponse, ImageRequest
from candid.serve.server import serve
from candid.serve.service import Service
from candid.serve.worker import Worker, working
from tests.serve.helpers import calibrated_model, picture, until, without_rounding


def test_a_worker_answers_as_the_service_does_and_is_replaced(
    saved: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("candid.serve.worker.LAST_SECONDS", 120.0)  # also on a machine that is busy
    images = [decode_upload(picture(i), service.description.preprocessing, 10_000) for i in range(3)]
    requests = [
        [ImageRequest("0", images[0]), ImageRequest("1", images[1], explain=True)],
        [ImageRequest("2", images[2])],
    ]
    own = service.examine(requests)
    with working(saved, "small", 1) as (worker,):

        def check() -> None:
            for found, expected in zip(worker.answer(requests), own, strict=True):
                assert not isinstance(found, Exception) and not isinstance(expected, Exception)
                right = [without_rounding(each.model_dump(mode="json", by_alias=True)) for each in expected]
                assert [json.loads(each.json) for each in found] == right

        check()
        changed = worker.change(ImageRequest("0", images[0], towards=1))
        assert isinstance(changed, ChangedResponse) and changed.class_ == "dog"
        with pytest.raises(AttributeError) as caught:
            worker.change("no image")  # type: ignore[arg-type]
        assert "in change" in caught.value.__notes__[0]  # where it went wrong in the other process
        first = worker.process.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        worker.process.join()
        with pytest.raises(LostError) as lost:
            check()
        assert not worker.ready and not lost.value.blame  # it had ended before
        worker.prepare()
        check()
        assert worker.process.pid != first and worker.ready
    assert worker.process.exitcode == 0


def killing(worker: Worker, monkeypatch: pytest.MonkeyPatch, *signals: int) -> list[int]:
    """Let the next processes get these signals at their start; return those that are left."""
    start, left = worker._start, list(signals)

    def start_and_kill() -> None:
        start()
        seconds = 120.0
        if left:
            assert worker.process.pid is not None
            seconds = 0.2 if left[0] == signal.SIGSTOP else 120.0
            os.kill(worker.process.pid, left.pop(0))
        monkeypatch.setattr("candid.serve.worker.START_SECONDS", seconds)

    monkeypatch.setattr(worker, "_start", start_and_kill)
    return left


def test_a_worker_that_does_not_answer_is_ended_and_replaced_until_one_starts(
    saved: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = decode_upload(picture(), service.description.preprocessing, 10_000)
    many = [[ImageRequest("0", image)] * 1000]  # more than a pipe holds: writing waits, too
    with working(saved, "small", 1, patience=0.2) as (worker,):
        first = worker.process.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            worker.answer(many)
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert not worker.ready
        left = killing(worker, monkeypatch, signal.SIGKILL, signal.SIGSTOP)
        worker.prepare()
        assert worker.ready and not left and worker.process.pid != first
        worker._patience = 60.0
        (found,) = worker.answer([[ImageRequest("another", image)]])
        assert not isinstance(found, Exception)
        assert json.loads(found[0].json)["path"] == "another"  # not the late answer to the first question


def test_a_worker_that_cant_load_its_model_says_so(saved: str, tmp_path: Path) -> None:
    worker = Worker(str(tmp_path / "none"), "none", 1, 1.0)
    with pytest.raises(CandidError, match="There is no model"):
        worker.wait()
    assert not worker.ready
    worker.join()
    lost = Worker(str(tmp_path / "none"), "none", 1, 1.0)
    lost.process.kill()
    with pytest.raises(CandidError, match="ended before it was ready"):
        lost.wait()


def test_a_worker_does_not_start_again_with_a_different_model(saved: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    worker = Worker(str(folder), "changed", 1, 60.0)
    try:
        worker.wait()
        changed = calibrated_model()
        with torch.no_grad():
            next(changed.parameters()).add_(0.01)
        candid.save(changed, folder)
        worker._lose()
        worker._start()
        with pytest.raises(CandidError, match="files of the model have changed"):
            worker.wait()
        assert not worker.ready
    finally:
        worker.hang_up()
        worker.join()


def test_a_server_without_a_network_ends(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("candid.serve.served.Models.seconds_lost", lambda _: 200.0)
    with pytest.raises(CandidError, match="No process for the network could be started"):
        serve([saved], ServeOptions(port=0, workers=0), Limits(), lambda _: None)


def test_a_worker_ends_with_its_parent(saved: str) -> None:
    command = (
        "import os, sys\nfrom candid.serve.worker import working\nif __name__ == '__main__':\n"
        "    with working(sys.argv[1], 'small', 1) as (worker,):\n"
        "        print(worker.process.pid, flush=True)\n        os.kill(worker.process.pid, 19)\n"
        "        sys.stdin.read()\n        os.kill(worker.process.pid, 18)\n        os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", command, saved], input="", capture_output=True, text=True)
    until(lambda: not Path(f"/proc/{int(done.stdout)}").exists())
