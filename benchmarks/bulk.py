"""Bulk examination: memory of all processes over many images, and images/s next to bare decoding and network.

    python -m benchmarks.bulk                    # 30 000 images (about 15 minutes on two quiet cores)
    python -m benchmarks.bulk --images 1500      # the same with fewer
    python -m benchmarks.bulk --quick            # does it run at all?

Photos that ship with Candid are repeated in tar shards. ``candid examine`` judges them with one process per
core. The peer decodes the same shards with Pillow alone and passes them through the same network, without
checks, verdicts and tables, in as many processes. Both start a fresh Python and open their model. The memory
is the sum of the private and shared pages (PSS) of all processes, twice a second.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import candid
from benchmarks.common import Figure, Timing, conclude, console, parser, show_times, warn_if_busy

MODEL = "everyday"
SAMPLES = Path(candid.__file__).parent / "reports/demo/samples"
SHARDS = 12
"""Tar files: as many as leave no core idle at the end."""
PEER, OURS = "bare decoding and network", "candid examine"


def packed(folder: Path, images: int) -> list[Path]:
    """Write shards with ``images`` photos."""
    photos = [path.read_bytes() for path in sorted(SAMPLES.rglob("*.jpg"))]
    folder.mkdir()
    paths = [folder / f"part-{number:03}.tar" for number in range(SHARDS)]
    for number, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for i in range(number, images, SHARDS):
                member = tarfile.TarInfo(f"{i:07}.jpg")
                member.size = len(photos[i % len(photos)])
                tar.addfile(member, io.BytesIO(photos[i % len(photos)]))
    return paths


def tree(process: int) -> list[int]:
    """Return a process and all that it started."""
    try:
        tasks = Path(f"/proc/{process}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return []
    return [process, *(each for child in children for each in tree(child))]


def memory(process: int) -> float:
    """Return the megabytes of a process and all that it started."""
    total = 0
    for each in tree(process):
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


class Watched:
    """A command, its seconds and its memory while it runs."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        self.samples = list[float]()
        start, before = time.perf_counter(), os.times()
        process = subprocess.Popen(command, env={**os.environ, **(environment or {})}, stderr=subprocess.PIPE)
        ended = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(process.pid, ended))
        sampler.start()
        try:
            _, errors = process.communicate(timeout=7200)
        finally:
            process.kill()
            ended.set()
            sampler.join()
        self.seconds, after = time.perf_counter() - start, os.times()
        self.cpu = sum(after[2:4]) - sum(before[2:4])
        if process.returncode:
            sys.exit(f"{command} ended with {process.returncode}: {errors.decode()[-2000:]}")

    def _sample(self, process: int, ended: threading.Event) -> None:
        while not ended.wait(0.5):
            self.samples.append(memory(process))

    def tenths(self) -> list[float]:
        """Return the highest megabytes in each tenth of the run."""
        parts = np.array_split(np.array(self.samples), min(10, len(self.samples)))
        return [round(float(part.max()), 1) for part in parts]


def run(folder: Path, images: int, processes: int) -> tuple[Watched, Watched]:
    """Return ``candid examine`` and the peer on the same shards."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "candid", "examine", MODEL, str(folder), "--out", f"{out}/verdicts"]
        ours = Watched([*command, "--processes", str(processes)])
        rows = sum(path.read_text().count("\n") - 1 for path in Path(out).glob("verdicts/*.csv"))
    if rows != images:
        sys.exit(f"{rows} of {images} images were judged")
    peer = Watched([sys.executable, "-m", "benchmarks.bulk_peer", str(folder), MODEL, str(processes)])
    return ours, peer


def main() -> int:
    options = parser("benchmarks.bulk", __doc__)
    options.add_argument("--images", type=int, default=30_000)
    options.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options.add_argument("--repeats", type=int, default=1)
    asked = options.parse_args()
    warn_if_busy()
    images = 96 if asked.quick else asked.images
    with tempfile.TemporaryDirectory() as room, console.status("examining"):
        folder = Path(room) / "shards"
        packed(folder, images)
        rounds = [run(folder, images, asked.processes) for _ in range(asked.repeats)]
    both = (Timing(tuple(each.seconds for each in watched)) for watched in zip(*rounds, strict=True))
    ours, peer = both
    show_times(f"{images} photos, {asked.processes} processes", {OURS: ours, PEER: peer})
    tenths = rounds[0][0].tenths()
    console.print(f"MB of all processes in each tenth of the run: {json.dumps(tenths)}")
    figures = {
        "images/s": Figure(tuple(images / seconds for seconds in ours.seconds)),
        "images/s / bare decoding and network": Figure(peer.ratios(ours), 0.9, at_least=True),
        "CPU ms of an image": Figure(tuple(1e3 * each.cpu / images for each, _ in rounds)),
        "CPU ms of an image, bare": Figure(tuple(1e3 * each.cpu / images for _, each in rounds)),
        "MB at the end / in the third tenth": Figure((tenths[-2] / tenths[min(2, len(tenths) - 1)],), 1.05),
    }
    return conclude("bulk", asked.quick, {"bulk": {OURS: ours, PEER: peer}}, figures, {"megabytes": tenths})


if __name__ == "__main__":
    sys.exit(main())
