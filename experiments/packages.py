"""Build both distributions, wheel and sdist, and check what is in them.

    python -m experiments.packages FOLDER

``candid-vision`` has the code and the photo models; ``candid-vision-models`` has the pixel models, which a
checkout has in the same place. Both wheels put their files into ``candid/models/zoo``. Needs the package
``build`` (extra ``docs``) and the package index. ``make check`` installs these wheels.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("candid", "pyproject.toml", "README.md", "LICENSE")
ZOO = Path("candid", "models", "zoo")
LARGEST = 25.0
"""The most MB of the wheel of candid-vision."""


def models() -> list[str]:
    """Return the names of the models that are in the second distribution."""
    project = tomllib.loads((ROOT / "packages" / "models" / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["candid.models.zoo"]
    return sorted({file.parent.name for pattern in patterns for file in (ROOT / ZOO).glob(pattern)})


def staged(folder: Path) -> tuple[Path, Path]:
    """Copy the sources of both distributions, without leftovers of builds, and return their folders."""
    first, second = folder / "candid-vision", folder / "candid-vision-models"
    first.mkdir(parents=True)
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, first / name, ignore=skip)
        else:
            shutil.copy(ROOT / name, first / name)
    shutil.copytree(ROOT / "packages" / "models", second, ignore=skip)
    shutil.copy(ROOT / "LICENSE", second)
    for name in models():
        shutil.copytree(ROOT / ZOO / name, second / ZOO / name)
    return first, second


def build(folder: Path) -> tuple[Path, Path]:
    """Build both distributions into ``folder`` and return their wheels."""
    with tempfile.TemporaryDirectory() as work:
        for source in staged(Path(work)):
            # the wheel is built from the sdist: so that one is whole, too
            command = [sys.executable, "-m", "build", "--outdir", str(folder), str(source)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (first,) = folder.glob("candid_vision-*.whl")
    (second,) = folder.glob("candid_vision_models-*.whl")
    return first, second


def check(first: Path, second: Path) -> None:
    """Exit unless the wheels have every file once, and the first one is small."""
    has, has_models = (set(zipfile.ZipFile(wheel).namelist()) for wheel in (first, second))
    for wheel in (first, second):
        sdist = next(wheel.parent.glob(f"{'-'.join(wheel.name.split('-')[:2])}.tar.gz"))
        with tarfile.open(sdist) as archive:
            kept = {name.partition("/")[2] for name in archive.getnames()}
        if (
            missing := {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
            - kept
        ):
            sys.exit(f"{sdist.name} lacks {sorted(missing)[:5]}")
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "candid").rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    if missing := expected - has - has_models:
        sys.exit(f"Neither wheel has {sorted(missing)[:5]}: add them to package-data in pyproject.toml.")
    if twice := {name for name in has & has_models if ".dist-info/" not in name}:
        sys.exit(f"Both wheels have {sorted(twice)[:5]}.")
    if first.stat().st_size > LARGEST * 1e6:
        sys.exit(f"{first.name} has {first.stat().st_size / 1e6:.1f} MB, at most {LARGEST:g}.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="Where to put the files.")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    check(*build(folder))
    for file in sorted(folder.iterdir()):
        print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
