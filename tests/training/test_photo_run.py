import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import candid
from candid import CandidError
from candid.judging.held_out import HeldOut
from tests.photo_models import CLASSES, PhotoRun


def test_a_photo_model_knows_new_photos_of_its_classes(photo_run: PhotoRun) -> None:
    found = candid.examine(photo_run.model, [*photo_run.photos])
    assert [each.label for each in found] == list(CLASSES)
    held_out = HeldOut.of(candid.load(photo_run.model))
    assert held_out is not None and len(held_out) == 36


def test_a_finished_photo_run_is_never_started_over(photo_run: PhotoRun, tmp_path: Path) -> None:
    data, run = tmp_path / "photos", tmp_path / "run"
    shutil.copytree(photo_run.data, data)
    shutil.copytree(photo_run.model, run)
    before = (run / "model" / "best" / "model.json").stat().st_mtime_ns
    results = json.loads((run / "results.json").read_text())

    def resume() -> dict[str, Any]:
        return candid.train(str(data), out=run, resume=True).results

    assert resume()["test"] == results["test"]
    (data / "train" / "dots" / "000.png").rename(data / "train" / "rings" / "moved.png")
    with pytest.raises(CandidError, match="photos or labels are not those .* restore it"):
        resume()
    (data / "train" / "rings" / "moved.png").rename(data / "train" / "dots" / "000.png")
    with pytest.raises(CandidError, match="options are not those"):
        candid.train(str(data), out=run, resume=True, seed=3)
    (run / "results.json").write_text("{")
    with pytest.raises(CandidError, match="is damaged: restore it"):
        resume()
    (run / "results.json").write_text(json.dumps(results | {"test": {"accuracy": 1.0}}))
    with pytest.raises(CandidError, match="is damaged: restore it"):
        resume()
    assert (run / "model" / "best" / "model.json").stat().st_mtime_ns == before
    (run / "results.json").write_text(json.dumps(results))
    shutil.rmtree(run / "model" / "best")
    with pytest.raises(CandidError, match="model .* is missing: restore it"):
        resume()


def test_a_model_that_held_nothing_out_says_which_photos_can_calibrate_it(photo_run: PhotoRun) -> None:
    with pytest.raises(CandidError, match="scores out of fold: there are no others .* --part test"):
        candid.calibrate(photo_run.model, photo_run.data)
