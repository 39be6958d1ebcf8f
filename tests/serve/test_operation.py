"""What those who run a server need: whether it is alive and ready, its log, options from files."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from candid._support.errors import CandidError
from candid.cli.serve import FIELDS, PREFIX, read_config, read_environment
from candid.serve.service import Service
from tests.helpers import candid_command
from tests.serve.helpers import Running, picture, running, until


@contextmanager
def command(*arguments: object, **environment: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """``candid serve`` in a process of its own, and a client of it."""
    words = [sys.executable, "-m", "candid", "serve", *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env={**os.environ, **environment}, **pipes) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
            assert found is not None
            with httpx.Client(base_url=found[0], timeout=120, trust_env=False) as client:
                yield process, client
        finally:
            process.kill()


def test_a_server_without_a_network_is_alive_for_a_while_but_not_ready(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(service, timeout=5) as server:
        assert server.client.get("/readyz").json() == {"status": "ready"}
        for lost, alive in ((3.0, 200), (20.0, 503)):
            with monkeypatch.context() as patch:
                patch.setattr("candid.serve.served.Models.seconds_lost", lambda _, lost=lost: lost)
                assert server.client.get("/readyz").status_code == 503
                assert server.client.get("/healthz").status_code == alive
        assert server.client.get("/readyz").status_code == 200


def test_a_server_that_stops_is_not_ready(service: Service) -> None:
    with running(service) as server, httpx.stream("GET", f"{server.url}/v1/models", trust_env=False):
        server.guard.metrics.accepted += 1  # else it ends at once
        server.guard.stopping = True
        assert server.client.get("/readyz").status_code == 503
        server.guard.metrics.accepted -= 1


@pytest.mark.parametrize("path", ["/healthz", "/nothing", "/v1/models", "/app.js"])
def test_a_request_has_an_id(server: Running, path: str) -> None:
    sane = "7b1c.A-Z_09:+/="
    assert server.client.get(path, headers={"x-request-id": sane}).headers["x-request-id"] == sane
    made = {server.client.get(path).headers["x-request-id"] for _ in range(3)}
    for odd in ("a b", "x" * 129, 'a"b', "<script>", "é".encode()):
        headers = [(b"x-request-id", odd if isinstance(odd, bytes) else odd.encode())]
        made.add(server.client.get(path, headers=headers).headers["x-request-id"])
    assert len(made) == 8 and all(re.fullmatch("[0-9a-f]{32}", each) for each in made)


def test_a_json_log_has_one_object_a_line_with_the_id_of_its_request(saved: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with command(saved, "--port", 0, "--workers", 0, "--log", "json", "--store", store) as (process, client):
        asked = client.post("/v1/examine", files={"file": picture()}, headers={"x-request-id": "first"})
        assert asked.status_code == 200
        client.get('/no"thing\u2028?token=secret')
        for file in (store / "images").iterdir():
            file.unlink()
        (store / "images").rmdir()
        client.post("/v1/examine", files={"file": picture(1)}, headers={"x-request-id": "third"})
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    lines = [json.loads(line) for line in errors.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    facts = [
        (line["method"], line["path"], line["status"]) for line in lines if line["message"] == "answered"
    ]
    assert facts == [("POST", "/v1/examine", 200), ("GET", "other", 404), ("POST", "/v1/examine", 200)]
    (trouble,) = [line for line in lines if "Can't store images" in line["message"]]
    assert trouble["request"] == "third" and trouble["level"] == "error"
    assert lines[0]["request"] == "first" and "secret" not in errors


def test_options_come_from_a_file_and_the_environment(saved: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    lines = [f'models = ["{saved}"]', "port = 1", "max-megabytes = 3", "max_pixels = 4000", "workers = 0"]
    file.write_text("\n".join(lines))
    environment = {"CANDID_SERVE_MAX_PIXELS": "5000", "CANDID_TOKEN": "sesame", "CANDID_SERVE_PORT": "1"}
    with command("--config", file, "--port", 0, **environment) as (_, client):
        assert client.get("/v1/models").status_code == 401
        answer = client.get("/v1/models", headers={"authorization": "Bearer sesame"})
        (model,) = answer.json()["models"]
    assert model["limits"]["megabytes"] == 3 and model["limits"]["pixels"] == 5000 and model["name"] == "mine"


def test_every_option_has_a_variable() -> None:
    texts = {"host": "::1", "token": "sesame", "log": "json", "state": "s", "store": "t", "allow_host": "a,b"}
    given = {PREFIX + name.upper(): texts.get(name, "7") for name in FIELDS}
    found = read_environment({**given, "PATH": "/bin", "CANDID_CACHE": "/tmp"})
    assert found.keys() == FIELDS.keys()
    assert found["allow_host"] == ("a", "b") and found["port"] == found["timeout"] == 7
    assert read_environment({"CANDID_TOKEN": "one"}) == {"token": "one"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", r"no option 'prot' in '.*': did you mean 'port'\?"),
        ("port =", "must be a TOML file"),
        ('models = "mine"', "'models' in '.*' must be a list of names"),
        ('port = "80"', "'port' must be of type int"),
        ("max-queue = 0", "'max_queue' must be at least 1"),
        ('log = "jsn"', "did you mean 'json'"),
    ],
)
def test_mistakes_in_a_file_are_said(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    done = candid_command("serve", "--config", file)
    assert isinstance(done.exception, CandidError) and re.search(message, str(done.exception))


def test_mistakes_in_the_environment_are_said(tmp_path: Path) -> None:
    for variable, text, message in (
        ("CANDID_SERVE_PROT", "1", "did you mean 'CANDID_SERVE_PORT'"),
        ("CANDID_SERVE_PORT", "eighty", "takes a number"),
    ):
        with pytest.raises(CandidError, match=message):
            read_environment({variable: text})
    with pytest.raises(CandidError, match="Can't read"):
        read_config(tmp_path / "none.toml")


def has_handler(pid: int, number: signal.Signals) -> bool:
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="handlers are read from /proc")
def test_a_server_that_is_loading_ends_in_order(saved: str) -> None:
    """The first process of a container gets no signal without a handler."""
    words = [sys.executable, "-m", "candid", "serve", saved, "--port", "0", "--workers", "1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: has_handler(process.pid, signal.SIGTERM))
        process.send_signal(signal.SIGTERM)
        printed, errors = process.communicate(timeout=120)
    # a child that Python starts at this moment may say that its parent has ended
    own = [line for line in errors.splitlines() if "candid" in line]
    assert (process.returncode, printed, own) == (128 + signal.SIGTERM, "", [])
