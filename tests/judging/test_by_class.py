"""Results by class: the tables that training, evaluation, reports and audits show."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import candid
from candid._support.text import show_table
from candid.evaluation.compare import class_results, class_table
from candid.evaluation.result import write
from candid.judging.by_class import ByClass
from tests.photo_models import PhotoRun

NAMES = ("Apples", "Pear", "Melon")


def shop() -> ByClass:
    """Apples are often trained on, pears seldom; most pears are taken for apples."""
    labels = np.repeat([0, 1, 2], (100, 20, 40))
    predicted = labels.copy()
    predicted[100:109], predicted[109], predicted[0] = 0, 2, 1
    kinds = np.full(160, "accept", object)
    kinds[100:103], kinds[120:130] = "ambiguous", "novel"
    return ByClass.of(labels, predicted, NAMES, kinds.tolist(), trained=(200, 25, 90))


def test_shares_are_what_counting_gives() -> None:
    apples, pear, melon = shop().rows
    assert (pear.recall, pear.precision, pear.coverage) == (10 / 20, 10 / 11, 17 / 20)
    assert pear.taken_for == (("Apples", 9), ("Melon", 1))
    assert (pear.accepted_wrong, pear.right_of_accepted) == (7, 1 - 7 / 17)
    assert (melon.novel_share, melon.recall, melon.precision) == (10 / 40, 1.0, 40 / 41)
    assert apples.precision == 99 / 108


def test_the_weakest_class_is_named_with_what_would_help() -> None:
    sentences = shop().sentences()
    assert sentences == [
        "weakest class: Pear: 10 of 20 right, 9 taken for Apples; 7 wrong ones are accepted; trained on 25 "
        "photos: add about 50"
    ]
    assert shop().weakest()[0].name == shop().ranked()[0].name == "Pear"


def test_tables_have_all_classes_and_confusions() -> None:
    head, rows = shop().table()
    assert head[:2] == ["class", "images"] and rows[0][0] == "Pear" and "Apples (9)" in rows[0][-1]
    assert shop().confusion_table()[1][1] == ["Pear", "9", "10", "1"]
    assert shop().confusions(1) == [("Pear", "Apples", 9)]
    assert "<td>9</td>" in shop().html() and '<td class="right">10</td>' in shop().html()
    many = ByClass.of(np.array([0, 0, 1]), np.array([1, 1, 1]), tuple(map(str, range(40))))
    assert many.confusion_table()[1] == [["0", "1", "2"]]
    assert "accepted (%)" not in many.table()[0]


def test_it_survives_json_and_names_are_escaped() -> None:
    again = ByClass.from_dict(json.loads(json.dumps(shop().to_dict())))
    assert again == shop()
    assert "<b>" not in ByClass.of(np.array([0]), np.array([1]), ("<b>", "c")).html()


def test_the_table_of_a_terminal_has_its_head_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Also in the 80 columns of a pipe."""
    title, head, rows = shop().for_terminal("By class")
    assert title == "By class, the weakest first; shares in %, right: of accepted ones"
    assert rows == shop().table()[1]
    show_table(title, head, rows, tight=True)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [word for name in head for word in name.split()] in lines
    unjudged = ByClass.of(np.repeat([0, 1], 30), np.repeat([0, 1], 30), ("a", "b"))
    assert unjudged.for_terminal("Of photos", 1)[0] == (
        "Of photos, the weakest first; the weakest 1 of 2; shares in %"
    )


def test_classes_with_few_images_are_not_called_weak() -> None:
    table = ByClass.of(np.array([0] * 30 + [1] * 2), np.array([0] * 30 + [0] * 2), ("a", "b"))
    assert not table.weakest()
    assert table.sentences() == [
        "fewer than 5 images of b: too few to say how well a class is recognised",
        "every image of the other classes is right",
    ]
    assert ByClass.of(np.array([-1, 0]), np.array([0, 0]), ("a", "b")).rows[0].images == 1


def test_evaluations_and_comparisons_have_results_by_class(photo_run: PhotoRun, tmp_path: Path) -> None:
    found = candid.evaluate(photo_run.model, photo_run.data, workers=0)
    assert found is not None
    table = ByClass.from_dict(found.metrics["by_class"])
    right = found.predictions.logits.argmax(1) == found.predictions.labels
    assert sum(row.right for row in table.rows) == right.sum() and table.rows[0].trained == 12
    kinds = found.judged["test"].kinds
    assert sum(row.novel or 0 for row in table.rows) == kinds.count("novel")
    for name in ("one", "two"):
        write(found, tmp_path / name)
    with (tmp_path / "one" / "confusions.csv").open(newline="") as file:
        assert sum(int(row["images"]) for row in csv.DictReader(file)) == len(right)
    folders = [tmp_path / "one", tmp_path / "two"]
    candid.compare(folders, out=tmp_path / "both")
    head, rows = class_table(class_results(folders))
    assert head == ["recall (%)", "one", "two"] and {row[0] for row in rows} == set(found.class_names)
    assert len((tmp_path / "both" / "by_class.csv").read_text().splitlines()) == 1 + 2 * 3
