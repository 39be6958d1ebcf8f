"""Run attacks, each in its own process with a deadline: ``python -m experiments.red [NAME ...]``.

Every attack stays on this machine: it talks to 127.0.0.1 and writes to temporary folders. The exit code is
the number of promises that did not hold. With FULL=1 in the environment the counts are those of
docs/security.md, and each attack writes its row there.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from experiments.red import batches, disk, hostile, images, kills, models, results, serving, switch, writers
from experiments.red.attack import ATTACKS, TRIED, Attack, BrokenError, full
from experiments.red.results import Result

FILES = (serving, models, switch, batches, disk, hostile, images, kills, writers)
"""The files whose attacks are registered."""
FULL_TIMES = 10
"""How much longer an attack may take with the counts of docs/security.md."""


def attacked(attack: Attack) -> Result:
    """Return whether the promise held, what was tried, measured or went wrong, and how long that took."""
    started, counts = time.monotonic(), {"inputs": 0, "kills": 0}
    most = attack.seconds * (FULL_TIMES if full() else 1)
    command = [sys.executable, "-m", "experiments.red", "--alone", attack.name]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=most)
            held = process.returncode == 0
        except subprocess.TimeoutExpired:
            said, held = f"not finished within {most:g} s", False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started and left
    said = said.strip()
    if held:
        last = json.loads(said.splitlines()[-1])
        said, counts = last["said"], last["tried"]
    return Result(
        promise=attack.promise,
        held=held,
        said=said or "it said nothing",
        inputs=counts["inputs"],
        kills=counts["kills"],
        minutes=round((time.monotonic() - started) / 60, 2),
    )


def _alone(attack: Attack) -> int:
    try:
        said = attack.run()
    except BrokenError as error:
        print(error)
        return 1
    print(json.dumps({"said": said, "tried": {key: TRIED[key] for key in ("inputs", "kills")}}))
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
        found = attacked(each)
        failed += not found["held"]
        how = "held" if found["held"] else "BROKEN"
        print(f"  {how} after {60 * found['minutes']:.0f} s: {found['said']}", flush=True)
        if full():
            results.write(each.name, found, list(ATTACKS))
    if not asked.list:
        print(f"{failed} broken, {time.monotonic() - started:.0f} s in all")
    return failed


if __name__ == "__main__":
    sys.exit(main())
