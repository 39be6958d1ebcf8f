"""Teaching a class to a photo model and forgetting it: files, held-out scores, mistakes, kills."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import candid
from candid import CandidError
from candid.cli.app import run as command
from candid.data.images import decode_as, to_float
from candid.judging.held_out import HeldOut, needed
from candid.models import checkpoint
from candid.models.photo.model import PhotoModel
from candid.training.changes import CHANGES, DISCARDED
from candid.training.remembered import Remembered, left_out
from candid.training.teach import TeachResult
from candid.trust.ranking import ALL
from candid.trust.sets import TAUGHT_BOUND
from candid.trust.tree import Tree
from tests.helpers import RecordedProgress
from tests.photo_models import CLASSES, PhotoRun, photo, write_photos


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of two kinds that the model does not know: checks to learn and others to test."""
    folder = tmp_path_factory.mktemp("new")
    write_photos(folder, ("checks", "noise"), 6, start=50)
    write_photos(folder / "test", ("checks",), 6, start=80)
    return folder


@pytest.fixture(scope="module")
def taught(
    photo_run: PhotoRun, photos: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TeachResult, Path]:
    out = tmp_path_factory.mktemp("taught") / "model"
    return candid.teach(photo_run.model, {"checks": photos / "checks"}, out=out), out


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def record(folder: str | Path) -> dict[str, object]:
    found = json.loads((checkpoint.model_folder(folder) / "model.json").read_text())
    found["metadata"].pop(CHANGES, None)  # the record of changes has times
    return {name: value for name, value in found.items() if name != "digest"}


def test_the_new_class_is_known_and_the_old_folder_stays(
    photo_run: PhotoRun, photos: Path, tmp_path: Path
) -> None:
    before = content(Path(photo_run.model))
    arguments = ["teach", photo_run.model, f"checks={photos / 'checks'}", "--out", str(tmp_path / "more")]
    assert command(arguments) is None
    assert content(Path(photo_run.model)) == before
    old, new = candid.load(photo_run.model), candid.load(tmp_path / "more")
    assert new.class_names == (*old.class_names, "checks")
    found = candid.examine(new, photos / "test" / "checks")
    assert sum(each.label == "checks" for each in found) >= 5
    known = candid.examine(new, list(photo_run.photos))
    assert [each.label for each in known] == list(old.class_names)


def test_ratios_of_known_classes_are_exact(photo_run: PhotoRun, taught: tuple[TeachResult, Path]) -> None:
    old, new = candid.load(photo_run.model), candid.load(taught[1])
    features = old.eye.statistics(np.random.default_rng(0).random((3, 3, 224, 224), np.float32))
    assert np.array_equal(new.logits_of(features)[:, :3], old.logits_of(features))


def test_held_out_scores_and_levels_are_updated(
    photo_run: PhotoRun, taught: tuple[TeachResult, Path]
) -> None:
    old, new = (HeldOut.of(candid.load(path)) for path in (photo_run.model, taught[1]))
    assert old is not None and new is not None
    assert len(new) == len(old) + 6
    assert new.pair_uncertainty is not None and new.pair_uncertainty.shape == (4, 4)
    assert needed(candid.load(taught[1])).rule().promises[ALL].n_reference == len(new)
    lesson = taught[0].lessons[0]
    assert lesson.photos == 6
    assert (new.statistics["predicted"][-6:] == 3).mean() == lesson.recall
    assert set(taught[0].recalls) == {"dots", "rings", "stripes"}
    assert any(sentence.startswith("the price") for sentence in taught[0].sentences())


def test_an_older_taught_model_knows_which_photos_taught_it(taught: tuple[TeachResult, Path]) -> None:
    model = candid.load(taught[1])
    expected = needed(model)
    assert (expected.statistics["taught"] == 3).sum() == 6
    del model.held_out["statistic.taught"]
    older = needed(model)
    assert (older.statistics["taught"] == expected.statistics["taught"]).all()
    assert older.rule().bounds == expected.rule().bounds == {3: TAUGHT_BOUND}
    promises = older.rule().promises[ALL]
    assert promises.unmeasured == 1
    assert any("a class that was taught from fewer than 19 photos" in each for each in promises.sentences())


def test_each_photo_is_left_out_of_its_class(taught: tuple[TeachResult, Path], photos: Path) -> None:
    """The held-out score of a photo is that of a model which was taught the other five."""
    new = candid.load(taught[1])
    scores = HeldOut.of(new)
    assert scores is not None
    paths = sorted((photos / "checks").iterdir())
    base = candid.forget(new, "checks")
    others = candid.teach(base, {"checks": paths[1:]}).model
    features = new.eye.statistics(to_float(decode_as(paths[0], new.preprocessing)[None]))
    expected, within = (float(model.logits_of(features)[0, 3]) for model in (others, new))
    assert float(scores.statistics["max_logit"][-6]) == pytest.approx(expected, rel=1e-5)
    assert within > 1.001 * expected


