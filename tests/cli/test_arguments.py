"""Arguments in any order, and one sentence for those that are wrong."""

from pathlib import Path
from typing import Any

import pytest
from cyclopts import CycloptsError

from candid.cli.app import app, ordered
from candid.cli.arguments import sentence
from tests.helpers import candid_command


def parsed(line: str) -> dict[str, Any]:
    name, *words = line.split()
    given = [name, *ordered(app[name], words)]
    return dict(app.parse_args(given, exit_on_error=False, print_error=False)[1].arguments)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("examine M --novelty 0.05 a b", {"model": "M", "images": ["a", "b"], "novelty": 0.05}),
        ("examine M a --novelty=0.05 b", {"model": "M", "images": ["a", "b"], "novelty": 0.05}),
        ("examine --json M a b", {"model": "M", "images": ["a", "b"], "as_json": True}),
        ("examine M a --json b -- --top -x", {"images": ["a", "b", "--top", "-x"], "as_json": True}),
        ("examine M --novelty -1 a b", {"images": ["a", "b"], "novelty": -1}),
        ("teach M a=1 --out new b=2", {"model": "M", "classes": ["a=1", "b=2"]}),
        ("corrupt M --severities 1,2 N D", {"targets": ["M", "N", "D"], "severities": (1, 2)}),
        ("attack M --images 3 N D", {"targets": ["M", "N", "D"], "images": 3}),
        ("audit M --data D N", {"models": ("M", "N"), "data": "D"}),
        ("evaluate M --data D", {"model": "M", "data": "D"}),
        ("evaluate --data=D M", {"model": "M", "data": "D"}),
        ("corrupt M --data D N", {"targets": ["M", "N", "D"]}),
        ("evaluate M D --ood constant --ood a=b", {"data": "D", "ood": ("constant", "a=b")}),
        ("group M --out new a b", {"model": "M", "images": ["a", "b"]}),
        ("train --only a D --only b", {"data": "D", "only": ("a", "b")}),
    ],
)
def test_options_may_stand_anywhere(line: str, found: dict[str, Any]) -> None:
    assert found.items() <= parsed(line).items()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("info M N", "'N' is one argument too many for 'candid info': 'candid info --help' shows"),
        ("examine M a --novelty", "--novelty needs a value:"),
        ("forget M --out new", "NAME is missing:"),
        ("import weights.pt", "--out is missing:"),
        ("examine M a --novelty high", "--novelty takes a number, not 'high'."),
        ("examine M a --novelty 0.1 --novelty 0.2", "--novelty is given twice: leave one out."),
        ("examine M a --heatmap-rule papper", "--heatmap-rule can't be 'papper': did you mean 'paper'?"),
        ("examine M --noveltiy 0.1 a", "There is no option '--noveltiy': did you mean '--novelty'?"),
    ],
)
def test_a_wrong_argument_is_named(line: str, message: str) -> None:
    with pytest.raises(CycloptsError) as caught:
        parsed(line)
    assert sentence(caught.value).startswith(message)


def test_the_command_line_orders_its_arguments(tmp_path: Path) -> None:
    done = candid_command("compare", tmp_path / "a", "--out", tmp_path / "new", tmp_path / "b")
    assert f"'{tmp_path / 'a'}" in str(done.exception)


def test_images_before_the_model_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my photos").mkdir()
    for words in (
        ("examine", "my photos", "waste"),
        ("evaluate", "my photos", "waste"),
        ("corrupt", "*.jpg", "waste"),
    ):
        message = str(candid_command(*words).exception)
        assert "the model comes first: candid " in message and " waste " in message
    (tmp_path / "waste").mkdir()  # photos of waste, in a folder that is called like a model
    assert "the model comes first" not in str(candid_command("examine", "my photos", "waste").exception)


def test_a_wrong_set_of_other_images_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    for command in ("evaluate", "audit"):
        done = candid_command(command, tmp_path / "none", "--data", "digits", "--ood", "noise")
        assert str(done.exception) == "--ood takes NAME=PATH, not 'noise'."
    done = candid_command("evaluate", tmp_path / "none", "digits", "--ood", "uniform-noise")
    assert "none'" in str(done.exception)  # the next thing that is wrong
