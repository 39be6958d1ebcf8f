"""The tables of ``docs/results`` and the figures on the cards as pure functions of ``results.json``."""

from collections.abc import Iterator, Mapping
from typing import Any

from candid._support.text import number
from candid.robustness.corruptions.benchmark import CORRUPTIONS
from experiments.class_tables import (
    geometry_table,
    similar_classes,
    similarity_by_confusions,
    tiny20_pairs,
)
from experiments.imagenet import paper
from experiments.tables import (
    Cell,
    Results,
    area,
    at,
    between,
    bold,
    decimal,
    interval,
    percent,
    ranged,
    second_seed,
    shown,
    table,
    text,
    title,
    with_interval,
)
from experiments.trends import trends_table

BY_CORRUPTION = ("two-tailed", "joint", "mahalanobis", "combined", "max-posterior", "code-length")
ON_OTHER_IMAGES = ("two-tailed", "joint", "mahalanobis", "combined")
GUESSES = "β = 0"
"""The title of the model that does not classify."""
NOT_ON_CARDS = {"beta", "images", "sure", "scaled", "false_positives", "ood", "verdicts", "ten_crops"}
NOT_ON_CARDS |= {"corruptions", "closest_pairs", "bundled", "command", "selective"}


def tables(results: Results) -> dict[str, str]:
    """Return each table in Markdown, by its name on the page."""
    return {
        "table-1": _table_1(results),
        "calibration": _calibration(results),
        "corruptions": _corruptions(results),
        "corruption-areas": _corruption_areas(results, "two-tailed"),
        "corruption-areas-joint": _corruption_areas(results, "joint"),
        "other-images": _other_images(results),
        "accepted": _accepted(results),
        "attacks": _attacks(results),
        "trends": trends_table(results),
        "similar-classes": similar_classes(results),
        "similarity": similarity_by_confusions(results),
        "receptive-fields": _receptive_fields(results),
        "geometry": geometry_table(results),
        "tiny20": _tiny20(results),
        "tiny20-pairs": tiny20_pairs(results),
        "tiny20-corruptions": _tiny20_corruptions(results),
    }


def headline(results: Results) -> str:
    """Return the table of docs/paper.md: what beta buys, and what it costs."""
    means = {record["model"]: record["mean_auc"] for record in results["corruptions"]}
    records = [
        {**model, "mean_auc": means.get(model["name"])}
        for model in _models(results)
        if not second_seed(model["name"])
    ]
    two_tailed = "corrupted images found (AUC, %): paper's two-tailed score"
    return table(
        records,
        (
            ("", lambda model: f"`{model['name']}`"),
            ("test accuracy (%)", _if_classifies(shown(2, 100, "accuracy"))),
            ("bits/dim", shown(3, 1, "bits_per_dim")),
            ("ECE, top class (%)", _if_classifies(shown(1, 100, "top1_ece"))),
            (two_tailed, shown(1, 100, "mean_auc", "two-tailed")),
            ("joint score", shown(1, 100, "mean_auc", "joint")),
            ("other photos: joint score", shown(1, 100, "ood", "tiny", "joint", "auc")),
        ),
    )


def _models(results: Results) -> Iterator[dict[str, Any]]:
    """Yield the record of each model, with its name and how tables call it."""
    for name, model in results["models"].items():
        yield {"name": name, "title": title(name), **model}


def _classifiers(results: Results) -> list[dict[str, Any]]:
    return [model for model in _models(results) if model["title"] != GUESSES]


def _if_classifies(cell: Cell) -> Cell:
    return lambda model: "–" if model["title"] == GUESSES else cell(model)


def _published(figures: Mapping[str, Any], name: str) -> Any:
    """Return the paper's figures for the model with this title; None if it has none."""
    return figures.get(name.removeprefix("β = "))


def _table_1(results: Results) -> str:
    def published(number: int) -> Cell:
        return lambda model: decimal((_published(paper.TABLE_2, model["title"]) or (None,) * 5)[number], 2)

    return table(
        _models(results),
        (
            ("", bold("title")),
            ("L_X", shown(3, 1, "L_X")),
            ("L_Y", _if_classifies(shown(3, 1, "L_Y"))),
            ("bits/dim", shown(3, 1, "bits_per_dim")),
            ("accuracy (%)", _if_classifies(interval("accuracy", 100, 2))),
            ("accuracy, ten crops (%)", _if_classifies(interval("accuracy", 100, 2, "ten_crops"))),
            ("OCE", _if_classifies(interval("oce", 1, 2))),
            ("paper: bits/dim", published(2)),
            ("accuracy, ten crops (%)", published(3)),
            ("OCE", published(4)),
        ),
    )