def test_forgetting_is_exact(photo_run: PhotoRun, taught: tuple[TeachResult, Path], tmp_path: Path) -> None:
    assert command(["forget", str(taught[1]), "checks", "--out", str(tmp_path / "old")]) is None
    assert record(tmp_path / "old") == record(photo_run.model)  # with the SHA-256 of all tensors
    assert command(["examine", str(tmp_path / "old"), str(photo_run.photos[0])]) is None


def test_classes_are_forgotten_in_any_order(
    photo_run: PhotoRun, taught: tuple[TeachResult, Path], photos: Path, tmp_path: Path
) -> None:
    both = candid.teach(taught[0].model, {"noise": photos / "noise"}, out=tmp_path / "both")
    assert both.model.class_names[-2:] == ("checks", "noise")
    assert set(both.recalls) == {"dots", "rings", "stripes"}
    alone = candid.teach(photo_run.model, {"noise": photos / "noise"}, out=tmp_path / "alone")
    candid.forget(tmp_path / "both", "checks", out=tmp_path / "left")
    assert record(tmp_path / "left") == record(tmp_path / "alone")
    assert both.lessons[0].photos == alone.lessons[0].photos == 6


def test_a_recalibrated_model_can_still_forget(
    photo_run: PhotoRun, taught: tuple[TeachResult, Path], tmp_path: Path
) -> None:
    model = candid.load(taught[1])
    scores = HeldOut.of(model)
    assert scores is not None
    scores.attach(model)
    candid.forget(model, "checks", out=tmp_path / "old")
    assert record(tmp_path / "old") == record(photo_run.model)


def test_scores_of_other_images_are_not_discarded_silently(
    photo_run: PhotoRun, taught: tuple[TeachResult, Path], photos: Path, tmp_path: Path
) -> None:
    others = str(write_photos(tmp_path, CLASSES, 8, start=400))
    model, more = candid.load(photo_run.model), candid.load(taught[1])
    for each in (model, more):
        candid.calibrate(each, others)
    calibrated = model.held_out["statistic.keys"]
    progress = RecordedProgress()
    found = candid.teach(model, {"checks": photos / "checks"}, progress=progress)
    assert found.discarded and not taught[0].discarded
    assert DISCARDED in progress.messages
    assert np.array_equal(candid.forget(found.model, "checks").held_out["statistic.keys"], calibrated)
    candid.forget(more, "checks", progress=(said := RecordedProgress()))
    assert DISCARDED in said.messages


def test_the_given_model_stays_as_it_is(
    photo_run: PhotoRun, taught: tuple[TeachResult, Path], photos: Path
) -> None:
    model = candid.load(photo_run.model)
    before, scores = model.fingerprint(), set(model.held_out)
    found = candid.teach(model, {"checks": photos / "checks"}).model
    assert found.fingerprint() == taught[0].model.fingerprint() != before
    assert (model.fingerprint(), set(model.held_out)) == (before, scores)
    assert found.folder == model.folder is not None  # an eye from a file may lie there


def test_a_model_without_held_out_photos_can_be_taught(photo_run: PhotoRun, photos: Path) -> None:
    model: PhotoModel = candid.load(photo_run.model)
    model.held_out = {}
    assert Remembered.of(model) is None
    found = candid.teach(model, {"checks": photos / "checks"})
    assert found.recalls == {}
    assert "the price is unknown" in found.sentences()[-1]
    assert candid.forget(found.model, "checks").class_names == model.class_names


def test_photos_of_a_known_class_are_noticed(photo_run: PhotoRun, tmp_path: Path) -> None:
    write_photos(tmp_path, ("dots",), 5, start=200)
    found = candid.teach(photo_run.model, {"more dots": tmp_path / "dots"})
    assert found.lessons[0].accepted_as == "dots"
    assert any("accepted as 'dots'" in sentence for sentence in found.sentences())


