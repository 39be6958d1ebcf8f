"""Models, monitors and states of watches of earlier versions load, and say what those versions said.

``tests/released`` has them, by the commit that made them: see ``make.py`` there. a4840b1 has digests of the
whole configuration; c7b0e75 the first photo models, monitors and watches; 5ec7360 is the last version before
the one rule; a0e47f3 the first one with it; 6313cdf the last one before 1.0.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import candid
from candid._support.errors import CandidError
from tests.helpers import candid_command
from tests.released.make import arrays, digits, photo, photos, said

RELEASED = Path(__file__).parent / "released"
VERSIONS = sorted(path.parent.name for path in RELEASED.glob("*/said.json"))
LATER = sorted(path.parent.name for path in RELEASED.glob("*/watch.json"))
"""Versions with photo models, monitors and watches."""
LATEST = "6313cdf"


def expected(version: str, kind: str) -> Any:
    return json.loads((RELEASED / version / "said.json").read_text())[kind]


def check(found: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    assert len(found) == len(before)
    for new, old in zip(found, before, strict=True):
        assert new["label"] == old["label"]
        assert new["posterior"] == pytest.approx(old["posterior"], rel=1e-5, abs=1e-7)
        for key in [key for key in old if key not in ("label", "posterior") and old[key] is not None]:
            assert new[key] == pytest.approx(old[key], rel=1e-5, abs=1e-7), key


@pytest.mark.parametrize("version", VERSIONS)
def test_pixel_models_of_earlier_versions_judge_as_they_did(version: str, tmp_path: Path) -> None:
    folder = shutil.copytree(RELEASED / version / "pixel", tmp_path / "model")
    before = expected(version, "pixel")
    check(said(candid.examine(str(folder), digits())), before)
    model = candid.load(folder)
    again = candid.save(model, tmp_path / "again")  # with its held-out scores
    check(said(candid.examine(str(again), digits())), before)


@pytest.mark.parametrize("version", LATER)
def test_photo_models_of_earlier_versions_judge_as_they_did(version: str, tmp_path: Path) -> None:
    folder = shutil.copytree(RELEASED / version / "photo", tmp_path / "model")
    check(said(candid.examine(str(folder), photos())), expected(version, "photo"))


@pytest.mark.parametrize("version", LATER)
def test_photo_models_of_earlier_versions_are_taught(version: str, tmp_path: Path) -> None:
    folder = shutil.copytree(RELEASED / version / "photo", tmp_path / "model")
    (tmp_path / "new").mkdir()
    for seed in range(6):
        photo(0, 300 + seed).rotate(90).save(tmp_path / "new" / f"{seed}.png")
    candid.teach(str(folder), {"turned": tmp_path / "new"}, out=folder)
    assert candid.load(folder).class_names == ("rings", "stripes", "turned")
    assert candid.undo(str(folder)).class_names == ("rings", "stripes")
    check(said(candid.examine(str(folder), photos())), expected(version, "photo"))


@pytest.mark.parametrize("version", LATER)
def test_monitors_of_earlier_versions_say_what_they_did(version: str) -> None:
    logits, _, features = arrays(9, seed=1)
    monitor = candid.Monitor.load(RELEASED / version / "monitor")
    check(said(monitor.examine(logits, features)), expected(version, "monitor"))


@pytest.mark.parametrize("version", LATER)
def test_watches_of_earlier_versions_go_on(version: str) -> None:
    watch, before = candid.Watch.load(RELEASED / version / "watch.json"), expected(version, "watch")
    assert (watch.images, watch.alarm) == (before["images"], before["alarm"])
    assert watch.evidence == pytest.approx(before["evidence"])
    logits, _, _ = arrays(60)
    watch.update(logits[20:40, 1])
    assert watch.images == before["images"] + 20


@pytest.mark.parametrize("version", LATER)
def test_a_state_of_candid_watch_goes_on_or_says_what_to_do(version: str, tmp_path: Path) -> None:
    state = shutil.copy(RELEASED / version / "watch.sqlite", tmp_path / "watch.sqlite")
    folder = shutil.copytree(RELEASED / version / "photo", tmp_path / "model")
    (tmp_path / "new").mkdir()
    photo(0, 500).save(tmp_path / "new" / "one.png")
    done = candid_command("watch", folder, tmp_path / "new", "--once", "--json", "--state", state)
    if version == LATEST:
        assert "goes on after 40" in done.stderr and json.loads(done.stdout)["images"] == 41
    else:  # their score of a photo model left its first part out: the watch can't go on with another one
        assert done.exit_code == 2 and isinstance(done.exception, CandidError)
        assert "to start a new watch" in str(done.exception)
