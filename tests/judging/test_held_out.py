"""One entry adds a score, also one with a measurement of its own; detectors are fitted once and saved."""

import json
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import candid
from candid import CandidError, GenerativeClassifier, Score
from candid._support.numbers import Array
from candid.inference.predictions import predict
from candid.judging import calibrate as calibration
from candid.judging.calibrate import calibrate
from candid.judging.detection import Detection, unseen
from candid.judging.examine import Examiner
from candid.judging.held_out import HeldOut, measures_of, needed, thresholds
from candid.judging.watched import WatchedScore
from candid.models.checkpoint import load
from candid.models.protocol import Outputs
from candid.trust.conformal import Detector, TwoTailed
from candid.trust.gaussians import FitImages
from candid.trust.learned import LearnedScore, Mahalanobis
from candid.trust.promises import ExamineOptions, Levels
from candid.trust.ranking import ALL, new_detector
from candid.trust.scores import SCORES, Columns
from tests.data.helpers import write_folder
from tests.helpers import small_classifier
from tests.inference.test_predictions import small_resnet

LEARNED = [name for name, score in SCORES.items() if score.learns is not None]


@pytest.fixture
def registered() -> Iterator[None]:
    """Three scores more: of a column that there is, of one that it measures, and one that learns."""
    candid.register_score(Score("margin", "classifier", ("max_logit",), "OneTailed"))
    candid.register_score(
        Score("brightness", "control", ("brightness",), TwoTailed, measures={"brightness": brightness})
    )
    candid.register_score(Score("nearest-mean", "classifier", ("features",), learns=NearestMean))
    yield
    for name in ("margin", "brightness", "nearest-mean"):
        SCORES.pop(name)


class NearestMean(LearnedScore):
    """The distance to the nearest class mean."""

    means: Array

    def learn(self, images: FitImages) -> "NearestMean":
        self.means = images.moments.means.astype(np.float64)
        return self

    def of(self, columns: Mapping[str, Array]) -> Array:
        offsets: Array = columns["features"][:, None].astype(np.float64) - self.means
        return np.sqrt((offsets**2).sum(2)).min(1)


def pictures(images: Array) -> Array:
    """Images (B, C, H, W) as arrays that people have, (B, H, W, C)."""
    return np.moveaxis(images, 1, -1)


def brightness(images: Array, outputs: Outputs) -> Array:
    return images.astype(np.float64).mean((1, 2, 3))


@pytest.fixture(scope="module")
def model() -> GenerativeClassifier:
    return GenerativeClassifier.from_preset("digits", class_names=tuple("0123456789")).eval()


def test_a_score_is_one_entry(registered: None, model: GenerativeClassifier) -> None:
    held_out = calibrate(model, "digits", images=150, workers=0)
    assert held_out is not None and "brightness" in held_out.statistics
    images = np.random.default_rng(0).integers(0, 256, size=(4, 1, 8, 8), dtype=np.uint8)
    found = predict(model, images, np.full((4,), -1), tuple("abcd"), measures_of(model))
    detection = Detection(held_out.statistics, found.statistics, {})
    assert {"margin", "brightness", "nearest-mean"} <= detection.p_values(detection.inside).keys()
    for name in ("margin", "brightness", "nearest-mean"):
        (first, *_) = candid.examine(model, pictures(images), score=name)
        assert first.promises is not None and first.promises.score == name
        assert first.p_value == float(detection.p_values(detection.inside)[name][0])
    expected = TwoTailed().fit(held_out.statistics["brightness"]).p_value(brightness(images, None))  # type: ignore[arg-type]
    assert np.array_equal(detection.p_values(detection.inside)["brightness"], expected)


