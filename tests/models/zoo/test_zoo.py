"""The models that come with the package: whole, small, calibrated, and as their cards say."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_sample_images

import candid
from candid import CandidError, CheckpointError
from candid.models import zoo
from candid.models.model_files import sealed
from candid.models.zoo.cards import as_markdown
from candid.trust.judge import HeldOut
from tests.helpers import candid_command

MODELS = zoo.names()
PHOTOS = {"everyday": 1000, "bloodcells": 333, "clothing": 341, "waste": 256}
"""Bundled models of photos, and how many photos each has held out."""
GENERATIVE = [name for name in MODELS if zoo.card(name)["kind"] == "generative"]


def photos(size: int = 32) -> torch.Tensor:
    """Two square photos, cut from scikit-learn's."""
    images = torch.stack([torch.from_numpy(image.copy()) for image in load_sample_images().images])
    return images[:, 100 : 100 + size, 200 : 200 + size].permute(0, 3, 1, 2) / 255


@pytest.mark.parametrize("name", MODELS)
def test_a_bundled_model_loads_by_its_name(name: str) -> None:
    model = candid.load_any(name)
    posterior = model.posterior(photos(model.image_shape[1]))
    assert torch.allclose(posterior.sum(1), torch.ones(2))
    held_out = HeldOut.of(model)
    images = PHOTOS.get(name, 487 if name == "tiny20" else 1000)
    assert held_out is not None and len(held_out) == images
    if name not in PHOTOS:
        data = "tiny20" if name == "tiny20" else "cifar-10-batches-bin"
        assert Path(model.record.config["data"]).parts == (data,)


@pytest.mark.parametrize("name", MODELS)
def test_no_file_is_larger_than_eight_megabytes(name: str) -> None:
    assert all(file.stat().st_size <= 8_000_000 for file in (zoo.FOLDER / name).iterdir())


@pytest.mark.parametrize("name", GENERATIVE)
def test_a_bundled_model_still_inverts_in_double_precision(name: str) -> None:
    model = candid.load(name).double()
    x = photos(model.image_shape[1]).double()
    with torch.inference_mode():
        assert (model.invert(model.latent(x)) - x).abs().max() < 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_a_card_says_what_the_model_is_and_how_it_did(name: str) -> None:
    card = zoo.card(name)
    model = candid.load_any(name)
    assert card["classes"] == list(model.class_names)
    numbers = model.state_dict().values() if name in PHOTOS else model.parameters()
    assert card["parameters"] == sum(each.numel() for each in numbers)
    assert card["bytes"] == sum(file.stat().st_size for file in (zoo.FOLDER / name).glob("*.safetensors"))
    assert 0 < card["figures"]["accuracy"] < 1
    assert ("bits_per_dim" in card["figures"]) == (card["kind"] == "generative")
    assert all(card[part] for part in ("data", "training", "storage", "limits", "not_for", "more_figures"))
    assert (zoo.FOLDER / name / "README.md").read_text(encoding="utf-8") == as_markdown(card)


def test_the_command_lists_models_and_shows_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    listed = candid_command("models").output
    assert all(name in listed for name in MODELS)
    cards = json.loads(candid_command("models", "--json").stdout)
    assert [card["name"] for card in cards] == MODELS
    assert json.loads(candid_command("models", MODELS[0], "--json").stdout) == cards[0]
    shown = candid_command("models", "cifar10-beta1").output
    assert "Not to be used for" in shown and "bits/dim" in shown


def test_a_name_that_is_none_gets_a_hint() -> None:
    with pytest.raises(CandidError, match="did you mean 'cifar10-beta1'"):
        zoo.card("cifar10-bet1")
    with pytest.raises(CheckpointError, match="did you mean 'cifar10-beta1'"):
        candid.load("cifar10-beta-1")


def test_a_folder_of_ones_own_comes_before_a_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(zoo.FOLDER / "cifar10-resnet", "cifar10-beta1")
    assert isinstance(candid.load_any("cifar10-beta1"), candid.ResNet)


def test_a_bundled_model_is_not_calibrated_anew() -> None:
    done = candid_command("calibrate", "cifar10-beta1", "digits")
    assert isinstance(done.exception, CheckpointError) and "comes with candid" in str(done.exception)


def test_examine_gives_verdicts_at_once(tmp_path: Path) -> None:
    from PIL import Image

    noise = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8)
    Image.fromarray(noise.numpy()).save(tmp_path / "noise.png")
    done = candid_command("examine", "cifar10-beta1", str(tmp_path / "noise.png"), "--json")
    assert json.loads(done.stdout)["verdict"] == "novel"


@pytest.mark.parametrize("name", zoo.names())
def test_every_bundled_model_carries_digests_and_fitted_detectors(name: str) -> None:
    record = json.loads((zoo.FOLDER / name / "model.json").read_text(encoding="utf-8"))
    assert record == sealed(record) and {"sha256"} < record["weights"].keys()
    held_out = HeldOut.of(candid.load(name))
    assert held_out is not None and held_out.fits


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("temperature", torch.tensor(0.0), "temperature is 0"),
        ("temperature", torch.tensor(-1.0), "temperature is -1"),
        ("temperature", torch.tensor(math.nan), "temperature is nan"),
        ("temperature", torch.ones(3), "scalar"),
        ("statistic.predicted", torch.tensor(3), "'predicted' is"),
        ("statistic.predicted", torch.full((1000,), 10), "none of the 10"),
        ("statistic.complexity", torch.zeros(7, 3), r"'complexity' has the shape \(7, 3\)"),
        ("statistic.max_logit", torch.ones(1000, dtype=torch.bool), "'max_logit' is not made of numbers"),
        ("statistic.max_logit", torch.full((1000,), math.nan), "'max_logit' is not made of numbers"),
    ],
)
def test_malformed_held_out_scores_give_one_sentence(key: str, value: torch.Tensor, reason: str) -> None:
    model = candid.load("cifar10-resnet")
    model.held_out[key] = value
    with pytest.raises(candid.CandidError, match=f"{reason}.*calibrate it again"):
        HeldOut.of(model)
