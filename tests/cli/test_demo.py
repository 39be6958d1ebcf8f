"""The demonstration, with fewer epochs."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from candid._support.errors import CandidError
from candid.cli import demo as cli_demo


def test_demo_shows_verdicts_trains_groups_teaches_and_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli_demo.demo(tmp_path, epochs=6)
    printed = capsys.readouterr().out
    verdicts = {Path(line.split()[-1]).name: line for line in printed.splitlines() if line.endswith(".jpg")}
    assert " accept " in verdicts["sandal.jpg"] and " novel " in verdicts["moose.jpg"]
    assert re.search(r"ambiguous +\S+cat.jpg +\(.*tabby", printed)  # several cats
    assert re.search(r"ambiguous +\S+vodka.jpg +\(plastic or glass\)", printed)
    assert " novel " in verdicts["cat.jpg"]  # the second time, as waste
    novel = re.search(r"Of 34 photos, (\d+) are novel", printed)
    assert novel is not None and int(novel[1]) > 25
    known = re.search(r"(\d+) of the (\d+) other hats are recognised", printed)
    assert known is not None and int(known[1]) > 0.7 * int(known[2])
    flagged = {name: int(share) for name, share in re.findall(r"│ ([a-z ]+?) +│ +(\d+) % │", printed)}
    assert flagged["test digits"] < 20
    assert flagged["random pixels"] == flagged["inverted digits"] == 100
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert page.count("<section>") == 6 and page.count('<img src="data:image/jpeg') == 33
    assert "://" not in re.sub(r"data:image/[^\"]*", "", page)
    commands = re.findall(r"^  (.*?)    # ", printed, re.MULTILINE)
    assert len(commands) == 4 and all(command in page.replace("&#39;", "'") for command in commands)
    program, *rest = shlex.split(commands[1])
    done = subprocess.run([program, *rest], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # the command works as it is printed
    assert (tmp_path / "pages" / "cat.page.png").exists()


@pytest.mark.parametrize("name", ["photos", "clothes", "digits"])
def test_demo_replaces_only_folders_that_it_made(tmp_path: Path, name: str) -> None:
    made = cli_demo.fresh_folders(tmp_path / "demo")[0]
    (made / "old.txt").write_text("of an earlier demo")
    assert [path.name for path in cli_demo.fresh_folders(made)[0].iterdir()] == [cli_demo.MARKER]
    (tmp_path / name).mkdir()
    own = tmp_path / name / "holiday.jpg"
    own.write_text("of the user")
    with pytest.raises(CandidError, match="choose another folder"):
        cli_demo.demo(tmp_path, epochs=1)
    assert own.read_text() == "of the user" and {path.name for path in tmp_path.iterdir()} == {"demo", name}
