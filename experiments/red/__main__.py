"""Run attacks, each in its own process with a deadline: ``python -m experiments.red [NAME ...]``.

Every attack stays on this machine: it talks to 127.0.0.1 and writes to temporary folders. The exit code is
the number of promises that did not hold.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from experiments.red import models, serving, switch
from experiments.red.attack import ATTACKS, Attack, BrokenError

FILES = (serving, models, switch)
"""The files whose attacks are registered."""


def attacked(attack: Attack) -> tuple[bool, str, float]:
    """Return whether the promise held, what was measured or went wrong, and the seconds that it took."""
    started = time.monotonic()
    command = [sys.executable, "-m", "experiments.red", "--alone", attack.name]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=attack.seconds)
            held = process.returncode == 0
        except subprocess.TimeoutExpired:
            said, held = f"not finished within {attack.seconds:g} s", False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started and left
    lines = said.strip().splitlines() or ["it said nothing"]
    return held, lines[-1] if held else said.strip(), time.monotonic() - started


def _alone(attack: Attack) -> int:
    try:
        print(attack.run())
    except BrokenError as error:
        print(error)
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the attacks that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m experiments.red", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these; all otherwise")
    parser.add_argument("--list", action="store_true", help="show names, deadlines and promises")
    parser.add_argument("--alone", metavar="NAME", help="run this attack in this process")
    asked = parser.parse_args(arguments)
    unknown = [name for name in (*asked.names, *filter(None, [asked.alone])) if name not in ATTACKS]
    if unknown:
        parser.error(f"there is no attack {unknown[0]}: --list shows all")
    if asked.alone:
        return _alone(ATTACKS[asked.alone])
    failed = 0
    started = time.monotonic()
    for each in [ATTACKS[name] for name in asked.names or ATTACKS]:
        if asked.list:
            print(f"{each.name} ({each.seconds:g} s): {each.promise}")
            continue
        print(f"{each.name}: {each.promise}", flush=True)
        held, said, seconds = attacked(each)
        failed += not held
        print(f"  {'held' if held else 'BROKEN'} after {seconds:.0f} s: {said}", flush=True)
    if not asked.list:
        print(f"{failed} broken, {time.monotonic() - started:.0f} s in all")
    return failed


if __name__ == "__main__":
    sys.exit(main())
