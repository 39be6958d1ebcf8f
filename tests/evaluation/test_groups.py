"""Verdicts of a model within groups of images: of a table, and by predicted class."""

from pathlib import Path
from typing import Any

import pytest
import torch

import candid
from candid import CandidError
from candid.data.datasets import open_part
from candid.data.loader import named_batches
from candid.evaluation.evaluate import evaluate
from candid.inference.predictions import Predictions
from candid.models.protocol import Model
from candid.trust.calibrate import calibrate
from candid.trust.grouped import GroupedJudge
from candid.trust.judge import HeldOut, Judge
from candid.trust.verdict import Verdict


@pytest.fixture(scope="module")
def model() -> Model:
    """A network that learned nothing: levels hold for it, too."""
    made = candid.GenerativeClassifier.from_preset("digits").eval()
    assert calibrate(made, "digits", part="val", workers=0) is not None
    return made


@pytest.fixture
def table(model: Model, tmp_path: Path) -> Path:
    """Two large groups and one of three held-out images, of the held-out and the test images."""
    lines = ["path,site"]
    for part in ("val", "test"):
        split = open_part("digits", model.class_names, part, model.record.config).split
        names = [name for _, _, batch in named_batches(split, model.preprocessing, 100) for name in batch]
        lines += [f"{name},{'west' if i % 24 == 5 else 'ns'[i % 2]}" for i, name in enumerate(names)]
    file = tmp_path / "photos.csv"
    file.write_text("\n".join(lines))
    return file


def test_levels_hold_within_groups_of_a_table(model: Model, table: Path) -> None:
    found = evaluate(
        model, "digits", workers=0, by=f"{table}:site", novelty=0.1, ood={"noise": "uniform-noise"}
    )
    assert found is not None
    groups, known = found.metrics["groups"]["groups"], HeldOut.of(model)
    assert known is not None and set(groups) == {"n", "s", "west"}
    assert groups["n"]["own_levels"] and groups["s"]["own_levels"] and not groups["west"]["own_levels"]
    (small,) = (each for each in found.metrics["verdicts"]["sentences"] if each.startswith("Group"))
    assert "Group 'west' has 3 held-out images, too few" in small
    rows = torch.tensor([i for i in range(len(known)) if i % 24 != 5 and i % 2 == 0])
    judge = Judge.of(model, novelty=0.1, held_out=known.rows(rows))
    new = torch.tensor([i for i in range(359) if i % 24 != 5 and i % 2 == 0])
    expected = judge.examine(found.predictions[new])
    own = list(found.examinations())[: len(found.predictions)]
    assert [own[i][2] for i in new.tolist()] == expected
    assert groups["n"]["n_reference"] == judge.promises.n_reference


def test_levels_hold_within_predicted_classes(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    verdicts = Judge.verdicts

    def counted(judge: Judge, predictions: Predictions, p_value: torch.Tensor) -> list[Verdict]:
        judged.extend(predictions.paths)
        return verdicts(judge, predictions, p_value)

    monkeypatch.setattr(Judge, "verdicts", counted)
    found = evaluate(model, "digits", workers=0, by="class", novelty=0.1)
    assert found is not None
    rows = found.metrics["groups"]["groups"]
    assert sum(each["images"] for each in rows.values()) == 359 and set(rows) <= set(model.class_names)
    assert sorted(judged) == sorted(found.predictions.paths)  # each image once


def test_each_image_keeps_its_place(model: Model) -> None:
    known = HeldOut.of(model)
    found = evaluate(model, "digits", workers=0, images=9)
    assert known is not None and found is not None
    whole = Judge.of(model, novelty=0.1)
    groups = ["ab"[i % 2] for i in range(len(known))]
    judge = GroupedJudge.of(whole, lambda part: Judge.of(model, novelty=0.1, held_out=part), groups)
    some = ["b", "a", "new", "a", "b", "b", "a", "a", "b"]
    examined = judge.examine(found.predictions, some)
    assert [each.path for each in examined] == list(found.predictions.paths)
    assert examined[2] == whole.examine(found.predictions)[2]
    assert examined[0].promises is judge.own["b"].promises


@pytest.mark.parametrize(
    ("by", "more", "said"),
    [
        ("site", {}, "--by takes 'class' or a column of a table"),
        ("class", {"risk": 0.1}, "--risk holds over the images of all groups"),
        ("few.csv:site", {}, "has no row for"),
    ],
)
def test_groups_that_cant_be_formed_are_refused(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, more: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.csv").write_text("path,site\nnothing.png,a\n")
    with pytest.raises(CandidError) as refused:
        evaluate(model, "digits", workers=0, by=by, **more)
    assert said in str(refused.value)


def test_groups_of_unknown_held_out_images_are_refused(model: Model, table: Path) -> None:
    other = candid.GenerativeClassifier.from_preset("digits").eval()
    calibrate(other, "digits", part="test", images=100, workers=0)
    with pytest.raises(CandidError, match="100 of the model's 100 held-out images are not in 'digits'"):
        evaluate(other, "digits", workers=0, by=f"{table}:site")
