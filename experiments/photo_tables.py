"""The tables of ``docs/results/photos.md`` as pure functions of what was measured."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from candid._support.text import number
from candid.robustness.corruptions.benchmark import CORRUPTIONS
from experiments import photo_models
from experiments.results_tables import detected
from experiments.tables import (
    Cell,
    Results,
    area,
    at,
    bold,
    decimal,
    filled,
    interval,
    markdown,
    ranged,
    shown,
    table,
    text,
    with_interval,
)

PAGE = photo_models.ROOT / "docs" / "results"
FIGURES = PAGE / "photo_trust.json"
ROWS = {
    "accuracy": "accuracy (%)",
    "nll": "NLL (nats)",
    "ece": "ECE of the top class (%)",
    "coverage": "coverage at 1 % error (%)",
    "unknown": "AUROC, unknown class (%)",
    "far": "AUROC, caltech99 (%)",
    "false_alarms_0.01": "false alarms at 1 % (%)",
    "false_alarms_0.05": "false alarms at 5 % (%)",
    "false_alarms_0.1": "false alarms at 10 % (%)",
    "missed": "class sets at 5 % that miss the true class (%)",
}
RIVALS = ("Candid", "logistic regression", "logistic regression, standardised channels")
SCORES = ("two-tailed", "combined", "max-posterior")
"""Those whose AUC on corrupted photos is shown."""


def page(words: str) -> str:
    """Return the page with the tables of the bundled models and of ``experiments.photo_trust``."""
    measured = json.loads(FIGURES.read_text(encoding="utf-8"))
    bundled = json.loads(photo_models.RESULTS.read_text(encoding="utf-8"))
    return filled(words, trust_tables(bundled, measured))


def tables(results: Results) -> dict[str, str]:
    """Return the tables of the sections of ``experiments.photos`` that were measured, by their marks."""
    return {name: make(results[name]) for name, make in TABLES.items() if name in results}


def trust_tables(bundled: Results, measured: Results) -> dict[str, str]:
    """Return the other tables by their marks on the page: of the bundled models, and of what was measured."""
    found = {"selective": _selective(bundled)}
    if "everyday" in measured:
        found["everyday"] = _everyday(bundled["everyday"], measured["everyday"])
    for name, (section, make) in TRUST_TABLES.items():
        if section in measured:
            found[name] = make(measured[section])
    return found


def spread(values: Sequence[float], factor: float = 100, digits: int = 1) -> str:
    """Return the mean and the standard deviation of values.

    >>> spread([0.5, 0.7]), spread([0.5])
    ('60.0 ± 14.1', '50.0')
    """
    centre = decimal(mean(values), digits, factor)
    return f"{centre} ± {factor * stdev(values):.{digits}f}" if len(values) > 1 else centre


def _splits(results: Results) -> str:
    def of(runs: Any) -> Cell:
        return lambda row: _figure(runs, row[0])

    return "\n\n".join(
        table(
            ROWS.items(),
            [
                (name, lambda row: str(row[1])),
                *((rival, of(runs)) for rival, runs in zip(RIVALS, methods.values(), strict=True)),
            ],
        )
        for name, methods in results.items()
    )


def _figure(runs: Sequence[Mapping[str, float]], key: str) -> str:
    """Return one figure; of a logistic regression, the better one of its two scores."""
    if key in runs[0]:
        values = [run[key] for run in runs]
        return spread(values, 1, 3) if key == "nll" else spread(values)
    scores = {
        kind: [run[f"{key}_{kind}"] for run in runs] for kind in ("msp", "energy") if f"{key}_msp" in runs[0]
    }
    if not scores:
        return "–"
    best = max(scores, key=lambda kind: mean(scores[kind]))
    return f"{spread(scores[best])} ({best})"


def _left_out(results: Results) -> str:
    def record(name: str, found: Any) -> dict[str, Any]:
        runs = [run for each in found.values() for run in each]
        by_class = {each: mean(run["unknown"] for run in own) for each, own in found.items()}
        far, alarms = ([run[key] for run in runs] for key in ("far", "false_alarms_0.05"))
        worst = min(by_class, key=by_class.__getitem__)
        return {
            "name": name,
            "classes": len(by_class),
            "unknown": mean(by_class.values()),
            "worst": f"{decimal(by_class[worst], 1, 100)} ({worst})",
            "far": mean(far),
            "lowest": min(far),
            "alarms": mean(alarms),
            "most": max(alarms),
        }

    return table(
        [record(name, found) for name, found in results.items()],
        (
            ("", text("name")),
            ("classes", text("classes")),
            ("AUROC of the class, mean (%)", shown(1, 100, "unknown")),
            ("worst class", text("worst")),
            ("AUROC of caltech99, mean (%)", shown(1, 100, "far")),
            ("worst run", shown(1, 100, "lowest")),
            ("false alarms at 5 %, mean (%)", shown(1, 100, "alarms")),
            ("largest", shown(1, 100, "most")),
        ),
    )


def _few(results: Results) -> str:
    def difference(rival: str) -> Cell:
        def cell(record: Any) -> str:
            value, low, high = (100 * each for each in record["differences"][rival])
            return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"

        return cell

    def level(key: str) -> Cell:
        return lambda record: spread([run[key] for run in record["levels"]])

    return table(
        [
            {"name": name, "size": size, **found}
            for name, sizes in results.items()
            for size, found in sizes.items()
        ],
        (
            ("", text("name")),
            ("photos of a class", text("size")),
            ("accuracy (%)", shown(1, 100, "accuracy", "candid")),
            ("minus logistic regression's on pooled features", difference("pooled")),
            ("on the same features", difference("statistics")),
            ("false alarms at 5 % (%)", level("false_alarms_0.05")),
            ("class sets at 5 % that miss (%)", level("missed")),
        ),
    )


TABLES: dict[str, Callable[[Results], str]] = {"splits": _splits, "left_out": _left_out, "few": _few}
"""By the section of the figures, which is also the mark on the page."""


def _selective(bundled: Results) -> str:
    """Return how many photos each bundled model accepts, and how many of them are right."""

    def record(name: str, found: Any) -> dict[str, Any]:
        selective = found["selective"]
        (foreign,) = selective["verdicts"]["foreign"]
        known = next(key for key in found["verdicts"]["sets"] if key != foreign)
        # earlier results have one plain threshold, which ranks novel images, too
        alone = selective.get("without_novelty", selective["plain"])
        accepted, plain = (rule["foreign"][foreign] for rule in (selective["verdicts"], alone))
        return {
            **selective,
            "name": name,
            "images": found["images"],
            "novel": found["verdicts"]["sets"][known]["novel"],
            "foreign": f"{decimal(accepted, 1, 100)} ({foreign})",
            "plain_foreign": plain,
        }

    return table(
        [record(name, found) for name, found in bundled.items()],
        (
            ("", bold("name")),
            ("test photos", text("images")),
            ("accepted (%)", ranged("verdicts", "coverage")),
            ("of these right (%)", ranged("verdicts", "accepted")),
            ("a plain threshold, same novelty test (%)", ranged("plain", "accepted")),
            ("ambiguous ones right (%)", ranged("verdicts", "ambiguous")),
            ("called novel (%)", shown(1, 100, "novel")),
            ("foreign photos accepted (%)", text("foreign")),
            ("by a plain threshold alone (%)", shown(1, 100, "plain_foreign")),
        ),
    )


def _everyday(found: Results, validation: Results) -> str:
    """Return accuracy, calibration, promises and novelty of ``everyday``."""
    upper = "95 % upper end for this model (%)"
    promises = found["verdicts"]["promises"]

    def rows() -> Iterator[Sequence[str]]:
        for title, key, factor, digits in (
            ("accuracy (%)", "accuracy", 100, 1),
            ("ECE of the top class (%)", "top1_ece", 100, 1),
            ("NLL (nats)", "cross_entropy", 1, 2),
        ):
            yield title, *(with_interval(each, key, factor, digits) for each in (found, validation))
        yield "mean confidence (%)", "", decimal(validation["confidence"], 1, 100)
        for level, share in found["false_positives"].items():
            yield f"false alarms at {number(100 * float(level))} % (%)", decimal(share, 1, 100), ""
        for title, key in (("false alarms", "novelty"), ("missed classes", "error")):
            level = number(100 * promises[key]["in_force"])
            yield (
                f"promised {title}, {level} % on average: {upper}",
                decimal(promises[key]["upper"], 2, 100),
                "",
            )
        for what, share in found["novel_at_5_percent"].items():
            kind = what.replace("cells", "cell")
            yield f"{kind} images called novel at 5 % (%)", decimal(share, 0, 100), ""
        (foreign,) = found["auc"]
        shares = found["verdicts"]["sets"][foreign]
        verdicts = ", ".join(decimal(shares[key], 1, 100) for key in ("novel", "ambiguous", "accept"))
        yield f"{foreign}: novel, ambiguous, accepted (%)", verdicts, ""
        yield f"AUROC, {foreign} (%)", decimal(found["auc"][foreign], 1, 100), ""

    head = f"{found['images']} sample photos", f"{validation['images']:,} validation photos"
    return markdown(("everyday", *head), rows())


def _similar(found: Results) -> str:
    """Return how well kinds of animals stay together."""
    return table(
        [{"kind": kind, **each} for kind, each in found["kinds"].items()],
        (
            ("", bold("kind")),
            ("classes", text("classes")),
            ("nearest class is one of them", text("nearest_is_one")),
            ("in one group", text("in_one_group")),
            ("other classes in that group", text("others_there")),
        ),
    )


def _near(found: Results) -> str:
    """Return what is accepted of kinds that a model does not know."""
    return table(
        [{"name": name, **each} for name, each in found.items()],
        (
            ("unknown kind", bold("name")),
            ("known photos accepted (%)", shown(1, 100, "known", "accept")),
            ("known photos called novel (%)", shown(1, 100, "known", "novel")),
            ("unknown photos accepted (%)", shown(1, 100, "unknown", "accept")),
            ("by a plain threshold alone (%)", shown(1, 100, "plain")),
            ("called novel (%)", shown(1, 100, "unknown", "novel")),
            ("AUROC (%)", shown(1, 100, "auc")),
        ),
    )


def _of_sets(found: Results, section: str, digits: int) -> list[tuple[str, Cell]]:
    """Return the columns of each set of photos, for rows of methods."""

    def of(figures: Any) -> Cell:
        return lambda method: decimal(figures[method], digits)

    return [(name, of(each[section])) for name, each in found.items()]


def pointing_table(found: Results) -> str:
    """Return the share of maps that point to the half that shows their class."""
    methods = next(iter(found.values()))["pointing"]

    def average(method: str) -> str:
        return decimal(mean(each["pointing"][method] for each in found.values()), 3)

    named: tuple[str, Cell] = ("points to the right half", str)
    return table(methods, (named, *_of_sets(found, "pointing", 3), ("mean", average)))


def deletion_table(found: Results) -> str:
    """Return how far the answer's log posterior falls without what the map names."""
    methods = next(iter(found.values()))["deletion"]
    return table(methods, (("drop without the 30 % (nats)", str), *_of_sets(found, "deletion", 2)))


