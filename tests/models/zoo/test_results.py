"""The pages of results and the cards say what was measured."""

import json
import re
from typing import Any

import pytest

from candid.models import zoo
from experiments import photo_models, photo_tables
from experiments.class_tables import compared_distances
from experiments.results import PAGE, RESULTS, ROOT, TEMPLATE
from experiments.results_tables import card_figures, headline, tables
from experiments.tables import filled
from experiments.trends import rank_correlation, trends

PAPER = ROOT / "docs" / "paper.md"
THEORY = ROOT / "docs" / "theory.md"
EXPLANATIONS = ROOT / "docs" / "explanations.md"
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


def generative(results: Any, least_beta: float = 1) -> list[Any]:
    models = (model for model in results["models"].values() if model["beta"] is not None)
    return [model for model in models if float(model["beta"]) >= least_beta and "ten_crops" in model]


def contains_one(found: Any) -> bool:
    low, high = found["intervals"]["oce"]
    return found["oce"] is None or float(low) <= 1 <= float(high)


def attacked(results: Any, model: str) -> float:
    """Return the AUC of the attack without a bound that knows the detector, in percent."""
    asked = (model, "inf", 1000)
    metrics = results["attacks"]["metrics"]
    (attack,) = (each for each in metrics if (each["model"], each["kappa"], each["d"]) == asked)
    return round(100 * attack["eight_bit"]["detection"]["two_tailed"], 1)


def tiny20_blurs(results: Any) -> list[float]:
    areas = results["tiny20"]["corruptions"]["auc"]["two-tailed"]
    return [area for name, area in areas.items() if "blur" in name]


CLAIMS: dict[str, Any] = {
    "add 2 to 3 points to the generative models": lambda results: all(
        0.02 <= round(model["ten_crops"]["accuracy"] - model["accuracy"], 2) <= 0.03
        for model in generative(results)
    ),
    "All their intervals of OCE contain 1": lambda results: all(map(contains_one, generative(results))),
    "OCE still can't be distinguished from 1": lambda results: all(
        contains_one(model["scaled"]) for model in generative(results)
    ),
    "14 % at beta 1 and 1.7 % at infinity": lambda results: (
        (attacked(results, "cifar10-beta1"), attacked(results, "cifar10-betainf")) == (14.2, 1.7)
    ),
    "Other photos are found less, too": lambda results: (
        generative(results)[0]["ood"]["tiny"]["joint"]["auc"]
        > generative(results)[-1]["ood"]["tiny"]["joint"]["auc"]
    ),
    "8-bit attacks succeed on 96 to 100 % of the images in every setting": lambda results: all(
        attack["eight_bit"]["success"] > 0.955 for attack in results["attacks"]["metrics"]
    ),
    "the four blurs have 60 to 72 %": lambda results: (
        {
            round(100 * min(tiny20_blurs(results))),
            round(100 * max(tiny20_blurs(results))),
        }
        == {60, 72}
    ),
    "Verdicts at novelty 1 % and error 5 %": lambda results: all(
        (model["verdicts"]["novelty"], model["verdicts"]["error"]) == (0.01, 0.05)
        for model in generative(results)
    ),
    "by at most 0.6 points": lambda results: all(
        -0.006 <= model["selective"]["difference"]["value"] <= 0
        for model in generative(results)
        if model.get("selective")
    ),
    "The measured distances agree better than the means for every model that has both": lambda results: all(
        model["similarity"]["rank"]["line"]["value"] > model["similarity"]["rank"]["means"]["value"]
        for model in results["geometry"].values()
        if "line" in model["similarity"]["rank"]
    ),
    "ECE and MCE have no trend here, since their intervals include 0": lambda results: all(
        low <= 0 <= high
        for trend in trends(results)
        if trend.name in ("ECE (%)", "MCE (%)")
        for _, low, high in [rank_correlation(trend.points)]
    ),
    "The mean over all pairs is still two or more times the measured one": lambda results: all(
        found["after"]["expected"] >= 2 * found["after"]["measured"]
        for name, found in results["geometry"].items()
        if name.startswith("cifar10") and name != "cifar10-beta0"
    ),
    "Cat and dog are the closest classes at beta 1 and at infinity": lambda results: all(
        results["geometry"][f"cifar10-beta{beta}"]["similarity"]["closest"]["line"][0] == ["cat", "dog"]
        for beta in ("1", "inf")
    ),
}
"""Sentences of the page, and whether they hold for all models that were measured."""


