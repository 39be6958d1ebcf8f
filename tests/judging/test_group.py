"""Groups of unknown images: the arrays, the page, sorted copies, teaching from a group."""

import csv
import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import adjusted_mutual_info_score

import candid
from candid import CandidError
from candid._support import files
from candid._support.numbers import Array
from candid.cli.app import run as command
from candid.judging import group as sort
from candid.judging.group import GroupResult, Whitener, _joined, clusters
from candid.judging.held_out import HeldOut
from candid.reports.pages import groups_page
from tests.photo_models import PhotoRun, photo, write_photos


@pytest.fixture(scope="module")
def images(photo_run: PhotoRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of two unknown kinds and of a known one."""
    folder = tmp_path_factory.mktemp("mixed")
    write_photos(folder, ("checks", "noise"), 9, start=400)
    write_photos(folder, ("stripes",), 3, start=400)
    return folder


@pytest.fixture(scope="module")
def found(photo_run: PhotoRun, images: Path) -> GroupResult:
    return candid.group(photo_run.model, images, novelty=0.06)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def blobs(each: int, kinds: int = 3, d: int = 30) -> tuple[Array, Array]:
    random = np.random.default_rng(3)
    y = np.arange(kinds).repeat(each)
    return 3 * random.normal(size=(kinds, d))[y] + random.normal(size=(len(y), d)), y


def test_clusters_are_found() -> None:
    x, y = blobs(20)
    rows = clusters(x)
    labels = np.full((len(y),), -1)
    for number, own in enumerate(rows):
        labels[own] = number
    assert adjusted_mutual_info_score(y, labels) > 0.9
    assert [len(own) for own in rows] == sorted((len(own) for own in rows), reverse=True)
    assert clusters(x) == rows


def test_the_first_row_of_a_cluster_is_central() -> None:
    x, _ = blobs(20, kinds=2)
    x[5] = 0.5 * x[5] + 20 * np.eye(30)[0]  # far from the others
    for rows in clusters(x, 2):
        unit = x[rows] / np.linalg.norm(x[rows], axis=1, keepdims=True)
        assert int(np.argsort(-(unit @ unit.mean(0))).tolist().index(0)) < len(rows) // 2
        assert rows[0] != 5


def test_the_number_of_groups_can_be_given() -> None:
    x, y = blobs(12)
    assert sorted(map(sorted, clusters(x, 3))) == [np.flatnonzero(y == k).tolist() for k in range(3)]
    assert [len(rows) for rows in clusters(x, 1)] == [36]
    with pytest.raises(CandidError, match="36 novel images can't be divided into 40 groups"):
        clusters(x, 40)
    assert clusters(x[:4]) == []
    assert clusters(x[:0]) == []


def test_what_is_known_is_not_grouped(found: GroupResult) -> None:
    grouped = {Path(each.path).parent.name for group in found.groups for each in group.members}
    assert grouped == {"checks", "noise"}
    assert len(found.examinations) == 21
    assert [group.name for group in found.groups] == [f"unknown {i + 1}" for i in range(len(found.groups))]
    for group in found.groups:  # of one kind each
        assert len({Path(each.path).parent.name for each in group.members}) == 1
        assert group.nearest in ("dots", "rings", "stripes")
    assert found.novel == sum(each.verdict == "novel" for each in found.examinations)


def test_the_table_has_every_image(found: GroupResult) -> None:
    rows = list(csv.DictReader(io.StringIO(found.csv())))
    assert [row["path"] for row in rows] == [each.path for each in found.examinations]
    named = {row["path"]: row["group"] for row in rows}
    for group in found.groups:
        assert {named[each.path] for each in group.members} == {group.name}
    assert {named[each.path] for each in found.singles} <= {"single"}
    formula = GroupResult((replace(found.examinations[0], path="=1+2.png"),), (), ())
    assert formula.csv().splitlines()[1].startswith("'=1+2.png,")
    assert {row["group"] for row in rows if row["verdict"] != "novel"} == {""}


def test_the_page_is_whole_and_escaped(photo_run: PhotoRun, tmp_path: Path) -> None:
    folder = tmp_path / "<b>bold"
    folder.mkdir()
    for i in range(6):
        photo("noise", 500 + i).save(folder / f"{i}.png")
    page = groups_page(candid.group(photo_run.model, folder, groups=1, novelty=0.06))
    assert page.count("data:image/jpeg;base64,") == 6
    assert "<b>bold" not in page and "&lt;b&gt;bold" in page
    assert "http" not in page
    assert "unknown 1: 6 images" in page


def test_images_are_sorted_and_a_group_is_taught(
    photo_run: PhotoRun, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, out = content(images), tmp_path / "sorted"
    arguments = ["group", photo_run.model, str(images), "--groups", "2", "--novelty", "0.06"]
    arguments += ["--out", str(tmp_path / "groups"), "--sort-into", str(out)]
    assert command(arguments) is None
    first = content(out)
    assert content(images) == before
    assert sorted(first.values()) == sorted(before.values())  # every image once
    assert {name.split("/")[0] for name in first} <= {"accepted", "ambiguous", "unknown-1", "unknown-2"}
    assert command(arguments) is None  # again: nothing changes
    assert content(out) == first
    assert {path.name for path in (tmp_path / "groups").iterdir()} == {"groups.csv", "groups.html"}
    assert "unknown 1" in capsys.readouterr().out
    taught = candid.teach(photo_run.model, {"new": out / "unknown-1"})
    assert taught.model.class_names[-1] == "new"
    kinds = {each.label for each in candid.examine(taught.model, out / "unknown-1")}
    assert kinds == {"new"}


def test_copies_of_the_same_name_get_a_number(tmp_path: Path) -> None:
    for folder, text in (("a", "one"), ("b", "two"), ("c", "one")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.png").write_text(text)
    places = {str(tmp_path / folder / "x.png"): "accepted/cat, or/dog" for folder in "abc"}
    for _ in range(2):
        assert sort.sort_into(places, tmp_path / "out") == {"accepted/cat, or-dog": 3}
        assert content(tmp_path / "out") == {
            "accepted/cat, or-dog/x.png": b"one",
            "accepted/cat, or-dog/x-2.png": b"two",
        }


def test_classes_with_similar_names_get_folders_of_their_own(tmp_path: Path) -> None:
    names = ("a b", "a-b", "A-B", "a?b", "日本", "..")
    for i in range(len(names)):
        (tmp_path / f"{i}.png").write_text(str(i))
    places = {str(tmp_path / f"{i}.png"): f"accepted/{name}" for i, name in enumerate(names)}
    counts = sort.sort_into(places, tmp_path / "out")
    folders = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").glob("*/*")}
    assert counts == dict.fromkeys(folders, 1) and len(folders) == len(names)
    assert len({folder.casefold() for folder in folders}) == len(names)


def test_an_image_within_the_reach_of_a_group_joins_it() -> None:
    """One that HDBSCAN leaves out between two groups stays alone, one that is nearer than a member joins."""
    angle = np.deg2rad([0, 1, 2, 3, 4, 30, 2.5, 90, 91, 92, 93, 60])
    x = np.stack((np.cos(angle), np.sin(angle)), 1)
    labels = np.array([0, 0, 0, 0, 0, 0, -1, 1, 1, 1, 1, -1])
    assert _joined(x, labels).tolist() == [0] * 7 + [1] * 4 + [-1]
    assert _joined(x, np.full(12, -1)).tolist() == [-1] * 12


def test_sorted_copies_are_not_grouped_again(photo_run: PhotoRun, images: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(images / "noise", mixed)
    arguments = ["group", photo_run.model, str(mixed), "--sort-into", str(mixed / "sorted")]
    for _ in range(2):
        assert command([*arguments, "--out", str(tmp_path / "groups")]) is None
        assert (tmp_path / "groups/groups.csv").read_text().count("\n") == 10


def test_images_are_sorted_into_their_own_folder(photo_run: PhotoRun, images: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(images / "noise", mixed)
    arguments = ["--sort-into", str(mixed), "--out", str(tmp_path / "groups")]
    for _ in range(2):
        assert command(["group", photo_run.model, str(mixed), *arguments]) is None
        assert (tmp_path / "groups/groups.csv").read_text().count("\n") == 10
        assert len(content(mixed)) == 18
    (copies,) = {path.parent for path in mixed.rglob("*.png")} - {mixed}
    with pytest.raises(CandidError, match="copies that an earlier run made"):
        command(["group", photo_run.model, str(copies), *arguments])


def test_each_file_is_read_once_however_many_share_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(20):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "x.png").write_text(str(i))
    read, digest = [], sort._digest
    monkeypatch.setattr(sort, "_digest", lambda path: read.append(path) or digest(path))  # type: ignore[func-returns-value]
    for files_read in (20, 60):  # the second time also those that are there
        sort.sort_into({str(tmp_path / str(i) / "x.png"): "ambiguous" for i in range(20)}, tmp_path / "out")
        assert len(read) == files_read and len(content(tmp_path / "out")) == 20


def test_errors_name_a_model_by_its_path(photo_run: PhotoRun, images: Path, tmp_path: Path) -> None:
    model = candid.load(photo_run.model)
    model.held_out = {}
    candid.save(model, tmp_path / "bare")
    with pytest.raises(CandidError, match=f"candid calibrate {tmp_path / 'bare'} DATA"):
        candid.group(tmp_path / "bare", images)


def test_a_full_disk_is_one_sentence(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", full)
    path = next((images / "noise").iterdir())
    with pytest.raises(
        CandidError, match="Can't copy images into .*No space left on device.*free some space"
    ):
        sort.sort_into({str(path): "unknown-1"}, tmp_path / "out")
    assert content(tmp_path / "out") == {}


def test_a_killed_sorting_goes_on(photo_run: PhotoRun, images: Path, tmp_path: Path) -> None:
    before, out = content(images), tmp_path / "sorted"
    arguments = ["group", photo_run.model, str(images), "--groups", "2", "--novelty", "0.06"]
    arguments += ["--out", str(tmp_path / "groups"), "--sort-into", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "candid", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not out.exists() and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert content(images) == before
    assert command(arguments) is None
    assert sorted(content(out).values()) == sorted(before.values())
    assert not list(out.rglob(f"{files.TEMPORARY}*"))


def test_mistakes_get_one_sentence(photo_run: PhotoRun, images: Path, tmp_path: Path) -> None:
    model = candid.load(photo_run.model)
    with pytest.raises(CandidError, match="can't be divided into 99 groups"):
        candid.group(model, images, groups=99, novelty=0.06)
    (tmp_path / "bad.png").write_text("no image")
    with pytest.raises(CandidError, match="bad.png' can't be used"):
        candid.group(model, [*images.rglob("*.png"), tmp_path / "bad.png"])
    skipped = candid.group(model, [images / "noise", tmp_path / "bad.png"], skip_bad=True)
    assert [Path(each.path).name for each in skipped.unusable] == ["bad.png"]
    model.held_out = {}
    with pytest.raises(CandidError, match="no held-out scores"):
        candid.group(model, images)


def test_a_resnet_groups_in_its_whitened_features() -> None:
    model = candid.load("cifar10-resnet")
    held_out = HeldOut.of(model)
    assert held_out is not None
    features = np.random.default_rng(0).normal(size=(5, model.feature_size))
    white = Whitener(model, held_out)(features)
    score = held_out.learned["mahalanobis"]
    distances = np.linalg.norm(white[:, None].astype(np.float64) - score.means, axis=2).min(1)  # type: ignore[attr-defined]
    assert np.allclose(distances, score.of({"features": features}), rtol=1e-4)
