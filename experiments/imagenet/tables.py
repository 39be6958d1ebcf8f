"""The page: its tables and sentences are pure functions of ``results.json``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from candid._support.files import write_texts
from candid._support.text import listed
from candid.robustness.corruptions.benchmark import CORRUPTIONS
from experiments.imagenet import paper
from experiments.imagenet.figures import draw_trade_off
from experiments.tables import Results, area, decimal, filled, markdown

Model = Mapping[str, Any]
Rows = Iterator[Sequence[str]]
LINE = "paper"
"""The name of a line with the paper's values."""


def write_page(results: Results, out: Path) -> Path:
    """Write ``results.json``, Figure 3 and the page into the folder ``out``; return where the page is."""
    template = files("experiments.imagenet").joinpath("page.md").read_text(encoding="utf-8")
    drawn = draw_trade_off(results["models"], results["photos"]["classes"], out / "figure-3.png")
    page = filled(template, tables(results, drawn))
    return write_texts({"results.json": json.dumps(results, indent=1) + "\n", "README.md": page}, out)[1]


def tables(results: Results, trade_off: bool) -> dict[str, str]:
    """Return what stands between the marks of the page, in Markdown; ``trade_off``: Figure 3 is there."""
    models = results["models"]
    overconfidence = {name: model.get("oce") for name, model in _classifiers(models)}
    return {
        "photos": _photos(results),
        "table-2": markdown(_TABLE_2, _table_2(models)),
        "here-table-2": f"*Here*: {_here_table_2(results)}",
        "figure-3": _figure_3(trade_off),
        "calibration": markdown(("", "ECE (%)", "MCE (%)", "OCE"), _calibration(models)),
        "here-calibration": f"*Here*: {_trend('OCE', overconfidence, models)}",
        "calibration-curves": "\n".join(
            f"![Share of right predictions against confidence, {title(model)}](calibration-{name}.png)"
            for name, model in _classifiers(models)
        ),
        "decisions": _decisions(results),
        "similar-classes": markdown(_PAIRS, _pairs(results)),
        "here-similar-classes": f"*Here*: {_here_similar(results)}",
        "heatmaps": "\n".join(
            f"![Heatmaps of {each['photo']}](figure-6-{i}.png)"
            for i, each in enumerate(results["decisions"]["photos"], 1)
        ),
        "receptive-fields": markdown(("", "width at half maximum (pixels)"), _fields(results)),
        "corruptions": markdown(_CORRUPTIONS, _corruptions(results)),
        "here-corruptions": f"*Here*: {_here_corruptions(results)}",
        "areas": markdown(("", *(each.short for each in CORRUPTIONS.values())), _areas(results)),
        "attacks": _attacks(results),
    }


def title(model: Model) -> str:
    """Return ``β = 1``, ``ResNet``, or the model's name if its beta is not known."""
    if model["kind"] == "resnet":
        return "ResNet"
    return model["name"] if model["beta"] is None else f"β = {model['beta']}"


def _key(model: Model) -> str:
    """Return the model's row in the paper's tables."""
    return "ResNet" if model["kind"] == "resnet" else str(model["beta"])


def _classifiers(models: Mapping[str, Model]) -> list[tuple[str, Model]]:
    return [(name, model) for name, model in models.items() if model["beta"] != "0"]


def _with_interval(metrics: Mapping[str, Any], key: str, digits: int, factor: float = 1) -> str:
    if metrics.get(key) is None:
        return "none confident" if key == "oce" else "–"
    low, high = (f"{factor * end:.{digits}f}" for end in metrics["intervals"][key])
    return f"{factor * metrics[key]:.{digits}f} ({low} to {high})"


def _theirs(values: Sequence[float | None] | None, digits: Sequence[int]) -> Rows:
    """Yield the line with the paper's values, if it has this model."""
    if values is not None:
        yield f"*{LINE}*", *(decimal(value, places) for value, places in zip(values, digits, strict=True))


