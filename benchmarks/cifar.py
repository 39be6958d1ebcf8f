"""Images a second of the cifar preset in training: whole steps on a fixed batch of 128.

The peer is the ResNet with the same stages and widths, in the same process. With ``--before`` there is
one more: Candid as it is in another checkout, in a process of its own::

    git worktree add ../before <commit>
    python -m benchmarks.cifar --before ../before
"""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.common import Figure, Timing, conclude, console, parsed, parser, show, spread

CANDID, RESNET, BEFORE = "Candid", "ResNet next to it", "Candid, before"


class Worker:
    """benchmarks/cifar_worker.py with the package of one checkout."""

    def __init__(self, checkout: Path, threads: int, batch: int) -> None:
        script = Path(__file__).with_name("cifar_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(threads), str(batch)],
            env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, name: str, steps: int) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(name, steps, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline()) / steps

    def end(self) -> None:
        self.process.communicate()


def measure(before: Path | None, threads: int, batch: int, steps: int, rounds: int) -> dict[str, Timing]:
    """Seconds a step; the first round is not counted."""
    here = Worker(Path(__file__).parents[1], threads, batch)
    contenders = {CANDID: (here, "candid"), RESNET: (here, "resnet")}
    if before is not None:
        contenders[BEFORE] = Worker(before, threads, batch), "candid"
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, (worker, model) in contenders.items():
            seconds[name].append(worker.seconds(model, steps))
    for worker, _ in contenders.values():
        worker.end()
    return {name: Timing(tuple(of_rounds[1:])) for name, of_rounds in seconds.items()}


def main() -> int:
    options = parser("benchmarks.cifar", __doc__)
    options.add_argument("--before", type=Path, help="another checkout of Candid to compare with")
    chosen = parsed(options)
    batch, steps, rounds = (16, 1, 2) if chosen.quick else (128, 8, 5)
    with console.status("measuring"):
        times = measure(chosen.before, chosen.threads, batch, steps, rounds)
    speeds = {name: tuple(batch / seconds for seconds in t.seconds) for name, t in times.items()}
    rows = [(name, t, spread(speeds[name]), spread(t.ratios(times[CANDID]))) for name, t in times.items()]
    columns = ("", "s a step", "images / s", f"{CANDID}'s speed to this one's")
    show(f"Training, batch {batch}: median (lowest to highest)", columns, rows)
    figures = {
        f"speed, {CANDID} / {name}": Figure(t.ratios(times[CANDID]))
        for name, t in times.items()
        if name != CANDID
    }
    return conclude("cifar", chosen.quick, {f"batch {batch}": times}, figures, {"images a second": speeds})


if __name__ == "__main__":
    sys.exit(main())
