"""What the README and the page on the paper show works as shown, and every number in them was measured."""

import json
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import candid
from candid.cli.app import COMMANDS
from candid.models import zoo
from candid.training.options import ENOUGH
from candid.trust.promises import Levels
from candid.trust.verdict import CONFIDENCE, ERROR, NOVELTY
from experiments.readme import README, ROOT, installed, promises
from experiments.tables import filled

TEXT = README.read_text(encoding="utf-8")
SAMPLES = ROOT / "candid" / "reports" / "demo" / "samples"


def code(page: Path) -> str:
    (found,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


def test_the_readme_is_short_and_has_the_promises_that_were_measured() -> None:
    assert len(TEXT.splitlines()) <= 140
    assert filled(TEXT, {"promises": promises(), "install": installed()}) == TEXT


def near_accepted() -> list[str]:
    """The share of photos of a similar, unknown kind that is accepted at the default levels, by set."""
    page = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    rows = [
        re.search(rf"^\| {name} (?:\| [\d.]+ ){{4}}\| ([\d.]+) \|", page, re.MULTILINE)
        for name in ("bloodcells8 without ig", "trashnet6 without trash", "clothing10")
    ]
    return [f"{float(row[1]):.0f}" for row in rows if row is not None]


def python_needed() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["requires-python"]).removeprefix(">=")


CLAIMS: dict[str, Callable[[], tuple[str, ...]]] = {
    r"at most (\S+) % of ordinary images are called novel, and at most (\S+) % get a list": lambda: (
        f"{100 * NOVELTY:g}",
        f"{100 * ERROR:g}",
    ),
    r"An accepted answer has a posterior of at least (\d+) %": lambda: (f"{100 * Levels().confidence:g}",),
    r"asked with (\d+) % confidence for your model": lambda: (f"{100 * CONFIDENCE:g}",),
    r'says "shoes" with (\d+) %': lambda: ("99",),  # what the picture shows
    r"trained on fewer than (\d+) photos": lambda: (str(ENOUGH),),
    r"You need Python (\S+) or newer": lambda: (python_needed(),),
    r"At the default level of (\S+) % it happens to (\d+) % .* cells, (\d+) % .* waste and (\d+) %": lambda: (
        f"{100 * NOVELTY:g}",
        *near_accepted(),
    ),
    r"Mackowiak, Ardizzone, Köthe, Rother, (\d+)": lambda: ("2021",),
    r"results on CIFAR-(\d+), next to the paper's": lambda: ("10",),
}
"""What each sentence with a number says, and where the number comes from."""


def test_every_number_of_the_readme_is_checked() -> None:
    text = re.sub(r"```.*?```|<!-- (\w+) -->.*?<!-- /\1 -->|`[^`]*`|\]\([^)]*\)", "", TEXT, flags=re.DOTALL)
    text = " ".join(text.split())
    for pattern, numbers in CLAIMS.items():
        found = re.search(pattern, text)
        assert found is not None, pattern
        assert found.groups() == numbers(), pattern
        text = text.replace(found[0], "")
    assert not re.findall(r"\S*\d\S*", text)


def test_the_sentence_about_few_photos_is_about_what_was_measured() -> None:
    text = (ROOT / "docs/start/photos.md").read_text(encoding="utf-8")
    assert "Twenty photos per kind are a start, fifty are better." in text
    few = json.loads((ROOT / "docs/results/photos.json").read_text(encoding="utf-8"))["few"]
    for each in few.values():
        assert set(each) == {"20", "50"}
        assert each["50"]["accuracy"]["candid"] > each["20"]["accuracy"]["candid"]


RUN = {
    "pip install .": "experiments/check.py",
    "candid examine photo.jpg": "tests/cli/test_app.py",
    "candid serve": "tests/serve/test_command.py",
    "candid train photos --out mine": "tests/training/test_photos.py",
    "candid examine mine new/*.jpg --figures pages": "tests/explanations/test_nearest_photos.py",
    "candid serve mine": "tests/serve/test_command.py",
    "candid group mine new --sort-into sorted": "tests/judging/test_group.py",
    "candid teach mine hat=sorted/unknown-1 pear=more-pears": "tests/training/test_teach.py",
    "candid watch mine incoming": "tests/cli/test_watch.py",
}
"""The commands of the README, and what runs them. ``make demo`` and ``make test`` are run by hand."""


def test_every_command_of_the_readme_is_run_somewhere() -> None:
    blocks = re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)
    shown = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]
    assert list(dict.fromkeys(shown)) == list(RUN)
    for command, file in list(RUN.items())[1:]:
        assert command.split()[1] in COMMANDS
        assert f'"{command.split()[1]}"' in (ROOT / file).read_text(encoding="utf-8"), command


def test_the_python_code_of_the_readme_gives_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SAMPLES / "everyday", tmp_path / "photos")
    random, labels = np.random.default_rng(0), np.arange(400) % 3
    arrays = random.normal(size=(400, 8)) + 3 * np.eye(3, 8)[labels]
    new = random.normal(size=(5, 8)) + 9
    scope: dict[str, Any] = {"logits": arrays[:, :3], "labels": labels, "features": arrays}
    scope |= {"new_logits": new[:, :3], "new_features": new}
    exec(code(README), scope)
    printed = capsys.readouterr().out
    assert all(kind in printed for kind in ("accept", "ambiguous", "novel"))
    assert {each.verdict for each in scope["verdicts"]} == {"novel"}
    assert candid.load("adopted").class_names == tuple(zoo.card("everyday")["classes"])


def test_the_python_code_on_the_paper_leaves_a_working_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(code(ROOT / "docs" / "paper.md"), scope)
    assert scope["z"].shape == (8, 64)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert sum(label == str(i) for i, (label, *_) in enumerate(lines)) >= 6, lines
    assert {verdict for *_, verdict in lines} <= {"accept", "ambiguous", "novel"}
    (each,) = candid.examine(tmp_path / "my-model", scope["digits"][0])
    assert each.verdict is not None
