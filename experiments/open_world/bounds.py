"""How far down a taught class must be before it is ruled out, and how levels hold after teaching.

Each class of three sets is left out in turn, and taught from its first photos by name or from random ones. A
class set keeps the taught class if its posterior is at least ``bound`` times the largest one.
"""

from statistics import mean
from typing import Any

import numpy as np

from candid._support.numbers import Array
from candid._support.randomness import Draws
from candid.judging.held_out import needed
from candid.models.photo.efficientnet import PackagedEye
from candid.models.photo.model import PhotoModel
from candid.training.pieces import assembled
from candid.trust.promises import Levels
from candid.trust.ranking import ALL
from candid.trust.rule import Rule
from candid.trust.scores import Columns
from candid.trust.sets import answers
from experiments.measures import share
from experiments.open_world.teaching import _parts, photo_model, said
from experiments.photo_sets import UNKNOWN, Photos, PhotoSet, joined
from experiments.tables import Cell, decimal, table, text

NUMBERS = (5, 10, 20, 50)
CHOSEN = ("first by name", "random")
BOUNDS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
Figures = dict[str, float]


def measured(sets: dict[str, PhotoSet], far: Photos, eye: PackagedEye) -> list[dict[str, Any]]:
    """Return the figures of every class, number of photos and way to choose them."""
    found = []
    for name, photos in sets.items():
        everything = photos.photos
        if name in UNKNOWN:
            new = np.full(len(photos.unknown), len(photos.class_names))
            unknown = Photos(photos.unknown.statistics, photos.unknown.pooled, new)
            everything = joined(everything, unknown)
        for left_out in np.unique(everything.labels).tolist():
            found += _of_class(name, everything, left_out, eye)
            print(_splits(found[-len(NUMBERS) * len(CHOSEN) :]), flush=True)
    return found


def _of_class(name: str, photos: Photos, left_out: int, eye: PackagedEye) -> list[dict[str, Any]]:
    new = photos[photos.labels == left_out]
    old = _parts(photos.without(left_out), Draws(0))
    classes = int(photos.labels.max())
    model = photo_model(*old[:2], classes, eye)
    most, random = max(NUMBERS), Draws(1).permutation(len(new))[: max(NUMBERS)]
    orders = dict(zip(CHOSEN, (np.arange(most), random), strict=True))
    test = new[np.setdiff1d(np.arange(len(new)), np.concatenate([*orders.values()]))]
    tests = old[2], Photos(test.statistics, test.pooled, np.full(len(test), classes))
    figures = []
    for how, rows in orders.items():
        for n in NUMBERS:
            own = new[rows[:n]]
            keys = [10**6 + np.arange(n)]
            taught, (recall,) = assembled(model, [{"name": "new"}], [own.statistics], keys)
            record = {"set": name, "class": left_out, "photos": n, "chosen": how, "left_out": recall}
            figures.append(record | _figures(taught, tests))
    return figures


def _figures(taught: PhotoModel, tests: tuple[Photos, Photos]) -> dict[str, Any]:
    """Return what is said of test photos of old classes and of the new one: now, and with each bound."""
    rule = needed(taught).rule(Levels())
    figures: dict[str, Any] = {"in_force": rule.bounds[len(taught.class_names) - 1]}
    for kind, photos in zip(("old", "new"), tests, strict=True):
        columns = said(taught, photos)
        p = rule.p_values(columns)
        figures[kind] = _said(columns, photos.labels, p <= rule.cuts[ALL], rule.named(columns["posterior"]))
        for bound in BOUNDS:
            named = _named(rule, columns, len(taught.class_names) - 1, bound)
            figures[f"{kind} {bound:g}"] = _said(columns, photos.labels, p <= rule.cuts[ALL], named)
    return figures


def _named(rule: Rule, columns: Columns, taught: int, bound: float) -> Array:
    ratio = np.full(columns.images, rule.smallest_ratios[ALL])
    return answers(columns["posterior"], ratio, rule.levels.confidence, {taught: bound})


