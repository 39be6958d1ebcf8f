"""Training again into a folder with a photo model: only new photos pass the eye; both models are compared."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import candid
from candid import CandidError
from candid.cli.app import run as command
from candid.training.changes import changes_of
from tests.helpers import RecordedProgress
from tests.photo_models import CLASSES, PhotoRun, photo, write_photos


@pytest.fixture
def shop(photo_run: PhotoRun, tmp_path: Path) -> tuple[Path, Path]:
    """The photos and the folder of a run of one's own."""
    data, run = tmp_path / "photos", tmp_path / "mine"
    shutil.copytree(photo_run.data, data)
    shutil.copytree(photo_run.model, run)
    return data, run


def train(data: Path, run: Path, **options: Any) -> tuple[dict[str, Any], list[str]]:
    progress = RecordedProgress()
    return candid.train(str(data), out=run, progress=progress, **options).results, progress.messages


def test_only_new_photos_are_extracted_and_changes_are_listed(shop: tuple[Path, Path]) -> None:
    data, run = shop
    results, said = train(data, run)
    assert any(line.startswith("nothing has changed since") for line in said)
    dots = data / "train" / "dots"
    for i in range(5):
        photo("dots", 300 + i).save(dots / f"new{i}.png")
    (dots / "000.png").rename(dots / "moved.png")
    (dots / "001.png").rename(data / "train" / "rings" / "relabelled.png")
    (data / "train" / "stripes" / "000.png").unlink()
    results, said = train(data, run, keep_old=True)
    assert results["extracted"] == 5
    assert any("5 new, 1 moved, 1 relabelled and 1 deleted photo" in line for line in said)
    with (run / "photos-changed.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["what"] for row in rows) == ["deleted", "moved", *["new"] * 5, "other class"]
    moved = next(row for row in rows if row["what"] == "moved")
    assert moved["before"].endswith("000.png") and moved["path"].endswith("moved.png")
    assert any("out of fold on" in line and "right before" in line for line in said)
    assert results["compared"]["out_of_fold"]
    old, new = candid.load(run.with_name("mine.1")), candid.load(run)
    assert old.fingerprint() != new.fingerprint()
    assert new.metadata["head"]["counts"] == [16, 13, 11]
    assert changes_of(new)[-1]["text"].startswith("trained again: 5 new, 1 moved")


def test_photos_that_are_new_to_both_compare_them(shop: tuple[Path, Path]) -> None:
    data, run = shop
    for kind in CLASSES:
        for i in range(4):
            photo(kind, 500 + i).save(data / "test" / kind / f"new{i}.png")
    results, said = train(data, run)
    assert results["compared"]["photos"] == 24
    assert not results["compared"]["out_of_fold"]
    assert any("on 24 photos that neither model was trained on" in line for line in said)


def test_a_model_of_other_photos_is_kept(
    photo_run: PhotoRun, shop: tuple[Path, Path], tmp_path: Path
) -> None:
    other = write_photos(tmp_path / "others", ("checks", "noise"), 8, start=400)
    _, said = train(other, shop[1])
    assert candid.load(shop[1]).class_names == ("checks", "noise")
    kept = shop[1].with_name("mine.1")
    assert candid.load(kept).fingerprint() == candid.load(photo_run.model).fingerprint()
    assert any(line.startswith("none of these photos") for line in said)
    assert f"the old model is kept in {kept}" in said


def test_what_was_taught_stays_and_what_is_lost_is_said(shop: tuple[Path, Path], tmp_path: Path) -> None:
    data, run = shop
    new = write_photos(tmp_path / "more", ("checks", "rings"), 6, start=60)
    candid.teach(str(run), {"checks": new / "checks"}, out=str(run))
    candid.teach(str(run), {"rings": new / "rings"}, out=str(run))
    photo("dots", 300).save(data / "train" / "dots" / "new.png")
    _, said = train(data, run)
    model = candid.load(run)
    assert model.class_names == (*CLASSES, "checks")
    assert "taught again from its photos: checks" in said
    lost = [line for line in said if line.startswith("warning: the new model does not have this change")]
    assert len(lost) == 1 and "6 more photos of 'rings'" in lost[0]
    assert candid.load(run.with_name("mine.1")).metadata["head"]["counts"] == [12, 18, 12]
    assert (run / "photos-changed.csv").exists()
    train(data, run, priors="uniform")
    assert not (run / "photos-changed.csv").exists()
    found = candid.examine(model, new / "checks")
    assert sum(each.label == "checks" for each in found) >= 4
    assert changes_of(candid.undo(run))[-1]["text"] == "undid: trained again"
    before = candid.undo(run)
    assert before.fingerprint() == candid.load(run.with_name("mine.1")).fingerprint()
    assert changes_of(before)[-1]["text"] == "undid: trained again: 1 new photo"
    assert "6 more photos of 'rings'" in changes_of(candid.undo(run))[-1]["text"]


def test_bad_photos_are_skipped_and_a_run_without_a_model_is_no_run(tmp_path: Path) -> None:
    data = write_photos(tmp_path / "photos", CLASSES, 8)
    (data / "dots" / "bad.png").write_bytes(b"no photo")
    out = tmp_path / "run"
    with pytest.raises(CandidError, match=r"bad\.png' can't be used: .* leave --strict out"):
        candid.train(str(data), out=out, strict=True)
    assert (out / "config.toml").exists() and not (out / "model").exists()
    _, said = train(data, out, skip_bad=True)
    assert any(line.startswith("left out 1 photo that can't be used") for line in said)
    assert "bad.png" in (out / "skipped.txt").read_text()
    assert candid.load(out).class_names == CLASSES
    (data / "dots" / "bad.png").unlink()
    train(data, out, skip_bad=True)
    assert not (out / "skipped.txt").exists()


def test_training_names_the_weakest_class_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_photos(tmp_path / "photos" / "train", CLASSES, 12)
    write_photos(tmp_path / "photos" / "test", CLASSES, 1, start=90)
    for path in sorted((data / "rings").iterdir())[:8]:  # most rings are dots to the model
        path.unlink()
    for i in range(6):
        photo("dots", 700 + i).save(data / "rings" / f"wrong{i}.png")
    assert command(["train", str(data.parent), "--out", str(tmp_path / "mine")]) is None
    shown = capsys.readouterr()
    assert "weakest class: rings" in shown.err + shown.out and "taken for dots" in shown.err + shown.out
    page = (tmp_path / "mine" / "photos.html").read_text()
    assert "Results by class" in page and "weakest class: rings" in page
    assert command(["models", str(tmp_path / "mine")]) is None
    assert "weakest class: rings" in capsys.readouterr().out.replace("\n", " ")
    results = json.loads((tmp_path / "mine" / "results.json").read_text())
    assert results["by_class"]["classes"][1]["taken_for"]["dots"] >= 3


def test_the_story_of_a_shop(tmp_path: Path) -> None:
    """Few rings, and what real folders have: the class is named, more photos help, few are extracted."""
    shop, run = tmp_path / "shop", tmp_path / "mine"
    write_photos(shop / "train", ("dots", "stripes"), 20)
    write_photos(shop / "train", ("rings",), 5)
    test = write_photos(shop / "test", CLASSES, 8, start=400)
    shutil.copy(shop / "train" / "rings" / "000.png", shop / "train" / "rings" / "copy.png")
    shutil.copy(Path(__file__).parent.parent / "data" / "turned.heic", shop / "train" / "dots" / "phone.heic")
    (shop / "train" / "dots" / "001.png").rename(shop / "train" / "stripes" / "wrong.png")
    clear = Image.open(shop / "train" / "dots" / "002.png").convert("RGBA")
    clear.putalpha(128)
    clear.save(shop / "train" / "dots" / "clear.png")
    results, said = train(shop, run)
    assert results["head"]["counts"] == [21, 6, 21]
    assert any(line.startswith("weakest class: ") and "trained on" in line for line in said)
    more = write_photos(tmp_path / "more", ("rings",), 14, start=600)
    before, after = (
        [each.label for each in candid.examine(model, test / "rings")].count("rings")
        for model in (str(run), candid.teach(str(run), {"rings": more / "rings"}).model)
    )
    assert after >= before - 1
    for path in sorted((more / "rings").iterdir())[:3]:
        shutil.copy(path, shop / "train" / "rings" / f"more {path.name}")
    for i in range(4):
        photo("rings", 800 + i).save(shop / "train" / "rings" / f"new {i}.png")
    assert train(shop, run)[0]["extracted"] == 4  # those that were taught have passed the eye before