def _calibration(results: Results) -> str:
    return table(
        _classifiers(results),
        (
            ("", bold("title")),
            ("confident (≥ 99.7 %)", lambda model: f"{model['sure']:,}"),
            ("OCE", interval("oce", 1, 2)),
            ("ECE (%)", interval("ece", 100, 2)),
            ("MCE (%)", interval("mce", 100, 1)),
            ("ECE, top class (%)", interval("top1_ece", 100, 2)),
            ("temperature", shown(2, 1, "scaled", "temperature")),
            ("then confident", lambda model: f"{model['scaled']['sure']:,}"),
            ("then OCE", interval("oce", 1, 2, "scaled")),
            ("then ECE, top class (%)", interval("top1_ece", 100, 2, "scaled")),
        ),
    )


def _corruptions(results: Results) -> str:
    """Return errors on corrupted images, and how well scores find them."""

    def found(score: str) -> tuple[str, Cell]:
        keys = ("mean_auc", score)
        return score, lambda record: between(at(record, *keys), at(record, "intervals", *keys))

    def published(record: Any) -> str:
        return decimal((_published(paper.CORRUPTIONS, record["title"]) or (None,))[-1], 1)

    return table(
        [{"title": title(record["model"]), **record} for record in results["corruptions"]],
        (
            ("", bold("title")),
            ("clean error (%)", _if_classifies(shown(2, 100, "clean_error"))),
            ("mCE (%)", _if_classifies(ranged("mce"))),
            ("rel. mCE (%)", _if_classifies(ranged("relative_mce"))),
            ("Δ entropy (nats)", _if_classifies(lambda record: f"{record['entropy_increase_nats']:+.2f}")),
            *map(found, BY_CORRUPTION),
            ("paper: two-tailed", published),
        ),
    )


def _areas(records: list[tuple[str, Any, Any]]) -> str:
    """Return the table of a name and the areas of each corruption, with the ends of their intervals."""

    def one(name: str) -> Cell:
        return lambda record: area(record[1][name], record[2].get(name))

    named = [("", lambda record: str(record[0]))]
    return table(records, [*named, *((each.short, one(name)) for name, each in CORRUPTIONS.items())])


def _corruption_areas(results: Results, score: str) -> str:
    """Return the AUC of a score for each corruption."""
    records: list[tuple[str, Any, Any]] = []
    for record in results["corruptions"]:
        if (areas := record["auc"].get(score)) is None:
            continue
        name = title(record["model"])
        records.append((f"**{name}**", areas, at(record, "intervals", "auc", score) or {}))
        published = _published(paper.AREAS, name)
        if score == "two-tailed" and published is not None:
            shares = [each / 100 for each in published]
            records.append(("*on ImageNet*", dict(zip(CORRUPTIONS, shares, strict=True)), {}))
    return _areas(records)


def _tiny20_corruptions(results: Results) -> str:
    """Return AUCs of corrupted photos of 64 pixels."""
    record = results["tiny20"]["corruptions"]
    scores = ("two-tailed", "joint", "code-length")
    return _areas([(f"**{name}**", record["auc"][name], record["intervals"]["auc"][name]) for name in scores])


def _other_images(results: Results) -> str:
    """Return AUCs of images that are none of the classes."""

    def found(other: str) -> tuple[str, Cell]:
        def cell(record: Any) -> str:
            model, score = record
            return area(model["ood"][other][score]["auc"], at(model["ood"][other][score], "intervals", "auc"))

        return other, cell

    return table(
        [
            (model, score)
            for model in _models(results)
            for score in ON_OTHER_IMAGES
            if score in model["false_positives"]
        ],
        (
            ("", lambda record: f"**{record[0]['title']}**, {record[1]}"),
            *map(found, next(_models(results))["ood"]),
            (
                "false alarms at 5 % (%)",
                lambda record: decimal(record[0]["false_positives"][record[1]]["0.05"], 1, 100),
            ),
        ),
    )


def _accepted(results: Results) -> str:
    """Return coverage and accuracy of accepted images, and of a plain threshold at the same coverage."""

    def difference(found: Any) -> str:
        value, low, high = (f"{100 * found['difference'][key]:+.2f}" for key in ("value", "low", "high"))
        return f"{value} ({low} to {high})"

    return table(
        [
            {**model["selective"], "title": model["title"]}
            for model in _classifiers(results)
            if "selective" in model
        ],
        (
            ("", bold("title")),
            ("accepted (%)", ranged("verdicts", "coverage")),
            ("right of accepted (%)", ranged("verdicts", "accepted")),
            ("plain threshold (%)", ranged("plain", "accepted")),
            ("difference (points)", difference),
            ("right of ambiguous (%)", ranged("verdicts", "ambiguous")),
            ("AUGRC (%)", shown(2, 100, "augrc")),
            ("AURC (%)", shown(2, 100, "aurc")),
        ),
    )


