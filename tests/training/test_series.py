"""Series of photos and nested folders: they count once, stay on one side of every split, and make a tree."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest

import candid
from candid import CandidError
from candid.judging.held_out import needed
from candid.models.photo.gaussian import stratified_folds
from candid.training.photo_report import first_alike, standardised
from candid.trust.ranking import ALL
from tests.photo_models import CLASSES, write_photos


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
    with pytest.raises(CandidError, match=r"--together takes FILE.csv, FILE.csv:COLUMN"):
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
