"""What starting costs: imports and the command line, each in a fresh process.

The peers are the bare interpreter and ``import torch``, which every program that computes with Candid needs:
what Candid adds is the difference to it, taken round by round.
"""

import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.common import Timing, alternate, console, parser, set_threads, show, write

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


def beyond(timing: Timing, peer: Timing) -> float:
    """Median of the rounds' own differences to ``peer``."""
    return statistics.median(a - b for a, b in zip(timing.seconds, peer.seconds, strict=True))


def main() -> int:
    options = parser("benchmarks.startup", __doc__).parse_args()
    set_threads(options.threads)
    with console.status("measuring"):
        times = alternate(
            {name: partial(run, command) for name, command in COMMANDS.items()}, 3 if options.quick else 11
        )
    table = [
        (name, timing, f"{timing.ratio(times[BARE]):.1f}", f"{timing.ratio(times[TORCH]):.2f}")
        for name, timing in times.items()
    ]
    columns = ("", "s", f"ratio to {BARE}", f"ratio to {TORCH}")
    show("Fresh processes: median (fastest to slowest) in s", columns, table)

    figures = {ADDED: beyond(times[EVERYTHING], times[TORCH]), HELP: times[HELP].median}
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