def test_a_registered_score_reaches_monitors_evaluations_audits_and_watches(
    registered: None, model: GenerativeClassifier, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    labels = np.arange(300) % 3
    logits = random.normal(size=(300, 3)) + 4 * np.eye(3)[labels]
    features = random.normal(size=(300, 5)) + 4 * np.eye(5)[labels]
    files = {name: tmp_path / f"{name}.npz" for name in ("val", "test", "far")}
    for file, rows in zip(files.values(), (slice(200), slice(200, 300), slice(200, 250)), strict=True):
        times = 0.1 if file.stem == "far" else 1
        np.savez(file, logits=logits[rows] * times, labels=labels[rows], features=features[rows] / times)
    stored: dict[str, Any] = {
        "held_out": files["val"],
        "test": files["test"],
        "ood": (f"far={files['far']}",),
    }

    examined = candid.Monitor(score="margin").fit(logits[:200], labels[:200]).examine(logits[200:])
    ranks = 1 + (logits[:200].max(1) <= logits[200:].max(1)[:, None]).sum(1)
    assert [e.p_value for e in examined] == pytest.approx(ranks / 201)
    evaluation = candid.evaluate(**stored, score="margin", out=tmp_path / "evaluation")
    assert evaluation is not None and evaluation.metrics["verdicts"]["score"] == "margin"
    audited = candid.audit(**stored, out=tmp_path / "audit").evaluations[0]
    assert audited.metrics["ood"]["far"]["margin"] == evaluation.metrics["ood"]["far"]["margin"]
    assert audited.metrics["ood"]["far"]["nearest-mean"]["auc"] > 0.9
    monitor = candid.Monitor(score="nearest-mean").fit(logits[:200], labels[:200], features[:200])
    monitor.save(tmp_path / "monitor")
    new = logits[200:], features[200:]
    assert candid.Monitor.load(tmp_path / "monitor").examine(*new) == monitor.examine(*new)

    calibrate(model, "digits", images=150, workers=0)
    watched = WatchedScore.of(model, score="nearest-mean")
    statistics = needed(model).statistics
    distances = np.array([sighting.score for sighting in watched.sightings(statistics)])
    assert np.array_equal(np.argsort(distances), np.argsort(statistics["nearest-mean"]))
    watched = WatchedScore.of(model, score="margin")
    scores = np.array([sighting.score for sighting in watched.sightings(statistics)])
    assert np.array_equal(np.argsort(scores), np.argsort(-statistics["max_logit"]))
    assert watched.watch(model.class_names).score == "margin"
    with pytest.raises(CandidError, match="no score 'marginal' for this model"):
        WatchedScore.of(model, score="marginal")


def test_thresholds_of_an_exported_model_are_those_of_its_rule(tmp_path: Path) -> None:
    """`everyday` has a tree: more than three classes become a kind in examples/deploy/verdict.py, too."""
    model = candid.load("everyday")
    (made,) = candid.export(model, tmp_path / "everyday.onnx")
    file = tmp_path / "everyday.json"
    assert made.verdicts == file
    assert json.loads(file.read_text()) == thresholds(model)
    verdicts = runpy.run_path("examples/deploy/verdict.py")["Verdicts"](file)
    rule, random = needed(model).rule(Levels(score="combined")), np.random.default_rng(0)
    logits = np.concatenate([random.normal(0, scale, (30, 1000)) for scale in (1, 2, 4, 8)])
    logits[:, 100:130] += random.normal(3, 2, (120, 1))
    novelty = random.choice(rule.rankings[0].values, 120) + random.normal(0, 1e-3, (120, 1))
    columns = Columns({"logits": logits, "novelty": novelty})
    kinds = set()
    for i, expected in enumerate(rule.examine(columns, range(120), model.class_names)):
        verdict, classes, kind, _, p = verdicts.verdict(logits[i], novelty[i])
        assert (verdict, classes, kind) == (expected.verdict, list(expected.classes or ()), expected.node)
        assert p == pytest.approx(expected.p_value, abs=1e-12)
        kinds.add((verdict, kind is None, len(classes) > 3))
    assert len(kinds) >= 4


def test_a_name_is_registered_once() -> None:
    with pytest.raises(CandidError, match="already a score 'joint'"):
        candid.register_score(SCORES["joint"])


def test_a_score_that_the_model_has_no_columns_for_is_refused(model: GenerativeClassifier) -> None:
    calibrate(model, "digits", images=60, workers=0)
    candid.register_score(Score("later", "new", ("nothing",), "OneTailed"))
    try:
        with pytest.raises(CandidError, match="no score 'later' for this model"):
            needed(model).rule(Levels(score="later"))
    finally:
        SCORES.pop("later")


def test_saved_detectors_are_not_fitted_again(
    model: GenerativeClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(model, "digits", images=150, workers=0)
    images = np.random.default_rng(0).integers(0, 256, size=(20, 1, 8, 8), dtype=np.uint8)
    expected = candid.examine(model, pictures(images))
    loaded = candid.load(candid.save(model, tmp_path / "model"))
    older = {name: values for name, values in loaded.held_out.items() if not name.startswith("fit.")}
    again = candid.load(tmp_path / "model")
    again.held_out = older
    assert candid.examine(again, pictures(images)) == expected

    def fit(self: Detector, held_out: Array) -> Detector:
        raise AssertionError("fitted again")

    for detector in {type(new_detector(SCORES[name])) for name in SCORES}:
        monkeypatch.setattr(detector, "fit", fit)
    assert candid.examine(loaded, pictures(images)) == expected
    with pytest.raises(AssertionError, match="fitted again"):
        candid.examine(again, pictures(images))


@pytest.mark.parametrize("name", sorted(SCORES.keys() - {"waic"}))
def test_every_detector_comes_back_from_its_state(name: str, model: GenerativeClassifier) -> None:
    calibrate(model, "digits", images=60, workers=0)
    score, statistics = SCORES[name], needed(model).statistics
    fitted = new_detector(score).fit(score.of(statistics))
    again = new_detector(score).restored(fitted.state())
    rows = score.of(statistics)[:9] * 1.01
    assert np.array_equal(again.p_value(rows), fitted.p_value(rows))
    assert np.array_equal(again.score(rows), fitted.score(rows))
    assert again.smallest_p_value == fitted.smallest_p_value


def test_a_changed_model_has_no_held_out_scores(model: GenerativeClassifier) -> None:
    calibrate(model, "digits", images=60, workers=0)
    assert HeldOut.of(model) is not None
    names, model.class_names = model.class_names, tuple("abcdefghij")
    assert HeldOut.of(model) is None
    model.class_names = names
    assert HeldOut.of(model) is not None


def test_code_lengths_are_measured_only_for_scores_that_need_them(model: GenerativeClassifier) -> None:
    calibrate(model, "digits", images=60, workers=0)
    assert Examiner(model).measures.keys() == {"complexity"}
    assert not Examiner(model, options=ExamineOptions(score="two-tailed")).measures


def test_held_out_images_say_how_uncertain_pairs_of_classes_are(
    model: GenerativeClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = calibrate(model, "digits", images=60, workers=0)
    assert held_out is not None and held_out.pair_uncertainty is not None
    pairs = held_out.pair_uncertainty
    assert pairs.shape == (10, 10) and np.array_equal(
        np.nan_to_num(pairs, nan=9), np.nan_to_num(pairs.T, nan=9)
    )
    loaded = candid.load(candid.save(model, tmp_path / "model"))
    found = HeldOut.of(loaded)
    assert found is not None and found.pair_uncertainty is not None
    assert np.array_equal(np.nan_to_num(found.pair_uncertainty, nan=9), np.nan_to_num(pairs, nan=9))
    loaded.held_out["pair_uncertainty"] = pairs[:3]
    with pytest.raises(CandidError, match=r"shape \(3, 10\) for 10 classes.*calibrate it again"):
        HeldOut.of(loaded)
    assert held_out.pair_distances is not None and found.pair_distances is not None
    np.testing.assert_array_equal(found.pair_distances, held_out.pair_distances)
    loaded.held_out |= {"pair_uncertainty": pairs, "pair_distances": pairs[:3]}
    with pytest.raises(CandidError, match=r"'pair_distances' has the shape \(3, 10\)"):
        HeldOut.of(loaded)
    del loaded.held_out["pair_uncertainty"], loaded.held_out["pair_distances"]  # as in earlier versions
    older = HeldOut.of(loaded)
    assert older is not None and older.pair_uncertainty is None and older.pair_distances is None
    monkeypatch.setattr(calibration, "MOST_CLASSES", 9)
    many = calibrate(model, "digits", images=60, workers=0)
    assert many is not None and many.pair_uncertainty is None and many.pair_distances is None


@pytest.fixture
def photos(tmp_path: Path) -> str:
    """Images of three classes without a training part."""
    write_folder(tmp_path / "photos", {"0": 40, "1": 40, "2": 40}, width=16)
    return str(tmp_path / "photos")


def test_without_training_images_one_half_fits_and_the_other_half_ranks(photos: str) -> None:
    model = small_resnet()
    held_out = calibrate(model, photos, workers=0)
    assert held_out is not None and held_out.fitted_keys is not None
    assert len(held_out) == len(held_out.fitted_keys) == 60
    assert not np.isin(held_out.fitted_keys, held_out.statistics["keys"]).any()
    rule = needed(model).rule()
    assert (rule.score.name, rule.promises[ALL].n_reference) == ("combined", 60)
    both = np.concatenate((held_out.fitted_keys, held_out.statistics["keys"], np.array([-1])))
    kept, overlap = unseen(Columns({"keys": both}), needed(model))
    assert (kept["keys"].tolist(), overlap) == ([-1], 120)
    kept, _ = unseen(Columns({"keys": both[:120]}), needed(model))
    assert np.isin(kept["keys"], held_out.statistics["keys"]).all() and len(kept["keys"]) == 30


def test_few_images_and_densities_are_not_halved(photos: str) -> None:
    few = calibrate(small_resnet(), photos, workers=0, images=30)
    assert few is not None and len(few) == 30 and not few.learned
    pixels = calibrate(small_classifier(), photos, workers=0)
    assert pixels is not None and len(pixels) == 120 and not pixels.learned


def test_held_out_scores_of_earlier_versions_keep_their_default(photos: str, tmp_path: Path) -> None:
    """They have a Mahalanobis distance and none of the other scores of features."""
    model = small_resnet()
    held_out = calibrate(model, photos, workers=0)
    assert held_out is not None
    gone = {f"statistic.{name}" for name in (*LEARNED, "generalised_entropy")}
    kept = {
        name: values
        for name, values in model.held_out.items()
        if name not in gone and not name.startswith(("fit.", "column_score.", "fitted_keys"))
    }
    mahalanobis = held_out.learned["mahalanobis"]
    assert isinstance(mahalanobis, Mahalanobis)
    model.held_out = {
        **kept,
        "statistic.distance": held_out.statistics["mahalanobis"],
        "gaussian.whitening": mahalanobis.whitening,
        "gaussian.means": mahalanobis.means + mahalanobis.centre.astype(np.float32) @ mahalanobis.whitening.T,
    }
    images = np.random.default_rng(0).integers(0, 256, size=(4, 3, 16, 16), dtype=np.uint8)
    old = candid.examine(model, pictures(images))
    assert old[0].promises is not None and old[0].promises.score == "mahalanobis"
    calibrate(model, photos, workers=0)
    new = candid.examine(model, pictures(images), score="mahalanobis")
    assert [each.p_value for each in old] == [each.p_value for each in new]
    assert needed(model).rule().score.name == "combined"


def test_a_saved_model_keeps_its_fitted_scores(photos: str, tmp_path: Path) -> None:
    model = small_resnet()
    calibrate(model, photos, workers=0)
    images = np.random.default_rng(0).integers(0, 256, size=(4, 3, 16, 16), dtype=np.uint8)
    loaded = load(candid.save(model, tmp_path / "model"))
    for name in (*LEARNED, "combined"):
        assert candid.examine(loaded, pictures(images), score=name) == candid.examine(
            model, pictures(images), score=name
        )


def test_an_examiner_measures_only_the_parts_of_its_score(photos: str) -> None:
    model = small_resnet()
    calibrate(model, photos, workers=0)
    assert Examiner(model).measures.keys() == {"mahalanobis++", "pca-residual"}
    assert Examiner(model, options=ExamineOptions(score="knn")).measures.keys() == {"knn"}
    assert not Examiner(model, options=ExamineOptions(score="gen")).measures
