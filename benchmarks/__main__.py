"""Runs every benchmark, each in its own process: ``python -m benchmarks [--quick] [--threads N]``."""

import subprocess
import sys

from benchmarks.common import console, parser

SCRIPTS = (
    "startup",
    "neighbours",
    "forward",
    "training",
    "inverse",
    "mixture",
    "memory",
    "gradients",
    "loading",
    "cifar",
    "evaluation",
    "explanations",
    "corruptions",
    "attacks",
    "photos",
    "serving",
)


def main() -> int:
    options = parser("benchmarks", __doc__).parse_args()
    arguments = ["--threads", str(options.threads)] + ["--quick"] * options.quick
    failed = []
    for script in SCRIPTS:
        console.rule(script)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{script}", *arguments], check=False).returncode:
            failed.append(script)
    if failed:
        console.print(f"[red]Failed, or a target missed: {', '.join(failed)}[/]")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
