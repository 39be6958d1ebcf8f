"""Recipes of training: find, read and write them as TOML."""

import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from candid._support.config import build, from_dict, to_dict
from candid._support.errors import CandidError, did_you_mean
from candid.models.flow.presets import PRESETS, RECIPE_OF_PRESET
from candid.training.options import TrainOptions, renamed


def load_options(recipe: str | Path | None = None, **flags: Any) -> TrainOptions:
    """Return the options of a recipe, overridden by the flags that are not None.

    Without a recipe, the preset's own is taken; without a preset, the recipe ``digits``.

    >>> load_options(data="digits", beta=2.0).beta
    2.0
    """
    flags = {key: value for key, value in flags.items() if value is not None}
    if recipe is None:
        name = flags.get("preset", "digits")
        if name not in PRESETS:
            raise CandidError(f"There is no preset '{name}': {did_you_mean(str(name), PRESETS)}")
        recipe = RECIPE_OF_PRESET[name]
    values = renamed(read_toml(_file_of(recipe)))
    table = values.get("model", {})
    if not isinstance(table, dict):
        raise CandidError(f"'model' of the recipe '{recipe}' must be a table of the preset's keys.")
    values["model"] = {**table, **flags.pop("model", {})}
    from_dict(TrainOptions, {"data": "", **values})  # a wrong key of the recipe is named as such
    return build(TrainOptions, {**values, **flags})


def recipes() -> dict[str, Path]:
    """Return the recipes that come with candid, by name."""
    return {file.stem: file for file in sorted((Path(__file__).parent / "recipes").glob("*.toml"))}


def _file_of(recipe: str | Path) -> Path:
    bundled = recipes()
    if str(recipe) in bundled:
        return bundled[str(recipe)]
    path = Path(recipe)
    if not path.is_file():
        raise CandidError(f"There is no recipe '{recipe}': {did_you_mean(str(recipe), bundled)}")
    return path


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file, or raise one sentence on what is wrong with it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CandidError(f"'{path}' can't be read as TOML: {error}.") from error


def write_toml(options: TrainOptions) -> str:
    """Return ``options`` as TOML; those that are None are left out."""
    return tomli_w.dumps({key: value for key, value in to_dict(options).items() if value is not None})