def _attacks(results: Results) -> str:
    """Return success and size of attacks with real-valued and with 8-bit images, and who notices."""
    return table(
        results["attacks"]["metrics"],
        (
            ("", lambda attack: f"**{title(attack['model'])}**"),
            ("κ", lambda attack: number(float(attack["kappa"]))),
            ("d", lambda attack: f"{attack['d']:g}"),
            ("images", text("images")),
            ("real-valued: success (%)", interval("success", 100, 1)),
            ("median L2", interval("l2_median", 1, 3)),
            ("success if rounded (%)", interval("rounded_success", 100, 1)),
            ("8-bit: success (%)", interval("success", 100, 1, "eight_bit")),
            ("median L2", interval("l2_median", 1, 3, "eight_bit")),
            ("confidence (%)", shown(1, 100, "eight_bit", "confidence")),
            ("AUC, two-tailed (%)", detected),
        ),
    )


def detected(attack: Results) -> str:
    """Return the AUC with which the two-tailed score finds the 8-bit images of an attack."""
    file = attack["eight_bit"]
    detection, ends = file["detection"], file["intervals"].get("two_tailed")
    return "–" if detection is None else area(detection["two_tailed"], ends)


def _tiny20(results: Results) -> str:
    model = results["tiny20"]
    rows = (
        ("accuracy (%)", interval("accuracy", 100, 2)),
        ("accuracy, ten crops (%)", interval("accuracy", 100, 2, "ten_crops")),
        ("bits/dim", shown(3, 1, "bits_per_dim")),
        ("ECE, top class (%)", interval("top1_ece", 100, 2)),
    )
    figures = (f"{model['images']:,} test photos", lambda row: row[1](model))
    return table(rows, (("", lambda row: row[0]), figures))


def _receptive_fields(results: Results) -> str:
    fields = next(iter(results["explanations"].values()))["receptive_fields"] or {}
    width = shown(1, 1, "width_at_half_maximum_pixels")
    return table(
        fields.items(),
        (
            ("", lambda field: f"**{title(field[0])}**"),
            ("width at half maximum (pixels)", lambda field: width(field[1])),
        ),
    )


def card_figures(name: str, results: Results) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return what was measured on what, accuracy and likelihood and calibration, and more figures as text."""
    model = results["tiny20"] if name == "tiny20" else results["models"][name]
    figures = {key: value for key, value in model.items() if key not in NOT_ON_CARDS}
    score = next(name for name in ("joint", "combined", "mahalanobis") if name in model["false_positives"])
    more = {f"false alarms at 5 %, score '{score}'": percent(model["false_positives"][score]["0.05"])}
    for other, scores in model["ood"].items():
        more[f"AUC on {other}, score '{score}'"] = percent(scores[score]["auc"])
    more |= _accepted_figures(model)
    for record in results["corruptions"]:
        if record["model"] == name:
            more["mCE, relative to cifar10-resnet"] = percent(record["mce"])
            more[f"mean AUC over 15 corruptions, score '{score}'"] = percent(record["mean_auc"].get(score))
    for attack in results["attacks"]["metrics"]:
        if attack["model"] == name and attack["kappa"] == 0.01 and attack["d"] == 0:
            median, file = "median L2 of the smallest attack", attack["eight_bit"]
            more[f"{median} (pixels in [0, 1])"] = with_interval(attack, "l2_median", 1, 3)
            more["success of this attack"] = percent(attack["success"])
            more[f"{median} with an 8-bit file"] = with_interval(file, "l2_median", 1, 3)
            more["success of this attack with an 8-bit file"] = percent(file["success"])
    data = "Tiny ImageNet's 20 classes" if name == "tiny20" else "CIFAR-10"
    return f"On the {model['images']:,} test images of {data}.", figures, more


def _accepted_figures(model: Results) -> dict[str, str]:
    """Return what the card of a model says of its verdicts; nothing if they were not measured."""
    found = model.get("selective")
    if found is None or found["difference"] is None:
        return {}
    figures = {
        "accepted by verdicts (%)": ranged("verdicts", "coverage")(found),
        "right of accepted (%)": ranged("verdicts", "accepted")(found),
        "the same, plain threshold at equal coverage (%)": ranged("plain", "accepted")(found),
        "right of ambiguous (%)": ranged("verdicts", "ambiguous")(found),
    }
    verdicts = found["verdicts"]
    for name, share in verdicts["foreign"].items():
        figures[f"accepted of {name} (%)"] = between(share, verdicts["intervals"]["foreign"][name])
    return figures | {"AUGRC (%)": decimal(found["augrc"], 2, 100)}
