"""The command: it says where it listens, what is wrong, and ends as it should."""

import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import candid
from candid import GenerativeClassifier
from candid._support.errors import CandidError
from candid.serve.server import is_local, listening
from tests.helpers import candid_command
from tests.serve.helpers import picture, until


def run(*arguments: object) -> Any:
    return candid_command("serve", *arguments)


def test_a_port_in_use_is_said(model: GenerativeClassifier, tmp_path: Path) -> None:
    saved = candid.save(model, tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run(saved, "--port", taken.getsockname()[1])
    assert isinstance(done.exception, CandidError)
    assert "Can't listen at 127.0.0.1" in str(done.exception) and "--port" in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such-model", "--port", 0), "no model at 'no-such-model'"),
        (("--batch", 0), "'batch' must be at least 1"),
        (("--token", ""), "The token must be"),
        (("--host", "no such host"), "Can't listen at no such host"),
    ],
)
def test_mistakes_are_said(arguments: tuple[object, ...], message: str) -> None:
    done = run(*arguments)
    assert isinstance(done.exception, CandidError) and message in str(done.exception)


def test_a_missing_extra_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = run()
    assert isinstance(done.exception, CandidError)
    assert "pip install 'candid-vision[web]'" in str(done.exception)


@pytest.mark.parametrize("workers", [0, 1])
def test_sigterm_in_the_middle_of_requests_answers_every_accepted_one(
    model: GenerativeClassifier, tmp_path: Path, workers: int
) -> None:
    saved = candid.save(model, tmp_path / "runs" / "mine" / "model" / "best")
    held_up = tmp_path / "held up"
    started = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.serve.stopped_server", str(saved)),
            *("--port", "0", "--batch", "2", "--workers", str(workers)),
        ],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CANDID_HELD_UP": str(held_up)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdout is not None
        line = started.stdout.readline()
        found = re.fullmatch(r"mine answers at (http://127\.0\.0\.1:\d+); Ctrl-C ends it\n", line)
        assert found is not None, line
        with (
            httpx.Client(base_url=found[1], timeout=30, trust_env=False) as client,
            ThreadPoolExecutor(6) as pool,
        ):
            assert client.get("/healthz").status_code == 200
            held_up.touch()
            answers = [pool.submit(client.post, "/v1/examine", files={"file": picture(i)}) for i in range(6)]
            until(lambda: "candid_queue_length 6.0" in client.get("/metrics").text)
            started.send_signal(signal.SIGTERM)
            until(lambda: client.get("/healthz").status_code == 503)
            assert client.post("/v1/examine", files={"file": picture()}).status_code == 503
            held_up.unlink()
            assert [answer.result().status_code for answer in answers] == [200] * 6
        _, errors = started.communicate(timeout=30)
        assert started.returncode == 0 and errors == ""
    finally:
        started.kill()


def test_whether_others_can_connect_is_known() -> None:
    for host, local in (("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)):
        with listening(host, 0) as sock:
            assert is_local(sock) is local
