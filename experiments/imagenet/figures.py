"""Figures 3, 4 and 6 as the paper arranges them; 'candid explain' draws Figure 5."""

import csv
import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.explanations.class_maps import ClassMaps
from candid.explanations.decision_space import CONFIDENT, DecisionSpace, Summary
from candid.explanations.explainer import Explainer
from candid.explanations.similarity import similarity
from candid.judging.examine import Examiner
from candid.models.protocol import Model
from candid.reports.plots import comparison, style
from candid.reports.plots.examine import draw_decision_space, heatmaps
from candid.trust.verdict import Examination, UnusableImage
from experiments.imagenet import paper

TYPICAL = 0.2
"""The p-value from which a photo is typical enough for the first three cases."""
Row = dict[str, str]
Similar = Callable[[str, str], bool]
"""Whether two classes are similar, by their names."""


class Explained(NamedTuple):
    """A photo with what Figures 4 and 6 show of it."""

    examined: Examination
    maps: ClassMaps
    space: DecisionSpace
    summary: Summary


def draw_trade_off(models: Mapping[str, Mapping[str, Any]], classes: int, path: Path) -> bool:
    """Draw Figure 3, the paper's models in grey; return whether any model has a known beta."""
    rows = [
        {
            "name": name,
            "beta": _beta(model["beta"]),
            "crops": 10,
            "L_X": model.get("L_X_printed"),
            "L_Y": model["L_Y"],
            "bits_per_dim": model.get("bits_printed"),
            "accuracy": model["ten_crop"]["accuracy"],
        }
        for name, model in models.items()
        if model["beta"] is not None or model["kind"] == "resnet"
    ]
    if not any(row["beta"] for row in rows):
        return False
    figure = comparison.trade_off(rows)
    if classes == paper.CLASSES:
        theirs = [row for beta, row in paper.TABLE_2.items() if beta not in ("0", "ResNet")]
        for axes, (x, y) in zip(figure.axes, ((0, 1), (2, 3)), strict=True):
            xs, ys = [row[x] for row in theirs], [row[y] for row in theirs]
            axes.plot(xs, ys, "x--", color=style.GREY, linewidth=0.8, zorder=2)  # type: ignore[arg-type]
        figure.suptitle("each marker is a model, with its β; grey crosses: the paper's", fontsize=11)
    style.save(figure, path)
    return True


def _beta(beta: str | None) -> float | None:
    return math.inf if beta == "∞" else None if beta is None else float(beta)


def draw_decisions(model: Model, table: Path, given: Sequence[Path], out: Path) -> dict[str, Any]:
    """Draw Figures 4 and 6 of the ``given`` photos, or of one photo of each kind in ``table``.

    Args:
        model: the model, with held-out scores.
        table: ``images.csv`` of its evaluation.
        given: photos to show instead.
        out: the folder of the figures.

    Returns:
        What is shown, and the expected uncertainty of the paper's example of similar classes.
    """
    paths = list(given)
    if not paths:
        rows = list(csv.DictReader(table.read_text(encoding="utf-8").splitlines()))
        paths = [Path(row["path"]) for row in chosen_photos(rows, similar_classes(model))]
    found = explained(model, paths)
    names = model.class_names
    style.save(_decision_spaces(found, names), out / "figure-4.png")
    files = [f"figure-6-{i}.png" for i in range(1, len(found) + 1)]
    for file, each in zip(files, found, strict=True):
        style.save(heatmaps(_image(each.examined), each.maps, names), out / file)
    shown = [
        {
            "photo": f"{path.parent.name}/{path.name}",
            "kind": each.summary.kind,
            "sentence": each.summary.sentence,
        }
        for path, each in zip(paths, found, strict=True)
    ]
    pair = None
    if len(names) == paper.CLASSES:
        cats = similarity(model, [paper.TABBY, paper.TIGER_CAT], order="given")
        pair = {
            "distance": float(cats.distances[0, 1]),
            "expected_uncertainty": float(cats.uncertainty[0, 1]),
        }
    return {"photos": shown, "cats": pair, "files": ["figure-4.png", *files]}


def explained(model: Model, paths: Sequence[Path]) -> list[Explained]:
    """Return photos with their explanations by a pixel model."""
    explainer, photos = Explainer(model), []
    for examined in Examiner(model, evidence=True).examine(paths):
        if isinstance(examined, UnusableImage):
            raise CandidError(f"'{examined.path}' can't be used: {examined.reason}.")
        explanation = explainer.explain(examined)
        maps, space, summary = explanation.maps, explanation.space, explanation.summary
        assert isinstance(maps, ClassMaps) and space is not None and summary is not None
        photos.append(Explained(examined, maps, space, summary))
    return photos


def similar_classes(model: Model) -> Similar:
    """Return what says whether two classes of ``model`` are similar."""
    found = similarity(model, order="given")
    number = {name: i for i, name in enumerate(found.names)}
    return lambda a, b: found.pair(number[a], number[b]).similar


def chosen_photos(rows: Sequence[Row], similar: Similar) -> list[Row]:
    """Return the four cases of the paper's Figure 4, by the model's own numbers; different ones if possible.

    A right decision of median confidence among the confident ones, the most uncertain one between similar
    classes and the one between different classes, and the photo with the smallest p-value.

    Args:
        rows: of ``images.csv``.
        similar: whether two classes are similar.
    """
    typical = [row for row in rows if float(row["p_value"] or 1) >= TYPICAL] or list(rows)

    def second(row: Row) -> float:
        return list(json.loads(row["posterior"]).values())[1]

    def between_similar(row: Row) -> bool:
        first, second, *_ = json.loads(row["posterior"])
        return similar(first, second)

    right = [row for row in typical if row["label"] == row["true_label"]] or typical
    rising = sorted(right, key=lambda row: float(row["confidence"]))
    confident = [row for row in rising if float(row["confidence"]) >= CONFIDENT] or rising[-1:]
    near = [row for row in typical if between_similar(row)]
    far = [row for row in typical if not between_similar(row)]
    novel = min(rows, key=lambda row: float(row["p_value"] or 1))
    chosen = [confident[len(confident) // 2]]
    for group in (near, far):
        others = [row for row in group or typical if row not in (*chosen, novel)] or group or typical
        chosen.append(max(others, key=second))
    return [*chosen, novel]


@rc_context(style.STYLE)
def _decision_spaces(found: Sequence[Explained], names: Sequence[str]) -> Figure:
    """Draw each photo next to its place in the space of its five most probable classes, two in a row."""
    columns = min(2, len(found))
    rows = math.ceil(len(found) / columns)
    figure = Figure(figsize=(7 * columns, 4.3 * rows), layout="constrained")
    parts = figure.subfigures(rows, columns, squeeze=False)
    for part, (examined, _, space, summary) in zip(parts.flat, found, strict=False):
        picture, axes = part.subplots(1, 2, width_ratios=[1, 1.7])
        p_value = "" if examined.p_value is None else f"p = {examined.p_value:.2g}"
        style.picture_of(picture, _image(examined), p_value)
        draw_decision_space(axes, space, names)
        sentence = textwrap.fill(summary.sentence, 88)
        part.suptitle(style.plain(sentence), x=0.02, ha="left", fontsize=10)
    return figure


def _image(examined: Examination) -> Array:
    assert examined.evidence is not None
    return examined.evidence.image
