"""The storeys of the package: who may import whom (imports inside functions included), and no cycles."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import candid

ROOT = Path(candid.__file__).parent
STOREYS = (
    {"_support"},
    {"data"},
    {"models"},
    {"inference"},
    {"trust"},
    {"evaluation", "explanations", "robustness", "training"},
    {"reports"},
    {"serve"},
    {"cli"},
)
LEVEL = {package: level for level, packages in enumerate(STOREYS) for package in packages}
FRONT = {"__init__.py", "__main__.py", "py.typed"}


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in ROOT.rglob("*.py")}


def imports(file: Path) -> Iterator[tuple[str, int]]:
    """Every module of the package that ``file`` imports, anywhere, with the line; types alone included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            inner = [f"{base}.{alias.name}" for alias in node.names]
            names = [each if each in MODULES else base for each in inner]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.split(".")[0] == "candid")


def package_of(module: str) -> str:
    return [*module.split("."), ""][1]


def test_there_are_twelve_packages_and_the_front_door() -> None:
    entries = {path.name for path in ROOT.iterdir() if path.name != "__pycache__"}
    assert entries == set(LEVEL) | FRONT


def test_a_package_imports_only_those_above_it() -> None:
    wrong = [
        f"{module}:{line} imports {target}"
        for module, file in MODULES.items()
        if package_of(module) in LEVEL
        for target, line in imports(file)
        if package_of(target) != package_of(module)
        if target == "candid" or LEVEL[package_of(target)] >= LEVEL[package_of(module)]
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_no_module_imports_itself_through_others() -> None:
    inside = {
        module: {target for target, _ in imports(file) if target in MODULES} - {module}
        for module, file in MODULES.items()
        if module != "candid"
    }
    TopologicalSorter(inside).prepare()  # raises CycleError with the cycle
