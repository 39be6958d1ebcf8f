"""Whole evaluations of small trained models: what is found, written, kept and refused."""

import csv
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import candid
from candid._support.errors import CandidError
from candid.data.datasets import open_dataset
from candid.data.splits import ArraySplit
from candid.evaluation.compare import compare, read_rows
from candid.evaluation.evaluate import evaluate
from candid.evaluation.result import EvaluationResult, remove_older, write
from candid.inference.predictions import Predictions
from candid.judging.calibrate import calibrate
from candid.judging.held_out import HeldOut
from candid.models.checkpoint import load
from candid.trust.scores import SCORES
from candid.trust.verdict import KINDS
from tests.data.helpers import write_folder
from tests.data.test_images import published_by_pil
from tests.helpers import RecordedProgress, candid_command, small_classifier
from tests.models.importers.test_released import released_state
from tests.photo_models import PhotoRun
from tests.training.runs import run, small_config, train

COMMAND = [sys.executable, "-m", "candid", "evaluate"]
ALL_TESTS = {
    "one-tailed",
    "typicality",
    "two-tailed",
    "complexity",
    "typical-set",
    "density-of-states",
    "joint",
}
LEARNED = {name for name, score in SCORES.items() if score.learns is not None}
OF_ANY_CLASSIFIER = {*LEARNED, "max-posterior", "energy", "max-logit", "gen", "combined", "code-length"}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    train(small_config(epochs=3, holdout=0.3), folder)
    return folder


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "resnet"
    train(small_config(epochs=1, holdout=0.3, baseline=True), folder)
    return folder / "model" / "best"


