"""What starting costs: imports and the command line, each in a fresh process.

The peers are the bare interpreter and ``import torch``, which every program that computes with Candid needs:
what Candid adds is timed in processes that have imported torch before.
"""

import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.common import alternate, console, parsed, parser, show, write

CANDID = Path(sys.executable).with_name("candid")
BARE, TORCH, EVERYTHING, HELP = "python", "import torch", "from candid import *", "candid --help"
COMMANDS: dict[str, list[str | Path]] = {
    BARE: [sys.executable, "-c", "pass"],
    TORCH: [sys.executable, "-c", TORCH],
    "import candid": [sys.executable, "-c", "import candid"],
    "candid.GenerativeClassifier": [sys.executable, "-c", "import candid; candid.GenerativeClassifier"],
    EVERYTHING: [sys.executable, "-c", EVERYTHING],
    HELP: [CANDID, "--help"],
    "candid train --help": [CANDID, "train", "--help"],
    "candid --version": [CANDID, "--version"],
}
ADDED = f"{EVERYTHING}, beyond torch"
TARGETS = {ADDED: 0.3, HELP: 1.0}


def run(command: list[str | Path]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def beyond_torch() -> float:
    """Seconds that everything of Candid takes once torch is there."""
    script = (
        "import time, torch; start = time.perf_counter(); exec('from candid import *'); "
        "print(time.perf_counter() - start)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> int:
    options = parsed(parser("benchmarks.startup", __doc__))
    with console.status("measuring"):
        rounds = 3 if options.quick else 11
        times = alternate({name: partial(run, command) for name, command in COMMANDS.items()}, rounds)
        added = [beyond_torch() for _ in range(rounds)]
    table = [
        (name, timing, f"{timing.ratio(times[BARE]):.1f}", f"{timing.ratio(times[TORCH]):.2f}")
        for name, timing in times.items()
    ]
    columns = ("", "s", f"ratio to {BARE}", f"ratio to {TORCH}")
    show("Fresh processes: median (fastest to slowest) in s", columns, table)

    figures = {ADDED: statistics.median(added), HELP: times[HELP].median}
    missed = [name for name, target in TARGETS.items() if figures[name] >= target]
    rows = [
        (name, f"{seconds:.3f}", f"< {TARGETS[name]}", "missed" if name in missed else "met")
        for name, seconds in figures.items()
    ]
    show("Figures", ("", "s", "target", ""), rows)
    write(
        "startup",
        options.quick,
        {
            "seconds": {name: timing.seconds for name, timing in times.items()},
            "figures": {name: {"seconds": figures[name], "target": TARGETS[name]} for name in figures},
        },
    )
    return int(not options.quick and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
