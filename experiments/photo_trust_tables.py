"""The tables of ``experiments.photo_trust`` in Markdown."""

import json
from collections.abc import Callable, Iterator, Sequence
from statistics import mean
from typing import Any

from candid._support.text import number
from candid.robustness.corruptions.apply import CORRUPTIONS
from experiments import photo_models
from experiments.cells import Results, Table, area, between, decimal, markdown, with_interval
from experiments.tables import filled

PAGE = photo_models.ROOT / "docs" / "results"
FIGURES = PAGE / "photo_trust.json"


def page(text: str) -> str:
    """Return the page of results on photos with all tables of this module."""
    measured = json.loads(FIGURES.read_text(encoding="utf-8"))
    bundled = json.loads(photo_models.RESULTS.read_text(encoding="utf-8"))
    return filled(text, tables(bundled, measured))


def tables(bundled: Results, measured: Results) -> dict[str, str]:
    """Return all tables by their marks on the page: of the bundled models, and of what was measured."""
    found = {"selective": selective(bundled)}
    if "everyday" in measured:
        found["everyday"] = everyday(bundled["everyday"], measured["everyday"])
    for name, (section, table) in TABLES.items():
        if section in measured:
            found[name] = table(measured[section])
    return {name: markdown(*table) for name, table in found.items()}


def selective(bundled: Results) -> Table:
    """Return how many photos each bundled model accepts, and how many of them are right."""
    head = ["", "test photos", "accepted (%)", "of these right (%)", "a plain threshold (%)"]
    head += ["ambiguous ones right (%)", "called novel (%)", "foreign photos accepted (%)"]
    head += ["by a plain threshold (%)"]

    def rows() -> Iterator[Sequence[str]]:
        for name, found in bundled.items():
            verdicts, plain = found["selective"]["verdicts"], found["selective"]["plain"]
            (foreign,) = verdicts["foreign"]
            known = next(key for key in found["verdicts"]["sets"] if key != foreign)
            yield (
                f"**{name}**",
                str(found["images"]),
                between(verdicts["coverage"], verdicts["intervals"]["coverage"]),
                between(verdicts["accepted"], verdicts["intervals"]["accepted"]),
                between(plain["accepted"], plain["intervals"]["accepted"]),
                between(verdicts["ambiguous"], verdicts["intervals"]["ambiguous"]),
                decimal(found["verdicts"]["sets"][known]["novel"], 1, 100),
                f"{decimal(verdicts['foreign'][foreign], 1, 100)} ({foreign})",
                decimal(plain["foreign"][foreign], 1, 100),
            )

    return head, rows()


