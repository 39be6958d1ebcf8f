"""The command of ``make red``: what it runs, counts and writes."""

import json
from pathlib import Path

import pytest

from experiments.red import __main__ as red
from experiments.red import attack, results
from experiments.red.attack import ATTACKS, Attack


def test_the_page_has_the_table_of_the_last_full_run() -> None:
    page, found = results.PAGE.read_text(encoding="utf-8"), results.read()
    assert page == results.with_table(page, found)
    assert found.keys() <= ATTACKS.keys()
    assert all(each["held"] and each["promise"] == ATTACKS[name].promise for name, each in found.items())


def test_a_result_is_written_into_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "security.md"
    page.write_text(f"before\n{results.START}old\n{results.END}after\n")
    monkeypatch.setattr(results, "PAGE", page)
    monkeypatch.setattr(results, "RECORD", tmp_path / "red.json")
    one = results.Result(promise="P.", held=True, said="3 | 4 refused", inputs=1500, kills=0, minutes=1.25)
    results.write("edits", one, ["kills", "edits"])
    results.write("kills", {**one, "held": False, "inputs": 0, "kills": 7}, ["kills", "edits"])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| `edits` | 1,500 |  | 1.2 | 3 \\| 4 refused |" in text
    assert "| `kills` |  | 7 | 1.2 | BROKEN: 3" in text and "| 2 attacks | 1,500 | 7 | 2 | |" in text
    assert list(json.loads((tmp_path / "red.json").read_text())) == ["kills", "edits"]


def test_an_attack_tells_what_it_tried(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> str:
        attack.tried(inputs=3)
        attack.tried(inputs=1, kills=2)
        return "all refused"

    def broken() -> str:
        raise attack.BrokenError("it does not")

    assert red._alone(Attack("toy", "It holds.", 9, run)) == 0
    assert json.loads(capsys.readouterr().out) == {"said": "all refused", "tried": {"inputs": 4, "kills": 2}}
    assert red._alone(Attack("toy", "It holds.", 9, broken)) == 1
    assert capsys.readouterr().out == "it does not\n"


@pytest.mark.parametrize(("value", "full"), [("", False), ("0", False), ("1", True)])
def test_full_counts_are_asked_for_by_the_environment(
    value: str, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULL", value)
    assert attack.full() is full
