"""Verdicts of a model within groups of images: of a table, and by predicted class."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import candid
from candid import CandidError
from candid.data.batches import named_batches
from candid.data.datasets import open_part
from candid.evaluation.evaluate import evaluate
from candid.evaluation.result import ImageGroups, judged_sets
from candid.judging.calibrate import calibrate
from candid.judging.held_out import HeldOut, needed
from candid.models.protocol import Model
from candid.trust.promises import Levels
from candid.trust.ranking import ALL
from candid.trust.rule import Rule


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
    assert "Group 'west' has 2 held-out images to rank among, too few" in small  # one of 3 shapes the density
    rows = np.array([i for i in range(len(known)) if i % 24 != 5 and i % 2 == 0])
    rule = known.rows(rows).rule(Levels(novelty=0.1))
    new = np.array([i for i in range(359) if i % 24 != 5 and i % 2 == 0])
    images = found.predictions[new]
    expected = rule.examine(images.statistics, images.paths, model.class_names)
    whole = list(found.examinations())[: len(found.predictions)]
    for i, alone in zip(new.tolist(), expected, strict=True):
        within = whole[i][2]
        assert within.p_value == alone.p_value and within.promises == alone.promises
        assert (within.verdict, within.classes) == (alone.verdict, alone.classes)
    assert groups["n"]["n_reference"] == rule.promises[ALL].n_reference


def test_levels_hold_within_predicted_classes(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    examine = Rule.examine

    def counted(rule: Rule, columns: Any, names: Any, *others: Any) -> Any:
        judged.extend(names)
        return examine(rule, columns, names, *others)

    monkeypatch.setattr(Rule, "examine", counted)
    found = evaluate(model, "digits", workers=0, by="class", novelty=0.1)
    assert found is not None
    rows = found.metrics["groups"]["groups"]
    assert sum(each["images"] for each in rows.values()) == 359 and set(rows) <= set(model.class_names)
    assert sorted(judged) == sorted(found.predictions.paths)  # each image once


def test_each_image_keeps_its_place(model: Model) -> None:
    known = needed(model)
    found = evaluate(model, "digits", workers=0, images=9)
    assert found is not None
    levels, names = Levels(novelty=0.1), ["ab"[i % 2] for i in range(len(known))]
    some = ["b", "a", "new", "a", "b", "b", "a", "a", "b"]
    groups = ImageGroups.by_name("site", names, lambda _: some)
    rule, whole = known.rule(levels, groups.held_out), known.rule(levels)
    judged = judged_sets(rule, {"test": found.predictions}, model.class_names, groups)["test"]
    examined = judged.examine(found.predictions)
    alone = whole.examine(found.predictions.statistics, found.predictions.paths, model.class_names)
    assert [each.path for each in examined] == list(found.predictions.paths)
    assert examined[2] == alone[2]
    assert examined[0].promises is rule.promises[groups.names.index("b")]


def test_a_risk_is_promised_over_the_images_of_all_groups(model: Model) -> None:
    """A model that learned nothing is wrong nearly always: only a high risk can be promised."""
    levels: dict[str, Any] = {"novelty": 0.1, "error": 0.9, "risk": 0.97, "delta": 0.2, "confidence": 0.0}
    found = evaluate(model, "digits", workers=0, by="class", **levels)
    assert found is not None
    promised = found.metrics["verdicts"]["promises"]["risk"]
    assert promised["asked"] == 0.97 and any(
        sentence.startswith("Risk 97 %") for sentence in found.metrics["verdicts"]["sentences"]
    )
    for judged in found.judged.values():
        assert all(promises.risk is not None for promises in judged.promises)
    assert found.metrics["groups"]["by"] == "class"


@pytest.mark.parametrize(
    ("by", "more", "said"),
    [
        ("site", {}, "--by takes 'class' or a column of a table"),
        ("class", {"risk": 0.01}, "A risk of 1 % can't be promised"),
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
