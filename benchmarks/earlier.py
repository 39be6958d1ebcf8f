"""What this version and an earlier one take, in one run: for a photo on the command line, and for a monitor.

    git worktree add --detach ../earlier REVISION
    python -m benchmarks.earlier ../earlier

Every measurement is a process of its own, which imports one of the two source trees, in turn. CPU seconds
of a command include its start; its memory is the peak of what is resident (``VmHWM``: on Linux alone). A
monitor is timed after ten calls.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Figure, Timing, conclude, parsed, parser, show_times

ROOT = Path(__file__).parents[1]
PHOTO = "everyday/cat.jpg"
OURS, EARLIER = "this version", "the earlier one"
COMMAND = """
import sys
from pathlib import Path
from candid.cli.app import run
run(sys.argv[1:])
(peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(peak.split()[1])
"""
MONITOR = """
import inspect, json, statistics, sys, time
import numpy as np
import candid
classes, features, images, repeats, risk = json.loads(sys.argv[1])
random = np.random.default_rng(0)
n = max(2000, classes)

def draw(labels):
    logits = random.normal(size=(len(labels), classes)).astype(np.float32)
    logits[np.arange(len(labels)), labels] += 8
    return logits, random.normal(size=(len(labels), features)) if features else None

labels = np.arange(n) % classes
logits, columns = draw(labels)
levels = {"novelty": 0.01, "error": 0.05, "risk": risk}
if "confidence" in inspect.signature(candid.Monitor).parameters:
    levels["confidence"] = 0.0  # earlier versions have no such level
monitor = candid.Monitor(**levels).fit(logits, labels, columns)
new = draw(labels[:images])
seconds = []
for i in range(10 * (repeats > 10) + repeats):
    start = time.process_time()
    monitor.examine(*new)
    seconds.append(time.process_time() - start)
print(statistics.median(seconds[-repeats:]))
"""
CASES: dict[str, tuple[tuple[Any, ...], float]] = {
    "monitor.examine, 1 image, 10 classes, 64 features, a risk": ((10, 64, 1, 200, 0.1), 0.15),
    "monitor.examine, 256 images, 5000 classes": ((5000, 0, 256, 5, None), 0.1),
}
"""The arguments of a monitor, and the ratio to the earlier version that is aimed at."""
SMALL = (3, 4, 2, 3, None)


def run(tree: Path, *arguments: str) -> tuple[float, float]:
    """Run Python with the candid of a tree; return the last number that it printed, and its CPU seconds."""
    environment, before = {**os.environ, "PYTHONPATH": str(tree)}, os.times()
    command = [sys.executable, "-c", *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    after = os.times()
    if done.returncode:
        sys.exit(f"With the candid of '{tree}': {done.stderr}")
    return float(done.stdout.split()[-1]), sum(after[2:4]) - sum(before[2:4])


def photo_of(tree: Path) -> str:
    """The same photo, wherever the tree has it."""
    return str(next((tree / "candid").rglob(PHOTO)))


def main() -> int:
    options = parser("benchmarks.earlier", __doc__)
    options.add_argument("earlier", type=Path, help="the source tree of an earlier version")
    asked = parsed(options)
    trees = {OURS: ROOT, EARLIER: asked.earlier.resolve()}
    rounds = 1 if asked.quick else 7
    cases: dict[str, dict[str, Timing]] = {}
    figures: dict[str, Figure] = {}

    def compare(case: str, seconds: dict[str, Sequence[float]], target: float) -> None:
        times = cases[case] = {name: Timing(tuple(values)) for name, values in seconds.items()}
        show_times(case, times)
        figures[f"{case}: ratio"] = Figure(times[OURS].ratios(times[EARLIER]), target)

    command = "candid examine everyday"
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in trees}
    for _ in range(rounds + 1):
        for name, tree in trees.items():
            measured[name].append(run(tree, COMMAND, "examine", "everyday", photo_of(tree)))
    compare(command, {name: [cpu for _, cpu in rows[1:]] for name, rows in measured.items()}, 0.5)
    for name, rows in measured.items():
        peaks = tuple(kilobytes / 1024 for kilobytes, _ in rows[1:])
        figures[f"{command}: MiB, {name}"] = Figure(peaks, 200.0 if name == OURS else None)
    for case, (shape, target) in CASES.items():
        shape = SMALL if asked.quick else shape
        seconds: dict[str, list[float]] = {name: [] for name in trees}
        for _ in range(1 if asked.quick else 3):
            for name, tree in trees.items():
                seconds[name].append(run(tree, MONITOR, json.dumps(shape))[0])
        compare(case, dict(seconds), target)
    return conclude("earlier", asked.quick, cases, figures)


if __name__ == "__main__":
    sys.exit(main())
