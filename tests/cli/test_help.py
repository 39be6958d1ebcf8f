"""Help in groups, an example for each command, completion in a shell, and tables that fit a terminal."""

import re
import shlex
import subprocess

import pytest

from candid._support.text import show_table
from candid.cli.app import COMMANDS, GROUPS, app, ordered
from tests.helpers import candid_command

EXAMPLES = {name: line for group in GROUPS.values() for name, line in group.items()}


def test_every_command_is_in_one_group() -> None:
    assert sorted(EXAMPLES) == sorted(COMMANDS)
    assert sum(map(len, GROUPS.values())) == len(COMMANDS)
    shown = candid_command("--help").stdout
    for title in (*GROUPS, "Flags"):
        assert f"─ {title} ─" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_in_the_help_of_a_command_can_be_typed(name: str) -> None:
    program, command, *words = shlex.split(EXAMPLES[name])
    assert (program, command) == ("candid", name)
    app.parse_args([name, *ordered(app[name], words)], exit_on_error=False, print_error=False)
    assert f"Example: {EXAMPLES[name]}" in candid_command(name, "--help").stdout


def test_options_that_commands_share_have_panels_of_their_own() -> None:
    shown = candid_command("evaluate", "--help").stdout
    places = [shown.index(f"─ {title} ─") for title in ("Options", "Verdicts", "Which images, and how")]
    assert places == sorted(places)
    assert places[1] < shown.index("--confidence") < places[2] < shown.index("--skip-bad")


def test_a_shell_completes_commands_and_options() -> None:
    script = app.generate_completion(shell="bash")
    check = "_candid; echo ${COMPREPLY[@]}"
    typed = f"{script}\nCOMP_WORDS=(candid eval); COMP_CWORD=1; {check}"
    done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["evaluate"]
    typed = f"{script}\nCOMP_WORDS=(candid teach --o); COMP_CWORD=2; {check}"
    done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--out"]


ROWS = [
    ["relative-mahalanobis", "99.9 (99.1 to 100.0)", "98.0 (97.5 to 98.8)", "647 of small groups", "5.1"],
    ["Apples (loose)", "1", "2", "3", "4"],
]
HEAD = [
    "score",
    "uniform-noise (95 % interval)",
    "caltech99",
    "other-clothes-of-another-shop",
    "false positives",
]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("tight", [False, True])
def test_a_table_never_breaks_a_word(
    width: int, tight: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    show_table("A table", HEAD, ROWS, tight=tight)
    printed = capsys.readouterr().out
    words = set(re.split(r"[\s│┃]+", printed))
    assert {word for row in (HEAD, *ROWS) for cell in row for word in cell.split()} <= words
    widest = max(len(line.rstrip()) for line in printed.splitlines())
    least = len("relative-mahalanobis") + len("other-clothes-of-another-shop")
    assert widest <= max(width, least + 10)


def test_a_word_that_is_wider_than_the_terminal_stays_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    show_table("Paths", ["path", "images"], [["a" * 90, "1"]])
    assert "a" * 90 in capsys.readouterr().out