def _corruptions(found: Results) -> str:
    """Return errors on corrupted photos, and how well scores find them, for each corruption."""

    def of(score: str) -> tuple[str, Cell]:
        return f"AUC, {score}", lambda record: area(*record[score])

    control = "code-length (no model)"
    rows: list[dict[str, Any]] = [
        {
            "name": name.replace("_", " "),
            "error": mean(found["errors"][name]),
            control: (found["control"][name],),
            **{
                score: (found["auc"][score][name], at(found, "intervals", "auc", score, name))
                for score in SCORES
            },
        }
        for name in CORRUPTIONS
    ]
    whole = {
        "name": "**mean**",
        "error": mean(mean(each) for each in found["errors"].values()),
        control: (mean(found["control"].values()),),
        **{score: (found["mean_auc"][score], found["intervals"]["mean_auc"][score]) for score in SCORES},
    }
    errors = f"error (%); clean {decimal(found['clean_error'], 1, 100)}"
    named = ("corruption", text("name"))
    return table([*rows, whole], (named, (errors, shown(1, 100, "error")), *map(of, (*SCORES, control))))


def _attacks(found: Sequence[Results]) -> str:
    """Return success and size of attacks with real-valued and with 8-bit images, and who notices."""
    return table(
        found,
        (
            ("d", lambda attack: f"{attack['d']:g}"),
            ("photos", lambda attack: f"{attack['images'] - attack['already_misclassified']}"),
            ("success (%)", interval("success", 100, 0)),
            ("median L2", interval("l2_median", 1, 3)),
            ("8-bit: success (%)", interval("success", 100, 0, "eight_bit")),
            ("median L2", interval("l2_median", 1, 3, "eight_bit")),
            ("RMS of a pixel (grey levels)", shown(2, 255, "eight_bit", "per_pixel")),
            ("confidence (%)", shown(1, 100, "eight_bit", "confidence")),
            ("AUC, two-tailed (%)", detected),
        ),
    )


TRUST_TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "similar": ("similar", _similar),
    "near": ("near", _near),
    "pointing": ("pointing", pointing_table),
    "deletion": ("pointing", deletion_table),
    "photo_corruptions": ("corruptions", _corruptions),
    "photo_attacks": ("attacks", _attacks),
}
"""By the mark on the page: the section of the figures, and the table."""
