"""Build Candid, install it into new environments, without and with its extras, and use it there.

    python -m experiments.check [--keep FOLDER] [--write]

Needs the package index, the extra ``docs`` and about a quarter of an hour; ``make check`` runs it. Wheels and
sdists are built and checked (``experiments/packages.py``), and the wheels are installed: the first without
the pixel models. ``--write`` stores sizes and seconds in docs/install.json, which the README has its sentence
from (``python -m experiments.readme``); do that on a quiet machine. Then the steps of the Dockerfile run
(``experiments/container.py``). It prints a table: the size of each environment, the seconds that installation
and first verdict took, and which commands ran.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path
from typing import NamedTuple

from candid._support.files import replacing
from experiments import container, packages

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "candid" / "reports" / "demo" / "samples"
PHOTOS = 12
"""Photos of each class that a model is trained with."""
LARGEST = 640.0
"""The most MB of a base installation."""
RANG = 3
"""The exit code of ``candid watch`` after an alarm, which hats are meant to raise."""
FRAMES = ("pandas", "polars", "pyarrow")
TABLES = """
import candid
examinations = candid.examine("everyday", {image!r})
table = candid.table(examinations * 3)
for frame in (table.to_pandas(), table.to_polars(), table.to_arrow(), candid.table([]).to_polars()):
    assert list(getattr(frame, "column_names", frame.columns)) == list(table), frame
