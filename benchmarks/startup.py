"""What starting costs: imports and the command line, each in a fresh process.

The peers are the bare interpreter, and ``import torch``, which networks need and photos don't. What the
public names of Candid take beyond torch is timed in processes that have imported it before.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.common import Figure, alternate, conclude, console, parsed, parser, show_times

CANDID = Path(sys.executable).with_name("candid")
BARE, TORCH, EVERYTHING, HELP = "python", "import torch", "from candid import *", "candid --help"
COMMANDS: dict[str, list[str | Path]] = {
    BARE: [sys.executable, "-c", "pass"],
    TORCH: [sys.executable, "-c", TORCH],
    "import candid": [sys.executable, "-c", "import candid"],
    "candid.Monitor": [sys.executable, "-c", "import candid; candid.Monitor"],
    "candid.GenerativeClassifier": [sys.executable, "-c", "import candid; candid.GenerativeClassifier"],
    EVERYTHING: [sys.executable, "-c", EVERYTHING],
    HELP: [CANDID, "--help"],
    "candid train --help": [CANDID, "train", "--help"],
    "candid --version": [CANDID, "--version"],
}
ADDED = f"{EVERYTHING}, beyond torch, s"


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
        rounds = 1 if options.quick else 5
        times = alternate({name: partial(run, command) for name, command in COMMANDS.items()}, rounds)
        added = tuple(beyond_torch() for _ in range(rounds))
    show_times("Fresh processes", times)
    figures = {ADDED: Figure(added, 0.3), f"{HELP}, s": Figure(times[HELP].seconds, 1.0)}
    figures |= {
        f"{name} / {TORCH}": Figure(timing.ratios(times[TORCH]))
        for name, timing in times.items()
        if name in ("import candid", "candid.Monitor")
    }
    return conclude("startup", options.quick, {"a fresh process": times}, figures)


if __name__ == "__main__":
    sys.exit(main())
