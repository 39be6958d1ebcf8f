"""The pages of results and the cards say what was measured."""

import json
import re
from typing import Any

import pytest

from candid.models import zoo
from experiments import photo_models, photo_tables
from experiments.results import PAGE, RESULTS, ROOT, TEMPLATE
from experiments.results_tables import card_figures, headline, tables
from experiments.tables import filled

PAPER = ROOT / "docs" / "paper.md"
PHOTOS = PAGE / "photos.md"


@pytest.fixture(scope="module")
def results() -> Any:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_page_has_the_figures_that_were_measured(results: Any) -> None:
    page = filled(TEMPLATE.read_text(encoding="utf-8"), tables(results))
    assert (PAGE / "README.md").read_text(encoding="utf-8") == page


def test_the_page_on_the_paper_has_the_figures_that_were_measured(results: Any) -> None:
    page = PAPER.read_text(encoding="utf-8")
    assert filled(page, {"headline": headline(results)}) == page


def test_the_cards_have_the_figures_that_were_measured(results: Any) -> None:
    bundled = {name for name, model in results["models"].items() if model.get("bundled", True)}
    photos = json.loads(photo_models.RESULTS.read_text(encoding="utf-8"))
    assert bundled | {"tiny20"} | photos.keys() == set(zoo.names())
    for name, metrics in photos.items():
        card = zoo.card(name)
        assert card["figures"] == photo_models.figures(metrics)
        assert card["more_figures"] == photo_models.more_figures(metrics)
    for name in bundled | {"tiny20"}:
        card = zoo.card(name)
        measured, figures, more = card_figures(name, results)
        assert (card["measured"], card["figures"], card["more_figures"]) == (measured, figures, more)


def test_the_page_on_photos_has_the_figures_that_were_measured() -> None:
    page = PHOTOS.read_text(encoding="utf-8")
    assert photo_tables.page(page) == page


def test_the_page_on_photos_quotes_other_pages_as_they_are() -> None:
    _, _, section = PHOTOS.read_text(encoding="utf-8").partition("## Teach, group, watch")
    section, _, _ = section.partition("\n## ")
    quoted = {line for line in section.splitlines() if line.startswith("|")}
    others = [ROOT / "docs" / f"{name}.md" for name in ("open-world", "drift")]
    assert quoted <= {line for page in others for line in page.read_text(encoding="utf-8").splitlines()}
    assert len(quoted) > 10


def test_a_plain_threshold_is_as_good_on_known_photos_as_the_page_on_photos_says() -> None:
    photos = json.loads(photo_models.RESULTS.read_text(encoding="utf-8"))
    differences = [found["selective"]["difference"] for found in photos.values()]
    assert all(each["low"] <= 0 <= each["high"] for each in differences)


@pytest.mark.parametrize("page", [PAPER, PAGE / "README.md", PHOTOS], ids=["paper", "results", "photos"])
def test_every_picture_and_page_that_is_linked_exists(page: Any) -> None:
    linked = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert linked and not [path for path in linked if not (page.parent / path).exists()]


def test_nothing_that_was_measured_names_a_place_on_a_machine(results: Any) -> None:
    def texts(found: Any) -> list[str]:
        if isinstance(found, dict):
            return [*found, *(text for value in found.values() for text in texts(value))]
        if isinstance(found, list):
            return [text for value in found for text in texts(value)]
        return [found] if isinstance(found, str) else []

    assert not [text for text in texts(results) if text.startswith("/") or "\\" in text]
