"""Names with control characters and formulas, from models, folders and files."""

import csv
from pathlib import Path

import pytest

import candid
from candid.cli.app import show_table
from tests.data.helpers import write_folder
from tests.helpers import candid_command, small_classifier

NAMES = ("=1+1", "\x1b]0;owned\x07\x1b[2J", "b\nc")


def test_names_reach_neither_the_terminal_nor_a_spreadsheet(tmp_path: Path) -> None:
    model = small_classifier()
    model.class_names = NAMES
    candid.save(model, tmp_path / "model")
    data = tmp_path / "a\x1b[31mred"
    write_folder(data, dict.fromkeys(NAMES, 8), width=16)
    assert candid_command("calibrate", tmp_path / "model", data).exit_code == 0
    out = tmp_path / "out"
    commands = [
        ("examine", tmp_path / "model", data),
        ("evaluate", tmp_path / "model", data, "--out", out, "--ood", f"\x1b[5mx={data}", "--workers", 0),
        ("explain", tmp_path / "model", "--data", data, "--out", out, "--workers", 0, "--images", 2),
    ]
    for command in commands:
        done = candid_command(*command)
        assert done.exit_code == 0, (done.stderr, done.exception)
        shown = [each for each in done.output if not each.isprintable() and each != "\n"]
        assert not shown, (command[0], shown)
        assert "\\x1b" in done.output and "b\nc" not in done.output
    with (out / "images.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["true_label"] for row in rows} - {""} == {"'=1+1", r"\x1b]0;owned\x07\x1b[2J", "b\nc"}


def test_intervals_are_on_a_second_line_of_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    show_table("Attacks", ("", "success"), [("two\nlines", "100.0\n63–100")])
    shown = [line.strip(" │") for line in capsys.readouterr().out.splitlines()]
    assert shown[-3].split() == ["two\\nlines", "│", "100.0"]
    assert shown[-2].endswith("63–100")
