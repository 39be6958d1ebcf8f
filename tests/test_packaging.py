"""A wheel has every file of the package."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_file_that_is_no_code_is_package_data() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = {
        file
        for package, patterns in project["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for file in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    files = {
        file for file in (ROOT / "candid").rglob("*") if file.is_file() and "__pycache__" not in file.parts
    }
    assert not {file for file in files - packaged if file.suffix != ".py"}
