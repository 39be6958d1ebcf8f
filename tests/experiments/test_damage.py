"""A short sample of the attacks of experiments/red/models.py, and what they must notice."""

from pathlib import Path

import pytest

import candid
from candid.judging.calibrate import calibrate
from candid.models.checkpoint import sealed
from experiments.red.damage import Subject, edits, flips
from experiments.red.models import (
    array_subject,
    attack_subject,
    digits,
    model_subjects,
    monitor_subjects,
    pass_subject,
    pixel_run,
    run_subjects,
    verdicts,
)
from tests.photo_models import PhotoRun


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pixel_run(tmp_path_factory.mktemp("red"))


def test_edits_of_the_record_are_refused_or_change_nothing(run: Path) -> None:
    images, best = digits(), run / "model" / "best"
    subject = Subject(best / "model.json", lambda: verdicts(best, images), "model.json")
    assert edits(subject, 40).report() == "40: 40 refused"
    assert edits(subject, 40, sealed).report().startswith("40: ")


def test_flipped_bits_are_noticed_or_change_nothing(run: Path, tmp_path: Path) -> None:
    images, best = digits(), run / "model" / "best"
    subjects = model_subjects(best, lambda: verdicts(best, images), "pixel") + run_subjects(run)
    subjects += [pass_subject(best, tmp_path / "passes"), attack_subject(best, tmp_path / "attacks")]
    subjects += [*monitor_subjects(tmp_path / "monitor"), array_subject(tmp_path, compressed=False)]
    assert len(subjects) == 11
    assert flips(subjects, 110).report().startswith("110: ")


def test_flipped_bits_of_a_photo_model_are_noticed(photo_run: PhotoRun) -> None:
    best = Path(photo_run.model) / "model" / "best"
    subjects = model_subjects(best, lambda: verdicts(best, [photo_run.photos[0]]), "photo")
    assert flips(subjects, 9).report() == "9: 9 refused"


def test_damage_that_is_not_noticed_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "numbers.txt"
    file.write_text("[1, 2]")
    found = flips([Subject(file, lambda: file.read_bytes(), "text")], 5)
    assert len(found.broken) == 5 and "without a word" in found.broken[0]


def test_held_out_images_that_were_trained_on_are_left_out(run: Path) -> None:
    model = candid.load(run)
    held_out = calibrate(model, "digits", part="val", workers=0)
    assert held_out is not None
    model.held_out["training_keys"] = held_out.statistics["keys"][:10]
    again = calibrate(model, "digits", part="val", workers=0)
    assert again is not None and len(again) == len(held_out) - 10