def _photos(results: Results) -> str:
    photos = results["photos"]
    held_out = (
        "photos of a folder of their own"
        if photos["own_held_out"]
        else "other photos of the same folder, some of each class, chosen by a hash of their names"
    )
    text = (
        f"{photos['evaluated']:,} validation photos of {photos['classes']:,} classes are evaluated. P-values "
        f"and scores of detection need held-out photos: {photos['held_out']:,} {held_out}. "
        "No table counts them."
    )
    overlap = max(model["held_out_overlap"] for model in results["models"].values())
    if overlap:
        text += f" {overlap:,} of the evaluated photos have the same pixels as a held-out one."
    if photos["trial"]:
        text += " **This is a trial with few photos: its numbers mean little.**"
    if photos["classes"] != paper.CLASSES:
        text += " **The paper's models have 1000 classes: its numbers can't be compared with these.**"
    return text


_TABLE_2 = ("", "L_X", "L_Y", "bits/dim, as printed", "bits/dim, true", "accuracy, ten crops (%)", "OCE")


def _table_2(models: Mapping[str, Model]) -> Rows:
    for model in models.values():
        classifies = model["beta"] != "0"
        yield (
            f"**{title(model)}**",
            decimal(model.get("L_X_printed"), 2),
            decimal(model["L_Y"], 2) if classifies else "–",
            decimal(model.get("bits_printed"), 2),
            _with_interval(model, "bits_per_dim", 2),
            _with_interval(model["ten_crop"], "accuracy", 2, 100) if classifies else "–",
            _with_interval(model, "oce", 2) if classifies else "–",
        )
        if (found := paper.TABLE_2.get(_key(model))) is not None:
            yield from _theirs((*found[:3], None, *found[3:]), (2,) * 6)


def _here_table_2(results: Results) -> str:
    models = results["models"]
    accuracy: list[float] = []
    bits: list[float] = []
    for model in models.values():
        _, _, their_bits, their_accuracy, _ = paper.TABLE_2.get(_key(model), (None,) * 5)
        if their_accuracy is not None:
            accuracy.append(abs(100 * model["ten_crop"]["accuracy"] - their_accuracy))
        if their_bits is not None:
            bits.append(abs(model["bits_printed"] - their_bits))
    accuracies = {name: model["ten_crop"]["accuracy"] for name, model in _classifiers(models)}
    parts = [f"{max(accuracy):.2f} points of accuracy"] if accuracy else []
    parts += [f"{max(bits):.2f} bits/dim, as printed"] if bits else []
    text = _trend("Accuracy", accuracies, models)
    if parts and results["photos"]["classes"] == paper.CLASSES:
        text += f" The largest difference to the paper is {listed(parts)}."
    return text


def _trend(
    what: str, values: Mapping[str, float | None], models: Mapping[str, Model], rising: bool = True
) -> str:
    """Say whether a value of the models rises, or falls, with every larger beta."""
    betas = {name: models[name]["beta"] for name in values}
    known = [(betas[name], each) for name, each in values.items() if betas[name] and each is not None]
    if len(known) < 2:
        return f"{what} is known of fewer than two models, so there is no trend with beta."
    verb = "rise" if rising else "fall"
    wrong = [f"from beta {a} to {b}" for (a, x), (b, y) in pairwise(known) if (y <= x if rising else y >= x)]
    return f"{what} does not {verb} {listed(wrong)}." if wrong else f"{what} {verb}s with every larger beta."


def _figure_3(trade_off: bool) -> str:
    if trade_off:
        return "![Losses, and accuracy against bits per dimension, by beta](figure-3.png)"
    return "There is no Figure 3: it needs a model of known beta above 0, such as `beta_1.avg.pt`."


def _calibration(models: Mapping[str, Model]) -> Rows:
    for _, model in _classifiers(models):
        errors = [_with_interval(model, key, 2, 100) for key in ("ece", "mce")]
        yield f"**{title(model)}**", *errors, _with_interval(model, "oce", 2)
        yield from _theirs(paper.CALIBRATION.get(_key(model)), (2,) * 3)


def _decisions(results: Results) -> str:
    photos = results["decisions"]["photos"]
    lines = [f"{i}. `{each['photo']}`: {each['sentence']}" for i, each in enumerate(photos, 1)]
    return "\n".join(["![Where four photos lie between their classes](figure-4.png)", "", *lines])


