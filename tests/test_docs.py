"""The pages link to what exists, and the index names the files that there are."""

import re
from pathlib import Path

import pytest

import candid

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
    assert {path for path in PAGES if path.parent.name in ("docs", "results")} <= found


def test_the_glossary_is_in_alphabetical_order() -> None:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    terms = [
        re.sub(r"[^a-z]", "", term.lower()) for term in re.findall(r"^- .*?\*\*(.+?)\*\*", text, re.MULTILINE)
    ]
    assert len(terms) > 90 and [term[0] for term in terms] == sorted(term[0] for term in terms)
