"""Write docs/licences.md: the licence of every package that Candid needs, and of all weights it comes with.

    python -m experiments.licences [--check]

Licences of packages are those of their own metadata, in the environment that runs this; it needs all extras.
"""

import argparse
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from candid.models.photo.eyes import EYES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
EXTRAS = ("paper", "shards", "web", "eyes", "export", "hub", "bulk", "tensorboard")
"""Extras for users; those for tests and pages are not installed with Candid."""
UNKNOWN = ("", "UNKNOWN")
PHOTO_MODELS = ("everyday", "clothing", "waste", "bloodcells")
WEIGHTS = {canonicalize_name(eye.package): f"{eye.licence} (weights)" for eye in EYES.values()}
"""Packages whose metadata say nothing: their licence stands in the repository of their authors."""
HEAD = """# Licences

Candid itself is under the [MIT licence](../LICENSE). `python -m experiments.licences` writes this page
from the metadata of the installed packages; a test compares them.

## Packages

"base" is always installed, the others come with the extra of that name. Packages that only tests and pages
need are not listed. Binary packages contain more (pi-heif: libheif under the LGPL; numpy, torch, pillow:
libraries of their own); their licences are in the packages.

| package | comes with | licence |
|---|---|---|
"""
MODELS = """
## Weights and data

| what | comes with | licence |
|---|---|---|
"""


def licence_of(name: str) -> str:
    """Return the licence in the metadata of a package.

    >>> licence_of("httpx")
    'BSD-3-Clause'
    """
    found = metadata.metadata(name)
    stated = _entry(found, "License-Expression")
    classified = [
        each.split(" :: ")[-1] for each in found.get_all("Classifier") or [] if each.startswith("License ::")
    ]
    short = (_entry(found, "License").splitlines() or [""])[0]
    licence = stated or ", ".join(classified) or short
    return WEIGHTS.get(canonicalize_name(name), "unknown") if licence in UNKNOWN else licence


def _entry(found: metadata.PackageMetadata, key: str) -> str:
    return found[key].strip() if key in found else ""


def needed(requirements: list[str]) -> set[str]:
    """Return the packages that are installed for requirements, with all that these need."""
    found: set[str] = set()
    open_ones = [(Requirement(each), "") for each in requirements]
    while open_ones:
        requirement, extra = open_ones.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name in found and not requirement.extras:
            continue
        found.add(name)
        for each in metadata.requires(name) or ():
            open_ones += [(Requirement(each), part) for part in ("", *requirement.extras)]
    return found


def packages() -> dict[str, str]:
    """Return the packages of the base and of all extras, each with the first of these that brings it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    parts = {"base": project["dependencies"]}
    parts |= {extra: project["optional-dependencies"][extra] for extra in EXTRAS}
    found: dict[str, str] = {}
    for part, requirements in parts.items():
        for name in sorted(needed(requirements)):
            found.setdefault(name, part)
    return found


def page() -> str:
    """Return the page."""
    lines = [f"| {name} | {part} | {licence_of(name)} |\n" for name, part in sorted(packages().items())]
    weights = [
        f"| `{eye.name}`: {eye.source} | {canonicalize_name(eye.package)} | {eye.licence} |\n"
        for eye in EYES.values()
    ]
    weights += [
        f"| bundled models of photos: {', '.join(PHOTO_MODELS)} | base | MIT, on the weights of `lite0` |\n",
        "| bundled models of CIFAR-10 and Tiny ImageNet | candid-vision-models | MIT |\n",
        "| kinds of classes of WordNet | base | WordNet licence (`candid/data/WORDNET-LICENSE.txt`) |\n",
    ]
    return HEAD + "".join(lines) + MODELS + "".join(weights)


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="Only say whether the page is up to date.")
    if parser.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
