"""A server under load, then stopped: no request is lost or wrong, and its own process has no network."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from candid.data.uploads import decode_upload
from candid.serve.schemas import ImageRequest
from candid.serve.service import Service
from tests.serve.helpers import multipart, picture, until, without_rounding

REQUESTS, MORE, ROUNDS, CLIENTS, PICTURES = 2000, 1000, 5, 32, 50
MOST = 2
"""Megabytes by which a process may grow in one of the rounds, at least; it may grow by more in others, since
torch caches something for every new size of a batch. What leaks, leaks in all of them."""
FILES = [picture(i) for i in range(PICTURES)]


@contextmanager
def served(saved: str, held_up: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server in a process of its own, and give its address."""
    command = [sys.executable, "-m", "tests.serve.stopped_server", saved, "--port", "0", *options]
    environment = {**os.environ, "CANDID_HELD_UP": str(held_up)}
    root = Path(__file__).parents[2]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=root, env=environment, **pipes) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"mine answers at (http://127\.0\.0\.1:\d+); Ctrl-C ends it\n", line)
            assert found is not None, line
            yield process, found[1]
        finally:
            process.kill()


def damaged_tiff() -> bytes:
    """A file about which libtiff writes to descriptor 2."""
    file = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(
        file, "TIFF", compression="tiff_lzw"
    )
    content = file.getvalue()
    return content[:200] + bytes(1800) + content[2000:]


def stop_in_the_middle(
    process: subprocess.Popen[str], address: str, held_up: Path, number: signal.Signals = signal.SIGTERM
) -> str:
    """Send a signal while six requests wait, check that all are answered, and return what it printed.

    Nothing is written to standard error, also not by the library that decodes a damaged file.
    """
    with (
        httpx.Client(base_url=address, timeout=120, trust_env=False) as client,
        ThreadPoolExecutor(6) as pool,
    ):
        assert client.get("/healthz").status_code == 200
        damaged = client.post("/v1/examine", files={"file": damaged_tiff()}).json()["results"]
        assert [each["status"] for each in damaged] == ["unusable"]
        held_up.touch()
        answers = [pool.submit(client.post, "/v1/examine", files={"file": picture(i)}) for i in range(6)]
        until(lambda: "candid_queue_length 6.0" in client.get("/metrics").text)
        process.send_signal(number)
        until(lambda: client.get("/healthz").status_code == 503)
        assert client.post("/v1/examine", files={"file": picture()}).status_code == 503
        held_up.unlink()
        assert [answer.result().status_code for answer in answers] == [200] * 6
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and errors == ""
    return printed


def ask(port: int, client: int, requests: int) -> list[tuple[int, int, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    answers = []
    for i in range(client, requests, CLIENTS):
        connection.request("POST", "/v1/examine", *multipart(FILES[i % PICTURES]))
        answer = connection.getresponse()
        answers.append((i, answer.status, json.load(answer)))
    connection.close()
    return answers


def ask_all(port: int, requests: int) -> list[tuple[int, int, Any]]:
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(ask, port, client, requests) for client in range(CLIENTS)]
        return [answer for client in clients for answer in client.result()]


def resident_megabytes(pid: int) -> list[float]:
    workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    statistics = [Path(f"/proc/{each}/statm").read_text().split() for each in (pid, *workers)]
    return [int(resident) * 4096 / 1e6 for _, resident, *_ in statistics]


def grown(sizes: list[list[float]]) -> list[float]:
    """Megabytes by which the process that grew most did so, in each round."""
    return [max(late - early for early, late in zip(*pair, strict=True)) for pair in pairwise(sizes)]


@pytest.mark.slow
def test_two_thousand_requests_from_32_clients_then_sigterm(
    saved: str, service: Service, tmp_path: Path
) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("the memory of a process is read from /proc")
    images = [decode_upload(file, service.description.preprocessing, 10_000) for file in FILES]
    (right,) = service.examine([[ImageRequest("0.png", image) for image in images]])
    assert not isinstance(right, Exception)
    held_up = tmp_path / "held up"
    with served(saved, held_up) as (process, address):
        port = int(address.rpartition(":")[2])
        answers = ask_all(port, REQUESTS)
        sizes = [resident_megabytes(process.pid)]
        while len(sizes) <= ROUNDS and not any(each < MOST for each in grown(sizes)):
            ask_all(port, MORE)
            sizes.append(resident_megabytes(process.pid))
        printed = stop_in_the_middle(process, address, held_up)
    assert printed == "0\n"  # layers of networks in the server's own process
    assert sorted(i for i, _, _ in answers) == list(range(REQUESTS))
    for i, status, answer in answers:
        assert status == 200
        (judged,) = answer["results"]
        assert judged == without_rounding(right[i % PICTURES].model_dump(by_alias=True))
    assert min(grown(sizes)) < MOST, sizes


def test_sigterm_is_obeyed_with_the_network_in_the_same_process(saved: str, tmp_path: Path) -> None:
    held_up = tmp_path / "held up"
    with served(saved, held_up, "--batch", "2", "--workers", "0") as (process, address):
        assert int(stop_in_the_middle(process, address, held_up, signal.SIGHUP)) > 0