assert table.to_pandas()["label"].tolist() == table.to_polars()["label"].to_list() == table["label"]
assert table.to_arrow()["top_classes"].to_pylist() == table["top_classes"]
"""
"""Tables of every library, which are not in the environment of the tests."""


class Environment(NamedTuple):
    """A new environment in which Candid is installed."""

    extra: str
    folder: Path
    seconds: float
    """How long the installation took."""

    @classmethod
    def make(cls, extra: str, folder: Path, wheel: Path) -> "Environment":
        """Install a wheel with an extra, or the base alone."""
        venv.create(folder, with_pip=True)
        start = time.monotonic()
        installed = cls(extra, folder, 0.0)
        installed.install(f"{wheel}[{extra}]" if extra else str(wheel), "--find-links", str(wheel.parent))
        return installed._replace(seconds=time.monotonic() - start)

    def install(self, *targets: str) -> None:
        """Install more."""
        constraints = str(ROOT / "constraints.txt")
        pip = [str(self.folder / "bin" / "pip"), "install", "--quiet", "--constraint", constraints]
        subprocess.run([*pip, *targets], check=True, cwd=self.folder)

    def use(self, code: str) -> None:
        """Run Python outside the sources."""
        subprocess.run([str(self.folder / "bin" / "python"), "-c", code], check=True, cwd=self.folder)

    @property
    def packages(self) -> Path:
        """Where packages are installed."""
        (path,) = self.folder.glob("lib/python*/site-packages")
        return path

    @property
    def megabytes(self) -> float:
        """The size of all installed files."""
        return sum(path.stat().st_size for path in self.packages.rglob("*") if path.is_file()) / 1e6

    def has(self, package: str) -> bool:
        """Return whether a package can be imported."""
        command = [str(self.folder / "bin" / "python"), "-c", f"import {package}"]
        return subprocess.run(command, capture_output=True, cwd=self.folder).returncode == 0

    def run(self, *arguments: object) -> float:
        """Run a command of Candid outside the sources and return its seconds."""
        start = time.monotonic()
        words = [str(self.folder / "bin" / "candid"), *map(str, arguments)]
        done = subprocess.run(words, capture_output=True, text=True, cwd=self.folder)
        if done.returncode not in (0, RANG if arguments[0] == "watch" else 0):
            sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
        return time.monotonic() - start

    def serve(self, model: str) -> None:
        """Start the server of a model, and ask it for its description."""
        words = [str(self.folder / "bin" / "candid"), "serve", model, "--port", "0"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=self.folder) as server:
            assert server.stdout is not None
            line = next((line for line in server.stdout if " at http" in line), None)
            if line is None:
                sys.exit(f"{' '.join(words)} did not start")
            try:
                urllib.request.urlopen(line.split(" at ")[1].split(";")[0].strip() + "/v1/models", timeout=60)
            finally:
                server.terminate()


def use_photos(installed: Environment, work: Path) -> list[str]:
    """Run every command about photos and return their names."""
    photos, others = work / "photos", work / "others"
    for folder in (SAMPLES / "clothes").iterdir():
        for part, start in ((photos, 0), (others, PHOTOS)):
            (part / folder.name).mkdir(parents=True)
            for photo in sorted(folder.iterdir())[start : start + PHOTOS]:
                shutil.copy(photo, part / folder.name)
    image, hats, run = SAMPLES / "everyday" / "jeans.jpg", SAMPLES / "hats", work / "run"
    lines = [
        ("examine", "everyday", image, "--figures", work / "pages"),
        ("train", photos, "--out", run),
        ("evaluate", run, photos, "--ood", f"hats={hats}", "--out", work / "evaluation"),
        ("teach", run, f"hat={hats}", "--out", work / "taught"),
        ("forget", work / "taught", "hat", "--out", work / "forgotten"),
        ("explain", run, "--out", work / "explained"),
        ("calibrate", run, others),
        ("info", run),
        ("group", run, hats, "--out", work / "groups"),
        ("watch", run, hats, "--once"),
        ("adopt", "lite0", photos, "--out", work / "adopted"),
        ("export", run, "--out", work / "model.onnx"),
        ("corrupt", run, photos, "--corruptions", "pixelate", "--images", 4, "--out", work / "corrupted"),
        ("audit", run, "--data", photos, "--out", work / "audit"),
    ]
    for line in lines:
        installed.run(*line)
    return [str(line[0]) for line in lines]


def use_networks(installed: Environment, work: Path) -> list[str]:
    """Run commands that need extras and return their names."""
    lines = [
        ("examine", "cifar10-beta1", SAMPLES / "everyday" / "cat.jpg"),
        ("export", "cifar10-resnet", "--out", work / "resnet.onnx"),
        ("explain", "cifar10-beta1", "--out", work / "classes"),
        ("train", "digits", "--epochs", "1", "--out", work / "digits"),
        ("calibrate", work / "digits", "digits"),
        ("info", "cifar10-beta1"),
        ("demo", "--out", work / "demo"),
    ]
    for line in lines:
        installed.run(*line)
    installed.serve("cifar10-beta1")
    return [*(str(line[0]) for line in lines), "serve"]


def store(load: float, base: Environment, first: float) -> None:
    """Write what the base takes to docs/install.json."""
    sizes = {"megabytes": base.megabytes, "seconds": base.seconds, "first": first}
    rounded = {name: round(value, 1) for name, value in sizes.items()}
    with replacing(ROOT / "docs" / "install.json") as file:
        file.write_text(json.dumps({"load": round(load, 2), "base": rounded}) + "\n", encoding="utf-8")


def report(installed: Environment, first: float, commands: list[str]) -> str:
    """Return the row of an environment."""
    name = f"`[{installed.extra}]`" if installed.extra else "base"
    numbers = f"{installed.megabytes:,.0f} | {installed.seconds:.0f} | {first:.1f}"
    return f"| {name} | {numbers} | {'yes' if installed.has('torch') else 'no'} | {', '.join(commands)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--keep", type=Path, help="Make everything in this folder and leave it there.")
    parser.add_argument("--write", action="store_true", help="Store what was measured in docs/install.json.")
    asked = parser.parse_args()
    keep, load = asked.keep, os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if keep is None else keep
        packages.check(*(built := packages.build(folder / "dist")))
        wheel = built[0]
        sizes = ", ".join(f"{each.name} {each.stat().st_size / 1e6:.1f} MB" for each in built)
        print(f"{sizes}\n", flush=True)
        print("| install | MB | seconds | first verdict, s | torch | commands that ran |")
        print("|---|---:|---:|---:|---|---|", flush=True)
        base = Environment.make("", folder / "base", wheel)
        first = base.run("examine", "everyday", SAMPLES / "everyday" / "jeans.jpg")
        if asked.write:
            store(load, base, first)
        commands = use_photos(base, folder / "work")
        print(report(base, first, commands), flush=True)
        if base.has("torch") or base.megabytes > LARGEST:
            sys.exit(f"The base has {base.megabytes:,.0f} MB, at most {LARGEST:g}, and must not have torch.")
        web = Environment.make("web", folder / "web", wheel)
        first = web.run("examine", "everyday", SAMPLES / "everyday" / "jeans.jpg")
        web.serve("waste")
        print(report(web, first, ["serve"]), flush=True)
        web.install(*FRAMES)
        web.use(TABLES.format(image=str(SAMPLES / "everyday" / "jeans.jpg")))
        everything = Environment.make("all,models", folder / "all", wheel)
        first = everything.run("examine", "everyday", SAMPLES / "everyday" / "jeans.jpg")
        print(report(everything, first, use_networks(everything, folder / "work")), flush=True)
        container.run(folder / "container")
        print("\nTables of pandas, polars and Arrow agree. The steps of the Dockerfile ran.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
