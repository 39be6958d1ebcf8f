"""The tables of ``docs/results`` on corrupted, other and attacked images."""

from collections.abc import Iterator, Sequence

from candid._support.text import number
from candid.robustness.corruptions.apply import CORRUPTIONS
from experiments.cells import Results, Table, area, between, decimal, title, with_interval

PAPER_MEANS = {"0": 77.51, "1": 75.6, "2": 73.6, "4": 70.84, "16": 62.43, "∞": 44.24}
"""The paper's mean AUC of the two-tailed score over corruptions of ImageNet (%).

At beta 1 it is the mean of its fifteen areas; 67.9 is printed.
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


def corruptions(results: Results) -> Table:
    """Return errors on corrupted images, and how well scores find them."""
    tests = ("two-tailed", "joint", "mahalanobis", "combined", "max-posterior", "code-length")
    head = ["", "clean error (%)", "mCE (%)", "rel. mCE (%)", "Δ entropy (nats)", *tests]
    head += ["paper: two-tailed"]

    def rows() -> Iterator[Sequence[str]]:
        for record in results["corruptions"]:
            name, ends = title(record["model"]), record.get("intervals", {})
            errors = [
                decimal(record["clean_error"], 2, 100),
                between(record["mce"], ends.get("mce")),
                between(record["relative_mce"], ends.get("relative_mce")),
                f"{record['entropy_increase_nats']:+.2f}",
            ]
            yield (
                f"**{name}**",
                *(errors if name != "β = 0" else ("–",) * 4),
                *(
                    between(record["mean_auc"].get(test), ends.get("mean_auc", {}).get(test))
                    for test in tests
                ),
                decimal(PAPER_MEANS.get(name.removeprefix("β = ")), 1),
            )

    return head, rows()


def corruption_areas(results: Results, test: str) -> Table:
    """Return the AUC of a score for each corruption."""

    def rows() -> Iterator[Sequence[str]]:
        for record in results["corruptions"]:
            areas = record["auc"].get(test)
            if areas is None:
                continue
            name = title(record["model"])
            ends = record.get("intervals", {}).get("auc", {}).get(test, {})
            yield f"**{name}**", *(area(areas[each], ends.get(each)) for each in CORRUPTIONS)
            found = PAPER_AREAS.get(name.removeprefix("β = "))
            if test == "two-tailed" and found is not None:
                yield "*on ImageNet*", *(area(each / 100) for each in found)

    return ("", *(each.short for each in CORRUPTIONS.values())), rows()


def other_images(results: Results) -> Table:
    """Return AUCs of images that are none of the classes."""
    sets = list(next(iter(results["models"].values()))["ood"])
    tests = ("two-tailed", "joint", "mahalanobis", "combined")

    def rows() -> Iterator[Sequence[str]]:
        for name, model in results["models"].items():
            for test in tests:
                if test in model["false_positives"]:
                    found = [model["ood"][each][test] for each in sets]
                    areas = (area(each["auc"], each.get("intervals", {}).get("auc")) for each in found)
                    alarms = decimal(model["false_positives"][test]["0.05"], 1, 100)
                    yield f"**{title(name)}**, {test}", *areas, alarms

    return ("", *sets, "false alarms at 5 % (%)"), rows()


def attacks(results: Results) -> Table:
    """Return success and size of attacks with real-valued and with 8-bit images, and who notices."""
    head = ["", "κ", "d", "images", "real-valued: success (%)", "median L2", "success if rounded (%)"]
    head += ["8-bit: success (%)", "median L2", "confidence (%)", "AUC, two-tailed (%)"]

    def rows() -> Iterator[Sequence[str]]:
        for attack in results["attacks"]["metrics"]:
            file = attack["eight_bit"]
            detection, ends = file["detection"], file["intervals"].get("two_tailed")
            yield (
                f"**{title(attack['model'])}**",
                number(float(attack["kappa"])),
                f"{attack['d']:g}",
                f"{attack['images']}",
                with_interval(attack, "success", 100, 1),
                with_interval(attack, "l2_median", 1, 3),
                with_interval(attack, "rounded_success", 100, 1),
                with_interval(file, "success", 100, 1),
                with_interval(file, "l2_median", 1, 3),
                decimal(file["confidence"], 1, 100),
                "–" if detection is None else area(detection["two_tailed"], ends),
            )

    return head, rows()


def tiny20_corruptions(results: Results) -> Table:
    """Return AUCs of corrupted photos of 64 pixels."""
    record = results["tiny20"]["corruptions"]

    def rows() -> Iterator[Sequence[str]]:
        for test in ("two-tailed", "joint", "code-length"):
            areas, ends = record["auc"][test], record["intervals"]["auc"][test]
            yield f"**{test}**", *(area(areas[each], ends.get(each)) for each in CORRUPTIONS)

    return ("", *(each.short for each in CORRUPTIONS.values())), rows()