def everyday(found: Results, validation: Results) -> Table:
    """Return accuracy, calibration, promises and novelty of ``everyday``."""
    upper = "95 % upper end for this model (%)"
    promises = found["verdicts"]["promises"]
    shown = (("accuracy (%)", "accuracy", 100), ("ECE of the top class (%)", "top1_ece", 100))

    def rows() -> Iterator[Sequence[str]]:
        for title, key, factor in (*shown, ("NLL (nats)", "cross_entropy", 1)):
            yield (
                title,
                *(with_interval(each, key, factor, 2 - factor // 100) for each in (found, validation)),
            )
        yield "mean confidence (%)", "", decimal(validation["confidence"], 1, 100)
        for level, share in found["false_positives"].items():
            yield f"false alarms at {number(100 * float(level))} % (%)", decimal(share, 1, 100), ""
        for title, key in (("false alarms, 1 %", "novelty"), ("missed classes, 5 %", "error")):
            yield f"promised {title} on average: {upper}", decimal(promises[key]["upper"], 2, 100), ""
        for what, share in found["novel_at_5_percent"].items():
            yield (
                f"{what.replace('cells', 'cell')} images called novel at 5 % (%)",
                decimal(share, 0, 100),
                "",
            )
        (foreign,) = found["auc"]
        shares = found["verdicts"]["sets"][foreign]
        found_at_1 = ", ".join(decimal(shares[key], 1, 100) for key in ("novel", "ambiguous", "accept"))
        yield f"{foreign} at 1 %: novel, ambiguous, accepted (%)", found_at_1, ""
        yield f"AUROC, {foreign} (%)", decimal(found["auc"][foreign], 1, 100), ""

    head = f"{found['images']} sample photos", f"{validation['images']:,} validation photos"
    return ("everyday", *head), rows()


def similar(found: Results) -> Table:
    """Return how well kinds of animals stay together."""
    head = ["", "classes", "nearest class is one of them", "in one group", "other classes in that group"]
    keys = ("classes", "nearest_is_one", "in_one_group", "others_there")
    return head, ([f"**{kind}**", *(str(each[key]) for key in keys)] for kind, each in found["kinds"].items())


def near(found: Results) -> Table:
    """Return what is accepted of kinds that a model does not know."""
    head = ["unknown kind", "known photos accepted (%)", "known photos called novel (%)"]
    head += ["unknown photos accepted (%)", "by a plain threshold (%)", "called novel (%)", "AUROC (%)"]

    def rows() -> Iterator[Sequence[str]]:
        for name, each in found.items():
            known, unknown = each["known"], each["unknown"]
            shares = known["accept"], known["novel"], unknown["accept"], each["plain"], unknown["novel"]
            yield f"**{name}**", *(decimal(share, 1, 100) for share in (*shares, each["auc"]))

    return head, rows()


def pointing(found: Results) -> Table:
    """Return the share of maps that point to the half that shows their class."""

    def rows() -> Iterator[Sequence[str]]:
        for key in next(iter(found.values()))["pointing"]:
            values = [each["pointing"][key] for each in found.values()]
            yield key, *(decimal(each, 3) for each in (*values, mean(values)))

    return ("points to the right half", *found, "mean"), rows()


def deletion(found: Results) -> Table:
    """Return how far the answer's log posterior falls without what the map names."""

    def rows() -> Iterator[Sequence[str]]:
        for key in next(iter(found.values()))["deletion"]:
            yield key, *(decimal(each["deletion"][key], 2) for each in found.values())

    return ("drop without the 30 % (nats)", *found), rows()


def corruptions(found: Results) -> Table:
    """Return errors on corrupted photos, and how well scores find them, for each corruption."""
    tests = ("two-tailed", "combined", "max-posterior")
    head = ["corruption", f"error (%); clean {decimal(found['clean_error'], 1, 100)}"]
    head += [f"AUC, {test}" for test in (*tests, "code-length (no model)")]

    def rows() -> Iterator[Sequence[str]]:
        areas = [*(found["auc"][test] for test in tests), found["control"]]
        ends: list[dict[str, Any]] = [*(found["intervals"]["auc"][test] for test in tests), {}]
        for name in CORRUPTIONS:
            cells = (area(each[name], end.get(name)) for each, end in zip(areas, ends, strict=True))
            yield name.replace("_", " "), decimal(mean(found["errors"][name]), 1, 100), *cells
        means = [area(found["mean_auc"][test], found["intervals"]["mean_auc"][test]) for test in tests]
        errors = mean(mean(each) for each in found["errors"].values())
        yield "**mean**", decimal(errors, 1, 100), *means, area(mean(found["control"].values()))

    return head, rows()


def attacks(found: Sequence[Results]) -> Table:
    """Return success and size of attacks with real-valued and with 8-bit images, and who notices."""
    head = ["d", "photos", "success (%)", "median L2", "8-bit: success (%)", "median L2"]
    head += ["RMS of a pixel (grey levels)", "confidence (%)", "AUC, two-tailed (%)"]

    def rows() -> Iterator[Sequence[str]]:
        for attack in found:
            file = attack["eight_bit"]
            seen, ends = file["detection"], file["intervals"].get("two_tailed")
            yield (
                f"{attack['d']:g}",
                f"{attack['images'] - attack['already_misclassified']}",
                with_interval(attack, "success", 100, 0),
                with_interval(attack, "l2_median", 1, 3),
                with_interval(file, "success", 100, 0),
                with_interval(file, "l2_median", 1, 3),
                decimal(file["per_pixel"], 2, 255),
                decimal(file["confidence"], 1, 100),
                "–" if seen is None else area(seen["two_tailed"], ends),
            )

    return head, rows()


TABLES: dict[str, tuple[str, Callable[[Any], Table]]] = {
    "similar": ("similar", similar),
    "near": ("near", near),
    "pointing": ("pointing", pointing),
    "deletion": ("pointing", deletion),
    "photo_corruptions": ("corruptions", corruptions),
    "photo_attacks": ("attacks", attacks),
}
"""By the mark on the page: the section of the figures, and the table."""
