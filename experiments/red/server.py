"""A real server to attack, and small clients of it."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from experiments.red.attack import check

MODEL = "cifar10-beta1"


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[str]
    port: int
    log: Path

    def workers(self) -> list[int]:
        """Return the ids of its processes with a network."""
        found = children(self.process.pid)
        return [pid for pid in found if "spawn_main" in command_of(pid)]

    def decoders(self) -> list[int]:
        """Return the ids of its processes that decode images."""
        return [each for pid in self.forking() for each in children(pid)]

    def forking(self) -> list[int]:
        """Return the id of the process that decoders are forked from."""
        return [pid for pid in children(self.process.pid) if "forkserver" in command_of(pid)]

    def log_lines(self) -> list[str]:
        """Return what it has written to standard error."""
        return self.log.read_text(errors="replace").splitlines()


@contextmanager
def served(*options: object, model: str = MODEL, before: str = "", wait: float = 120.0) -> Iterator[Served]:
    """Run ``candid serve`` in a process of its own; ``before`` is a shell command that runs first."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "candid", "serve", model, "--port", "0", *map(str, options)]
        shell = ["bash", "-c", f'{before or "true"}; exec "$@"', "bash", *command]
        with (
            log.open("w") as file,
            subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=file, text=True) as process,
        ):
            try:
                yield Served(process, _port(process, log, wait), log)
            finally:
                process.kill()


def _port(process: subprocess.Popen[str], log: Path, wait: float) -> int:
    assert process.stdout is not None
    signal.signal(signal.SIGALRM, lambda *_: process.kill())
    signal.alarm(round(wait))
    line = process.stdout.readline()
    signal.alarm(0)
    found = re.search(r"127\.0\.0\.1:(\d+)", line)
    check(found is not None, f"the server did not start: {line} {log.read_text()[-500:]}")
    assert found is not None
    return int(found[1])


def children(pid: int) -> list[int]:
    """Return the ids of the processes that a process has started."""
    found = []
    for threads in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(each) for each in threads.read_text().split()]
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, and of those that it has started and that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def command_of(pid: int) -> str:
    """Return the command line of a process; nothing if there is no such process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def picture(seed: int = 0, side: int = 16) -> bytes:
    """Return a PNG file with random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def body_of(files: Sequence[bytes]) -> bytes:
    """Return the body of a multipart request; the boundary is 'edge'."""
    head = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="%d.png"\r\n\r\n'
    parts = [head % i + file + b"\r\n" for i, file in enumerate(files)]
    return b"".join(parts) + b"--edge--\r\n"


MULTIPART = {"content-type": "multipart/form-data; boundary=edge"}


def examine(port: int, *files: bytes, timeout: float = 60.0) -> tuple[int, Any]:
    """Send images and return status and answer; status 0 if there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("POST", "/v1/examine", body_of(files or [picture()]), MULTIPART)
        answer = connection.getresponse()
        return answer.status, json.load(answer)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return 0, {"error": repr(error)}
    finally:
        connection.close()


def get(port: int, path: str = "/healthz", timeout: float = 20.0, **headers: str) -> tuple[int, bytes]:
    """Ask for an address and return status and content; status 0 if there is no answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error).encode()
    finally:
        connection.close()


def seconds_to_end(process: subprocess.Popen[str], most: float) -> float:
    """Send SIGTERM and return the seconds until the process has ended; raise if that takes too long."""
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(most)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"SIGTERM had no effect within {most:g} s") from None
    return time.monotonic() - started


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
