"""Runs every benchmark, each in its own process: ``python -m benchmarks [--quick] [--only NAME ...]``.

Then what they measured becomes one file, docs/speed.json, and the tables of docs/speed.md
(benchmarks/page.py). With ``--only`` the others are taken from the last run. A quick run says whether
everything works: it is written next to the results of the scripts, and the page stays as it is.
"""

import subprocess
import sys
import time

from benchmarks import page
from benchmarks.common import console, parser


def main() -> int:
    options = parser("benchmarks", __doc__)
    options.add_argument("--only", nargs="+", choices=page.SCRIPTS, help="measure these again")
    asked = options.parse_args()
    arguments = ["--threads", str(asked.threads)] + ["--quick"] * asked.quick
    missed = []
    start = time.monotonic()
    for script in asked.only or page.SCRIPTS:
        console.rule(f"{script}, after {(time.monotonic() - start) / 60:.1f} minutes")
        if subprocess.run([sys.executable, "-m", f"benchmarks.{script}", *arguments], check=False).returncode:
            missed.append(script)
    if missed:
        console.print(f"[red]Failed, or a target missed: {', '.join(missed)}[/]")
    console.print(f"{(time.monotonic() - start) / 60:.1f} minutes; written to {page.collect()}")
    return len(missed)


if __name__ == "__main__":
    sys.exit(main())
