"""Recipes, flags, TOML, and what a resumed run may change."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from candid import CandidError
from candid._support.old_formats import renamed_options
from candid._support.options import from_dict
from candid.models.flow.config import PRESETS, RECIPE_OF_PRESET
from candid.training.options import PhotoOptions, TrainOptions
from candid.training.recipes import load_options, read_toml, recipes, write_toml
from candid.training.run_folder import state_digest


def test_every_recipe_is_a_configuration_and_every_preset_has_one() -> None:
    assert set(recipes()) == {"cifar10", "cifar10-quick", "digits", "imagenet", "tiny-imagenet", "tiny20"}
    assert set(RECIPE_OF_PRESET) == set(PRESETS)
    for name in recipes():
        assert load_options(name, data="somewhere").preset in PRESETS


def test_the_imagenet_recipe_is_the_papers() -> None:
    config = load_options("imagenet", data="somewhere")
    assert (config.optimiser, config.schedule, config.learning_rate) == ("sgd", "plateau", 0.07)
    assert (config.momentum, config.weight_decay, config.lr_decays, config.batch) == (0.9, 1e-4, 2, 6 * 64)
    assert (config.label_smoothing, config.clip, config.crop, config.flip) == (0.05, 8.0, "resized", True)
    assert config.means_rate == 1.0


def test_flags_win_over_the_recipe_and_the_preset_chooses_it(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('preset = "digits"\nepochs = 7\nbatch = 50\n[model]\nclamp = 1.5\nrank = 3\n')
    config = load_options(recipe, data="digits", batch=60, epochs=None, model={"rank": 4})
    assert (config.epochs, config.batch, config.model) == (7, 60, {"clamp": 1.5, "rank": 4})
    assert load_options(data="x", preset="cifar").preset == "cifar"
    assert load_options(data="x", preset="cifar").flip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epoch": 3}, "did you mean 'epochs'"),
        ({"epochs": 0}, "'epochs' must be at least 1"),
        ({"epochs": 2.5}, "'epochs' must be of type int"),
        ({"beta": -1.0}, "'beta' must be at least 0"),
        ({"beta": math.nan}, "'beta' must be a finite number"),
        ({"learning_rate": 0.0}, "'learning_rate' must be above 0"),
        ({"learning_rate": math.inf}, "'learning_rate' must be a finite number"),
        ({"label_smoothing": 1.5}, "'label_smoothing' must be"),
        ({"optimiser": "adam"}, "did you mean 'adamw'"),
        ({"preset": "imagnet"}, "did you mean 'imagenet'"),
        ({"model": {"blocs": [1]}}, "did you mean 'blocks'"),
        ({"model": {"height": 30}}, "multiples of"),
        ({"warmup": 0.95}, "'warmup' is a share"),
        ({"means_only": True}, "name it with --start"),
        ({"memory": "none"}, "'memory' can't be 'none'"),
        ({"momentum": 1.0}, "'momentum' must be at least 0 and below 1"),
        ({"model": {"classes": "abc"}}, "'classes' must be a whole number"),
        ({"data": "a\udcff"}, "bytes that are no text"),
    ],
)
def test_a_bad_key_stops_with_one_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CandidError, match=message) as caught:
        from_dict(TrainOptions, {"data": "digits", **values})
    assert "\n" not in str(caught.value)


def test_bad_recipes_are_named(tmp_path: Path) -> None:
    with pytest.raises(CandidError, match="did you mean 'cifar10'"):
        load_options("cifar01", data="x")
    (tmp_path / "flat.toml").write_text("model = 3")
    with pytest.raises(CandidError, match="must be a table"):
        load_options(tmp_path / "flat.toml", data="x")
    (tmp_path / "broken.toml").write_text("epochs = = 3")
    with pytest.raises(CandidError, match=r"broken.toml' can't be read as TOML"):
        load_options(tmp_path / "broken.toml", data="x")


@given(
    data=st.text(min_size=1),
    beta=st.one_of(st.just(math.inf), st.floats(0, 1e6)),
    rate=st.floats(1e-12, 1e3),
    blocks=st.lists(st.integers(1, 5), min_size=3, max_size=3),
)
def test_a_configuration_survives_toml(data: str, beta: float, rate: float, blocks: list[int]) -> None:
    config = TrainOptions(data=data, beta=beta, learning_rate=rate, model={"blocks": blocks, "entry": "none"})
    assert from_dict(TrainOptions, tomllib.loads(write_toml(config))) == config


def test_digests_of_options_are_those_of_earlier_versions() -> None:
    """However options are declared: a run of an earlier version can be resumed."""
    photos = PhotoOptions(data="photos", seed=3, only=("a", "b"))
    pixels = TrainOptions(data="digits", beta=2.0, seed=3)
    assert state_digest(photos.deciding()).startswith("79aa13e2a3363fc036e3da7462b8c377")
    assert state_digest(pixels.deciding()).startswith("f210a8a7b3225886d55954f4b3c004e9")


def test_a_resumed_run_keeps_what_decides_its_result(tmp_path: Path) -> None:
    recorded = TrainOptions(data="digits", epochs=5)
    assert recorded.resumed({"epochs": 5, "workers": 7, "beta": None}).workers == 7
    with pytest.raises(CandidError, match="started with epochs = 5: it can't change"):
        recorded.resumed({"epochs": 6})
    with pytest.raises(CandidError, match="started with beta = 1.0"):
        recorded.resumed({"beta": 2.0})
    with pytest.raises(CandidError, match="started with workers = 2"):
        TrainOptions(data="train-{0..9}.tar").resumed({"workers": 3})
    changed = TrainOptions(data="digits", model={"blocks": [1, 1, 1], "clamp": 1.5})
    assert changed.resumed({"model": {"clamp": 1.5}}) == changed
    with pytest.raises(CandidError, match="started with model"):
        changed.resumed({"model": {"clamp": 1.0}})
    plateau = TrainOptions(data="digits", epochs=5, schedule="plateau")
    assert plateau.resumed({"epochs": 6}).epochs == 6
    (tmp_path / "config.toml").write_text(write_toml(recorded))
    assert from_dict(TrainOptions, read_toml(tmp_path / "config.toml")) == recorded


def test_recipes_of_older_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text('burn_in = 0.2\ncoolings = 3\naccumulate = 2\ncrop = "wobble"\n')
    options = load_options(tmp_path / "old.toml", data="digits")
    assert (options.warmup, options.lr_decays, options.grad_accumulation) == (0.2, 3, 2)
    assert options.crop == "jitter"
    assert renamed_options({"epochs": 3}) == {"epochs": 3}


def test_more_classes_than_the_model_has() -> None:
    config = TrainOptions(data="digits", model={"classes": 4})
    assert config.model_config(classes=3).classes == 4
    with pytest.raises(CandidError, match="10 classes, more than the model's 4"):
        config.model_config(classes=10)
