"""The pages link to what exists, and the index names the files that there are."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import candid
from candid.cli.app import COMMANDS, run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")]


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    wrong = []
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        path = page.parent / target if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append(f"{target}#{anchor}")
    assert not wrong


LONGEST, ROWS = 25, 6
"""The most words of a sentence, and the most rows of a table, on a page for newcomers."""


def newcomers() -> list[Path]:
    """The pages for newcomers: the first page of the site, and those that it lists below "Start"."""
    index = ROOT / "docs/index.md"
    (listed,) = re.findall(r":caption: Start\n.*?\n((?:[\w./-]+\n)+):::", index.read_text(encoding="utf-8"))
    return [index, *((ROOT / "docs" / f"{name}.md").resolve() for name in listed.split())]


def sentences(text: str) -> list[str]:
    """The sentences of a page, without code, tables, comments and headings; a link is its text."""
    text = re.sub(r"```.*?```|:::.*?:::|<!--.*?-->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text))
    text = re.sub(r"^(?:#.*|\|.*|\W*)$", "\n", text, flags=re.MULTILINE)
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", text)
    return [
        each
        for block in blocks
        for each in re.split(r"(?<=[.!?])[*)\"]*\s+", " ".join(block.split()))
        if each
    ]


def too_long(text: str) -> list[str]:
    return [each for each in sentences(text) if len(re.findall(r"\w\S*", each)) > LONGEST]


def tables(text: str) -> list[list[str]]:
    """The rows of each table, without its head."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [found.splitlines()[2:] for found in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]


@pytest.mark.parametrize("page", newcomers(), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_for_newcomers_are_easy_to_read(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert too_long(text) == []
    assert all(len(rows) <= ROWS for rows in tables(text))


def test_the_commands_on_pages_for_newcomers_exist(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        line
        for page in newcomers()
        for line in re.findall(r"^candid (.*?)(?:  #.*)?$", page.read_text(), re.M)
    ]
    assert len(lines) > 15
    for line in lines:
        name, *words = line.split()
        asked = [word for word in words if word.startswith("--")]
        assert name in COMMANDS, line
        run([name, "--help"])
        said = capsys.readouterr().out
        assert all(option in said for option in asked), line


def test_the_code_for_a_classifier_of_your_own_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/start/own-classifier.md").read_text(encoding="utf-8")
    random, labels = np.random.default_rng(0), np.arange(400) % 3
    arrays = random.normal(size=(400, 8)) + 3 * np.eye(3, 8)[labels]
    new = random.normal(size=(60, 8)) + 9
    scope: dict[str, Any] = {"logits": arrays[:, :3], "labels": labels, "features": arrays}
    scope |= {"new_logits": new[:, :3], "new_features": new}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, scope)
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"novel"}
    assert scope["watch"].alarm


def test_long_sentences_and_tables_are_found() -> None:
    words = "word " * LONGEST
    assert too_long(f"{words}.\n\n# {words} heading\n\n```\n{words} code\n```\n| {words} | cell |\n") == []
    assert len(too_long(f"Short. {words}more.")) == len(too_long(f"- {words}\n  more\n- short")) == 1
    assert len(too_long(f"Short.** **{words} more**. Short.")) == 1
    assert [len(rows) for rows in tables("| a |\n|---|\n" + "| 1 |\n" * 7)] == [7]
    assert len(newcomers()) > 5 and all(page.exists() for page in newcomers())


def test_every_file_that_a_page_names_exists() -> None:
    named = {
        path
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for path in re.findall(r"`(candid/[\w/]+(?:\.py|/))`", page.read_text(encoding="utf-8"))
    }
    assert named and not [path for path in sorted(named) if not (ROOT / path).exists()]


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\.\. (?:auto\w+|py:data):: (\w+)$", text, re.MULTILINE))
    assert named == set(candid.__all__)


def test_every_page_is_on_the_site() -> None:
    contents = "\n".join(
        (ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("index", "models")
    )
    listed = re.findall(r"^[\w./*-]+$", contents, re.MULTILINE)
    found = {path for entry in listed for path in (ROOT / "docs").glob(f"{entry}.md")}
    found = {path.resolve() for path in found} | {ROOT / "docs/index.md", *ROOT.glob("docs/results/*.md")}
    assert {path for path in PAGES if path.parent.name in ("docs", "results", "start")} <= found


def test_the_glossary_is_in_alphabetical_order() -> None:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    terms = [
        re.sub(r"[^a-z]", "", term.lower()) for term in re.findall(r"^- .*?\*\*(.+?)\*\*", text, re.MULTILINE)
    ]
    assert len(terms) > 90 and [term[0] for term in terms] == sorted(term[0] for term in terms)