_PAIRS = ("closest classes", "distance of means (σ)", "expected uncertainty (%)", "measured (%)")


def _pairs(results: Results) -> Rows:
    for pair in results["explanation"]["closest_pairs"]:
        both = " – ".join(pair["classes"])
        shares = (decimal(pair[f"{key}_uncertainty"], 2, 100) for key in ("expected", "measured"))
        yield both, decimal(pair["distance"], 2), *shares


def _here_similar(results: Results) -> str:
    closest = results["explanation"]["closest_pairs"][0]
    share = 100 * closest["expected_uncertainty"]
    names = " and ".join(closest["classes"])
    text = f"The closest classes are {names}, with an expected uncertainty of {share:.3g} %."
    cats = results["decisions"]["cats"]
    if cats is not None:
        text += f" Of tabby and tiger cat it is {100 * cats['expected_uncertainty']:.3g} %."
    return text


def _fields(results: Results) -> Rows:
    for name, field in results["explanation"]["receptive_fields"].items():
        width = field["width_at_half_maximum_pixels"]
        yield f"**{title(results['models'][name])}**", decimal(width, 1)


_CORRUPTIONS = ("", "clean error (%)", "mCE (%)", "rel. mCE (%)", "Δ entropy (nats)", "mean AUC (%)")


def _corruptions(results: Results) -> Rows:
    for name, record in results["corruptions"].items():
        model = results["models"][name]
        errors = (
            decimal(record["clean_error"], 2, 100),
            decimal(record.get("mce"), 1, 100),
            decimal(record.get("relative_mce"), 1, 100),
            f"{record['entropy_increase_nats']:+.2f}",
        )
        auc = decimal(record["mean_auc"].get("two-tailed"), 1, 100)
        yield f"**{title(model)}**", *(errors if model["beta"] != "0" else ("–",) * 4), auc
        yield from _theirs(paper.CORRUPTIONS.get(_key(model)), (2, 1, 0, 2, 1))


def _areas(results: Results) -> Rows:
    for name, record in results["corruptions"].items():
        if (found := record["auc"].get("two-tailed")) is None:
            continue
        model = results["models"][name]
        yield f"**{title(model)}**", *(area(found[corruption]) for corruption in CORRUPTIONS)
        if (theirs := paper.AREAS.get(_key(model))) is not None:
            yield f"*{LINE}*", *(area(share / 100) for share in theirs)


def _here_corruptions(results: Results) -> str:
    records = results["corruptions"]
    areas = records[results["shown"]]["auc"]["two-tailed"]
    shares = sorted(areas, key=areas.__getitem__)
    best, worst = (
        listed(f"{CORRUPTIONS[name].name.replace('_', ' ')} ({100 * areas[name]:.0f} %)" for name in names)
        for names in (reversed(shares[-3:]), shares[:3])
    )

    means = {name: each["mean_auc"].get("two-tailed") for name, each in records.items()}
    trend = _trend("The mean AUC", means, results["models"], rising=False)
    shown = title(results["models"][results["shown"]])
    return f"At {shown}, {best} are detected best, and {worst} worst. {trend}"


def _attacks(results: Results) -> str:
    if results["attacks"] is None:
        return "Attacks were not measured: `--attacked 200` does it, with as many photos as the paper."
    head = ("", "κ", "d", "success (%)", "mean L2", "confidence (%)", "AUC, two-tailed (%)", "adaptive (%)")

    def rows() -> Rows:
        for attack in results["attacks"]["metrics"]:
            found = attack["detection"]
            yield (
                f"**{title(results['models'][attack['model']])}**",
                "∞" if attack["kappa"] == "inf" else f"{attack['kappa']:g}",
                f"{attack['d']:g}",
                decimal(attack["success"], 1, 100),
                decimal(attack["l2_mean"], 3),
                decimal(attack["confidence"], 1, 100),
                "–" if found is None else area(found["two_tailed"]),
                decimal(attack["adaptive_two_tailed"], 1, 100),
            )

    figures = "![Perturbation, detection and uncertainty](attacks.png)\n![Attacked photos](examples.png)"
    return f"{markdown(head, rows())}\n\n{figures}"
