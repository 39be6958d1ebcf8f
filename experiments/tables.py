"""The tables of ``docs/results`` as pure functions of ``results.json``."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from candid._support.text import number
from candid.robustness.corruptions.apply import CORRUPTIONS

Results = Mapping[str, Any]
PAPER = {
    "1": (4.34, 67.30, 3.87, 75.6),
    "2": (6.14, 71.73, 4.13, 73.6),
    "4": (8.72, 73.69, 4.31, 70.84),
    "16": (17.43, 75.54, 4.15, 62.43),
    "∞": (47.01, 76.27, 5.12, 44.24),
    "0": (2.59, None, None, 77.51),
    "ResNet": (None, 77.40, 6.75, None),
}
"""Its figures on ImageNet: bits/dim, top-1 accuracy of ten crops (%), OCE, mean AUC over corruptions (%).

The mean at beta 1 is that of its fifteen areas; 67.9 is printed.
"""
PAPER_AREAS = {
    "0": (94.9, 94.3, 98.0, 95.7, 89.8, 88.3, 89.5, 38.1, 43.1, 94.8, 44.7, 96.7, 65.5, 63.0, 66.2),
    "1": (95.3, 95.2, 98.6, 92.9, 87.1, 84.9, 87.4, 33.0, 45.4, 96.5, 43.5, 97.0, 60.4, 61.9, 55.6),
    "2": (94.8, 95.2, 98.5, 87.8, 82.6, 81.3, 84.9, 30.9, 43.2, 96.5, 44.1, 95.2, 56.6, 61.0, 51.2),
    "4": (92.7, 93.8, 97.4, 77.6, 76.7, 75.6, 81.7, 31.0, 43.2, 95.5, 44.5, 89.2, 54.1, 61.7, 48.0),
    "16": (83.7, 84.6, 88.0, 46.7, 56.7, 63.5, 67.9, 43.2, 52.0, 80.2, 45.6, 66.3, 53.3, 62.0, 42.7),
    "∞": (39.5, 44.5, 40.6, 42.8, 48.1, 46.3, 46.0, 40.9, 38.9, 36.1, 44.3, 48.5, 52.2, 47.9, 47.0),
}
"""Of the two-tailed test on ImageNet, by corruption."""


def _attack_metrics(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the metrics of all attacks; earlier results call them figures."""
    attacks = results["attacks"]
    found: list[dict[str, Any]] = attacks["metrics"] if "metrics" in attacks else attacks["figures"]
    return found


def tables(results: Results) -> dict[str, str]:
    """Each in Markdown, by its name on the page."""
    return {
        "table-1": _markdown(*_table_1(results)),
        "calibration": _markdown(*_calibration(results)),
        "corruptions": _markdown(*_corruptions(results)),
        "corruption-areas": _markdown(*_corruption_areas(results, "two-tailed")),
        "corruption-areas-joint": _markdown(*_corruption_areas(results, "joint")),
        "other-images": _markdown(*_other_images(results)),
        "attacks": _markdown(*_attacks(results)),
        "similar-classes": _markdown(*_similar_classes(results)),
        "receptive-fields": _markdown(*_receptive_fields(results)),
        "geometry": _markdown(*_geometry(results)),
        "tiny20": _markdown(*_tiny20(results)),
        "tiny20-pairs": _markdown(*_tiny20_pairs(results)),
        "tiny20-corruptions": _markdown(*_tiny20_corruptions(results)),
    }


def headline(results: Results) -> str:
    """The README's table: what beta buys, and what it costs."""
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
                _number(model["accuracy"], 2, 100) if classifies else "–",
                _number(model.get("bits_per_dim"), 3),
                _number(model["top1_ece"], 1, 100) if classifies else "–",
                _number(corruptions.get(name, {}).get("two-tailed"), 1, 100),
                _number(corruptions.get(name, {}).get("joint"), 1, 100),
                _number(other_photos.get("auc"), 1, 100),
            )

    return _markdown(head, rows())


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


def title(name: str) -> str:
    """``β = 1``, or which ResNet, and which of its kind."""
    beta = re.search(r"beta(\d+|inf)", name)
    kind = "ResNet" if beta is None else f"β = {number(float(beta[1]))}"
    if "unsmoothed" in name:
        return f"{kind}, hard labels"
    return f"{kind}, second seed" if second_seed(name) else kind


def second_seed(name: str) -> bool:
    """Whether this is a model trained again, to see what chance does."""
    return name.endswith("-seed1")


