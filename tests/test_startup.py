"""What starts without torch: ``import candid``, help, and the answer to a mistake."""

import pkgutil
import subprocess
import sys

import pytest

import candid

HEAVY = {"torch", "numpy", "matplotlib", "scipy", "sklearn", "PIL", "lightning_fabric", "safetensors"}
COMMAND_LINE = """
import sys
from candid.cli.app import main
try:
    main()
except SystemExit as end:
    code = end.code or 0
print(f"\\n{code}", *sys.modules)
"""
EACH_FIRST = """
import importlib, sys
for name in sys.argv[1:]:
    for module in [m for m in sys.modules if m.split(".")[0] == "candid"]:
        del sys.modules[module]
    if name.startswith("candid."):
        importlib.import_module(name)
    else:
        getattr(importlib.import_module("candid"), name)
    print(name)
"""


def last_line(code: str, *arguments: object) -> list[str]:
    """The words of the last line that ``code`` prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((), 0),
        (("--help",), 0),
        (("--version",), 0),
        (("info", "--help"), 0),
        (("import", "--help"), 0),
        (("train", "--help"), 0),
        (("demo", "--help"), 0),
        (("--vresion",), 2),
        (("train", "--epoch", "3"), 2),
        (("train", "--epochs", "three"), 2),
        (("train",), 2),
        (("train", "--resume"), 2),
        (("import", "weights.pt", "--out", __file__), 2),
    ],
)
def test_help_and_mistakes_import_nothing_heavy(arguments: tuple[str, ...], code: int) -> None:
    found, *modules = last_line(COMMAND_LINE, *arguments)
    assert int(found) == code
    assert "candid.cli.app" in modules and not HEAVY & set(modules)


def test_the_version_and_the_errors_import_nothing_heavy() -> None:
    modules = last_line(
        "import sys, candid; candid.__version__, candid.CheckpointError; dir(candid); print(*sys.modules)"
    )
    assert "candid" in modules and not HEAVY & set(modules)


def test_every_public_name_and_every_module_can_come_first() -> None:
    modules = [module.name for module in pkgutil.walk_packages(candid.__path__, "candid.")]
    assert {"candid.cli.app", "candid.models.flow.reversible"} < set(modules)
    assert last_line(EACH_FIRST, *candid.__all__, *modules)[-1] == modules[-1]


def test_star_brings_every_public_name() -> None:
    names = last_line("from candid import *; print(*globals())")
    assert set(candid.__all__) <= set(names)


def test_dir_lists_every_public_name_before_it_is_used() -> None:
    assert set(candid.__all__) <= set(last_line("import candid; print(*dir(candid))"))


def test_submodules_of_public_names_are_there_and_none_has_a_public_name() -> None:
    assert last_line("import candid; print(candid.models.flow.Invertible.__name__)") == ["Invertible"]
    assert not set(candid.__all__) & {module.name for module in pkgutil.iter_modules(candid.__path__)}


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(AttributeError, match="'candid' has no attribute 'laod'"):
        candid.laod  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="laod"):
        from candid import laod  # type: ignore[attr-defined]  # noqa: F401
