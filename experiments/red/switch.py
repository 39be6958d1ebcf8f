"""Requests while a server switches models: none may be lost, and none judged by a mixture of two models."""

import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from experiments.red.attack import attack, check
from experiments.red.server import served

REQUESTS, CLIENTS, SWITCHES = 2000, 32, 4
NEAR = 1e-3
"""Two answers of one model in different batches differ by less, those of two models by more."""


@attack("No request is lost or judged by two models while the server switches between them", seconds=3600)
def switch_of_models() -> str:
    """2000 requests of two photos from 32 clients, while a taught class comes and goes."""
    from tests.photo_models import photo, train_photo_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = train_photo_model(folder / "model", photos=12).model
        files = []
        for kind, seed in (("checks", 90), ("dots", 91)):
            photo(kind, seed).save(folder / f"{kind}.png")
            files.append(("file", (f"{kind}.png", (folder / f"{kind}.png").read_bytes())))
        options = ("--store", folder / "store", "--timeout", 300, "--max-queue", 2 * CLIENTS)
        with served(*options, model=model) as server:
            address = f"http://127.0.0.1:{server.port}"
            with httpx.Client(base_url=address, timeout=600, trust_env=False) as client:
                taught(client, folder)
                right = [answer_of(client, version, files) for version in (0, 1)]
                answers, switched = asked(address, client, files)
    return judged(answers, right, switched)


def taught(client: httpx.Client, folder: Path) -> None:
    """Teach the class 'checks'."""
    from tests.photo_models import photo

    for seed in range(60, 68):
        photo("checks", seed).save(folder / "new.png")
        client.post("/v1/examine", files={"file": (folder / "new.png").read_bytes()}).raise_for_status()
    data: dict[str, Any] = {"ids": [*range(1, 9)], "name": "checks"}
    client.post("/v1/corrections", data=data).raise_for_status()
    client.post("/v1/lessons").raise_for_status()
    done(client)


def done(client: httpx.Client) -> None:
    """Wait until the server does nothing but answer."""
    while True:
        state = client.get("/v1/lessons").json()
        if state["busy"] is None:
            assert state["problem"] is None, state["problem"]
            return
        time.sleep(0.1)


def use(client: httpx.Client, version: int) -> None:
    """Switch, and wait until it is done."""
    client.post("/v1/lessons/use", data={"version": version}).raise_for_status()
    done(client)


def answer_of(client: httpx.Client, version: int, files: list[Any]) -> Any:
    """Return what one version says."""
    use(client, version)
    return client.post("/v1/examine?again=true", files=files).json()


def asked(address: str, client: httpx.Client, files: list[Any]) -> tuple[list[tuple[int, Any]], int]:
    """Return status and answer of all requests, and how often the server switched meanwhile."""
    numbers, lock = iter(range(REQUESTS)), threading.Lock()

    def ask() -> list[tuple[int, Any]]:
        found: list[tuple[int, Any]] = []
        with httpx.Client(base_url=address, timeout=600, trust_env=False) as own:
            while True:
                with lock:
                    if next(numbers, None) is None:
                        return found
                try:
                    answer = own.post("/v1/examine?again=true", files=files)
                    found.append((answer.status_code, answer.json()))
                except httpx.HTTPError as error:
                    found.append((0, {"error": repr(error)}))

    switched = 0
    with ThreadPoolExecutor(CLIENTS) as pool:
        futures = [pool.submit(ask) for _ in range(CLIENTS)]
        while not all(future.done() for future in futures):
            use(client, switched % 2)
            switched += 1
        return [answer for future in futures for answer in future.result()], switched


def judged(answers: list[tuple[int, Any]], right: list[Any], switched: int) -> str:
    """Return what happened; raise if a request was lost or its images were judged by two models."""
    expected = [[posteriors(result) for result in each["results"]] for each in right]
    versions: Counter[int] = Counter()
    for status, answer in answers:
        check(status == 200, f"a request was lost: {status}, {answer}")
        version = answer["version"]
        versions[version] += 1
        for result, one in zip(answer["results"], expected[version], strict=True):
            other = posteriors(result)
            same = one.keys() == other.keys()
            same = same and np.allclose(list(one.values()), list(other.values()), atol=NEAR)
            check(same, f"version {version} says {one}, and an answer with its number says {other}")
    check(len(answers) == REQUESTS, f"{REQUESTS - len(answers)} requests have no answer")
    check(switched >= SWITCHES and len(versions) == 2, f"too few switches: {switched}")
    counts = " and ".join(f"{count} by version {version}" for version, count in sorted(versions.items()))
    return f"{len(answers)} requests, {counts}, {switched} switches"


def posteriors(result: Any) -> dict[str, float]:
    """Return the posteriors by class, in one order."""
    return dict(sorted(result["posterior"].items()))
