"""Series of photos and nested folders: they count once, stay on one side of every split, and make a tree."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import candid
from candid import CandidError
from candid.data.images import Preprocessing, decode_as, to_float
from candid.judging.held_out import needed
from candid.models.photo.gaussian import stratified_folds
from candid.models.photo.opening import open_eye
from candid.training.photo_report import first_alike, standardised
from candid.training.photo_series import TAKEN_IN, found_series, taken_at
from candid.trust.ranking import ALL
from tests.photo_models import CLASSES, photo, write_photos


def test_near_duplicates_are_found_and_stay_in_one_fold() -> None:
    random = np.random.default_rng(0)
    photos = random.normal(size=(40, 30))
    rows = np.concatenate((photos, photos[:10] + 0.01 * random.normal(size=(10, 30))))
    first = first_alike(standardised(rows, photos))
    assert first.tolist() == [*range(40), *range(10)]
    folds = stratified_folds(np.arange(50) % 3, 5, series=first)
    assert (folds[40:] == folds[:10]).all()
    assert (stratified_folds(np.arange(50) % 3, 5)[:40] == folds[:40]).all()


def test_copies_and_named_series_count_once(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", CLASSES, 10)
    for folder in photos.iterdir():
        shutil.copy(next(iter(sorted(folder.glob("*.png")))), folder / "copy.png")
    model = candid.load(candid.train(str(photos), out=tmp_path / "run").best)
    promises = needed(model).rule().promises[ALL]
    assert promises.copies >= 1 and promises.n_reference == len(needed(model)) - promises.copies
    assert promises.occasions and "same occasions" in " ".join(promises.sentences())
    with (tmp_path / "photos.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "object"))
        for i, path in enumerate(sorted(photos.rglob("*.png"))):
            rows.writerow((path.relative_to(photos).as_posix(), i // 2))
    together = candid.train(str(photos), out=tmp_path / "named", together=f"{tmp_path / 'photos.csv'}:object")
    named = needed(candid.load(together.best)).rule().promises[ALL]
    assert named.n_reference < promises.n_reference and not named.occasions
    with pytest.raises(CandidError, match=r"--together takes FILE.csv:COLUMN"):
        candid.train(str(photos), out=tmp_path / "wrong", together="objects")


def test_nested_folders_are_a_tree(tmp_path: Path) -> None:
    flat = write_photos(tmp_path / "flat", CLASSES, 10)
    nested = tmp_path / "nested"
    for i, name in enumerate(CLASSES):
        shutil.copytree(flat / name, nested / ("pattern" if i < 2 else "other") / name)
    trained = candid.train(str(nested), out=tmp_path / "run", tree="folders")
    model = candid.load(trained.best)
    assert set(model.class_names) == set(CLASSES) and model.tree is not None
    assert model.tree.names[1:] == ("pattern",)
    evaluated = candid.evaluate(trained.best, str(nested), part="train")
    assert evaluated is not None and len(evaluated.predictions) > 0
    assert {e.verdict for e in candid.examine(model, nested)} <= {"accept", "ambiguous", "novel"}
    shutil.copy(flat / CLASSES[0] / "000.png", nested / "pattern" / "stray.png")
    with pytest.raises(CandidError, match="has images next to the folder"):
        candid.train(str(nested), out=tmp_path / "stray", tree="folders")
    (nested / "pattern" / "stray.png").unlink()
    shutil.copytree(flat / CLASSES[0], nested / "other" / CLASSES[0])
    with pytest.raises(CandidError, match="have one name"):
        candid.train(str(nested), out=tmp_path / "twice", tree="folders")


def test_bursts_are_found_by_times_and_numbers_but_names_alone_join_nothing(tmp_path: Path) -> None:
    """Photos of one object that follow each other are a series, numbered photos of different ones are not."""
    for i in range(24):
        photo("dots", 900 + i).save(tmp_path / f"shot {i}.jpg")
    one = photo("dots", 950)
    for i in range(3):  # one object, with the numbers that follow
        turned = one.rotate(7 * i).crop((8, 8, 100 + 4 * i, 100))
        turned.save(tmp_path / f"shot {24 + i}.jpg")
    other = photo("dots", 960)
    for i, name in enumerate(("x", "y")):  # another one, by the clock of the camera
        exif = Image.Exif()
        exif[TAKEN_IN] = f"2026:05:01 10:00:{10 * i:02d}"
        other.rotate(9 * i).crop((6, 6, 96 + 5 * i, 100)).save(tmp_path / f"{name}.jpg", exif=exif)
    exif[TAKEN_IN] = "2026:05:01 10:00:05"  # of another class, between both
    photo("rings", 970).save(tmp_path / "z.jpg", exif=exif)
    paths = [tmp_path / f"shot {i}.jpg" for i in range(27)] + [tmp_path / f"{name}.jpg" for name in "xyz"]
    assert taken_at(paths[0]) is None and taken_at(paths[-1]) is not None
    model = open_eye("lite0")
    shown = Preprocessing(3, model.size, model.size)
    values = model.statistics(to_float(np.stack([decode_as(path, shown) for path in paths])))
    found = found_series(list(map(str, paths)), standardised(values, values), np.repeat([0, 1], [29, 1]))
    sizes = np.bincount(found)
    assert found[24] == found[25] and found[27] == found[28] != found[24]
    assert (sizes[found[:20]] == 1).mean() >= 0.8
    apart = found_series(list(map(str, paths)), standardised(values, values), np.arange(30))
    assert len(np.unique(apart)) == 30  # photos of different classes are never joined


def test_folders_within_a_class_are_series(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", CLASSES, 9)
    for kind in CLASSES:
        for i, path in enumerate(sorted((photos / kind).iterdir())):
            place = photos / kind / f"object {i // 3}"
            place.mkdir(exist_ok=True)
            path.rename(place / path.name)
    results = candid.train(str(photos), out=tmp_path / "run", together="folder").results
    assert results["series"]["count"] >= 8 and 0 <= results["series"]["accuracy_without"] <= 1
    single = candid.train(str(photos), out=tmp_path / "single", together="none").results
    assert single.get("series", {"count": 0})["count"] <= 1
