"""Run the steps of the Dockerfile in a new environment, without a container engine.

    python -m experiments.container FOLDER

COPY copies into FOLDER, RUN of pip installs into an environment there, and the command of ENTRYPOINT and CMD
starts; then the command of HEALTHCHECK must find it well. Steps about users, volumes and ports are only read.
Needs the package index; ``make check`` runs it.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
READ = {"FROM", "WORKDIR", "ENV", "USER", "VOLUME", "EXPOSE"}
"""Instructions that need an engine."""
SECONDS = 120.0
"""How long the server may take to be well."""


def steps() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line and line[0] != "#"]


def run(folder: Path) -> None:
    """Run the steps, and exit with an error if one fails."""
    source, binaries = folder / "source", folder / "venv" / "bin"
    source.mkdir(parents=True)
    venv.create(folder / "venv", with_pip=True)
    path = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "CANDID_TOKEN": "secret"}
    path.pop("PYTHONPATH", None)
    command: list[str] = []
    for instruction, text in steps():
        if instruction == "COPY":
            *names, target = shlex.split(text)
            for name in names:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, source / target)
                else:
                    shutil.copy(ROOT / name, source / target)
        elif instruction == "RUN" and text.startswith("pip "):
            subprocess.run(shlex.split(text), check=True, cwd=source, env=path, stdout=subprocess.DEVNULL)
        elif instruction in ("ENTRYPOINT", "CMD"):
            command += json.loads(text)
        elif instruction == "HEALTHCHECK":
            probe = json.loads(text[text.index("[") :])
        elif instruction not in READ and instruction != "RUN":
            sys.exit(f"The Dockerfile has {instruction}, which experiments/container.py does not know.")
    with subprocess.Popen(command, cwd=folder, env=path, stdout=subprocess.DEVNULL) as server:
        try:
            wait(probe, server, path)
        finally:
            server.terminate()
    if server.returncode:
        sys.exit(f"{shlex.join(command)} ended with {server.returncode} after it was told to stop.")


def wait(probe: list[str], server: "subprocess.Popen[bytes]", env: dict[str, str]) -> None:
    """Ask until the server is well."""
    end = time.monotonic() + SECONDS
    while subprocess.run(probe, env=env, stderr=subprocess.DEVNULL).returncode:
        if server.poll() is not None or time.monotonic() > end:
            sys.exit(f"The server was not well: {re.sub('[^ -~]', '', shlex.join(probe))}")
        time.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="A new folder.")
    run(parser.parse_args().folder)
    print("The steps of the Dockerfile ran, and its server is well.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