def _said(columns: Columns, labels: Array, novel: Array, named: Array) -> Figures:
    accepted = ~novel & (named.sum(1) == 1)
    wrong = columns["posterior"].argmax(1) != labels
    return {
        "novel": share(novel),
        "missed": share(~named[np.arange(len(labels)), labels]),
        "accepted": share(accepted),
        "accepted_wrong": share(accepted & wrong),
        "ambiguous": share(~accepted & ~novel),
    }


def tables(found: list[dict[str, Any]]) -> str:
    """Return the tables in Markdown."""
    return f"{_bounds(found)}\n\n{_splits(found)}"


def _bounds(found: list[dict[str, Any]]) -> str:
    """Return what each bound does with few photos, means over classes."""
    records = [
        {
            "set": name,
            "photos": n,
            "bound": bound,
            **{
                f"{kind} {key}": mean(each[f"{kind} {bound:g}"][key] for each in some)
                for kind in ("old", "new")
                for key in ("accepted", "accepted_wrong", "ambiguous", "missed")
            },
        }
        for n in NUMBERS[:2]
        for name in ("all", *dict.fromkeys(each["set"] for each in found))
        for bound in BOUNDS
        if (some := _some(found, n, CHOSEN[0], name))
    ]
    return table(
        records,
        (
            ("set", text("set")),
            ("photos", text("photos")),
            ("bound", text("bound")),
            ("new: accepted", _percent("new accepted")),
            ("wrong of these", _ratio("new")),
            ("ambiguous", _percent("new ambiguous")),
            ("without the class", _percent("new missed")),
            ("old: accepted", _percent("old accepted")),
            ("wrong of these", _ratio("old")),
            ("ambiguous", _percent("old ambiguous")),
            ("without the class", _percent("old missed")),
        ),
    )


def _some(found: list[dict[str, Any]], n: int, how: str, name: str) -> list[dict[str, Any]]:
    return [e for e in found if e["photos"] == n and e["chosen"] == how and name in ("all", e["set"])]


def _percent(key: str) -> Cell:
    return lambda record: decimal(record[key], 1, 100)


def _ratio(kind: str) -> Cell:
    return lambda record: decimal(
        record[f"{kind} accepted_wrong"] / max(record[f"{kind} accepted"], 1e-9), 1, 100
    )


def _splits(found: list[dict[str, Any]]) -> str:
    """Return how levels hold after teaching: means over classes, and the worst class in brackets."""

    def cell(kind: str, key: str) -> Cell:
        return lambda record: (
            f"{100 * mean(each[kind][key] for each in record['some']):.1f} "
            f"({100 * max(each[kind][key] for each in record['some']):.0f})"
        )

    def wrong(kind: str) -> Cell:
        def shown(record: Any) -> str:
            shares = [e[kind]["accepted_wrong"] / max(e[kind]["accepted"], 1e-9) for e in record["some"]]
            return f"{100 * mean(shares):.1f} ({100 * max(shares):.0f})"

        return shown

    records = [
        {"chosen": how, "photos": n, "some": some}
        for how in CHOSEN
        for n in NUMBERS
        if (some := _some(found, n, how, "all"))
    ]
    return table(
        records,
        (
            ("photos", text("photos")),
            ("chosen", text("chosen")),
            ("old: novel", cell("old", "novel")),
            ("without the class", cell("old", "missed")),
            ("ambiguous", cell("old", "ambiguous")),
            ("wrong of accepted", wrong("old")),
            ("new: novel", cell("new", "novel")),
            ("without the class", cell("new", "missed")),
            ("ambiguous", cell("new", "ambiguous")),
            ("wrong of accepted", wrong("new")),
            ("left-out recall", lambda r: decimal(mean(e["left_out"] for e in r["some"]), 1, 100)),
        ),
    )
