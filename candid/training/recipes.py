"""Recipes of training: find, read and write them as TOML."""

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from candid._support.errors import CandidError, did_you_mean
from candid._support.old_formats import renamed_options
from candid._support.options import build, from_dict, named_option, to_dict
from candid.data import FEATURES_FILE, PHOTO_SIDE, shards
from candid.data.formats import FORMATS, Query, format_of
from candid.models.flow.config import PRESETS, RECIPE_OF_PRESET, VECTOR
from candid.training.options import PhotoOptions, TrainOptions, VectorOptions

LOOKED_AT = 9
"""Images whose size decides what is trained."""
NETWORKS = ("preset", "baseline", "start", "model")
"""Options that name a network on pixels; a recipe does, too."""
ACCEPTED = {"workers"}
"""Options of networks that change nothing for photos, which two threads load."""


def load_options(recipe: str | Path | None = None, **flags: Any) -> TrainOptions:
    """Return the options of a recipe, overridden by the flags that are not None.

    Without a recipe, the preset's own is taken; without a preset, the one for the size of the images.

    >>> load_options(data="digits", beta=2.0).beta
    2.0
    """
    flags = {key: value for key, value in flags.items() if value is not None}
    if recipe is None:
        name = flags.get("preset") or preset_for(str(flags["data"]))
        if name not in PRESETS:
            raise CandidError(f"There is no preset '{name}': {did_you_mean(str(name), [*PRESETS, VECTOR])}")
        flags["preset"], recipe = name, RECIPE_OF_PRESET[name]
    values = renamed_options(read_toml(_file_of(recipe)))
    table = values.get("model", {})
    if not isinstance(table, dict):
        raise CandidError(f"'model' of the recipe '{recipe}' must be a table of the preset's keys.")
    values["model"] = {**table, **flags.pop("model", {})}
    from_dict(TrainOptions, {"data": "", **values})  # a wrong key of the recipe is named as such
    return build(TrainOptions, {**values, **flags})


def photo_options(
    given: Mapping[str, Any], recipe: str | Path | None = None, run: Path | None = None
) -> PhotoOptions | None:
    """Return the options of a training on photos; None if a network is to be trained on pixels.

    A folder of images of at least 96 pixels a side gets an eye, unless an option names a network, such as a
    preset or a recipe.

    Args:
        given: the options; those that are None are left out.
        recipe: the recipe.
        run: the folder of the run that is resumed, which has its own options.

    Raises:
        CandidError: if there is no such option, or if it is for networks and the images are photos.
    """
    given = {key: value for key, value in given.items() if value is not None and value != {}}
    known = {field.name for field in fields(PhotoOptions)}
    pixel = {field.name for field in fields(TrainOptions)}
    vector = {field.name for field in fields(VectorOptions)}
    for key in given:
        if key not in known | pixel | vector:
            raise CandidError(f"There is no option '{key}': {did_you_mean(key, known | pixel | vector)}")
        if key not in known | pixel:
            raise CandidError(f"{_shown(key)} is for a network on features: add {_shown('preset')} vector.")
    others = [key for key in given if key not in known | ACCEPTED]
    own = {key: value for key, value in given.items() if key in known}
    if run is not None:
        recorded = read_toml(run / "config.toml") if (run / "config.toml").is_file() else {}
        if "eye" in recorded and others:
            raise CandidError(_only_pixels(others[0], "leave it out."))
        return from_dict(PhotoOptions, {**recorded, **own}) if "eye" in recorded else None
    if "eye" in given:
        if others or recipe is not None:
            remedy = f"leave it or {_shown('eye')} out."
            raise CandidError(_only_pixels([*others, "recipe"][0], remedy))
    elif network_named_by(given, recipe) is not None or not are_photos(str(given["data"])):
        return None
    elif others:
        remedy = f"leave it out, or add {_shown('preset')} to train one on these photos."
        raise CandidError(_only_pixels(others[0], remedy))
    return build(PhotoOptions, own)


def vector_options(
    given: Mapping[str, Any], recipe: str | Path | None = None, run: Path | None = None
) -> VectorOptions | None:
    """Return the options of a training on features; None if something else is to be trained.

    Args:
        given: the options; those that are None are left out.
        recipe: the recipe.
        run: the folder of the run that is resumed, which has its own options.

    Raises:
        CandidError: if an option is for other models.
    """
    given = {key: value for key, value in given.items() if value is not None and value != {}}
    if run is not None:
        recorded = read_toml(run / "config.toml") if (run / "config.toml").is_file() else {}
        return from_dict(VectorOptions, {**recorded, **given}) if recorded.get("preset") == VECTOR else None
    if given.get("preset", VECTOR if str(given["data"]).endswith(FEATURES_FILE) else None) != VECTOR:
        return None
    known = {field.name for field in fields(VectorOptions)}
    for key in [*given, *(["recipe"] if recipe is not None else [])]:
        if key not in known | ACCEPTED:
            raise CandidError(f"{_shown(key)} is no option of {named_option('preset')} vector: leave it out.")
    return build(VectorOptions, {key: value for key, value in given.items() if key in known})


def network_named_by(given: Mapping[str, Any], recipe: str | Path | None = None) -> str | None:
    """Return the option that asks for a network on pixels; None if there is none."""
    if recipe is not None:
        return _shown("recipe")
    return next((_shown(key) for key in NETWORKS if given.get(key) not in (None, {}, False)), None)


def are_photos(data: str) -> bool:
    """Return whether the images are large enough for an eye."""
    return (smallest_side(data) or 0) >= PHOTO_SIDE


def _shown(key: str) -> str:
    return "'model' (--set)" if key == "model" else named_option(key)


def _only_pixels(key: str, remedy: str) -> str:
    return f"{_shown(key)} is for networks that are trained on pixels: {remedy}"


def smallest_side(data: str) -> int | None:
    """Return the shorter side, in pixels, of most images in a folder or in tar shards; None of other data.

    A few images are looked at, so that one that is broken or unusually small does not decide.
    """
    format = format_of(data)
    if format is FORMATS["tar shards"]:
        return shards.first_side(data)
    if format is not FORMATS["image folder"] or format.read is None:
        return None
    try:
        opened = next(iter(format.read(Query(data)).parts.values()))()
    except CandidError:
        return None  # opening the data says what is wrong
    few = opened.subsample(LOOKED_AT)
    sizes = (few.subset(np.array([i])).image_size() for i in range(len(few)))
    sides = sorted(min(size) for size in sizes if size is not None)
    return sides[len(sides) // 2] if sides else None


def preset_for(data: str) -> str:
    """Return the preset for the size of the images: digits, cifar or tiny."""
    side = smallest_side(data)
    return "digits" if side is None or side < 20 else "cifar" if side < 48 else "tiny"


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


def write_toml(options: TrainOptions | PhotoOptions | VectorOptions) -> str:
    """Return ``options`` as TOML; those that are None are left out."""
    return tomli_w.dumps({key: value for key, value in to_dict(options).items() if value is not None})
