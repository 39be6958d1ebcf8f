"""The command: it says where it listens, what is wrong, and ends as it should."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

import candid
from candid import GenerativeClassifier
from candid._support.errors import CandidError
from candid.serve.server import is_local, listening
from tests.helpers import candid_command


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


def test_whether_others_can_connect_is_known() -> None:
    for host, local in (("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)):
        with listening(host, 0) as sock:
            assert is_local(sock) is local


def test_answers_dont_wait_for_acknowledgements() -> None:
    with listening("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()):
        connection, _ = sock.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
