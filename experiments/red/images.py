"""Attacks with damaged images, through the server and through ``candid examine``."""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from experiments.red.attack import attack, check, full, tried
from experiments.red.corpus import files
from experiments.red.server import children, examine, served

COUNT = 10_000 if full() else 400
AT_ONCE = 8
"""Files of a request."""
SECONDS, WAIT = 5.0, 60.0
"""The most CPU time of a request or between two lines, and the most time on a busy machine."""
MEGABYTES = 1000.0
MODEL = "cifar10-beta1"


def spent(pid: int) -> float:
    """Return the CPU seconds of a process and those that it has started."""
    seconds = 0.0
    for each in (pid, *children(pid)):
        with suppress(OSError, IndexError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def peak(pid: int) -> float:
    """Return the most MB that a process, or one that it has started, had in memory."""
    most = 0.0
    for each in (pid, *children(pid)):
        with suppress(OSError):
            lines = Path(f"/proc/{each}/status").read_text().splitlines()
            most = max([most, *(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))])
    return most


@attack("Damaged images through the server: no crash, no hang, at most 1 GB, one line of log an image.", 600)
def images_to_server() -> str:
    counts: Counter[str] = Counter()
    dearest = longest = 0.0
    with served(model=MODEL) as server:
        sent = [content for _, content in files(COUNT)]
        for at in range(0, COUNT, AT_ONCE):
            contents = sent[at : at + AT_ONCE]
            before, start = spent(server.process.pid), time.monotonic()
            status, answer = examine(server.port, *contents, timeout=WAIT)
            longest = max(longest, time.monotonic() - start)
            dearest = max(dearest, spent(server.process.pid) - before)
            check(status == 200, f"after {counts.total()} files: {status} {answer}")
            for result in answer["results"]:
                counts[result["status"]] += 1
                error = result.get("error", "x.")
                check(error.endswith(".") and "\n" not in error, f"no sentence: {error!r}")
        megabytes = peak(server.process.pid)
        lines, size = len(server.log_lines()), server.log.stat().st_size
    tried(inputs=COUNT)
    check(counts.total() == COUNT, f"{COUNT - counts.total()} files have no answer")
    check(dearest <= SECONDS, f"a request of {AT_ONCE} files took {dearest:.1f} s of CPU")
    check(megabytes <= MEGABYTES, f"the server had {megabytes:.0f} MB")
    check(lines <= COUNT and size <= 300 * COUNT, f"{lines} lines, {size} bytes of log")
    said = ", ".join(f"{number:,} {what}" for what, number in sorted(counts.items()))
    return (
        f"{said}; dearest request {dearest:.1f} s of CPU, longest {longest:.1f} s; {megabytes:.0f} MB; "
        f"{lines} lines of log"
    )


@attack("Damaged images through candid examine: no crash, no hang, at most 1 GB, one line an image.", 600)
def images_to_command() -> str:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "images")
        folder.mkdir()
        for number, (ending, content) in enumerate(files(COUNT)):
            (folder / f"{number:05}.{ending}").write_bytes(content)
        return examined(folder)


def examined(folder: Path) -> str:
    """Run ``candid examine`` on a folder and check what it costs and says, line by line."""
    names = [path.name for path in sorted(folder.iterdir())]
    command = [sys.executable, "-m", "candid", "examine", MODEL, str(folder), "--json"]
    said: dict[str, list[str]] = {"out": [], "error": []}
    dearest = longest = megabytes = 0.0
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
        selectors.DefaultSelector() as selector,
    ):
        for name, stream in (("out", process.stdout), ("error", process.stderr)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, name)
        rest = {"out": b"", "error": b""}
        start, before = time.monotonic(), 0.0
        while selector.get_map():
            ready = selector.select(WAIT)
            check(bool(ready), f"nothing for {WAIT:g} s after {len(said['out'])} images")
            if process.poll() is None:
                now, megabytes = spent(process.pid), max(megabytes, peak(process.pid))
                if said["out"]:  # the first line comes after the imports
                    dearest, longest = max(dearest, now - before), max(longest, time.monotonic() - start)
                start, before = time.monotonic(), now
            for key, _ in ready:
                more = os.read(key.fd, 1 << 16)
                if not more:
                    selector.unregister(key.fileobj)
                *lines, rest[key.data] = (rest[key.data] + more).split(b"\n")
                said[key.data] += [line.decode(errors="replace") for line in lines]
        code = process.wait()
    tried(inputs=len(names))
    records = [json.loads(line) for line in said["out"]]
    errors = [line for line in said["error"] if line.strip()]
    check(code in (0, 2), f"it ended with {code}: {said['error'][-3:]}")
    judged = sum("label" in record for record in records)
    check(len(errors) <= len(names) + 5, f"{len(errors)} lines for {len(names)} images: {errors[:5]}")
    check(dearest <= SECONDS, f"{dearest:.1f} s of CPU between two lines")
    check(megabytes <= MEGABYTES, f"{megabytes:.0f} MB")
    unusable = sum(any(name in line for line in (*said["error"], *said["out"])) for name in names)
    check(unusable == len(names), f"{len(names) - unusable} images are not mentioned")
    return (
        f"{judged:,} of {len(names):,} judged, the others named; at most {dearest:.1f} s of CPU and "
        f"{longest:.1f} s between two lines; {megabytes:.0f} MB; {len(errors)} lines on standard error"
    )