@pytest.mark.parametrize("sentence", CLAIMS)
def test_sentences_of_the_page_hold_for_all_betas(results: Any, sentence: str) -> None:
    assert sentence in " ".join(TEMPLATE.read_text(encoding="utf-8").split())
    assert CLAIMS[sentence](results)


def in_similarity(results: Any, *keys: str, tiny20: bool = False) -> list[float]:
    """Return what is below these keys of the models that classify CIFAR-10, or of the one of 64 pixels."""
    found = []
    for name, model in results["geometry"].items():
        if name == "tiny20" if tiny20 else name.startswith("cifar10") and name != "cifar10-beta0":
            value = model["similarity"]
            for key in keys:
                value = value[key]
            found.append(value)
    return found


def ranged(values: list[float], digits: int = 0, factor: float = 100) -> str:
    return f"{factor * min(values):.{digits}f} to {factor * max(values):.{digits}f}"


def differing(results: Any, distance: str) -> tuple[str, str]:
    keys = ("differing", distance)
    (of_tiny20,) = in_similarity(results, *keys, tiny20=True)
    return ranged(in_similarity(results, *keys)), f"{100 * of_tiny20:.0f}"


def at_three_betas(results: Any, *keys: str) -> str:
    models = [results["geometry"][f"cifar10-beta{beta}"]["similarity"] for beta in ("1", "16", "inf")]
    for key in keys:
        models = [model[key] for model in models]
    return "{:.1f}, {:.1f} and {:.1f} %".format(*(100 * value for value in models))


def correlations(results: Any, distance: str, *models: str) -> list[str]:
    found = [results["geometry"][model]["similarity"]["rank"][distance]["value"] for model in models]
    return [f"{value:.2f}" for value in found]


QUOTED: dict[str, tuple[Any, Any]] = {
    "share of the means beyond mean pooling": (
        THEORY,
        lambda results: (
            ranged(
                [
                    each
                    for both in (True, False)
                    for each in in_similarity(results, "beyond_pooled", tiny20=both)
                ]
            )
            + " % of the squared distance of the means"
        ),
    ),
    "pairs with another uncertainty than expected": (
        THEORY,
        lambda results: (
            "{} % of the pairs ({} % of `tiny20`), averages along the line for {} % ({} %), "
            "means for {} % ({} %)".format(
                *(each for name in ("span", "line", "means") for each in differing(results, name))
            )
        ),
    ),
    "uncertainty that the line expects": (
        THEORY,
        lambda results: (
            f"averages along the line expect {at_three_betas(results, 'expected', 'line')} at β = 1, 16 and ∞"
        ),
    ),
    "measured uncertainty": (
        THEORY,
        lambda results: f"{at_three_betas(results, 'measured')} are measured",
    ),
    "constant coefficient over the next": (
        EXPLANATIONS,
        lambda results: (
            f"its spread is {ranged(in_similarity(results, 'constant_over_next'), 2, 1)} times that of the "
            "next one in the CIFAR-10 models that classify, "
            f"{in_similarity(results, 'constant_over_next', tiny20=True)[0]:.1f} times in `tiny20`"
        ),
    ),
    "rank correlation with confusions": (
        EXPLANATIONS,
        lambda results: "{} at beta 1 and {} at beta infinity; that of the means is {} and {}.".format(
            *(
                each
                for distance in ("line", "means")
                for each in correlations(results, distance, "cifar10-beta1", "cifar10-betainf")
            )
        ),
    ),
    "the same of tiny20": (
        TEMPLATE,
        lambda results: "Their rank correlation with confusions is {}, that of the class means {} (".format(
            *correlations(results, "line", "tiny20"), *correlations(results, "means", "tiny20")
        ),
    ),
    "images of tiny20 in their region": (
        TEMPLATE,
        lambda results: (
            f"Of `tiny20`, {100 * results['geometry']['tiny20']['after']['inside']:.0f} % of the photos lie "
            "inside"
        ),
    ),
}
"""Sentences with numbers of all models: what is quoted, on which page, and the words that it must have."""


@pytest.mark.parametrize("quoted", QUOTED)
def test_sentences_quote_the_numbers_of_all_models(results: Any, quoted: str) -> None:
    page, words = QUOTED[quoted]
    assert words(results) in " ".join(page.read_text(encoding="utf-8").split())


def test_the_theory_page_has_the_distances_that_were_compared(results: Any) -> None:
    page = THEORY.read_text(encoding="utf-8")
    assert filled(page, {"distances": compared_distances(results)}) == page


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