def card_figures(name: str, results: Results) -> tuple[str, dict[str, Any], dict[str, str]]:
    """What was measured on what, accuracy and likelihood and calibration, and more figures as text."""
    model = results["tiny20"] if name == "tiny20" else results["models"][name]
    known = {"beta", "images", "sure", "scaled", "false_positives", "ood", "verdicts", "ten_crops"}
    known |= {"corruptions", "closest_pairs", "bundled", "command"}
    figures = {key: value for key, value in model.items() if key not in known}
    test = next(name for name in ("joint", "combined", "mahalanobis") if name in model["false_positives"])
    rate = model["false_positives"][test]["0.05"]
    more = {f"false alarms at 5 %, score '{test}'": _percent(rate)}
    for other, tests in model["ood"].items():
        more[f"AUC on {other}, score '{test}'"] = _percent(tests[test]["auc"])
    for record in results["corruptions"]:
        if record["model"] == name:
            more["mCE, relative to cifar10-resnet"] = _percent(record["mce"])
            more[f"mean AUC over 15 corruptions, score '{test}'"] = _percent(record["mean_auc"][test])
    for attack in _attack_metrics(results):
        if attack["model"] == name and attack["kappa"] == 0.01 and attack["d"] == 0:
            more["median L2 of the smallest attack (pixels in [0, 1])"] = _number(attack["l2_median"], 3)
            more["success of this attack"] = _percent(attack["success"])
            more["its success after rounding to 8 bits"] = _percent(attack["rounded_success"])
    data = "Tiny ImageNet's 20 classes" if name == "tiny20" else "CIFAR-10"
    return f"On the {model['images']:,} test images of {data}.", figures, more


Table = tuple[Sequence[str], Iterator[Sequence[str]]]


def _markdown(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ruler, *rows))


def _table_1(results: Results) -> Table:
    head = ["", "L_X", "L_Y", "bits/dim", "accuracy (%)", "accuracy, ten crops (%)", "OCE"]
    head += ["paper: bits/dim", "accuracy, ten crops (%)", "OCE"]

    def rows() -> Iterator[Sequence[str]]:
        for name, model in results["models"].items():
            classifies = model["beta"] is None or float(model["beta"]) > 0
            bits, accuracy, oce, _ = PAPER.get(title(name).removeprefix("β = "), (None,) * 4)
            yield (
                f"**{title(name)}**",
                _number(model.get("L_X"), 3),
                _number(model["L_Y"], 3) if classifies else "–",
                _number(model.get("bits_per_dim"), 3),
                _with_interval(model, "accuracy", 100, 2) if classifies else "–",
                _with_interval(model.get("ten_crops", {}), "accuracy", 100, 2) if classifies else "–",
                _with_interval(model, "oce", 1, 2) if classifies else "–",
                *(_number(value, 2) for value in (bits, accuracy, oce)),
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
                _with_interval(model, "oce", 1, 2),
                _with_interval(model, "ece", 100, 2),
                _with_interval(model, "mce", 100, 1),
                _with_interval(model, "top1_ece", 100, 2),
                f"{scaled['temperature']:.2f}",
                f"{scaled['sure']:,}",
                _with_interval(scaled, "oce", 1, 2),
                _with_interval(scaled, "top1_ece", 100, 2),
            )

    return head, rows()


def _corruptions(results: Results) -> Table:
    tests = ("two-tailed", "joint", "mahalanobis", "max-posterior", "code-length")
    head = ["", "clean error (%)", "mCE (%)", "rel. mCE (%)", "Δ entropy (nats)", *tests]
    head += ["paper: two-tailed"]

    def rows() -> Iterator[Sequence[str]]:
        for record in results["corruptions"]:
            name, ends = title(record["model"]), record.get("intervals", {})
            errors = [
                _number(record["clean_error"], 2, 100),
                _between(record["mce"], ends.get("mce")),
                _between(record["relative_mce"], ends.get("relative_mce")),
                f"{record['entropy_increase_nats']:+.2f}",
            ]
            yield (
                f"**{name}**",
                *(errors if name != "β = 0" else ("–",) * 4),
                *(
                    _between(record["mean_auc"].get(test), ends.get("mean_auc", {}).get(test))
                    for test in tests
                ),
                _number(PAPER.get(name.removeprefix("β = "), (None,) * 4)[3], 1),
            )

    return head, rows()


def _corruption_areas(results: Results, test: str) -> Table:
    def rows() -> Iterator[Sequence[str]]:
        for record in results["corruptions"]:
            areas = record["auc"].get(test)
            if areas is None:
                continue
            name = title(record["model"])
            ends = record.get("intervals", {}).get("auc", {}).get(test, {})
            yield f"**{name}**", *(_area(areas[each], ends.get(each)) for each in CORRUPTIONS)
            found = PAPER_AREAS.get(name.removeprefix("β = "))
            if test == "two-tailed" and found is not None:
                yield "*on ImageNet*", *(_area(area / 100) for area in found)

    return ("", *(each.short for each in CORRUPTIONS.values())), rows()


