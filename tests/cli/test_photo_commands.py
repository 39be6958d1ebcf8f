"""Every command takes a photo model."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import candid
from candid import CandidError
from candid.data.images import decode_as, to_float
from candid.robustness.attacks.carlini_wagner import carlini_wagner
from candid.serve.schemas import ExaminationResponse, ImageRequest, ImpossibleResponse
from candid.serve.service import Service
from tests.helpers import candid_command
from tests.photo_models import CLASSES, PhotoRun


def test_evaluate_and_compare_have_no_bits(photo_run: PhotoRun, tmp_path: Path) -> None:
    out = tmp_path / "evaluation"
    strange = f"noise={photo_run.strange}"
    done = candid_command("evaluate", photo_run.model, photo_run.data, "--ood", strange, "--out", out)
    assert done.exit_code == 0 and "bits/dim" not in done.output
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["images"] == 12 and "bits_per_dim" not in metrics
    assert metrics["ood"]["noise"]["combined"]["auc"] > 0.8
    done = candid_command("compare", out, "--out", tmp_path / "compared", "--json")
    (row,) = json.loads(done.stdout)
    assert row["kind"] == "photo" and row["bits_per_dim"] is None and row["beta"] is None


def test_explain_shows_known_photos_instead_of_samples(photo_run: PhotoRun, tmp_path: Path) -> None:
    done = candid_command("explain", photo_run.model, "--out", tmp_path, "--json")
    found = json.loads(done.stdout)
    assert "no inverse to pixels" in found["missing"] and found["mean_spread"] is None
    assert len(found["closest_pairs"]) == 3
    assert {Path(each).name for each in found["figures"]} == {"similarity.png", "known_photos.png"}
    done = candid_command("explain", photo_run.model, "--compare-with", "cifar10-resnet", "--data", "digits")
    assert "leave --compare-with out" in str(done.exception)


def test_a_plane_has_three_to_twelve_classes(photo_run: PhotoRun, tmp_path: Path) -> None:
    done = candid_command("plane", photo_run.model, photo_run.data, "--out", tmp_path, "--json")
    found = json.loads(done.stdout)
    assert found["classes"] == list(CLASSES) and found["images"] == 12 and found["accuracy"] > 0.6
    assert found["full_accuracy"] > 0.6 and 0 <= found["inside"] <= 1
    done = candid_command("plane", photo_run.model, photo_run.data, "--classes", "dots,rings")
    assert "has 3 to 12 classes, not 2: choose them with --classes" in str(done.exception)


def test_info_says_what_a_model_consists_of(photo_run: PhotoRun) -> None:
    found = json.loads(candid_command("info", photo_run.model, "--json").stdout)
    assert found["eye"]["name"] == "lite0" and found["statistics"] == 1408 and found["known_photos"] == 36
    assert 0 < sum(found["megabytes"].values()) < 6


def test_nothing_is_refitted_and_training_photos_are_not_held_out(photo_run: PhotoRun) -> None:
    done = candid_command("refit", photo_run.model, photo_run.data)
    assert "fitted in closed form" in str(done.exception)
    done = candid_command("calibrate", photo_run.model, f"{photo_run.data}/train")
    assert "36 of 36 held-out images are among the training images" in " ".join(done.stderr.split())
    assert "too few" in str(done.exception)


def test_what_can_not_be_taught_or_forgotten_is_named(photo_run: PhotoRun, tmp_path: Path) -> None:
    done = candid_command("forget", photo_run.model, "hat", "--out", tmp_path / "new")
    assert str(done.exception) == "The model has no class 'hat': choose one of dots, rings, stripes."
    done = candid_command("merge", photo_run.model, "a=dots,rings", "--out", tmp_path / "new", "a=stripes")
    assert str(done.exception) == "candid merge has the name 'a' twice: give each a name of its own."


def test_corruptions_and_attacks(photo_run: PhotoRun, tmp_path: Path) -> None:
    done = candid_command(
        *("corrupt", photo_run.model, photo_run.data, "--out", tmp_path, "--images", 3, "--severities", 3),
        *("--corruptions", "gaussian_noise,pixelate", "--workers", 0, "--json"),
    )
    assert done.exit_code == 0
    options: dict[str, Any] = {"images": 1, "kappa": (0.01,), "d": (0.0, 66.0), "steps": 5, "workers": 0}
    found = candid.attack(photo_run.model, photo_run.data, out=tmp_path, **options)
    assert found is not None
    (model,) = found
    (metrics,) = model.metrics  # the density of photos that were scored out of fold is not known
    assert metrics.bits_before is None and metrics.detection is None
    assert "scored out of fold" in found.notes[0].text


def test_gradients_reach_the_photo_and_its_density(photo_run: PhotoRun) -> None:
    model = candid.load(photo_run.model)
    image = decode_as(photo_run.photos[0], model.preprocessing)[None]
    y = int(model.outputs(to_float(image)).logits.argmax())
    found = carlini_wagner(model, image, [(y + 1) % 3], d=66.0, median=-1.0, steps=10)
    assert found.log_density is not None and bool(found.success[0])
    again = model.outputs(found.images)
    assert again.log_density_terms.sum(1) == pytest.approx(found.log_density, rel=1e-3, abs=0.5)


def test_an_eye_without_gradients_says_so(photo_run: PhotoRun) -> None:
    model = candid.load(photo_run.model)
    model.config = replace(model.config, eye="network.onnx")
    with pytest.raises(CandidError, match="'network.onnx' runs in onnxruntime, which gives no gradients"):
        carlini_wagner(model, np.zeros((1, *model.image_shape), np.uint8), [0])


def test_an_exported_model_gives_the_same_verdicts(photo_run: PhotoRun, tmp_path: Path) -> None:
    done = candid_command("export", photo_run.model, "--out", tmp_path / "model.onnx", "--json")
    (written,) = json.loads(done.stdout)
    assert set(written["differences"]) == {"logits", "novelty"}
    beside = json.loads((tmp_path / "model.json").read_text())
    model = candid.load(photo_run.model)
    paths = [*photo_run.photos, *sorted(photo_run.strange.rglob("*.png"))]
    images = to_float(np.stack([decode_as(path, model.preprocessing) for path in paths]))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    logits, novelty = session.run(None, {"images": images})
    posterior = np.exp(logits - logits.max(1, keepdims=True))
    posterior /= posterior.sum(1, keepdims=True)
    for i, examined in enumerate(candid.examine(model, paths)):
        assert p_value(novelty[i], beside) == pytest.approx(examined.p_value)
        assert examined.posterior == pytest.approx(dict(zip(CLASSES, posterior[i], strict=True)), abs=1e-4)
        least = beside["smallest_ratio"] * max(posterior[i])
        fits = {name for name, share in zip(CLASSES, posterior[i], strict=True) if share >= least}
        if examined.verdict != "novel":
            assert fits == set(examined.classes or ())


def p_value(new: Any, beside: dict[str, Any]) -> float:
    """The p-value as the docs write it, without candid."""
    scores = np.vstack([np.array(beside["held_out_novelty"], np.float32), new.astype(np.float32)])
    ranks = (scores[:, None] <= scores).sum(1) / len(scores)  # share that is at least as high, by each score
    combined = np.tan(np.pi * (0.5 - np.minimum(ranks, beside["clip"]))).sum(1)
    return float((combined >= combined[-1] - 1e-9).mean())


def test_the_server_explains_photos(photo_run: PhotoRun) -> None:
    model = candid.load(photo_run.model)
    service = Service(model, "tiny")
    image = decode_as(photo_run.photos[0], model.preprocessing)
    (answer,) = service.examine([[ImageRequest("photo.png", image, True)]])
    assert isinstance(answer, list)
    (found,) = answer
    assert isinstance(found, ExaminationResponse) and found.explanation is not None
    maps = found.explanation.heatmaps
    assert maps is not None and maps.saliency_nats is None
    first = maps.classes[0]
    assert first.score_nats is not None and first.baseline_nats is not None
    total = float(np.sum(first.values_nats))
    assert total + first.baseline_nats == pytest.approx(first.score_nats, abs=1e-4)
    photos = found.explanation.nearest_photos
    assert photos is not None and len(photos.nearest) == 5 and photos.instead in CLASSES
    assert {each.class_ for each in photos.of_instead} == {photos.instead}
    impossible = service.change(ImageRequest("photo.png", image, towards=1))
    assert isinstance(impossible, ImpossibleResponse) and "no inverse to pixels" in impossible.error
    assert "nearest photos" in service.description.info.cannot[0]


def test_results_without_held_out_photos_are_called_out_of_fold(photo_run: PhotoRun) -> None:
    done = candid_command("train", photo_run.data, "--resume", "--out", photo_run.model)
    assert done.exit_code == 0
    assert "out of fold" in done.stdout and "validation" not in done.stdout


def test_train_ends_with_the_next_commands_and_every_path_exists_as_printed(
    photo_run: PhotoRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "my photos"
    shutil.copytree(f"{photo_run.data}/train", data)
    folders = sorted(data.iterdir())
    first = min(folders[0].iterdir())
    shutil.copy(first, folders[1] / "again.png")  # one photo in two classes
    done = candid_command("train", data, "--out", "my run")
    assert done.exit_code == 0
    named = re.findall(r"my run/[\w./-]*\w", " ".join(done.output.split()))
    assert "my run/photos.html" in named and all(Path(path).exists() for path in named)
    commands = [
        line.split("#")[0].split() for line in done.stdout.splitlines() if line.startswith("  candid ")
    ]
    assert [words[1] for words in commands] == ["examine", "evaluate", "audit", "serve"]
    line = next(line for line in done.stdout.splitlines() if " evaluate " in line)
    program, command, model, spec = shlex.split(line, comments=True)
    assert (program, model, spec) == ("candid", "my run", str(data))
    assert candid_command(command, model, spec, "--workers", "0").exit_code == 0


def test_a_training_that_left_only_its_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.toml").write_text("")
    done = candid_command("examine", tmp_path / "mine", tmp_path)
    assert "ended before it had a model" in str(done.exception)