def test_photos_that_are_no_group_are_noticed(photo_run: PhotoRun, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    for i, kind in enumerate(("dots", "rings", "stripes") * 2):
        photo(kind, 300 + i).save(folder / f"{i}.png")
    found = candid.teach(photo_run.model, {"mixed": folder})
    assert found.lessons[0].recall < 0.5
    assert any("hardly a group" in sentence for sentence in found.sentences())


def test_mistakes_get_one_sentence(
    photo_run: PhotoRun, taught: tuple[TeachResult, Path], photos: Path, tmp_path: Path
) -> None:
    write_photos(tmp_path, ("checks",), 1)
    copies = tmp_path / "copies"
    copies.mkdir()
    for i in range(8):
        photo("checks", i % 2).save(copies / f"{i}.png")
    broken = tmp_path / "broken"
    broken.mkdir()
    for i in range(5):
        photo("checks", i).save(broken / f"{i}.png")
    (broken / "0.png").write_bytes((broken / "0.png").read_bytes()[:100])
    model, out = photo_run.model, tmp_path / "out"
    for classes, problem in (
        ({"checks": tmp_path / "checks"}, r"too few photos \(1\): give at least 5"),
        ({"checks": copies}, "copies of each other: 2 of 8 differ"),
        ({"checks": broken}, "Only 4 photos of 'checks' can be read"),
        ({"checks": tmp_path / "nothing"}, "no image, folder or match"),
        ({}, "no class to teach"),
        ({" ": photos / "checks"}, "needs a name"),
    ):
        with pytest.raises(CandidError, match=problem):
            candid.teach(model, classes, out=out)
    with pytest.raises(CandidError, match="already has a model: choose another --out"):
        candid.teach(model, {"checks": photos / "checks"}, out=taught[1])
    with pytest.raises(CandidError, match="Only a photo model can be taught"):
        candid.teach("cifar10-resnet", {"checks": photos / "checks"})
    with pytest.raises(CandidError, match="no class 'dot'"):
        candid.forget(taught[1], "dot")
    with pytest.raises(CandidError, match="takes NAME=FOLDER, not 'checks'"):
        command(["teach", model, "checks", "--out", str(out)])
    assert not out.exists()


def test_a_full_disk_leaves_nothing_half_done(
    photo_run: PhotoRun, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(CandidError, match="Can't save the model in .*No space left on device"):
        candid.teach(photo_run.model, {"checks": photos / "checks"}, out=tmp_path / "out")
    assert not (tmp_path / "out" / "model.json").exists()
    monkeypatch.undo()
    candid.teach(photo_run.model, {"checks": photos / "checks"}, out=tmp_path / "out")
    assert candid.load(tmp_path / "out").class_names[-1] == "checks"


def test_a_killed_teaching_loses_nothing(
    photo_run: PhotoRun, taught: tuple[TeachResult, Path], photos: Path, tmp_path: Path
) -> None:
    before, out = content(Path(photo_run.model)), tmp_path / "out"
    arguments = ["teach", photo_run.model, f"checks={photos / 'checks'}", "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "candid", *arguments], stderr=subprocess.DEVNULL)
    while not out.exists() and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert content(Path(photo_run.model)) == before
    if not (out / "model.json").exists():
        assert command(arguments) is None
    assert record(out) == record(taught[1])


def test_series_and_occasions_stay_and_a_tree_waits(photo_run: PhotoRun, photos: Path) -> None:
    model = candid.load(photo_run.model)
    scores, count = needed(model), len(needed(model))
    above = {"dots": "round", "rings": "round", "round": "pattern", "stripes": "pattern"}
    tree = Tree.of(above, model.class_names)
    kinds = {"kind_ratio": np.ones(count), "kind_mass": np.zeros(count), "series": np.arange(count) // 2}
    replace(scores, statistics=scores.statistics.with_columns(kinds), tree=tree).attach(model)
    model.tree = tree
    model.held_out["remembered.series"] = np.arange(count) // 2
    made = candid.teach(model, {"checks": photos / "checks"}).model
    taught = needed(made)
    promises = taught.rule().promises[ALL]
    assert promises.occasions and promises.n_reference == len(np.unique(taught.statistics["series"]))
    assert (taught.statistics["series"][:count] == np.arange(count) // 2).all()
    assert taught.statistics["series"][count:].min() == count // 2
    assert taught.tree is None and taught.rule().tree is None  # a kind would be said of fitted classes alone
    assert candid.forget(made, "checks").tree == tree


def test_photos_of_one_object_are_named(photo_run: PhotoRun, tmp_path: Path) -> None:
    one = photo("checks", 51)
    for i in range(8):
        one.rotate(2 * i).crop((8 + i, 6, 92 + 3 * i, 98)).save(tmp_path / f"{i}.png")
    result = candid.teach(photo_run.model, {"checks": tmp_path})
    assert result.lessons[0].one_object and "look like one object" in " ".join(result.sentences())
    assert needed(result.model).rule().bounds == {3: TAUGHT_BOUND}


def test_the_photos_of_a_series_are_left_out_together(photo_run: PhotoRun, photos: Path) -> None:
    model = candid.teach(photo_run.model, {"checks": photos / "checks"}).model
    features = model.held_out["taught.0.features"]
    apart, pairs = (
        left_out(model, [features], [series])[0].logits for series in (np.arange(6), np.arange(6) // 2)
    )
    third = left_out(model, [features], [np.array([0, 0, 1, 2, 3, 4])])[0].logits
    assert np.array_equal(third[2:], apart[2:]) and np.array_equal(third[:2], pairs[:2])
    assert (pairs[:, 3] != apart[:, 3]).all()