def _other_images(results: Results) -> Table:
    sets = list(next(iter(results["models"].values()))["ood"])
    tests = ("two-tailed", "joint", "mahalanobis")

    def rows() -> Iterator[Sequence[str]]:
        for name, model in results["models"].items():
            for test in tests:
                if test in model["false_positives"]:
                    found = [model["ood"][each][test] for each in sets]
                    areas = (_area(each["auc"], each.get("intervals", {}).get("auc")) for each in found)
                    alarms = _number(model["false_positives"][test]["0.05"], 1, 100)
                    yield f"**{title(name)}**, {test}", *areas, alarms

    return ("", *sets, "false alarms at 5 % (%)"), rows()


def _attacks(results: Results) -> Table:
    head = (
        "",
        "κ",
        "d",
        "success (%)",
        "as 8-bit file (%)",
        "median L2",
        "confidence (%)",
        "AUC two-tailed (%)",
        "adaptive (%)",
    )

    def rows() -> Iterator[Sequence[str]]:
        for attack in _attack_metrics(results):
            detection = attack["detection"]
            yield (
                f"**{title(attack['model'])}**",
                number(float(attack["kappa"])),
                f"{attack['d']:g}",
                _number(attack["success"], 1, 100),
                _number(attack["rounded_success"], 1, 100),
                _number(attack["l2_median"], 3),
                _number(attack["confidence"], 1, 100),
                "–" if detection is None else _area(detection["two_tailed"]),
                "–" if detection is None else _area(attack["adaptive_two_tailed"]),
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
            yield " – ".join(pair["classes"]), *(_number(pairs[name][both]["distance"], 2) for name in names)

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
                    _number(each["mean_distance"], 2),
                    _number(each["class_average_distance"], 2),
                    *(_number(each[key], 1, 100) for key in shares),
                    _number(each["rank_correlation"], 2),
                    "–" if state == "before" else f"{gain:+.2f}",
                    "–" if state == "before" else f"{each['largest_change']:.0e}",
                )

    return head, rows()


def _tiny20(results: Results) -> Table:
    model = results["tiny20"]
    rows = (
        ("accuracy (%)", _with_interval(model, "accuracy", 100, 2)),
        ("accuracy, ten crops (%)", _with_interval(model["ten_crops"], "accuracy", 100, 2)),
        ("bits/dim", _number(model["bits_per_dim"], 3)),
        ("ECE, top class (%)", _with_interval(model, "top1_ece", 100, 2)),
    )
    return ("", f"{model['images']:,} test photos"), iter(rows)


def _tiny20_pairs(results: Results) -> Table:
    def rows() -> Iterator[Sequence[str]]:
        for pair in results["tiny20"]["closest_pairs"][:8]:
            shares = (pair["expected_uncertainty"], pair["measured_uncertainty"])
            yield (
                " – ".join(pair["classes"]),
                _number(pair["distance"], 2),
                *(_number(share, 1, 100) for share in shares),
            )

    head = ("closest classes", "distance (σ)", "expected uncertainty (%)", "measured (%)")
    return head, rows()


def _tiny20_corruptions(results: Results) -> Table:
    record = results["tiny20"]["corruptions"]

    def rows() -> Iterator[Sequence[str]]:
        for test in ("two-tailed", "joint", "code-length"):
            areas, ends = record["auc"][test], record["intervals"]["auc"][test]
            yield f"**{test}**", *(_area(areas[each], ends.get(each)) for each in CORRUPTIONS)

    return ("", *(each.short for each in CORRUPTIONS.values())), rows()


def _receptive_fields(results: Results) -> Table:
    def rows() -> Iterator[Sequence[str]]:
        for each in results["explanations"].values():
            for name, field in (each["receptive_fields"] or {}).items():
                yield f"**{title(name)}**", _number(field["width_at_half_maximum_pixels"], 1)
            return

    return ("", "width at half maximum (pixels)"), rows()


def _number(value: float | str | None, digits: int, factor: float = 1) -> str:
    if value is None:
        return "–"
    return "∞" if float(value) == math.inf else f"{factor * float(value):.{digits}f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _area(share: float, ends: Sequence[float] | None = None) -> str:
    """Return an AUC in percent with half the width of its interval; good ones are bold, as in the paper."""
    shown = f"**{100 * share:.1f}**" if share >= 0.85 else f"{100 * share:.1f}"
    return shown if ends is None else f"{shown} ± {50 * (ends[1] - ends[0]):.1f}"


def _between(share: float | None, ends: Sequence[float] | None) -> str:
    """Return a share in percent, with its interval if there is one."""
    if share is None or ends is None:
        return _number(share, 1, 100)
    return f"{100 * share:.1f} ({100 * ends[0]:.1f} to {100 * ends[1]:.1f})"


def _with_interval(figures: Mapping[str, Any], key: str, factor: float, digits: int) -> str:
    if figures.get(key) is None:
        return "never sure" if key == "oce" else "–"
    low, high = (f"{factor * end:.{digits}f}" for end in figures["intervals"][key])
    return f"{factor * figures[key]:.{digits}f} ({low} to {high})"