@pytest.fixture
def model(run_folder: Path, tmp_path: Path) -> Path:
    """A copy of its own, to be changed."""
    return Path(shutil.copytree(run_folder / "model" / "best", tmp_path / "model"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Images of another size and mode, in a folder without classes."""
    folder = tmp_path / "photos" / "deep" / "inside"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for i in range(12):
        Image.fromarray(random.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "photos"


def evaluated(model: Path, **options: Any) -> EvaluationResult:
    found = evaluate(model, "digits", workers=0, **options)
    assert found is not None
    return found


def messages(model: Path, **options: Any) -> str:
    progress = RecordedProgress()
    evaluate(model, "digits", progress, workers=0, **options)
    return "\n".join(progress.messages)


def test_images_that_were_held_out_check_no_p_values(model: Path) -> None:
    found = evaluated(model, part="val")
    (note,) = (each for each in found.notes if each.topic == "overlap")
    assert "434 of 434 images are this model's held-out images" in note.text
    assert found.metrics["held_out_overlap"] == 434 and found.detection is not None
    assert len(found.detection.inside["keys"]) == 217  # those that shaped no density
    assert evaluated(model).metrics["held_out_overlap"] == 0
    calibrate(model, "digits", part="test", images=100, workers=0)
    found = evaluated(model)
    assert found.metrics["held_out_overlap"] == 100 and found.detection is not None
    assert len(found.detection.inside["keys"]) == 259 and len(found.predictions) == 359


def test_areas_are_not_flattered_by_images_that_shaped_the_density(model: Path) -> None:
    """Of two sets of the same kind neither is an outlier, even if one was held out."""
    found = evaluated(model, part="val")
    new = evaluated(model).predictions
    assert found.detection is not None
    areas = replace(found.detection, outside={"new": new.statistics}).metrics()["new"]
    assert all(0.35 < figures["auc"] < 0.62 for figures in areas.values()), areas


def test_training_images_cant_be_held_out(model: Path) -> None:
    for part in ("train", "all"):
        with pytest.raises(CandidError, match="has not seen"):
            calibrate(model, "digits", part=part, workers=0)


def test_other_weights_have_no_held_out_scores(model: Path) -> None:
    changed = candid.load(model)
    torch.nn.init.zeros_(changed.mixture.mean)
    candid.save(changed, model)
    with pytest.raises(CandidError, match="candid calibrate"):
        evaluated(model, score="two-tailed")


def test_a_run_with_few_held_out_images_ends_without_scores(tmp_path: Path) -> None:
    assert train(small_config(epochs=1, holdout=0.01), tmp_path / "run").finished
    assert HeldOut.of(candid.load(tmp_path / "run" / "model" / "best")) is None


def test_too_few_held_out_images_are_refused(model: Path) -> None:
    with pytest.raises(CandidError, match="5 held-out images are too few"):
        calibrate(model, "digits", images=5, workers=0)


def test_a_trained_model_carries_the_scores_of_the_images_kept_out(run_folder: Path) -> None:
    model = candid.load(run_folder / "model" / "best")
    held_out = HeldOut.of(model)
    assert held_out is not None and held_out.learned.keys() == LEARNED
    val = open_dataset("digits", holdout=0.3).val
    assert isinstance(val, ArraySplit) and len(held_out) == len(val)
    expected = model.log_density(torch.from_numpy(val.images) / 255)
    np.testing.assert_allclose(held_out.statistics["log_density"], expected.numpy(force=True), rtol=1e-5)


def test_calibrating_again_finds_what_training_found(model: Path) -> None:
    trained = load(model).held_out
    fresh = load(model)
    fresh.held_out = {}
    candid.save(fresh, model)
    assert not load(model).held_out
    calibrate(model, "digits", workers=0)
    again = load(model).held_out
    assert again.keys() == trained.keys() - {"training_keys"}
    for name in again:
        if name.startswith("column_score."):  # axes may turn; the statistics say whether that matters
            continue
        # features are in half precision
        rounding = 5e-3 if name.removeprefix("statistic.") in LEARNED else 1e-5
        np.testing.assert_allclose(again[name], trained[name], rtol=rounding, atol=rounding)


def test_training_images_are_named(model: Path) -> None:
    """Also after the model is calibrated again."""
    assert all(note.topic != "training-images" for note in evaluated(model).notes)
    calibrate(model, "digits", part="test", images=100, workers=0)
    (note,) = (each for each in evaluated(model, part="train", images=60).notes if each.topic != "overlap")
    assert note.topic == "training-images" and "60 of 60 images" in note.text


def test_metrics_are_those_of_the_predictions(model: Path, run_folder: Path) -> None:
    found = evaluated(model, ten_crop=True, temperature=True)
    results = json.loads((run_folder / "results.json").read_text())["test"]
    metrics = found.metrics
    assert metrics["images"] == 359 and metrics["part"] == "test"
    for name in ("accuracy", "cross_entropy", "bits_per_dim"):
        assert metrics[name] == pytest.approx(results[name], rel=1e-6)
        low, high = metrics["intervals"][name]
        assert low <= metrics[name] <= high
    assert metrics["L_Y"] == pytest.approx(metrics["cross_entropy"] + np.log(10))
    offset = candid.load(model).bits_offset + np.log2(2 * np.pi) / 2
    assert metrics["bits_per_dim"] == pytest.approx(metrics["L_X"] / np.log(2) + offset)
    assert metrics["ten_crop"]["accuracy"] > 0.2
    scaled = metrics["temperature_scaled"]
    assert scaled["accuracy"] == metrics["accuracy"] and scaled["temperature"] > 0
    assert scaled["ece"] != metrics["ece"]


def test_every_test_is_made_on_every_set(model: Path, photos: Path) -> None:
    found = evaluated(model, ood={"noise": "uniform-noise", "photos": str(photos)}, images=100)
    assert found.metrics["ood"].keys() == {"noise", "photos"}
    for tests in found.metrics["ood"].values():
        assert tests.keys() == ALL_TESTS | OF_ANY_CLASSIFIER
        for figures in tests.values():
            low, high = figures["intervals"]["auc"]
            assert 0 <= low <= figures["auc"] <= high <= 1
            assert all(0 <= figures[key] <= 1 for key in ("fpr95", "detected"))
    assert found.metrics["ood"]["noise"]["joint"]["auc"] > 0.9
    assert len(found.judged["photos"].kinds) == 12
    for shares in found.metrics["verdicts"]["sets"].values():
        assert sum(shares.values()) == pytest.approx(1)


def test_p_values_of_the_test_images_hold(model: Path) -> None:
    found = evaluated(model)
    n, held = 359, found.metrics["held_out_images"]
    for name, rates in found.metrics["false_positives"].items():
        spread = 3.5 * np.sqrt(0.1 * 0.9 * (1 / n + 2 / held))  # half of them are held out for densities
        assert rates["0.1"] <= 0.1 + spread, name


def test_a_baseline_has_all_but_likelihoods(baseline: Path, tmp_path: Path) -> None:
    found = evaluated(baseline, ood={"noise": "uniform-noise"}, images=50)
    assert not found.metrics.keys() & {"bits_per_dim", "L_X"}
    assert found.metrics["ood"]["noise"].keys() == OF_ANY_CLASSIFIER
    assert found.metrics["verdicts"]["score"] == "combined"
    write(found, tmp_path)
    rows = list(csv.DictReader((tmp_path / "images.csv").read_text().splitlines()))
    assert all(row["log_density_nats"] == "" and row["verdict"] for row in rows)


def test_files_hold_a_line_for_each_image_and_test(model: Path, tmp_path: Path) -> None:
    found = evaluated(model, ood={"noise": "uniform-noise"}, images=40)
    write(found, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == found.metrics
    rows = list(csv.DictReader((tmp_path / "out" / "images.csv").read_text().splitlines()))
    assert [row["set"] for row in rows] == ["test"] * 40 + ["noise"] * 40
    promised = next(found.examinations())[2].to_dict()
    del promised["promises"]  # they are once in metrics.json
    assert list(rows[0]) == ["set", "true_label", *promised]
    assert all(row["true_label"] == "" for row in rows[40:])
    right = sum(row["true_label"] == row["label"] for row in rows[:40]) / 40
    assert right == found.metrics["accuracy"]
    assert {row["verdict"] for row in rows} <= set(KINDS)
    assert all((row["verdict"] == "novel") == (row["classes"] == "") for row in rows)
    tests = list(csv.DictReader((tmp_path / "out" / "ood.csv").read_text().splitlines()))
    assert {row["score"] for row in tests} == ALL_TESTS | OF_ANY_CLASSIFIER
    assert all(float(row["auc_low"]) <= float(row["auc"]) <= float(row["auc_high"]) for row in tests)


def test_an_ensemble_adds_waic(model: Path, run_folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run_folder / "model" / "best", tmp_path / "other"))
    noisy = candid.load(other)
    torch.nn.init.zeros_(noisy.mixture.mean)
    candid.save(noisy, other)
    calibrate(other, "digits", workers=0)
    found = evaluated(model, ensemble=(str(other),), ood={"noise": "uniform-noise"}, images=50)
    assert "waic" in found.metrics["ood"]["noise"]
    calibrate(other, "digits", workers=0, images=60)
    with pytest.raises(CandidError, match="was calibrated on different images"):
        evaluated(model, ensemble=(str(other),))


def kept(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "predictions").iterdir()}


@pytest.mark.slow
def test_two_processes_give_the_same_files_as_one(model: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]
    commands = {"one": COMMAND, "devices": [*COMMAND, "--devices=2"], "torchrun": [*torchrun, *COMMAND[2:]]}
    printed = {}
    for name, command in commands.items():
        options = ("--ood=noise=uniform-noise", "--json", "--ten-crop", "--out", tmp_path / name)
        done = run(model, "digits", *options, command=command)
        assert done.returncode == 0, done.stderr
        assert kept(tmp_path / name) == kept(tmp_path / "one")
        printed[name] = json.loads(done.stdout)
    assert printed["one"] == printed["devices"] == printed["torchrun"]
    assert printed["one"].keys() >= {"accuracy", "bits_per_dim", "ece", "oce", "ood", "verdicts"}


def test_a_second_study_makes_no_pass_and_a_cut_file_is_made_again(model: Path, tmp_path: Path) -> None:
    first = evaluated(model, out=tmp_path)
    (file,) = (tmp_path / "predictions").iterdir()
    whole, date = file.read_bytes(), file.stat().st_mtime_ns
    assert messages(model, out=tmp_path, temperature=True) == ""
    assert file.stat().st_mtime_ns == date
    file.write_bytes(whole[:1000])
    assert "is damaged" in messages(model, out=tmp_path)
    assert file.read_bytes() == whole
    again = Predictions.load(file)
    assert again is not None and np.array_equal(again.logits, first.predictions.logits)


def test_the_command_prints_tables_and_draws(model: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--ood", f"photos={photos}", "--out", str(out), "--workers", "0")
    done = candid_command("evaluate", str(model), "digits", *options)
    assert done.exit_code == 0, done.output
    assert "top-1 accuracy" in done.stdout and "joint" in done.stdout and "ambiguous" in done.stdout
    assert "MCE, all classes, 15 bins" in done.stdout
    metrics = json.loads((out / "metrics.json").read_text())
    low, high = metrics["ood"]["photos"]["joint"]["intervals"]["auc"]
    assert f"({100 * low:.1f} to {100 * high:.1f})" in done.stdout and metrics["calibration_bins"] == 15
    assert "photos: images of 20 x 30 pixels are fitted to 8 x 8" in done.output
    for name in ("calibration", "ood_zones", "roc", "auc"):
        with Image.open(out / f"{name}.png") as image:
            image.verify()
        assert (out / f"{name}.svg").read_text().startswith("<?xml")


def test_results_that_were_not_made_again_are_removed(tmp_path: Path) -> None:
    names = (
        "metrics.json",
        "images.csv",
        "ood.csv",
        "calibration.png",
        "ood_zones.svg",
        "auc.png",
        "mine.txt",
    )
    for name in names:
        (tmp_path / name).touch()
    remove_older(tmp_path, [tmp_path / name for name in ("metrics.json", "images.csv", "calibration.png")])
    kept = {"metrics.json", "images.csv", "calibration.png", "mine.txt"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_an_imported_model_is_measured_as_published(tmp_path: Path, generator: torch.Generator) -> None:
    """A file of the released layout on photos: all of it again, from PIL and the network alone."""
    torch.save(released_state(generator), tmp_path / "beta_1.avg.pt")
    imported = candid.import_released(tmp_path / "beta_1.avg.pt", list("abcde"))
    write_folder(tmp_path / "photos", dict.fromkeys("abcde", 4), width=31)
    data = str(tmp_path / "photos")
    options: dict[str, Any] = {"workers": 0, "out": tmp_path / "out"}
    plain = candid.evaluate(imported, data, **options)
    both = candid.evaluate(imported, data, as_published=True, ten_crop=True, **options)
    assert plain is not None and both is not None
    published = both.metrics.pop("as_published")
    assert both.metrics == plain.metrics  # everything else stays as it is
    posteriors, averaged, labels = [], [], []
    for path in sorted((tmp_path / "photos").glob("*/*.png")):
        with Image.open(path) as image:
            crops = np.stack([np.asarray(crop) for crop in published_by_pil(image.convert("RGB"), 16)])
        x = torch.from_numpy(crops).permute(0, 3, 1, 2) / 255
        with torch.inference_mode():
            z, _ = imported.flow((x - imported.image_mean) / imported.image_std)
            posterior = imported.mixture.posterior(z).double()
        posteriors.append(posterior[4])
        averaged.append(posterior.mean(0))
        labels.append("abcde".index(path.parent.name))
    for metrics, shares in (
        (published, torch.stack(posteriors)),
        (published["ten_crop"], torch.stack(averaged)),
    ):
        right = (shares.argmax(1) == torch.tensor(labels)).double().mean()
        assert metrics["accuracy"] == float(right)
        loss = torch.nn.functional.nll_loss(shares.log(), torch.tensor(labels))
        assert metrics["cross_entropy"] == pytest.approx(float(loss), rel=1e-4)
        assert "accuracy" in metrics["intervals"]
    assert published["bits_per_dim"] != plain.metrics["bits_per_dim"] and "mce" in published


def test_published_metrics_are_shown_and_compared(tmp_path: Path) -> None:
    candid.save(small_classifier(), tmp_path / "model")
    metadata = tmp_path / "out" / "metrics.json"
    write_folder(tmp_path / "photos", dict.fromkeys("012", 3), width=31)
    command = ("evaluate", str(tmp_path / "model"), str(tmp_path / "photos"), "--out", str(tmp_path / "out"))
    done = candid_command(*command, "--workers", "0", "--as-published", "--ten-crop")
    assert done.exit_code == 0, done.output
    assert "as published" in done.stdout and "ten crops" in done.stdout
    metrics = json.loads(metadata.read_text())
    metadata.write_text(json.dumps(metrics | {"beta": "1"}))
    (row,) = read_rows([tmp_path / "out"])
    assert row["as_published"] and row["crops"] == 10
    assert row["accuracy"] == metrics["as_published"]["ten_crop"]["accuracy"]
    assert row["L_X"] == metrics["as_published"]["L_X"]


def test_only_photos_in_files_are_measured_as_published(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CandidError, match="is for models that see a square crop") as caught:
        evaluated(model, as_published=True)
    assert "\n" not in str(caught.value)
    plain = candid.save(candid.GenerativeClassifier.from_preset("digits"), tmp_path / "plain")
    with pytest.raises(CandidError, match="'digits' all have one size"):
        evaluated(plain, as_published=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ood": {"empty": "EMPTY"}}, "has no images: name a folder with some"),
        ({"ood": {"missing": "/nowhere"}}, "There is no data set or folder '/nowhere'"),
        ({"ood": {"test": "constant"}}, "The name 'test' is taken by the test images"),
        ({"score": "typicallity"}, "did you mean 'typicality'"),
        ({"novelty": 1.5}, "'novelty' must be above 0 and below 1"),
        ({"novelty": 0.0001}, "no image can be called novel at the level 0.0001 by the score 'joint'"),
        ({"error": 0.0001}, "no class can be ruled out"),
        ({"error": -1.0}, "'error' must be above 0"),
        ({"images": 0}, "at least 1, not 0"),
    ],
)
def test_bad_input_is_one_sentence(
    model: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    if "ood" in options:
        names = {
            name: str(tmp_path / "empty") if spec == "EMPTY" else spec
            for name, spec in options["ood"].items()
        }
        options = options | {"ood": names}
    with pytest.raises(CandidError, match=message) as raised:
        evaluated(model, **options)
    assert "\n" not in str(raised.value)


def test_all_images_can_be_evaluated(model: Path) -> None:
    found = evaluated(model, part="all")
    assert found.metrics["images"] == 1797 and found.metrics["held_out_overlap"] == 434


def test_a_model_without_held_out_scores_says_how_to_add_them(tmp_path: Path) -> None:
    plain = candid.save(candid.GenerativeClassifier.from_preset("digits"), tmp_path / "plain")
    with pytest.raises(CandidError, match=f"candid calibrate {plain} DATA"):
        evaluated(plain, ood={"noise": "uniform-noise"})
    (note,) = evaluated(plain, images=20).notes
    assert note.topic == "no-held-out" and f"candid calibrate {plain} DATA" in note.text
    assert evaluated(plain, images=20).judged == {}


def test_a_model_of_other_classes_is_refused(tmp_path: Path) -> None:
    three = candid.save(small_classifier(), tmp_path / "three")
    with pytest.raises(CandidError, match="10 classes and the model 3"):
        evaluated(three)


def test_a_model_is_no_evaluation(tmp_path: Path) -> None:
    for model in ("waste", str(candid.save(small_classifier(), tmp_path / "three"))):
        with pytest.raises(
            CandidError, match=f"'{model}' is not .*: to compare models, run 'candid evaluate"
        ):
            compare([model], out=tmp_path / "both")


def test_models_are_compared_by_beta(model: Path, baseline: Path, tmp_path: Path) -> None:
    folders = []
    for name, path in (("resnet", baseline), ("one", model)):
        write(evaluated(path), tmp_path / name)
        folders.append(tmp_path / name)
    ours, theirs = compare(folders, out=tmp_path / "both")
    assert ours["beta"] == 1.0 and theirs["beta"] is None and theirs["L_X"] is None
    done = candid_command("compare", *map(str, folders), "--out", str(tmp_path / "both"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "both" / "trade_off.svg").exists()
    assert len((tmp_path / "both" / "comparison.csv").read_text().splitlines()) == 3
    write(evaluated(model, images=10), tmp_path / "few")
    with pytest.raises(CandidError, match="evaluated on different images"):
        read_rows([tmp_path / "one", tmp_path / "few"])
    with pytest.raises(CandidError, match="is not the folder of an evaluation"):
        read_rows([tmp_path])


MODULES = """
import sys
from candid.cli.app import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(*sys.modules)
"""


def test_a_photo_model_is_evaluated_without_torch(photo_run: PhotoRun, tmp_path: Path) -> None:
    """In a real process, with all that it draws and writes."""
    options = ("--ood", f"noise={photo_run.strange}", "--temperature", "--ten-crop", "--by", "class")
    line = ("evaluate", photo_run.model, photo_run.data, *options, "--out", str(tmp_path / "out"))
    done = run(*line, command=[sys.executable, "-c", MODULES])
    assert done.returncode == 0, done.stderr
    modules = done.stdout.splitlines()[-1].split()
    assert "candid.evaluation.evaluate" in modules
    assert not {"torch", "lightning_fabric"} & set(modules)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["images"] == 12 and metrics["ood"]["noise"]["combined"]["auc"] > 0.5
    assert (tmp_path / "out" / "auc.png").stat().st_size > 0
