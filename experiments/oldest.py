"""Run the fast half of the tests with the oldest versions that ``pyproject.toml`` promises.

    python -m experiments.oldest [--keep FOLDER] [--torch VERSION] [TEST ...]

It makes an environment in which every package that Candid names has exactly its lowest version, and runs the
tests of arrays, data, models, judging and serving there. It needs the package index and about ten minutes.
torch has the version of ``constraints.txt`` unless ``--torch`` names its lowest one: builds of old versions
may bring several GB of libraries for graphics cards.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ("paper", "shards", "web", "export", "hub", "bulk")
"""Extras that the tests below use."""
TOOLS = ("httpx", "hypothesis", "pytest", "schemathesis", "mpmath", "FrEIA")
"""What tests need themselves; users don't get it, so these have the versions of ``constraints.txt``."""
TESTS = tuple(
    f"tests/{room}" for room in ("_support", "trust", "data", "models", "inference", "judging", "serve")
)
PAGES = "--ignore-glob=*_page.py"
"""They need a browser."""
LATER = "--deselect=tests/serve/test_guard.py::test_the_framework_reports_nothing"
"""Of later versions of FastAPI: earlier ones can't report anything."""
FLOOR = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?>=([0-9][0-9A-Za-z.]*)")


def floors(requirements: Iterable[str]) -> dict[str, str]:
    """Return the lowest version of each package.

    >>> floors(["numpy>=2.0", "candid-vision-models"])
    {'numpy': '2.0'}
    """
    found = (FLOOR.fullmatch(each.strip()) for each in requirements)
    return {each[1]: each[2] for each in found if each}


def promised() -> dict[str, str]:
    """Return the lowest version of each package that Candid names, without those for tests and pages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return floors([*project["dependencies"], *(each for extra in EXTRAS for each in extras[extra])])


def tested() -> dict[str, str]:
    """Return the versions of ``constraints.txt``."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def make(folder: Path, torch: str) -> Path:
    """Make the environment and return its interpreter."""
    versions = {**promised(), **{name: tested()[name] for name in TOOLS}, "torch": torch}
    wanted = [f"{name}=={version}" for name, version in versions.items()]
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", ROOT], check=True)
    print("\n".join(sorted(wanted)), flush=True)
    return python


def run(python: Path, tests: Iterable[str]) -> int:
    """Run tests; warnings are none of their failures, since old packages warn of Python's news."""
    words = ("-m", "not slow", "-o", "filterwarnings=ignore", "-p", "no:cacheprovider", PAGES, LATER)
    command = [str(python), "-m", "pytest", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, *tests], cwd=ROOT, env=environment).returncode


def main() -> int:
    """Make the environment, and run the tests in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--keep", type=Path, help="Make the environment in this folder and leave it there.")
    parser.add_argument("--torch", default=tested()["torch"], help="The version of torch.")
    parser.add_argument("tests", nargs="*", default=TESTS, help="Other tests.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary) / "oldest"
        python = folder / "bin" / "python"
        return run(python if python.exists() else make(folder, asked.torch), asked.tests)


if __name__ == "__main__":
    sys.exit(main())
