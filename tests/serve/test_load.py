"""Two thousand requests from 32 clients: none is lost, none is wrong, and memory stays as it was."""

import http.client
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import candid
from candid import GenerativeClassifier
from candid.data.images import decode_upload
from candid.serve.schemas import ImageRequest
from candid.serve.service import Service
from tests.serve.helpers import multipart, picture, without_rounding

REQUESTS, MORE, CLIENTS, PICTURES = 2000, 1000, 32, 50
SERVER, NETWORK = 2, 8
"""Megabytes by which a process may grow after that; torch keeps something for every new size of a batch."""


def test_two_thousand_requests_from_32_clients(
    model: GenerativeClassifier, service: Service, tmp_path: Path
) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("the memory of a process is read from /proc")
    files = [picture(i) for i in range(PICTURES)]
    images = [decode_upload(file, service.description.preprocessing, 10_000) for file in files]
    (right,) = service.examine([[ImageRequest("0.png", image) for image in images]])
    assert not isinstance(right, Exception)

    saved = candid.save(model, tmp_path / "model")
    command = [sys.executable, "-m", "candid", "serve", str(saved), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found is not None
        port = int(found[1])

        def ask(client: int, requests: int) -> list[tuple[int, int, Any]]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            answers = []
            for i in range(client, requests, CLIENTS):
                connection.request("POST", "/v1/examine", *multipart(files[i % PICTURES]))
                answer = connection.getresponse()
                answers.append((i, answer.status, json.load(answer)))
            connection.close()
            return answers

        def ask_all(requests: int) -> list[tuple[int, int, Any]]:
            with ThreadPoolExecutor(CLIENTS) as pool:
                clients = [pool.submit(ask, client, requests) for client in range(CLIENTS)]
                return [answer for client in clients for answer in client.result()]

        def resident_megabytes() -> list[float]:
            workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            statistics = [Path(f"/proc/{pid}/statm").read_text().split() for pid in (process.pid, *workers)]
            return [int(resident) * 4096 / 1e6 for _, resident, *_ in statistics]

        try:
            answers = ask_all(REQUESTS)
            before = resident_megabytes()
            ask_all(MORE)
            after = resident_megabytes()
        finally:
            process.terminate()

    assert sorted(i for i, _, _ in answers) == list(range(REQUESTS))
    for i, status, answer in answers:
        assert status == 200
        (judged,) = answer["results"]
        assert judged == without_rounding(right[i % PICTURES].model_dump(by_alias=True))
    server, *networks = (late - early for early, late in zip(before, after, strict=True))
    assert server < SERVER and all(grown < NETWORK for grown in networks)
    assert process.returncode == 0
