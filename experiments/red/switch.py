"""Requests while a server switches models: none may be lost, and none judged by a mixture of two models."""

import os
import signal
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from experiments.red.attack import attack, check, full
from experiments.red.server import Served, served

REQUESTS, CLIENTS, SWITCHES = 2000, 32, 4
STORM, HOSTILE = 64, 0.05
"""Clients of the storm, and the share of their requests that is hostile."""
NEAR = 1e-3
"""Two answers of one model in different batches differ by less, those of two models by more."""


@attack("Kills, switches of models and hostile requests together: no request lost, nothing grows.", 1500)
def storm() -> str:
    """64 clients; one request in twenty is hostile; processes are killed and models switched meanwhile."""
    from tests.photo_models import train_photo_model

    seconds = 600 if full() else 20
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = train_photo_model(folder / "model", photos=12).model
        files = photo_files(folder)
        options = ("--store", folder / "store", "--timeout", 300, "--max-queue", 256)
        with served(*options, model=model) as server:
            address = f"http://127.0.0.1:{server.port}"
            with httpx.Client(base_url=address, timeout=600, trust_env=False) as client:
                taught(client, folder)
                right = [answer_of(client, version, files) for version in (0, 1)]
                until = time.monotonic() + seconds
                with ThreadPoolExecutor(STORM) as pool:
                    futures = [pool.submit(stormed, address, files, until, seed) for seed in range(STORM)]
                    kills, switches, levels = 0, 0, [level_of(server)]
                    while time.monotonic() < until:
                        kills += killed(server, kills)
                        time.sleep(3)
                        switches += switched_to(client, (switches + 1) % 2)
                        levels.append(level_of(server))
                    answers = [answer for future in futures for answer in future.result()]
                done_or_failed(client)
                time.sleep(3)
                levels.append(level_of(server))
                check(client.get("/readyz").status_code == 200, "it is not ready")
    good = [(status, answer) for hostile, status, answer in answers if not hostile]
    odd = [status for hostile, status, _ in answers if hostile]
    check(all(400 <= status < 500 or status == 200 for status in odd), f"hostile requests got {set(odd)}")
    check_answers(good, right)
    middle, last = levels[len(levels) // 2], levels[-1]
    check(last.descriptors <= levels[0].descriptors + 20, f"descriptors: {levels}")
    check(last.threads <= levels[0].threads + 40, f"threads: {levels}")
    check(last.megabytes <= middle.megabytes + 100, f"memory: {levels}")
    return (
        f"{len(good)} requests, 0 lost, 0 swapped; {len(odd)} hostile, {kills} kills, {switches} switches; "
        f"descriptors {levels[0].descriptors} to {last.descriptors}, threads {levels[0].threads} to "
        f"{last.threads}, memory {middle.megabytes:.0f} MB in the middle, {last.megabytes:.0f} at the end"
    )


class Level(NamedTuple):
    """What a server holds."""

    descriptors: int
    threads: int
    megabytes: float


def level_of(server: Served) -> Level:
    """Return what the server's own process holds."""
    own = Path(f"/proc/{server.process.pid}")
    pages = int((own / "statm").read_text().split()[1])
    return Level(
        len(list((own / "fd").iterdir())),
        len(list((own / "task").iterdir())),
        pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
    )


def stormed(address: str, files: list[Any], until: float, seed: int) -> list[tuple[bool, int, Any]]:
    """Ask until it is time to end; return for each request whether it was hostile, its status and answer."""
    random = np.random.default_rng(seed)
    found: list[tuple[bool, int, Any]] = []
    with httpx.Client(base_url=address, timeout=600, trust_env=False) as own:
        while time.monotonic() < until:
            hostile = random.random() < HOSTILE
            given: dict[str, Any] = {"files": files}
            if hostile:
                given = odd_requests()[random.integers(len(odd_requests()))]
            try:
                answer = own.post("/v1/examine?again=true", **given)
                found.append((hostile, answer.status_code, answer.json()))
            except (httpx.HTTPError, ValueError) as error:
                found.append((hostile, 0, {"error": repr(error)}))
    return found


def odd_requests() -> list[dict[str, Any]]:
    """Return requests that no client means well with."""
    bomb = b"P6\n#" + b"a" * 2_000_000 + b"\n4 4 255\n" + bytes(48)
    return [
        {"content": b"[" * 100_000, "headers": {"content-type": "application/json"}},
        {"content": b"--x\r\n" * 1000, "headers": {"content-type": "multipart/form-data; boundary=x"}},
        {"files": {"file": b"\xff\xd8" + bytes(10_000)}},
        {"files": {"file": bomb}},
        {"content": b"", "headers": {"host": "evil.example"}},
        {"content": b"", "headers": {"origin": "http://["}},
    ]


def killed(server: Served, number: int) -> int:
    """Kill a decoder, or each third time a network; return how many were killed."""
    found = server.decoders() if number % 3 else server.workers()
    for pid in found[:1]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found[:1])


def switched_to(client: httpx.Client, version: int) -> bool:
    """Switch; return whether that was done, since the process that loads may be killed."""
    if client.post("/v1/lessons/use", data={"version": version}).status_code == 409:
        return False
    return done_or_failed(client) is None


def done_or_failed(client: httpx.Client) -> str | None:
    """Wait until the server does nothing but answer; return why its last job failed."""
    while (state := client.get("/v1/lessons").json())["busy"] is not None:
        time.sleep(0.1)
    problem: str | None = state["problem"]
    return problem


def photo_files(folder: Path) -> list[Any]:
    """Write two photos, and return them as the files of a request."""
    from tests.photo_models import photo

    files = []
    for kind, seed in (("checks", 90), ("dots", 91)):
        photo(kind, seed).save(folder / f"{kind}.png")
        files.append(("file", (f"{kind}.png", (folder / f"{kind}.png").read_bytes())))
    return files


@attack("No request is lost or judged by two models while the server switches between them", seconds=3600)
def switch_of_models() -> str:
    """2000 requests of two photos from 32 clients, while a taught class comes and goes."""
    from tests.photo_models import train_photo_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = train_photo_model(folder / "model", photos=12).model
        files = photo_files(folder)
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
    versions = check_answers(answers, right)
    check(len(answers) == REQUESTS, f"{REQUESTS - len(answers)} requests have no answer")
    check(switched >= SWITCHES and len(versions) == 2, f"too few switches: {switched}")
    counts = " and ".join(f"{count} by version {version}" for version, count in sorted(versions.items()))
    return f"{len(answers)} requests, {counts}, {switched} switches"


def check_answers(answers: list[tuple[int, Any]], right: list[Any]) -> Counter[int]:
    """Return how many requests each version answered; raise if one was lost or judged by two models."""
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
    return versions


def posteriors(result: Any) -> dict[str, float]:
    """Return the posteriors by class, in one order."""
    return dict(sorted(result["posterior"].items()))
