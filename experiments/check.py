"""Install Candid into new environments, without and with its extras, and use it there.

    python -m experiments.check [--keep FOLDER]

Needs the package index and about ten minutes; ``make check`` runs it. It prints a table: the size of each
environment, the seconds that the installation and the first verdict took, and which commands ran.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = ("candid", "pyproject.toml", "README.md", "LICENSE")
SAMPLES = ROOT / "candid" / "reports" / "demo" / "samples"
PHOTOS = 12
"""Photos of each class that a model is trained with."""
LARGEST = 640.0
"""The most MB of a base installation."""


class Environment(NamedTuple):
    """A new environment in which Candid is installed."""

    extra: str
    folder: Path
    seconds: float
    """How long the installation took."""

    @classmethod
    def make(cls, extra: str, folder: Path, source: Path) -> "Environment":
        """Install the sources with an extra, or the base alone."""
        venv.create(folder, with_pip=True)
        target = f"{source}[{extra}]" if extra else str(source)
        start = time.monotonic()
        constraints = str(ROOT / "constraints.txt")
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--constraint", constraints, target]
        subprocess.run(pip, check=True, cwd=folder)
        return cls(extra, folder, time.monotonic() - start)

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
        if done.returncode:
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


def report(installed: Environment, first: float, commands: list[str]) -> str:
    """Return the row of an environment."""
    name = f"`[{installed.extra}]`" if installed.extra else "base"
    numbers = f"{installed.megabytes:,.0f} | {installed.seconds:.0f} | {first:.1f}"
    return f"| {name} | {numbers} | {'yes' if installed.has('torch') else 'no'} | {', '.join(commands)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--keep", type=Path, help="Make everything in this folder and leave it there.")
    keep = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if keep is None else keep
        source = folder / "source"
        source.mkdir(parents=True)
        for name in SOURCES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, source / name)
        print("| install | MB | seconds | first verdict, s | torch | commands that ran |")
        print("|---|---:|---:|---:|---|---|", flush=True)
        base = Environment.make("", folder / "base", source)
        first = base.run("examine", "everyday", SAMPLES / "everyday" / "jeans.jpg")
        commands = use_photos(base, folder / "work")
        print(report(base, first, commands), flush=True)
        if base.has("torch") or base.megabytes > LARGEST:
            sys.exit(f"The base has {base.megabytes:,.0f} MB, at most {LARGEST:g}, and must not have torch.")
        web = Environment.make("web", folder / "web", source)
        first = web.run("examine", "everyday", SAMPLES / "everyday" / "jeans.jpg")
        web.serve("waste")
        print(report(web, first, ["serve"]), flush=True)
        everything = Environment.make("all", folder / "all", source)
        first = everything.run("examine", "everyday", SAMPLES / "everyday" / "jeans.jpg")
        print(report(everything, first, use_networks(everything, folder / "work")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
