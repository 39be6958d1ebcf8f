"""The page of results, the README's table and the cards say what was measured."""

import json
import re
from typing import Any

import pytest

from candid.models import zoo
from experiments.results import PAGE, RESULTS, ROOT, TEMPLATE
from experiments.tables import card_figures, filled, headline, tables

README = ROOT / "README.md"


@pytest.fixture(scope="module")
def results() -> Any:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_page_has_the_figures_that_were_measured(results: Any) -> None:
    page = filled(TEMPLATE.read_text(encoding="utf-8"), tables(results))
    assert (PAGE / "README.md").read_text(encoding="utf-8") == page


def test_the_readme_has_the_figures_that_were_measured(results: Any) -> None:
    readme = README.read_text(encoding="utf-8")
    assert filled(readme, {"headline": headline(results)}) == readme


def test_the_cards_have_the_figures_that_were_measured(results: Any) -> None:
    bundled = {name for name, model in results["models"].items() if model.get("bundled", True)}
    assert bundled | {"tiny20"} == set(zoo.names())
    for name in zoo.names():
        card = zoo.card(name)
        measured, figures, more = card_figures(name, results)
        assert (card["measured"], card["figures"], card["more_figures"]) == (measured, figures, more)


@pytest.mark.parametrize("page", [README, PAGE / "README.md"], ids=["readme", "results"])
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
