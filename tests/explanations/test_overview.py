"""`candid explain`: everything about a model, with and without real images."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cyclopts import CycloptsError
from PIL import Image

import candid
from candid import GenerativeClassifier, ResNet, ResNetConfig
from candid._support.errors import CandidError
from candid._support.numbers import softmax
from candid.data.datasets import open_dataset
from candid.data.images import to_float
from candid.data.splits import ArraySplit
from candid.explanations.explainer import Explainer
from candid.explanations.overview import explain as look_at
from candid.explanations.similarity import expected_uncertainty
from candid.judging.calibrate import calibrate
from candid.judging.examine import Examiner
from candid.models.flow.means import planar_model
from tests.helpers import candid_command, randomise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of digits, one with its means in a plane, and a ResNet; none is trained."""
    folder = tmp_path_factory.mktemp("models")
    model = randomise(GenerativeClassifier.from_preset("digits"), strength=0.05).eval()
    candid.save(model, folder / "own")
    candid.save(planar_model(model, [3, 1, 7]), folder / "planar")
    resnet = ResNetConfig(1, 8, 8, 10, blocks=(1, 1), widths=(4, 4), stem="3x3", mean=(0.3,), std=(0.38,))
    candid.save(ResNet(resnet, seed=0), folder / "resnet")
    return folder


def explain(*arguments: object) -> Any:
    return candid_command("explain", *arguments)


def test_the_command_draws_everything_and_prints_json(folder: Path, tmp_path: Path) -> None:
    done = explain(
        folder / "own", "--data", "digits", "--compare-with", folder / "resnet", "--group", "round=0,6,8,9",
        "--images", 2, "--pairs", 4, "--temperatures", "0,1", "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert json.loads((tmp_path / "out" / "explanation.json").read_text()) == found
    drawn = {Path(file).stem for file in found["figures"]}
    assert drawn == {
        *("similarity", "similarity_groups", "dct_basis", "mean_spread", "samples"),
        *("receptive_fields", "interpolation"),
    }
    for file in found["figures"]:
        with Image.open(file) as figure:
            assert min(figure.size) > 200
        assert Path(file).with_suffix(".svg").stat().st_size > 1000
    assert found["receptive_fields"].keys() == {"own", "resnet"}
    assert len(found["closest_pairs"]) == 4
    for pair in found["closest_pairs"]:
        assert pair["expected_uncertainty"] == pytest.approx(float(expected_uncertainty(pair["distance"])))
        assert 0 < pair["measured_uncertainty"] <= 0.5


def test_without_images_there_is_what_the_weights_say(folder: Path, tmp_path: Path) -> None:
    done = explain(folder / "own", "--classes", "1,7,4", "--order", "given", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "Closest classes" in done.stdout and "receptive" not in done.stdout
    assert "Measured on" not in done.stdout
    assert {file.stem for file in tmp_path.glob("*.png")} == {
        "similarity",
        "dct_basis",
        "mean_spread",
        "samples",
    }


def test_numbers_are_those_of_their_own_functions(folder: Path) -> None:
    model = candid.load(folder / "own")
    found = look_at(model, data="digits", classes="1,7,4", order="given", images=2, workers=0, seed=3)
    assert found.similarity.classes == (1, 7, 4) and found.sampled == [1, 4, 7]
    assert found.samples is not None and found.samples.shape == (3, 3, 2, 1, 8, 8)
    test = open_dataset("digits").test
    assert isinstance(test, ArraySplit)
    posterior, labels = softmax(model.outputs(to_float(test.images)).logits.astype(np.float64)), test.labels
    assert found.measured_on == f"{len(labels)} images (test)"
    for pair in found.pairs:
        own = posterior[(labels == pair.first) | (labels == pair.second)][:, [pair.first, pair.second]]
        assert pair.measured == pytest.approx(float((own.min(1) / own.sum(1)).mean()), rel=1e-5)
    assert found.fields["generative"].projections is None and found.fields["generative"].images == 2
    assert len(found.interpolations) == 3 and found.plane is None
    estimated = look_at(folder / "own", data="digits", images=2, projections=8, workers=0)
    assert estimated.fields["own"].projections == 8 and estimated.fields["own"].standard_error is not None


def test_without_images_there_is_what_the_held_out_ones_said(folder: Path) -> None:
    model = candid.load(folder / "own")
    held_out = calibrate(model, "digits", images=100, workers=0)
    assert held_out is not None and held_out.pair_uncertainty is not None
    assert held_out.pair_distances is not None
    found = look_at(model, pairs=45)
    assert found.measured_on == "held-out images" and not found.to_dict()["distances_of_means"]
    for pair in found.pairs:
        assert pair.distance == float(held_out.pair_distances[pair.first, pair.second])
        assert pair.measured == pytest.approx(float(held_out.pair_uncertainty[pair.first, pair.second]))
    image = np.arange(64, dtype=np.uint8).reshape(1, 8, 8)
    (examined,) = Examiner(model, "own", evidence=True).judged([("image", image)])
    assert isinstance(examined, candid.Examination)
    space = Explainer(model).explain(examined).space
    assert space is not None
    assert (space.p_value, space.verdict) == (examined.p_value, examined.verdict)


def test_a_plane_is_drawn_with_its_images(folder: Path) -> None:
    found = look_at(folder / "planar", data="digits", images=2, workers=0)
    assert found.plane is not None and found.points is not None and found.labels is not None
    assert len(found.points) == len(found.labels) > 50
    assert set(found.labels.tolist()) == {0, 1, 2}
    outputs = candid.load(folder / "planar").outputs(
        np.random.default_rng(0).random((4, 1, 8, 8), np.float32)
    )
    assert outputs.latent is not None
    shown = found.plane.posterior(found.plane.project(outputs.latent))
    np.testing.assert_allclose(shown, softmax(outputs.logits), atol=1e-5)
    assert look_at(folder / "planar", workers=0).points is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet",), "can't come from a ResNet"),
        (("own", "--compare-with", "resnet"), "name some with --data"),
        (("own", "--classes", "3"), "at least two"),
        (("own", "--classes", "3,12"), "from 0 to 9"),
        (("own", "--group", "3,4"), "--group takes NAME=CLASSES"),
        (("own", "--temperatures", "warm"), "--temperatures takes numbers"),
        (("own", "--pairs", "0"), "at least 1"),
        (("own", "--data", "digits", "--images", "0"), "at least 1"),
        (("own", "--data", "digits", "--projections", "2"), "at least 3"),
        (("own", "--data", "digits", "--projections", "-1"), "at least 0"),
    ],
)
def test_mistakes_are_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(folder)
    done = explain(*arguments)
    assert isinstance(done.exception, CandidError | CycloptsError) and message in str(done.exception)
    assert not (folder / "explanation").exists()
