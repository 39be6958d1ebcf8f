"""The models that come with the package: whole, small, calibrated, and as their cards say."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_images

import candid
from candid import CandidError, CheckpointError
from candid._support.numbers import Array, softmax
from candid.explanations.similarity import similarity
from candid.judging.held_out import HeldOut
from candid.models import zoo
from candid.models.checkpoint import sealed
from candid.models.hub import FREE, licence_of
from candid.models.protocol import require
from candid.models.zoo import as_markdown, as_readme
from tests.helpers import candid_command

MODELS = zoo.names()
PHOTOS = {"everyday": 1000, "bloodcells": 330, "clothing": 341, "waste": 251}
"""Bundled models of photos, and how many photos each has held out."""
GENERATIVE = [name for name in MODELS if zoo.card(name)["kind"] == "generative"]


def photos(size: int = 32) -> Array:
    """Two square photos, cut from scikit-learn's."""
    images = np.stack(load_sample_images().images)
    return images[:, 100 : 100 + size, 200 : 200 + size].transpose(0, 3, 1, 2) / np.float32(255)


@pytest.mark.parametrize("name", MODELS)
def test_a_bundled_model_loads_by_its_name(name: str) -> None:
    model = candid.load(name)
    logits = model.outputs(photos(model.image_shape[1])).logits
    assert np.isfinite(logits).all()
    assert np.allclose(softmax(logits).sum(1), 1)
    held_out = HeldOut.of(model)
    images = PHOTOS.get(name, 487 if name == "tiny20" else 1000)
    assert held_out is not None and len(held_out) == images
    if name not in PHOTOS:
        data = "tiny20" if name == "tiny20" else "cifar-10-batches-bin"
        assert Path(model.record.config["data"]).parts == (data,)


@pytest.mark.parametrize("name", GENERATIVE)
def test_the_distances_of_classes_are_measured(name: str) -> None:
    found = similarity(candid.load(name), order="given")
    assert not found.of_means and found.measured is not None


@pytest.mark.parametrize("name", MODELS)
def test_no_file_is_larger_than_eight_megabytes(name: str) -> None:
    assert all(file.stat().st_size <= 8_000_000 for file in (zoo.FOLDER / name).iterdir())


@pytest.mark.parametrize("name", GENERATIVE)
def test_a_bundled_model_still_inverts_in_double_precision(name: str) -> None:
    model = candid.load(name).double()
    x = torch.from_numpy(photos(model.image_shape[1])).double()
    with torch.inference_mode():
        assert (model.invert(model.latent(x)) - x).abs().max() < 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_a_card_says_what_the_model_is_and_how_it_did(name: str) -> None:
    card = zoo.card(name)
    model = candid.load(name)
    assert card["classes"] == list(model.class_names)
    weights = sum(array.size for array in model.state().values())
    assert card["parameters"] == (weights if name in PHOTOS else model.size)
    assert card["bytes"] == sum(file.stat().st_size for file in (zoo.FOLDER / name).glob("*.safetensors"))
    assert 0 < card["figures"]["accuracy"] < 1
    assert ("bits_per_dim" in card["figures"]) == (card["kind"] == "generative")
    assert all(card[part] for part in ("data", "training", "storage", "limits", "not_for", "more_figures"))
    assert (zoo.FOLDER / name / "README.md").read_text(encoding="utf-8") == as_readme(card)


@pytest.mark.parametrize("name", MODELS)
def test_a_card_begins_with_what_the_hub_reads(name: str) -> None:
    yaml = pytest.importorskip("yaml")
    text = (zoo.FOLDER / name / "README.md").read_text(encoding="utf-8")
    _, head, body = text.split("---\n", 2)
    assert body.lstrip().startswith(f"# {name}\n") and as_markdown(zoo.card(name)) == body[1:]
    found = yaml.safe_load(head)
    assert found["license"] in FREE and licence_of(text) == found["license"]
    assert (found["library_name"], found["pipeline_tag"]) == ("candid-vision", "image-classification")
    ((model,), accuracy) = found["model-index"], zoo.card(name)["figures"]["accuracy"]
    (result,) = model["results"]
    assert model["name"] == name and result["task"]["type"] == "image-classification"
    assert result["dataset"].keys() == {"name", "type"}
    assert result["metrics"] == [{"type": "accuracy", "value": pytest.approx(accuracy, abs=1e-4)}]


ABILITIES = {
    "generative": {"geometry", "mixture", "invert", "class maps", "gradients", "density", "network"},
    "resnet": {"gradients", "network"},
    "photo": {"geometry", "class maps", "gradients", "teach", "density", "eye", "whitening", "known photos"},
    "adopted": {"class maps", "gradients", "density", "eye", "whitening"},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_bundled_model_says_what_it_can(name: str) -> None:
    model = candid.load(name, held_out=False)
    assert model.can == ABILITIES[model.kind]
    assert ("density" in model.can) == (model.density_of is not None)
    classes = len(model.class_names)
    assert model.log_priors.shape == (classes,) and np.exp(model.log_priors).sum() == pytest.approx(1)
    if "geometry" not in model.can:
        with pytest.raises(
            CandidError, match="A decision plane can't come from an? (ResNet|adopted model), which"
        ):
            require(model, "geometry", "A decision plane")
        return
    assert require(model, "geometry", "A decision plane") is model
    some = np.array([2, 0])
    geometry, distances = model.geometry, model.geometry.distances()
    assert not geometry.planar and np.allclose(geometry.log_priors, model.log_priors)
    means = geometry.means(some)
    assert means.dtype == distances.dtype == np.float64 and distances.shape == (classes, classes)
    assert np.array_equal(means, geometry.means()[some])
    assert np.linalg.norm(means[0] - means[1]) == pytest.approx(distances[2, 0], rel=1e-6)


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
    assert isinstance(candid.load("cifar10-beta1"), candid.ResNet)


def test_a_bundled_model_is_not_calibrated_anew() -> None:
    done = candid_command("calibrate", "cifar10-beta1", "digits")
    assert isinstance(done.exception, CheckpointError) and "comes with candid" in str(done.exception)


def test_examine_gives_verdicts_at_once(tmp_path: Path) -> None:
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
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
        ("temperature", np.array(0.0), "temperature is 0"),
        ("temperature", np.array(-1.0), "temperature is -1"),
        ("temperature", np.array(math.nan), "temperature is nan"),
        ("temperature", np.ones(3), "scalar"),
        ("statistic.predicted", np.array(3), "'predicted' is"),
        ("statistic.predicted", np.full(1000, 10), "none of the 10"),
        ("statistic.complexity", np.zeros((7, 3)), r"'complexity' has the shape \(7, 3\)"),
        ("statistic.max_logit", np.ones(1000, bool), "'max_logit' is not made of numbers"),
        ("statistic.max_logit", np.full(1000, math.nan), "'max_logit' is not made of numbers"),
    ],
)
def test_malformed_held_out_scores_give_one_sentence(key: str, value: Array, reason: str) -> None:
    model = candid.load("cifar10-resnet")
    model.held_out[key] = value
    with pytest.raises(candid.CandidError, match=f"{reason}.*calibrate it again"):
        HeldOut.of(model)
