"""Tables of ``results.json`` on classes: which of them are close, and whether images agree."""

from collections.abc import Iterator
from typing import Any

from experiments.tables import Cell, Results, at, decimal, shown, table, text, title

CANDIDATES = {
    "means": "means",
    "pooled": "mean-pooled part of the means",
    "span": "averages of held-out latents in the span of the means",
    "whitened": "the same in the metric of the spread within classes",
    "line": "**averages along the line of both means**",
    "line over spread": "the same divided by the spread along the line",
}
"""The distances of classes that were compared, and what the theory page calls them."""


def similar_classes(results: Results) -> str:
    """Return the closest classes of the first model, and their distances in other ones."""
    explained = results["explanations"]
    distances = {
        name: {frozenset(pair["classes"]): pair["distance"] for pair in each["closest_pairs"]}
        for name, each in explained.items()
    }

    def distance(name: str) -> tuple[str, Cell]:
        own = distances[name]
        return f"{title(name)}: distance (σ)", lambda pair: decimal(own[frozenset(pair["classes"])], 2)

    first = next(iter(explained.values()))["closest_pairs"][:6]
    return table(first, (("closest classes", _pair), *map(distance, explained)))


def _pair(pair: Results) -> str:
    return " – ".join(pair["classes"])


def similarity_by_confusions(results: Results) -> str:
    """Return how well distances of classes agree with confusions of test images, for each model."""

    def correlation(distance: str) -> Cell:
        def cell(record: Any) -> str:
            found = at(record, "rank", distance)
            if found is None:
                return "–"
            return f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"

        return cell

    return table(
        [
            {"title": title(name), **model["similarity"]}
            for name, model in results["geometry"].items()
            if "similarity" in model
        ],
        (
            ("", lambda record: f"**{record['title']}**"),
            ("test images", lambda record: f"{record['images']:,}"),
            ("of these, confused", lambda record: f"{record['confused']:,}"),
            ("distances of class means", correlation("means")),
            ("measured distances", correlation("line")),
            ("share of the means beyond mean pooling (%)", shown(0, 100, "beyond_pooled")),
            ("constant coefficient / next", shown(2, 1, "constant_over_next")),
        ),
    )


def compared_distances(results: Results) -> str:
    """Return the table of docs/theory.md: six distances of classes, judged by confusions."""
    models = {
        title(name): model["similarity"]["rank"]
        for name, model in results["geometry"].items()
        if "line" in at(model, "similarity", "rank")
    }

    def value(name: str) -> Cell:
        return lambda distance: decimal(models[name][distance]["value"], 2)

    return table(
        CANDIDATES,
        (
            ("rank correlation with confusions", lambda distance: CANDIDATES[distance]),
            *((name, value(name)) for name in models),
        ),
    )


def geometry_table(results: Results) -> str:
    """Return how well each mixture describes its latents, as it was trained and as it was refitted."""

    def records() -> Iterator[dict[str, Any]]:
        for name, model in results["geometry"].items():
            for state in (state for state in ("before", "after") if state in model):
                gain = model[state]["log_density"] - model["before"]["log_density"]
                yield {**model[state], "title": f"**{title(name)}**, {state}", "gain": gain, "state": state}

    def if_after(cell: Cell) -> Cell:
        return lambda record: "–" if record["state"] == "before" else cell(record)

    return table(
        records(),
        (
            ("", text("title")),
            ("distance of class means (σ)", shown(2, 1, "mean_distance")),
            ("of class averages", shown(2, 1, "class_average_distance")),
            ("in the 90 % region (%)", shown(1, 100, "inside")),
            ("confident images", shown(1, 100, "inside_confident")),
            ("expected uncertainty (%)", shown(1, 100, "expected")),
            ("measured", shown(1, 100, "measured")),
            ("cat–dog: expected", shown(1, 100, "expected_pair")),
            ("measured", shown(1, 100, "measured_pair")),
            ("gain (nats per image)", if_after(lambda record: f"{record['gain']:+.2f}")),
            ("largest change of a posterior", if_after(lambda record: f"{record['largest_change']:.0e}")),
        ),
    )


def tiny20_pairs(results: Results) -> str:
    """Return the closest classes of the model of 64-pixel photos."""
    return table(
        results["tiny20"]["closest_pairs"][:8],
        (
            ("closest classes", _pair),
            ("distance (σ)", shown(2, 1, "distance")),
            ("expected uncertainty (%)", shown(1, 100, "expected_uncertainty")),
            ("measured (%)", shown(1, 100, "measured_uncertainty")),
        ),
    )
