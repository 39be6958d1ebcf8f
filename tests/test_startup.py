"""What commands load: help and mistakes no torch, an examination neither training nor figures."""

import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import candid
from candid.cli.app import COMMANDS

HEAVY = {"torch", "numpy", "matplotlib", "scipy", "sklearn", "PIL", "lightning_fabric", "safetensors"}
COMMAND_LINES = """
import json, sys
from candid.cli.app import main
codes = []
for line in json.loads(sys.argv[1]):
    sys.argv = ["candid", *line]
    try:
        main()
    except SystemExit as end:
        codes.append(end.code or 0)
print()
print(json.dumps([codes, list(sys.modules)]))
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


def command_lines(lines: list[list[str]]) -> tuple[list[int], set[str]]:
    """Run commands one after the other in a new process; return exit codes and all loaded modules."""
    command = [sys.executable, "-c", COMMAND_LINES, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    codes, modules = json.loads(done.stdout.splitlines()[-1])
    return codes, set(modules)


def last_line(code: str, *arguments: object) -> list[str]:
    """The words of the last line that ``code`` prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1].split()


MISTAKES = (
    ["--vresion"],
    ["exmaine"],
    ["train", "--epoch", "3"],
    ["train", "--epochs", "three"],
    ["train"],
    ["train", "--resume"],
    ["examine", "model"],
    ["examine", "model", "image.png", "--novelty", "2"],
    ["import", "weights.pt", "--out", __file__],
)
HELP = ([], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS))


def test_help_and_mistakes_import_nothing_heavy() -> None:
    """All in one process: what one of them had loaded would be there at its end."""
    lines = [*HELP, ["models"], ["models", "cifar10-beta1"], *MISTAKES]
    codes, modules = command_lines(lines)
    assert codes == [0] * (len(HELP) + 2) + [2] * len(MISTAKES), list(zip(lines, codes, strict=True))
    assert "candid.cli.app" in modules and not HEAVY & modules


def test_examine_loads_neither_training_nor_compiler_nor_figures(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "black.png")
    line = ["examine", "cifar10-beta1", str(tmp_path / "black.png")]
    codes, modules = command_lines([line, [*line, "--json"]])
    assert codes == [0, 0] and "torch" in modules
    assert not {"lightning_fabric", "torch._dynamo", "sympy", "scipy", "matplotlib"} & modules
    assert not {name for name in modules if name.startswith(("candid.training", "candid.reports"))}


def test_the_version_and_the_errors_import_nothing_heavy() -> None:
    modules = last_line(
        "import sys, candid; candid.__version__, candid.CheckpointError; dir(candid); print(*sys.modules)"
    )
    assert "candid" in modules and not HEAVY & set(modules)


def test_every_public_name_and_every_package_can_come_first() -> None:
    """Modules inside a package can, too: tests/test_storeys.py finds no cycle of imports."""
    modules = [each.name for each in pkgutil.walk_packages(candid.__path__, "candid.") if each.ispkg]
    assert {"candid.cli", "candid.models.flow"} < set(modules)
    assert last_line(EACH_FIRST, *candid.__all__, *modules)[-1] == modules[-1]


def test_star_brings_every_public_name() -> None:
    names = last_line("from candid import *; print(*globals())")
    assert set(candid.__all__) <= set(names)


def test_dir_lists_every_public_name_before_it_is_used() -> None:
    assert set(candid.__all__) <= set(last_line("import candid; print(*dir(candid))"))


def test_no_public_name_is_a_package_or_module() -> None:
    assert not set(candid.__all__) & {module.name for module in pkgutil.iter_modules(candid.__path__)}


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(AttributeError, match="'candid' has no attribute 'laod'"):
        candid.laod  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="laod"):
        from candid import laod  # type: ignore[attr-defined]  # noqa: F401


def test_every_public_name_is_documented() -> None:
    for name in set(candid.__all__) - {"PRESETS", "__version__"}:
        value = getattr(candid, name)
        text = inspect.getdoc(value) or ""
        shown = ">>>" in text or ":func:`candid." in text  # a result's example stands at its function
        assert text and shown, f"{name} has no example"
        if inspect.isfunction(value):
            assert "Args:" in text and "Returns:" in text, name
