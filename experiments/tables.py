"""The tables of ``docs/results`` as pure functions of ``results.json``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.accepted import accepted, accepted_figures
from experiments.cells import Results, Table, decimal, markdown, percent, second_seed, title, with_interval
from experiments.robustness import attacks, corruption_areas, corruptions, other_images, tiny20_corruptions

PAPER = {
    "1": (4.34, 67.30, 3.87),
    "2": (6.14, 71.73, 4.13),
    "4": (8.72, 73.69, 4.31),
    "16": (17.43, 75.54, 4.15),
    "∞": (47.01, 76.27, 5.12),
    "0": (2.59, None, None),
    "ResNet": (None, 77.40, 6.75),
}
"""Its figures on ImageNet: bits/dim, top-1 accuracy of ten crops (%), OCE."""


def tables(results: Results) -> dict[str, str]:
    """Each in Markdown, by its name on the page."""
    return {
        "table-1": markdown(*_table_1(results)),
        "calibration": markdown(*_calibration(results)),
        "corruptions": markdown(*corruptions(results)),
        "corruption-areas": markdown(*corruption_areas(results, "two-tailed")),
        "corruption-areas-joint": markdown(*corruption_areas(results, "joint")),
        "other-images": markdown(*other_images(results)),
        "accepted": markdown(*accepted(results)),
        "attacks": markdown(*attacks(results)),
        "similar-classes": markdown(*_similar_classes(results)),
        "receptive-fields": markdown(*_receptive_fields(results)),
        "geometry": markdown(*_geometry(results)),
        "tiny20": markdown(*_tiny20(results)),
        "tiny20-pairs": markdown(*_tiny20_pairs(results)),
        "tiny20-corruptions": markdown(*tiny20_corruptions(results)),
    }


def headline(results: Results) -> str:
    """The table of docs/paper.md: what beta buys, and what it costs."""
    head = ["", "test accuracy (%)", "bits/dim", "ECE, top class (%)"]
    head += [
        "corrupted images found (AUC, %): paper's two-tailed score",
        "joint score",
        "other photos: joint score",
    ]

    def rows() -> Iterator[Sequence[str]]:
        corruptions = {record["model"]: record["mean_auc"] for record in results["corruptions"]}
        for name, model in results["models"].items():
            if second_seed(name):
                continue
            classifies = title(name) != "β = 0"
            other_photos = model["ood"].get("tiny", {}).get("joint", {})
            yield (
                f"`{name}`",
                decimal(model["accuracy"], 2, 100) if classifies else "–",
                decimal(model.get("bits_per_dim"), 3),
                decimal(model["top1_ece"], 1, 100) if classifies else "–",
                decimal(corruptions.get(name, {}).get("two-tailed"), 1, 100),
                decimal(corruptions.get(name, {}).get("joint"), 1, 100),
                decimal(other_photos.get("auc"), 1, 100),
            )

    return markdown(head, rows())


def filled(page: str, found: Mapping[str, str]) -> str:
    r"""``page`` with each table ``found`` between its marks, ``<!-- name -->`` and ``<!-- /name -->``.

    >>> filled("<!-- a -->old<!-- /a -->", {"a": "new"})
    '<!-- a -->\n\nnew\n\n<!-- /a -->'
    """
    for name, table in found.items():
        before, begin, rest = page.partition(f"<!-- {name} -->")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if not end:
            raise ValueError(f"The page has no place for the table '{name}'.")
        page = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return page


def card_figures(name: str, results: Results) -> tuple[str, dict[str, Any], dict[str, str]]:
    """What was measured on what, accuracy and likelihood and calibration, and more figures as text."""
    model = results["tiny20"] if name == "tiny20" else results["models"][name]
    known = {"beta", "images", "sure", "scaled", "false_positives", "ood", "verdicts", "ten_crops"}
    known |= {"corruptions", "closest_pairs", "bundled", "command", "selective"}
    figures = {key: value for key, value in model.items() if key not in known}
    test = next(name for name in ("joint", "combined", "mahalanobis") if name in model["false_positives"])
    rate = model["false_positives"][test]["0.05"]
    more = {f"false alarms at 5 %, score '{test}'": percent(rate)}
    for other, tests in model["ood"].items():
        more[f"AUC on {other}, score '{test}'"] = percent(tests[test]["auc"])
    more |= accepted_figures(model)
    for record in results["corruptions"]:
        if record["model"] == name:
            more["mCE, relative to cifar10-resnet"] = percent(record["mce"])
            more[f"mean AUC over 15 corruptions, score '{test}'"] = percent(record["mean_auc"].get(test))
    for attack in results["attacks"]["metrics"]:
        if attack["model"] == name and attack["kappa"] == 0.01 and attack["d"] == 0:
            file = attack["eight_bit"]
            more["median L2 of the smallest attack (pixels in [0, 1])"] = with_interval(
                attack, "l2_median", 1, 3
            )
            more["success of this attack"] = percent(attack["success"])
            more["median L2 of the smallest attack with an 8-bit file"] = with_interval(
                file, "l2_median", 1, 3
            )
            more["success of this attack with an 8-bit file"] = percent(file["success"])
    data = "Tiny ImageNet's 20 classes" if name == "tiny20" else "CIFAR-10"
    return f"On the {model['images']:,} test images of {data}.", figures, more


def _table_1(results: Results) -> Table:
    head = ["", "L_X", "L_Y", "bits/dim", "accuracy (%)", "accuracy, ten crops (%)", "OCE"]
    head += ["paper: bits/dim", "accuracy, ten crops (%)", "OCE"]

    def rows() -> Iterator[Sequence[str]]:
        for name, model in results["models"].items():
            classifies = model["beta"] is None or float(model["beta"]) > 0
            paper = PAPER.get(title(name).removeprefix("β = "), (None,) * 3)
            yield (
                f"**{title(name)}**",
                decimal(model.get("L_X"), 3),
                decimal(model["L_Y"], 3) if classifies else "–",
                decimal(model.get("bits_per_dim"), 3),
                with_interval(model, "accuracy", 100, 2) if classifies else "–",
                with_interval(model.get("ten_crops", {}), "accuracy", 100, 2) if classifies else "–",
                with_interval(model, "oce", 1, 2) if classifies else "–",
                *(decimal(value, 2) for value in paper),
            )

    return head, rows()


def _calibration(results: Results) -> Table:
    head = ["", "confident (≥ 99.7 %)", "OCE", "ECE (%)", "MCE (%)", "ECE, top class (%)", "temperature"]
    head += ["then confident", "then OCE", "then ECE, top class (%)"]

    def rows() -> Iterator[Sequence[str]]:
        for name, model in results["models"].items():
            if title(name) == "β = 0":
                continue
            scaled = model["scaled"]
            yield (
                f"**{title(name)}**",
                f"{model['sure']:,}",
                with_interval(model, "oce", 1, 2),
                with_interval(model, "ece", 100, 2),
                with_interval(model, "mce", 100, 1),
                with_interval(model, "top1_ece", 100, 2),
                f"{scaled['temperature']:.2f}",
                f"{scaled['sure']:,}",
                with_interval(scaled, "oce", 1, 2),
                with_interval(scaled, "top1_ece", 100, 2),
            )

    return head, rows()


def _similar_classes(results: Results) -> Table:
    names = list(results["explanations"])
    head = ("closest classes", *(f"{title(name)}: distance (σ)" for name in names))

    def rows() -> Iterator[Sequence[str]]:
        pairs = {
            name: {frozenset(pair["classes"]): pair for pair in each["closest_pairs"]}
            for name, each in results["explanations"].items()
        }
        for pair in results["explanations"][names[0]]["closest_pairs"][:6]:
            both = frozenset(pair["classes"])
            yield " – ".join(pair["classes"]), *(decimal(pairs[name][both]["distance"], 2) for name in names)

    return head, rows()


def _geometry(results: Results) -> Table:
    head = ["", "distance of class means (σ)", "of class averages", "in the 90 % region (%)"]
    head += ["confident images", "expected uncertainty (%)", "measured", "cat–dog: expected", "measured"]
    head += ["rank correlation", "gain (nats per image)", "largest change of a posterior"]

    def rows() -> Iterator[Sequence[str]]:
        for name, found in results["geometry"].items():
            for state in ("before", "after"):
                each = found[state]
                gain = each["log_density"] - found["before"]["log_density"]
                shares = (
                    "inside",
                    "inside_confident",
                    "expected",
                    "measured",
                    "expected_pair",
                    "measured_pair",
                )
                yield (
                    f"**{title(name)}**, {state}",
                    decimal(each["mean_distance"], 2),
                    decimal(each["class_average_distance"], 2),
                    *(decimal(each[key], 1, 100) for key in shares),
                    decimal(each["rank_correlation"], 2),
                    "–" if state == "before" else f"{gain:+.2f}",
                    "–" if state == "before" else f"{each['largest_change']:.0e}",
                )

    return head, rows()


def _tiny20(results: Results) -> Table:
    model = results["tiny20"]
    rows = (
        ("accuracy (%)", with_interval(model, "accuracy", 100, 2)),
        ("accuracy, ten crops (%)", with_interval(model["ten_crops"], "accuracy", 100, 2)),
        ("bits/dim", decimal(model["bits_per_dim"], 3)),
        ("ECE, top class (%)", with_interval(model, "top1_ece", 100, 2)),
    )
    return ("", f"{model['images']:,} test photos"), iter(rows)


def _tiny20_pairs(results: Results) -> Table:
    def rows() -> Iterator[Sequence[str]]:
        for pair in results["tiny20"]["closest_pairs"][:8]:
            shares = (pair["expected_uncertainty"], pair["measured_uncertainty"])
            yield (
                " – ".join(pair["classes"]),
                decimal(pair["distance"], 2),
                *(decimal(share, 1, 100) for share in shares),
            )

    head = ("closest classes", "distance (σ)", "expected uncertainty (%)", "measured (%)")
    return head, rows()


def _receptive_fields(results: Results) -> Table:
    def rows() -> Iterator[Sequence[str]]:
        for each in results["explanations"].values():
            for name, field in (each["receptive_fields"] or {}).items():
                yield f"**{title(name)}**", decimal(field["width_at_half_maximum_pixels"], 1)
            return

    return ("", "width at half maximum (pixels)"), rows()
