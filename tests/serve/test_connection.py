"""Connections without a whole request keep nobody out, and do not last."""

import subprocess
import sys
from contextlib import ExitStack

import pytest

from candid.serve.guard import HEADERS
from candid.serve.service import Service
from tests.serve.helpers import picture, running, until
from tests.serve.test_guard import connected

SLOW = b"POST /v1/examine HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n-"


def test_slow_senders_keep_nobody_out(service: Service) -> None:
    with running(service, max_queue=2) as server, ExitStack() as stack:
        senders = [stack.enter_context(connected(server)) for _ in range(8)]
        for sender in senders:
            sender.sendall(SLOW)
        until(lambda: server.guard._held == 8)
        assert server.examine(picture()).status_code == 200


def test_a_body_has_a_least_rate(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("candid.serve.guard.GRACE", 0.1)
    with running(service) as server, connected(server) as sock:
        sock.sendall(SLOW)
        assert sock.recv(65536).startswith(b"HTTP/1.1 408")


def test_headers_and_silence_have_a_deadline(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(service) as server, connected(server) as silent, connected(server) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: local")
        assert server.client.get("/healthz").status_code == 200  # what was sent before has arrived
        monkeypatch.setattr("candid.serve.server.SILENT", 0.1)
        assert silent.recv(65536) == b""
        answer = slow.recv(65536).decode()
        assert answer.startswith("HTTP/1.1 408") and "too slowly" in answer
        assert f"content-security-policy: {HEADERS['content-security-policy']}" in answer


def test_when_all_connections_are_taken_the_one_that_waits_longest_goes(service: Service) -> None:
    with running(service) as server, ExitStack() as stack:
        server.guard.most_connections = 4
        first, *others = [stack.enter_context(connected(server)) for _ in range(8)]
        assert server.client.get("/healthz").status_code == 200
        assert first.recv(100) == b""
        others[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert others[-1].recv(100).startswith(b"HTTP/1.1 200")


def test_the_limit_of_descriptors_is_raised_and_bounds_connections() -> None:
    resource = pytest.importorskip("resource")
    command = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (50, 100))\n"
        "from candid.serve.server import most_connections\n"
        "print(most_connections(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    most, soft, hard = map(int, done.stdout.split())
    assert soft == hard == 100 and 20 < most < 68
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 100
