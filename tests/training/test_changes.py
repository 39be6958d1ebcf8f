"""Changes of the classes of a photo model: more photos, other names, merged and forgotten classes, undo."""

import importlib
import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import candid
from candid import CandidError
from candid.cli.app import run as command
from candid.data.images import decode_as, to_float
from candid.judging.held_out import HeldOut, needed
from candid.models import saving
from candid.models.photo.gaussian import Totals
from candid.models.photo.model import PhotoModel
from candid.models.photo.revised import totals_of
from candid.training import changes
from candid.training.changes import changes_of
from candid.training.remembered import Remembered
from candid.trust.tree import Tree
from tests.photo_models import CLASSES, PhotoRun, train_photo_model, write_photos

teach_module = importlib.import_module("candid.training.teach")  # the name is that of the function, too


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of known classes and of a new kind, none of which was trained on."""
    folder = tmp_path_factory.mktemp("more")
    write_photos(folder, ("dots", "rings"), 6, start=200)
    return write_photos(folder / "new", ("checks",), 6, start=50).parent


@pytest.fixture
def mine(photo_run: PhotoRun, tmp_path: Path) -> str:
    """A run folder to change."""
    return str(shutil.copytree(photo_run.model, tmp_path / "mine"))


def statistics(model: PhotoModel, seed: int = 0, count: int = 4) -> np.ndarray:
    return model.eye.statistics(np.random.default_rng(seed).random((count, 3, 224, 224), np.float32))


def features_of(model: PhotoModel, folders: list[Path]) -> np.ndarray:
    paths = [path for folder in folders for path in sorted(folder.iterdir())]
    images = np.stack([decode_as(path, model.preprocessing) for path in paths])
    return model.eye.statistics(to_float(images))


def test_more_photos_count_as_if_trained_together(photo_run: PhotoRun, more: Path) -> None:
    """A head carries the totals that it was fitted to; taught photos are added to these."""
    before = candid.load(photo_run.model)
    folders = [Path(photo_run.data) / "train" / name for name in CLASSES]
    x, labels = features_of(before, folders), np.repeat([0, 1, 2], 12)
    found = candid.teach(before, {"dots": more / "dots"})
    whole = np.concatenate((x, features_of(before, [more / "dots"]))), np.append(labels, [0] * 6)
    for model, photos in ((before, (x, labels)), (found.model, whole)):
        expected, totals = Totals.of(*photos, 3), totals_of(model)
        assert totals.counts.tolist() == expected.counts.tolist()
        np.testing.assert_allclose(totals.sums, expected.sums, atol=2e-3 * abs(expected.sums).mean())
        error = np.linalg.norm(totals.products - expected.products) / np.linalg.norm(expected.products)
        assert error < 1e-3
    assert found.model.metadata["head"]["counts"] == [18, 12, 12]
    assert found.model.class_names == CLASSES
    lesson = found.lessons[0]
    assert lesson.photos == 6 and lesson.before is not None and 0 <= lesson.recall <= 1
    assert any(line.startswith("6 more photos of 'dots'") for line in found.sentences())
    assert any(line.startswith("recall of 'dots'") for line in found.sentences())


def test_held_out_scores_follow_and_known_photos_are_not_added_twice(photo_run: PhotoRun, more: Path) -> None:
    before = candid.load(photo_run.model)
    model = candid.teach(before, {"dots": more / "dots"}).model
    held_out, remembered = HeldOut.of(model), Remembered.of(model)
    assert held_out is not None and len(held_out) == 42 and held_out.out_of_fold
    assert remembered is not None and (remembered.labels == 0).sum() == 18
    judged = candid.examine(model, list(photo_run.photos))
    assert all(each.p_value is not None for each in judged)
    assert needed(model).rule().promises
    with pytest.raises(CandidError, match="seen all of these photos of 'dots'"):
        candid.teach(model, {"dots": more / "dots"})
    assert model.known_photos is not None and before.known_photos is not None
    assert len(model.known_photos) == len(before.known_photos)
    moved = np.linalg.norm(model.known_photos.places - before.known_photos.places)
    assert moved < np.linalg.norm(before.known_photos.places)


def test_a_taught_class_gets_more_photos_from_several_folders(mine: str, more: Path, tmp_path: Path) -> None:
    extra = write_photos(tmp_path / "extra", ("checks",), 3, start=90) / "checks"
    folders = [f"checks={more / 'new' / 'checks'}", f"checks={extra}"]
    assert command(["teach", mine, *folders]) is None
    both = candid.load(mine)
    step = candid.teach(candid.teach(both, {"dots": more / "dots"}).model, {"rings": more / "rings"}).model
    one = candid.forget(both, "checks")
    one = candid.teach(one, {"checks": more / "new" / "checks"}).model
    two = candid.teach(one, {"checks": extra}).model
    assert [each.metadata["taught"][0]["photos"] for each in (both, one, two)] == [9, 6, 9]
    x = statistics(both)
    np.testing.assert_array_equal(two.logits_of(x), both.logits_of(x))
    assert step.class_names == both.class_names == (*CLASSES, "checks")
    assert step.metadata["head"]["counts"] == [18, 18, 12]


def test_renaming_changes_nothing_else(mine: str, more: Path, photo_run: PhotoRun) -> None:
    taught = candid.teach(mine, {"checks": more / "new" / "checks"}, out=mine).model
    assert command(["rename", mine, "dots=spots", "checks=squares"]) is None
    renamed = candid.load(mine)
    assert renamed.class_names == ("spots", "rings", "stripes", "squares")
    np.testing.assert_array_equal(
        renamed.logits_of(statistics(renamed)), taught.logits_of(statistics(taught))
    )
    old, new = (candid.examine(model, list(photo_run.photos)) for model in (taught, renamed))
    assert [(each.p_value, each.verdict) for each in old] == [(each.p_value, each.verdict) for each in new]
    assert candid.forget(renamed, "squares").class_names == ("spots", "rings", "stripes")
    with pytest.raises(CandidError, match="Two classes would be called 'rings'"):
        candid.rename(mine, {"spots": "rings"})
    with pytest.raises(CandidError, match="no class 'dot'"):
        candid.rename(mine, {"dot": "d"})


def test_merging_and_forgetting_classes(mine: str, more: Path, photo_run: PhotoRun) -> None:
    assert command(["merge", mine, "round=dots,rings"]) is None
    merged = candid.load(mine)
    assert merged.class_names == ("round", "stripes")
    assert merged.metadata["head"]["counts"] == [24, 12]
    assert [each.label for each in candid.examine(mine, list(photo_run.photos))] == [
        "round",
        "round",
        "stripes",
    ]
    with pytest.raises(CandidError, match="At least two of the classes"):
        candid.forget(mine, "round")
    candid.undo(mine)
    less = candid.forget(mine, "rings")
    assert less.class_names == ("dots", "stripes") and less.metadata["head"]["counts"] == [12, 12]
    held_out = HeldOut.of(less)
    assert held_out is not None and len(held_out) == 24
    taught = candid.teach(mine, {"checks": more / "new" / "checks"}).model
    mixed = candid.merge(taught, {"dots": ["dots", "checks"]})
    assert mixed.class_names == CLASSES and mixed.metadata["head"]["counts"] == [18, 12, 12]
    clash = {"checks": ["dots", "rings"], "x": ["checks", "stripes"]}
    for wrong in ({"dots": ["rings", "stripes"]}, {"x": ["dots"]}, {"x": ["dots", "dots"]}, clash):
        with pytest.raises(CandidError, match="Two classes would|at least two classes to merge"):
            candid.merge(taught, wrong)


def test_a_merged_class_lies_below_the_kind_that_covers_its_parts(photo_run: PhotoRun) -> None:
    model = candid.load(photo_run.model)
    model.tree = Tree(("thing", "round", "long"), (-1, 0, 0), (1, 1, 2))
    for merged, parents in ((["rings", "stripes"], (1, 0)), (["dots", "rings"], (1, 2))):
        tree = candid.merge(model, {"x": merged}).tree
        assert tree is not None and tree.class_parents == parents


def test_results_by_class_are_those_of_the_model(
    mine: str, more: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = candid.load(mine)
    renamed = candid.rename(model, {"dots": "spots"}).metadata["by_class"]
    results = model.metadata["by_class"]
    assert json.dumps(renamed["classes"]) == json.dumps(results["classes"]).replace("dots", "spots")
    assert "by_class" not in candid.merge(model, {"round": ["dots", "rings"]}).metadata
    assert "by_class" not in candid.teach(model, {"dots": more / "dots"}).model.metadata
    candid.teach(mine, {"checks": more / "new" / "checks"}, out=mine)
    for shown in (False, True):  # they are of the model without the taught class
        assert command(["models", mine]) is None
        assert ("Results by class" in capsys.readouterr().out) == shown
        candid.undo(mine) if not shown else None


def test_changes_are_recorded_and_undone_to_the_same_weights(
    mine: str, more: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = candid.load(mine)
    candid.teach(mine, {"dots": more / "dots"}, out=mine)
    candid.rename(mine, {"dots": "spots"}, out=mine)
    assert [each["what"] for each in changes_of(candid.load(mine))] == ["teach", "rename"]
    assert command(["models", mine, "--history"]) is None
    shown = capsys.readouterr().out
    assert "6 more photos of 'dots'" in shown and "renamed 'dots' to 'spots'" in shown
    assert command(["undo", mine]) is None
    assert candid.load(mine).class_names[0] == "dots"
    again = candid.undo(mine)
    assert again.fingerprint() == first.fingerprint()
    assert all(np.array_equal(again.held_out[name], first.held_out[name]) for name in first.held_out)
    assert [each["what"] for each in changes_of(again)] == ["teach", "rename", "undo", "undo"]
    with pytest.raises(CandidError, match="No change was made"):
        candid.undo(mine)
    assert not (Path(mine) / "model" / "best" / "earlier").exists()


def test_the_ten_latest_changes_can_be_undone_also_after_a_kill(mine: str) -> None:
    names = ["dots", *map(str, range(12))]
    for old, new in pairwise(names):
        candid.rename(mine, {old: new}, out=mine)
    earlier = Path(mine) / "model" / "best" / "earlier"
    assert sorted(int(each.name) for each in earlier.iterdir() if each.name.isdigit()) == [*range(3, 13)]
    (earlier / "13").mkdir()  # of a process that was killed
    for name in names[-2:-12:-1]:
        assert candid.undo(mine).class_names[0] == name
    with pytest.raises(CandidError, match="No change was made"):
        candid.undo(mine)


def test_a_model_with_other_posteriors_can_be_changed(tmp_path: Path, more: Path) -> None:
    """Logits stay linear in the statistics, and uniform priors uniform."""
    run = train_photo_model(tmp_path, photos=7, thumbnails=False, priors="uniform")
    model = candid.teach(run.model, {"dots": more / "dots"}).model
    weights, bias = model.linear_logits()
    x = statistics(model).astype(np.float64)
    np.testing.assert_allclose(x @ weights.T + bias, model.logits_of(x), rtol=1e-6, atol=1e-6)
    assert np.ptp(model.priors) < 1e-6


@pytest.mark.parametrize("place", ["elsewhere", "in place"])
def test_the_second_of_two_writers_says_so(
    mine: str, more: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """What another process saves while a class is taught stays, and can be undone."""
    out = mine if place == "in place" else str(tmp_path / "out")
    names = candid.load(mine).class_names
    save_change = changes.save_change

    def after_the_other(*arguments: Any) -> None:
        monkeypatch.setattr(changes, "save_change", save_change)
        candid.rename(mine, {"dots": "spots"}, out=out)
        save_change(*arguments)

    monkeypatch.setattr(teach_module, "save_change", after_the_other)
    with pytest.raises(CandidError, match="Another process has saved a model"):
        candid.teach(mine, {"checks": more / "new"}, out=out)
    assert candid.load(out).class_names == ("spots", *names[1:])
    earlier = Path(out) / "model" / "best" / "earlier"
    assert [each.name for each in earlier.glob("*")] == (["1"] if place == "in place" else [])
    if place == "in place":
        assert candid.undo(mine).class_names == names and not earlier.exists()


def test_a_change_on_a_full_disk_leaves_nothing_behind(mine: str) -> None:
    folder = Path(mine)
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    script = """
import resource, sys, candid
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    candid.rename(sys.argv[1], {"dots": "spots"}, out=sys.argv[1])
except candid.CandidError as error:
    print(error)
"""
    command = [sys.executable, "-c", script, mine]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "free some space" in done.stdout and done.stdout.count("\n") == 1
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before
    assert candid.load(mine).class_names[0] == "dots"


def test_a_model_is_saved_only_over_the_one_that_is_expected(photo_run: PhotoRun, tmp_path: Path) -> None:
    model, save = candid.load(photo_run.model), saving.save
    folder = save(model, tmp_path / "out")
    earlier = saving.record_hash(folder)
    save(candid.rename(model, {"dots": "spots"}), folder, expected=earlier)
    with pytest.raises(CandidError, match="Another process has saved a model"):
        save(model, folder, expected=earlier)
    with pytest.raises(CandidError, match="Another process has saved a model"):
        save(model, folder, expected="")
    assert candid.load(folder).class_names[0] == "spots"
