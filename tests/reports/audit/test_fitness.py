"""What an audit says on top: sentences whose figures are counted here again, and equal models."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import candid
from candid._support.errors import CandidError
from candid.reports.audit.content import digests, record, statement
from candid.reports.audit.fitness import comparisons, figures, fitness
from candid.reports.audit.page import page
from candid.reports.audit.pictures import Pictures
from candid.reports.audit.record import grades_of, results_by_class
from candid.reports.audit.run import audit
from tests.photo_models import PhotoRun

CLASSES = ("apple", "pear", "plum")
WITHOUT_STUDIES: dict[str, Any] = {"corruption_images": 0, "attack_images": 0, "examples": 0, "workers": 0}


def arrays(seed: int, each: int, weak: float, noise: bool = False) -> dict[str, Any]:
    """Return logits of three classes; a share ``weak`` of the pears is taken for apples without a doubt."""
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(3), each)
    logits = random.normal(0, 1, (3 * each, 3)) * (3 if noise else 1)
    if not noise:
        logits[np.arange(3 * each), labels] += 7
        wrong = np.flatnonzero(labels == 1)[: round(weak * each)]
        logits[wrong, 0] += 14
    return {"logits": logits, "labels": labels, "class_names": np.array(CLASSES)}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    for name, made in (
        ("val", arrays(0, 200, 0.02)),
        ("test", arrays(1, 100, 0.3)),
        ("noise", arrays(2, 100, 0, noise=True)),
    ):
        np.savez(folder / f"{name}.npz", **made)
    return folder


def of_arrays(stored: Path, out: Path, **options: Any) -> Any:
    files: dict[str, Any] = {"held_out": stored / "val.npz", "test": stored / "test.npz", "name": "fruit"}
    return audit(out=out, ood={"noise": str(stored / "noise.npz")}, **files, **options)


def test_sentences_have_the_figures_of_the_images(stored: Path, tmp_path: Path) -> None:
    found = of_arrays(stored, tmp_path)
    said = fitness(found, 0)
    judged = found.evaluations[0].judged["test"]
    kinds = np.array(judged.kinds)
    right = judged.predictions.logits.argmax(1) == judged.predictions.labels
    accepted = kinds == "accept"
    coverage, correct = 100 * accepted.mean(), 100 * right[accepted].mean()
    assert 50 < coverage < 100 and 80 < correct < 95
    text = said.summary[0]
    assert f"it answers {coverage:.1f} % of images like these; {correct:.1f} % of those answers" in text
    wrong = (accepted & ~right).mean()
    assert f"{round(1000 * accepted.mean())} are answered, {round(1000 * wrong)} of these wrongly" in text
    foreign = np.mean(np.array(found.evaluations[0].judged["noise"].kinds) == "accept")
    assert f"{100 * foreign:.1f} % of 'noise'" in said.summary[1]
    head, rows = figures(found)
    assert head[1] == "fruit" and str(rows[0][1]).startswith(f"{round(1000 * accepted.mean())} (")
    assert str(rows[1][1]).startswith(f"{round(1000 * wrong)} (")
    pears = next(line for line in said.unfit if "'pear'" in line)
    row = results_by_class(found.evaluations[0]).rows[1]
    assert (
        f"{row.right} of 100 are right, 30 taken for 'apple'; wrong but accepted: {row.accepted_wrong}."
        in pears
    )
    assert row.right == 70 and (row.accepted_wrong or 0) > 20
    assert any(line.startswith("Naming the classes apple (") for line in said.fit)
    assert any("Corruptions: stored arrays have no network" in line for line in said.untested)


def test_the_page_begins_with_what_decides_and_folds_the_rest(stored: Path, tmp_path: Path) -> None:
    found = of_arrays(stored, tmp_path)
    text = page(found, grades_of(found))
    order = [text.index(f'id="{anchor}"') for anchor in ("decision", "classes", "summary", "statement")]
    assert order == sorted(order)
    plain = re.sub(r"<[^>]+>", " ", text).replace("&nbsp;", " ")
    assert "beta" not in plain.lower().replace("trades", "") and "ResNet" not in plain
    assert "L_Y" not in plain and "bits/dim" not in plain.lower().replace("no bits/dim", "")
    assert text.count("<details open>") == 3 < text.count("<details")
    assert "The 30 mistakes are not shown" in plain


def test_a_statement_has_the_headings_and_says_what_is_not_known(stored: Path, tmp_path: Path) -> None:
    found = of_arrays(stored, tmp_path)
    parts = statement(found, 0, fitness(found, 0))
    assert [part.heading for part in parts] == [
        *("Intended use", "Not to be used for", "Data", "Metrics", "Limits", "Robustness and security"),
        *("Human oversight", "Changes", "What was not tested"),
    ]
    assert all(part.texts and "AI Act" in part.asked_in and "42001" in part.asked_in for part in parts)
    assert "Its owner has to say it" in parts[0].texts[0]
    named = {each.name: each.sha256 for each in digests(found)}
    assert len(named["test.npz of fruit"]) == 64 and named["val.npz of fruit"] != named["test.npz of fruit"]
    assert record(found, grades_of(found))["models"][0]["statement"][0]["heading"] == "Intended use"


def of_model(run: Path, folder: Path) -> dict[str, Any]:
    """Store what a model says of its held-out and of its test images."""
    files = {}
    for option, part in (("held_out", "val"), ("test", "test")):
        found = candid.evaluate(run, "digits", part=part, workers=0)
        assert found is not None
        files[option] = folder / f"{part}.npz"
        columns: dict[str, Any] = {"logits": found.predictions.logits, "labels": found.predictions.labels}
        np.savez(files[option], class_names=np.array(found.class_names), **columns)
    return files


def test_models_that_are_equal_are_called_equal(runs: Path, tmp_path: Path) -> None:
    files = of_model(runs / "own", tmp_path)
    found = audit(runs / "own", "digits", out=tmp_path / "out", name="copy", **files, **WITHOUT_STUDIES)
    assert [model.name for model in found.models] == ["own", "copy"]
    (first, *_) = comparisons(found)
    assert first.startswith("own and copy are equal: they give the same posteriors for every image")
    text = page(found, grades_of(found))
    assert "own and copy are equal" in text and "Stored arrays have no network" in text


def test_a_difference_is_counted_on_the_same_images(runs: Path, tmp_path: Path) -> None:
    files = of_model(runs / "resnet", tmp_path)
    found = audit(runs / "own", "digits", out=tmp_path / "out", name="other", **files, **WITHOUT_STUDIES)
    one, two = (each.predictions for each in found.evaluations)
    right = [each.logits.argmax(1) == each.labels for each in (one, two)]
    gap = 100 * (right[0].mean() - right[1].mean())
    assert f"{gap:+.1f} points" in comparisons(found)[0] and abs(gap) > 0.1


def test_arrays_of_other_images_do_not_stand_next_to_a_model(
    runs: Path, stored: Path, tmp_path: Path
) -> None:
    call: dict[str, Any] = {"out": tmp_path / "out", **WITHOUT_STUDIES}
    with pytest.raises(CandidError, match="add both"):
        audit(runs / "own", "digits", held_out=stored / "val.npz", **call)
    files = of_model(runs / "own", tmp_path)
    held: dict[str, Any] = {"held_out": files["held_out"]}
    with pytest.raises(CandidError, match="other class_names"):
        audit(runs / "own", "digits", held_out=stored / "val.npz", test=stored / "test.npz", **call)
    test = dict(np.load(files["test"]))
    half = tmp_path / "half.npz"
    np.savez(half, **{key: value if key == "class_names" else value[1:] for key, value in test.items()})
    with pytest.raises(CandidError, match="is not of the .* test images of 'digits' in their order"):
        audit(runs / "own", "digits", **held, test=half, **call)


def test_equal_photo_models_have_no_figure_of_beta(photo_run: PhotoRun, tmp_path: Path) -> None:
    copy = shutil.copytree(photo_run.model, tmp_path / "copy")
    found = audit([photo_run.model, copy], photo_run.data, out=tmp_path / "out", **WITHOUT_STUDIES)
    assert "are equal: they give the same posteriors for every image" in comparisons(found)[0]
    assert len(comparisons(found)) == 1 and Pictures(found).trade_off() == ""
    text = page(found, grades_of(found))
    assert not (tmp_path / "out" / "figures" / "trade_off.png").exists()
    assert "ResNet" not in text and ">beta<" not in text and "L_Y" not in text
    shown = sum(len(Pictures(found).mistakes(i)) for i in range(2))
    wrong = sum(row.wrong for each in found.evaluations for row in results_by_class(each).rows)
    assert shown == min(wrong, 16) and text.count("<li><img") == shown
    named = {each.of: each.sha256 for each in digests(found)}
    assert {"model", "eye", "training data", "test data", "software"} <= named.keys()
    assert all(len(named[kind]) == 64 for kind in ("model", "eye", "training data", "test data"))
