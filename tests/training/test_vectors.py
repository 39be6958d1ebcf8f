"""Training on features: of photos through an eye, and stored in a file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import candid
from candid import CandidError
from candid._support.numbers import Array
from candid._support.processes import OneProcess
from candid._support.progress import SILENT
from candid.judging.held_out import HeldOut
from candid.models.photo.opening import open_eye
from candid.robustness.attacks.search import differentiable
from candid.training.features import Extraction, FeatureCache
from candid.training.options import PhotoOptions
from candid.training.photo_data import PhotoData
from candid.training.recipes import vector_options
from tests.helpers import candid_command
from tests.photo_models import PhotoRun

SMALL: dict[str, Any] = {"epochs": 2, "batch": 30, "width": 8, "couplings": 2}


def drawn(rows: int, seed: int = 0) -> dict[str, Array]:
    """Features of three classes, in which a direction has no variance."""
    random = np.random.default_rng(seed)
    labels = np.arange(rows) % 3
    latent = 2 * np.eye(3, 5)[labels] + random.normal(size=(rows, 5))
    mixing = np.random.default_rng(7).normal(size=(5, 6))
    return {
        "features": np.sinh(latent / 2) @ mixing,
        "labels": labels,
        "class_names": np.array(["a", "b", "c"]),
    }


@pytest.fixture
def stored(tmp_path: Path) -> str:
    arrays: dict[str, Any] = {**drawn(600)}
    np.savez(tmp_path / "features.npz", **arrays)
    return str(tmp_path / "features.npz")


@pytest.mark.parametrize("beta", [0.0, 2.0, float("inf")])
def test_loss_falls_and_the_model_judges(stored: str, tmp_path: Path, beta: float) -> None:
    result = candid.train(stored, out=tmp_path / "run", beta=beta, **SMALL)
    assert result.metrics[-1]["train_loss"] < result.metrics[0]["train_loss"]
    assert result.results["val"]["accuracy"] > 0.6
    model = result.model()
    held_out = HeldOut.of(model)
    assert held_out is not None and len(held_out) == 120
    assert np.isfinite(result.results["val"]["nats_per_feature"]) and model.record.beta == beta
    assert candid.train(out=tmp_path / "run", resume=True).results == result.results


def test_density_of_new_features_says_which_are_strange(stored: str, tmp_path: Path) -> None:
    examiner = candid.Examiner(candid.train(stored, out=tmp_path / "run", **SMALL).model())
    shares = []
    for shift in (0, 20):
        judged = examiner.examine_features(drawn(90, seed=1)["features"] + shift)
        shares.append(np.mean([examined.verdict == "novel" for examined in judged]))
    assert shares[0] < 0.2 and shares[1] == 1


def test_a_folder_and_its_stored_features_give_the_same_weights(photo_run: PhotoRun, tmp_path: Path) -> None:
    options: dict[str, Any] = {**SMALL, "eye": "lite0", "width": 4, "beta": 2.0}
    folder = candid.train(photo_run.data, preset="vector", out=tmp_path / "folder", holdout=0.7, **options)
    eye = open_eye("lite0")
    seen = Extraction(eye, FeatureCache(eye, SILENT), OneProcess(), SILENT)
    data = PhotoData.of(PhotoOptions(photo_run.data, holdout=0.7))
    arrays: dict[str, Any] = {"class_names": np.array(data.class_names)}
    for name, prefix in (("train", ""), ("val", "val_"), ("test", "test_")):
        part = seen(data.parts[name])
        arrays |= {f"{prefix}features": part.values, f"{prefix}labels": part.labels}
    np.savez(tmp_path / "features.npz", **arrays)
    stored = candid.train(str(tmp_path / "features.npz"), out=tmp_path / "stored", **options)
    ours, theirs = folder.model(), stored.model()
    assert ours.fingerprint() == theirs.fingerprint()
    assert folder.results["test"] == stored.results["test"]
    assert "gradients" in ours.can and "invert" not in ours.can
    photos = [str(path) for path in photo_run.photos]
    verdicts = [
        [(judged.verdict, judged.p_value, judged.log_density) for judged in candid.examine(model, photos)]
        for model in (ours, theirs)
    ]
    assert verdicts[0] == verdicts[1]
    x = torch.rand(1, *ours.image_shape)
    network = differentiable(ours)
    (gradient,) = torch.autograd.grad(network.logits(x.requires_grad_())[0, 0], x)
    assert torch.isfinite(gradient).all() and gradient.abs().max() > 0
    np.testing.assert_allclose(
        network.logits(x).detach().numpy(), ours.outputs(x.detach().numpy()).logits, rtol=1e-3, atol=1e-2
    )
    done = candid_command(
        "evaluate", tmp_path / "folder", photo_run.data, "--ood", f"noise={photo_run.strange}"
    )
    assert done.exit_code == 0 and "bits" not in done.stdout


def broken(change: dict[str, Any]) -> dict[str, Any]:
    arrays = {**drawn(60), **change}
    return {name: values for name, values in arrays.items() if values is not None}


NAN = drawn(60)["features"]
NAN[7, 2] = np.nan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class_names": None}, "has no 'class_names', but features, labels"),
        ({"features": NAN}, "Row 7 of 'features'"),
        ({"features": np.zeros(60)}, r"must be numbers of the shape \(N, D\)"),
        ({"labels": np.arange(60.0)}, "must be 60 whole numbers"),
        ({"labels": np.arange(60) % 4}, "from 0 to 2"),
        ({"labels": np.zeros(60, int), "class_names": np.array(["a"])}, "one class only"),
        ({"labels": np.zeros(60, int)}, "The class 'b' has 0 for training"),
        ({"groups": np.array([4, 4])}, "have 8 features"),
        ({"val_features": np.zeros((3, 6)), "val_labels": np.zeros(2, int)}, "must be 3 whole numbers"),
        ({"paths": np.array(["a.png"])}, "1 entries for 60 rows"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "features.npz", **broken(change))
    with pytest.raises(CandidError, match=message) as error:
        candid.train(str(tmp_path / "features.npz"), out=tmp_path / "run", **SMALL)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_cut_file_and_wrong_options_are_refused(stored: str, tmp_path: Path) -> None:
    cut = tmp_path / "cut.npz"
    cut.write_bytes(Path(stored).read_bytes()[:500])
    for data, options, message in (
        (str(cut), {}, "can't be read as an .npz file"),
        (stored, {"eye": "lite0"}, "features"),
        (stored, {"optimiser": "sgd"}, "is no option of 'preset'"),
        ("digits", {"couplings": 2}, "is for a network on features"),
    ):
        with pytest.raises(CandidError, match=message):
            candid.train(data, out=tmp_path / "run", **options)
    assert vector_options({"data": "photos"}) is None


def test_a_killed_run_starts_again(stored: str, tmp_path: Path) -> None:
    whole = candid.train(stored, out=tmp_path / "run", **SMALL)
    (tmp_path / "run" / "results.json").unlink()
    again = candid.train(out=tmp_path / "run", resume=True)
    assert again.results == whole.results
    assert json.loads((tmp_path / "run" / "results.json").read_text())["val"] == whole.results["val"]


def test_commands_say_what_a_model_of_stored_features_can_do(stored: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained = candid_command("train", stored, "--out", run, "--epochs", 1, "--width", 8, "--couplings", 1)
    assert trained.exit_code == 0 and "wanted" not in trained.stdout
    shown = candid_command("info", run)
    assert shown.exit_code == 0 and "stored features" in shown.stdout
    explained = candid_command("explain", run, "--out", tmp_path / "explained")
    assert explained.exit_code == 0 and "--no-thumbnails" not in explained.stdout
    evaluated = candid_command("evaluate", run, stored)
    assert evaluated.exit_code == 2 and "examine_features" in str(evaluated.exception)


def test_too_few_features_for_their_length_are_told(tmp_path: Path) -> None:
    rows = drawn(15)
    np.savez(tmp_path / "features.npz", **rows)  # type: ignore[arg-type]
    done = candid_command("train", tmp_path / "features.npz", "--out", tmp_path / "run", "--epochs", 1)
    assert done.exit_code == 0 and "only 12 training features of 6 numbers" in done.stdout + done.stderr
