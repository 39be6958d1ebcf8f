"""Figures show the numbers that they are given, whatever these are, and are written whole."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.text import Text
from PIL import Image

from candid._support.numbers import Array, softmax
from candid.evaluation.calibration_error import Bins, all_bins, top_bins
from candid.inference.metrics import Roc, area_under_curve, roc_curve
from candid.reports.demo import digits as demo_plots
from candid.reports.plots import comparison as comparison_plots
from candid.reports.plots import comparison as training_plots
from candid.reports.plots import evaluation as evaluation_plots
from candid.reports.plots import style
from candid.reports.plots.style import BLUE, VERMILION
from candid.trust.conformal import OneTailed, ScalarDetector, TwoTailed, Typicality

KINDS = {
    "energy": "classifier",
    "one-tailed": "paper",
    "two-tailed": "paper",
    "code-length": "control",
    "typical-set": "new",
}
LONG = "imagenet-corrupted/gaussian_noise/severity-5-of-5, centre crops of 224 pixels"
PAPER = [  # Table 2: beta, L_X, L_Y, bits/dim, accuracy
    (4, 1.14, 8.14, 8.72, 0.7369),
    (None, None, 7.87, None, 0.774),
    (1, -1.90, 8.52, 4.34, 0.673),
    (math.inf, 27.68, 7.99, 47.01, 0.7627),
    (2, -0.65, 8.26, 6.14, 0.7173),
    (0, -3.11, None, 2.59, None),
    (8, 3.66, 8.10, 12.35, 0.7459),
    (16, 7.17, 8.06, 17.43, 0.7554),
    (32, 10.81, 8.01, 22.68, 0.7618),
]


RANDOM = np.random.default_rng(0)


def seed() -> None:
    """Draw the same numbers again."""
    RANDOM.bit_generator.state = np.random.default_rng(0).bit_generator.state


def normal(images: int) -> Array:
    return RANDOM.standard_normal(images)


def models(*rows: tuple[Any, ...], name: str = "ResNet-50", crops: int = 1) -> list[dict[str, Any]]:
    keys = ("beta", "L_X", "L_Y", "bits_per_dim", "accuracy")
    return [{"name": name, "crops": crops, **dict(zip(keys, row, strict=True))} for row in rows]


@pytest.mark.parametrize("name", ["$a_$", "a\udcff", "[/b]"])
def test_names_are_drawn_as_they_are(name: str, tmp_path: Path) -> None:
    areas = {"joint": {name: 0.8}}
    for figure in (
        comparison_plots.trade_off(models(*PAPER, name=name)),
        evaluation_plots.auc_table(areas, KINDS),
        evaluation_plots.roc_curves(
            {name: {"joint": roc_curve(RANDOM.random(9), RANDOM.random(9))}}, {name: {"joint": 0.8}}
        ),
        calibration_curves(name),
    ):
        style.save(figure, tmp_path / "figure.png", svg=True)


def calibration_curves(title: str) -> Figure:
    posterior, labels = posteriors()
    return comparison_plots.calibration_curves(
        {title: (all_bins(posterior, labels), top_bins(posterior, labels))}
    )


def posteriors(images: int = 300) -> tuple[Array, Array]:
    logits = 3 * RANDOM.standard_normal((images, 10))
    labels = np.array([RANDOM.choice(10, p=row) for row in softmax(logits / 2)])
    return softmax(logits), labels


def calibration(images: int = 300, title: str = "digits", scaled: bool = False) -> Figure:
    posterior, labels = posteriors(images)
    softer = np.sqrt(posterior) / np.sqrt(posterior).sum(1, keepdims=True)
    return evaluation_plots.calibration(
        all_bins(posterior, labels),
        top_bins(posterior, labels),
        title,
        top_bins(softer, labels) if scaled else None,
    )


def detectors(held_out: Array) -> dict[str, ScalarDetector]:
    tests = {"one-tailed": OneTailed(), "typicality": Typicality(), "two-tailed": TwoTailed()}
    return {name: test.fit(held_out) for name, test in tests.items()}


def skewed(images: int = 999) -> Array:
    values: Array = 3 - np.exp(RANDOM.standard_normal(images))
    return values


def zones(held_out: Array, others: Mapping[str, Array], alpha: float = 0.1) -> Figure:
    return evaluation_plots.ood_zones(
        held_out, detectors(held_out), alpha, others, "log p(x) per dimension (nats)"
    )


def sets(count: int) -> dict[str, Array]:
    return {f"set {i}": 3 - i + 0.2 * RANDOM.standard_normal(200) for i in range(count)}


def curves(sets: int, tests: int, images: int = 100) -> tuple[dict[str, dict[str, Roc]], dict[str, Any]]:
    found: dict[str, dict[str, Roc]] = {}
    aucs: dict[str, dict[str, float]] = {}
    for s in range(sets):
        scores = [(normal(images), normal(images) + s - t / 2) for t in range(tests)]
        found[f"set {s}"] = {f"test {t}": roc_curve(*pair) for t, pair in enumerate(scores)}
        aucs[f"set {s}"] = {f"test {t}": area_under_curve(*pair) for t, pair in enumerate(scores)}
    return found, aucs


def table(sets: list[str]) -> Figure:
    aucs = RANDOM.random((len(KINDS), len(sets))).tolist()
    return evaluation_plots.auc_table(
        {test: dict(zip(sets, row, strict=True)) for test, row in zip(KINDS, aucs, strict=True)}, KINDS
    )


CASES: dict[str, Callable[[], Figure]] = {
    "calibration": lambda: calibration(scaled=True),
    "calibration of one image": lambda: calibration(1, title=LONG + LONG),
    "calibration of empty bins": lambda: evaluation_plots.calibration(
        Bins(*np.zeros((3, 15))), Bins(*np.zeros((3, 1)))
    ),
    "zones": lambda: zones(skewed(), sets(2)),
    "zones and eight sets": lambda: zones(skewed(), {**sets(7), LONG: np.full(9, -1e9)}),
    "zones of one value": lambda: zones(np.array([5.0]), {"noise": np.array([-math.inf])}, 0.6),
    "roc": lambda: evaluation_plots.roc_curves(*curves(1, 13)),
    "roc of eight sets": lambda: evaluation_plots.roc_curves(*curves(8, 2)),
    "roc of a long name": lambda: evaluation_plots.roc_curves(
        *({LONG: {LONG: only["set 0"]["test 0"]}} for only in curves(1, 1))  # type: ignore[arg-type]
    ),
    "table": lambda: table([f"set {i}" for i in range(8)]),
    "table of long names": lambda: table([LONG, "b"]),
    "table of one set": lambda: evaluation_plots.auc_table({"two-tailed": {"noise": 1.0}}, KINDS),
    "trade-off": lambda: comparison_plots.trade_off(models(*PAPER)),
    "trade-off of two": lambda: comparison_plots.trade_off(models(PAPER[2], PAPER[3])),
    "trade-off of one": lambda: comparison_plots.trade_off(
        models((0.0625, *PAPER[0][1:]), PAPER[1], name=LONG)
    ),
}


TWICE = ("calibration", "zones", "roc", "table", "trade-off")
"""Those that must be the same files when they are drawn again."""


def written(texts: Axes | Figure) -> list[str]:
    return [text.get_text() for text in texts.findobj(Text) if isinstance(text, Text) and text.get_text()]


def points(axes: Axes, marker: str = "o") -> list[tuple[float, float]]:
    lines = [line for line in axes.lines if line.get_marker() == marker]
    return [(float(x), float(y)) for line in lines for x, y in np.asarray(line.get_xydata())]


def steps(axes: Axes, colour: str) -> list[StepPatch]:
    wanted = matplotlib.colors.to_rgb(colour)
    return [p for p in axes.patches if isinstance(p, StepPatch) and p.get_facecolor()[:3] == wanted]


def area(patch: StepPatch) -> float:
    heights, edges, baseline = patch.get_data()
    return float(((heights - baseline) * np.diff(edges)).sum())


def check_nothing_is_cut_off(figure: Figure) -> None:
    width, height = figure.get_size_inches()
    box = figure.get_tightbbox()
    assert box.x0 > -0.03 and box.y0 > -0.03 and box.x1 < width + 0.03 and box.y1 < height + 0.03


@pytest.mark.parametrize("name", CASES)
def test_every_figure_has_named_axes_and_is_written_whole_and_always_the_same(
    name: str, tmp_path: Path
) -> None:
    seed()
    figure = CASES[name]()
    assert style.save(figure, tmp_path / "new" / "a.png", svg=True) == tmp_path / "new" / "a.png"
    assert {file.name for file in (tmp_path / "new").iterdir()} == {"a.png", "a.svg"}
    with Image.open(tmp_path / "new" / "a.png") as image:
        shades = np.asarray(image.convert("L"))
    assert shades.shape[1] > 400 and shades.std() > 5
    check_nothing_is_cut_off(figure)
    for axes in figure.axes:
        place = axes.get_subplotspec()
        assert place is not None
        assert axes.get_xlabel() or not place.is_last_row()
        assert axes.get_ylabel() or not place.is_first_col()
    drawn = "".join(ElementTree.parse(tmp_path / "new" / "a.svg").getroot().itertext())
    assert figure.axes[-1].get_xlabel() in drawn
    if name in TWICE:
        seed()
        style.save(CASES[name](), tmp_path / "again" / "a.png", svg=True)
        for file in (tmp_path / "new").iterdir():
            assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_a_figure_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"old")
    figure = Figure()
    figure.text(0, 0, "$\\undefined$")
    with pytest.raises(ValueError, match="undefined"):
        style.save(figure, tmp_path / "a.png", svg=True)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.png", b"old")]
    style.save(calibration(), tmp_path / "a.png")
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"]


def test_drawing_leaves_the_settings_of_matplotlib_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    style.save(table(["noise"]), tmp_path / "a.png")
    assert dict(matplotlib.rcParams) == before
    assert matplotlib.get_backend().lower() == "agg"


def test_calibration_shows_the_bins() -> None:
    every = Bins(np.array([90, 0, 10]), np.array([0.1, 0, 0.9]), np.array([0.2, 0, 0.4]))
    top = Bins(np.array([0, 0, 1]), np.array([0, 0, 0.75]), np.array([0, 0, 1.0]))
    scaled = Bins(np.array([0, 2, 0]), np.array([0, 0.5, 0]), np.array([0, 0.5, 0]))
    figure = evaluation_plots.calibration(every, top, "digits", scaled)
    left, right, left_counts, right_counts = figure.axes
    assert points(left) == pytest.approx(np.array([(0.1, 0.2), (0.9, 0.4)]))
    assert points(right) == [(0.75, 1), (0.5, 0.5)]
    assert {line.get_markerfacecolor() for line in right.lines if line.get_marker() == "o"} == {BLUE, "white"}
    ends = [segment[:, 1] for segment in left.collections[0].get_segments()]  # type: ignore[attr-defined]
    spread = every.errors[every.count > 0]
    assert np.ptp(ends, axis=1) == pytest.approx(2 * spread)
    assert left_counts.patches[0].get_data().values.tolist() == [90, 0, 10]  # type: ignore[attr-defined]
    assert [patch.get_data().values.tolist() for patch in right_counts.patches] == [[0, 0, 1], [0, 2, 0]]  # type: ignore[attr-defined]
    assert left_counts.get_yscale() == right_counts.get_yscale() == "symlog"
    assert {
        "digits",
        "posteriors of all classes, ECE 14.00 %",
        "most probable class, ECE 25.00 %",
        "after temperature scaling, ECE 0.00 %",
    } <= set(written(figure))


def test_red_parts_and_numbers_are_the_shares_of_held_out_images_in_the_zone() -> None:
    held_out = skewed()
    figure = zones(held_out, sets(2), alpha=0.1)
    for axes, test in zip(figure.axes, detectors(held_out).values(), strict=True):
        low, high = test.accepted(0.1)
        below, above = (float((held_out < low).mean()), float((held_out > high).mean()))
        (accepted,), (rejected,) = steps(axes, BLUE), steps(axes, VERMILION)
        assert area(rejected) == pytest.approx(below + above)
        assert area(accepted) == pytest.approx(1 - below - above)
        shown = [text for text in written(axes) if text.endswith("%")]
        wanted = [(low, below), (high, above)]
        assert shown == [f"{100 * share:.3g} %" for end, share in wanted if math.isfinite(end)]
        start, end = axes.get_xlim()
        spans = [patch for patch in axes.patches if type(patch).__name__ == "Rectangle"]
        widths = sorted(span.get_width() for span in spans)  # type: ignore[attr-defined]
        assert widths == pytest.approx(sorted((max(0.0, low - start), max(0.0, end - high))), abs=1e-6)
    assert [axes.get_title("left") for axes in figure.axes] == ["one-tailed", "typicality", "two-tailed"]
    assert {"set 0", "set 1"} <= set(written(figure))


def test_far_sets_do_not_squeeze_the_held_out_images_and_are_said_to_be_beyond_the_axis() -> None:
    held_out = normal(999)
    far = np.concatenate((np.full(60, -math.inf), np.full(30, 1e30), np.zeros(10)))
    figure = zones(held_out, {"far": far, "near": held_out + 4})
    low, high = figure.axes[0].get_xlim()
    bulk = np.quantile(held_out, [0.05, 0.95])
    assert low < bulk[0] and np.quantile(held_out + 4, 0.95) < high
    assert high - low < 6 * (bulk[1] - bulk[0])
    assert "far (60 % further left, 30 % further right)" in written(figure)
    assert any("outermost bins" in text for text in written(figure))
    assert not any("outermost" in text for text in written(zones(held_out.clip(-2, 2), {})))


def test_a_threshold_beyond_the_axis_has_an_arrow() -> None:
    held_out = np.concatenate((normal(97), [-1e6, -1e5]))
    figure = zones(held_out, {}, alpha=0.02)
    assert "← 1.01 %" in written(figure.axes[0])
    assert figure.axes[0].get_xlim()[0] > -20


def test_equal_values_have_a_zone_around_them() -> None:
    axes = zones(np.zeros(50), {"empty": np.empty(0)}).axes[2]
    (accepted,), (rejected,) = steps(axes, BLUE), steps(axes, VERMILION)
    assert (area(accepted), area(rejected)) == pytest.approx((1, 0))
    assert [text for text in written(axes) if text.endswith("%")] == ["0 %", "0 %"]


def test_roc_curves_are_the_given_ones_and_told_apart() -> None:
    found, aucs = curves(5, 13, images=2000)
    kinds = {f"test {t}": ("control", "paper", "new", "classifier")[t % 4] for t in range(13)}
    figure = evaluation_plots.roc_curves(found, aucs, kinds)
    assert [axes.get_title() for axes in figure.axes] == list(found)
    order = sorted(kinds, key=lambda test: ("paper", "new", "classifier", "control").index(kinds[test]))
    for axes, by_test in zip(figure.axes, aucs.values(), strict=True):
        diagonal, *lines = axes.lines
        assert diagonal.get_linestyle() == ":"
        assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 13
        for test, line in zip(order, lines, strict=True):
            x, y = np.asarray(line.get_xydata()).T
            assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)
            assert len(x) <= 500
            assert np.trapezoid(y, x) == pytest.approx(by_test[test], abs=0.005)
    means = {test: sum(by_test[test] for by_test in aucs.values()) / 5 for test in order}
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [f"{test}: {100 * auc:.1f} %" for test, auc in means.items()]
    assert {axes.get_xlabel() for axes in figure.axes[2:]} == {"false positive rate"}
    figure.draw_without_rendering()
    check_nothing_is_cut_off(figure)


def test_tests_without_kinds_are_told_apart_too() -> None:
    figure = evaluation_plots.roc_curves(*curves(1, 13))
    lines = figure.axes[0].lines[1:]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 13


def test_the_table_has_every_auc_by_kind_and_the_best_in_bold() -> None:
    aucs = {
        "energy": {"noise": 0.5, "SVHN": 0.12345},
        "one-tailed": {"noise": 0.25, "SVHN": 0.9},
        "code-length": {"noise": 0.75},
        "two-tailed": {"noise": 1.0, "SVHN": 0.899},
        "odd": {"SVHN": 0.5},
    }
    (axes,) = evaluation_plots.auc_table(aucs, KINDS).axes
    tests = [label.get_text() for label in axes.get_yticklabels()]
    columns = [label.get_text() for label in axes.get_xticklabels()]
    assert tests == ["one-tailed", "two-tailed", "energy", "code-length", "odd"]
    assert columns == ["noise", "SVHN"]
    cells = {text.get_position(): text for text in axes.texts if text.get_horizontalalignment() == "center"}
    assert len(cells) == 10
    for (x, y), cell in cells.items():
        auc = aucs[tests[int(y)]].get(columns[int(x)])
        assert cell.get_text() == ("–" if auc is None else f"{100 * auc:.1f}")
        assert (cell.get_fontweight() == "bold") == (auc in (0.9, 1.0))
    groups = [
        (text.get_text(), text.get_position()[1])
        for text in axes.texts
        if text.get_horizontalalignment() == "left"
    ]
    assert groups == [("paper", 0.5), ("classifier", 2), ("control", 3), ("", 4)]
    (image,) = axes.images
    low, high = image.get_clim()
    assert low is not None and high is not None and (low + high) / 2 == 0.5


def test_the_trade_off_has_each_beta_in_its_marker() -> None:
    figure = comparison_plots.trade_off(models(*PAPER))
    by_beta = sorted((row for row in PAPER if row[0]), key=lambda row: row[0] or 0)
    for axes, x, y, scale, (resnet, flow) in zip(
        figure.axes, (1, 3), (2, 4), (1, 100), ((7.87, -3.11), (77.4, 2.59)), strict=True
    ):
        places = [(row[x], scale * float(row[y] or 0)) for row in by_beta]
        assert points(axes) == pytest.approx(np.array(places, dtype=float))
        assert np.asarray(axes.lines[0].get_xydata()) == pytest.approx(np.array(places, dtype=float))
        betas = [text for text in axes.texts if text.get_color() == "white"]
        assert [text.get_text() for text in betas] == ["1", "2", "4", "8", "16", "32", "∞"]
        assert np.array([text.xy for text in betas]) == pytest.approx(np.array(places, dtype=float))  # type: ignore[attr-defined]
        vertical, horizontal = axes.lines[-2:]
        assert list(vertical.get_xdata()) == [flow, flow]  # type: ignore[arg-type]
        assert list(horizontal.get_ydata()) == pytest.approx([resnet, resnet])  # type: ignore[arg-type]
        assert {"β = 0", "ResNet-50"} <= set(written(axes))
        low, high = axes.get_xlim()
        assert all(low < float(place) < high for place in (flow, *(px for px, _ in places)))  # type: ignore[arg-type]


def test_the_trade_off_says_whether_accuracies_are_of_ten_crops() -> None:
    for crops, said in ((1, False), (10, True)):
        _, right = comparison_plots.trade_off(models(*PAPER, crops=crops)).axes
        assert ("ten crops" in right.get_ylabel()) == said


def test_lines_that_are_close_share_a_label() -> None:
    rows = models(*PAPER) + models((None, None, 7.88, None, 0.70), name="ResNet-18")
    left, right = comparison_plots.trade_off(rows).axes
    assert "ResNet-18\nResNet-50" in written(left)  # losses of 7.88 and 7.87
    assert {"ResNet-18", "ResNet-50"} <= set(written(right))


def test_every_column_of_calibration_curves_has_an_axis_with_numbers() -> None:
    posterior, labels = posteriors()
    bins = all_bins(posterior, labels), top_bins(posterior, labels)
    figure = comparison_plots.calibration_curves({f"model {i}": bins for i in range(7)})
    labelled = [bool(axes.get_xlabel()) for axes in figure.axes]
    assert labelled == [False, False, False, True, True, True, True, False]


def test_a_trade_off_of_nothing_but_lines() -> None:
    for axes in comparison_plots.trade_off(models(PAPER[1], PAPER[5])).axes:
        assert {"β = 0", "ResNet-50"} <= set(written(axes))
        assert not points(axes)


def test_curves_of_a_run() -> None:
    rows = [{"epoch": i, "train_accuracy": i / 9, "val_accuracy": i / 10} for i in range(1, 4)]
    (axes,) = training_plots.curves(rows).axes
    assert [list(line.get_ydata()) for line in axes.lines] == [  # type: ignore[arg-type]
        [row[key] for row in rows] for key in ("train_accuracy", "val_accuracy")
    ]
    assert (axes.get_xlabel(), axes.get_title()) == ("epoch", "accuracy")


def test_figures_of_the_demo(tmp_path: Path) -> None:
    images = RANDOM.integers(256, size=(2, 1, 8, 8), dtype=np.uint8)
    posterior = np.array([[0.25, 0.75], [0.875, 0.125]])
    figure = demo_plots.opinions({"digits": (images, posterior, np.array([0.5, 0.01]))}, shown=2)
    assert {"1: 75 %", "0: 88 %", "p = 0.50", "p = 0.01", "digits"} <= set(written(figure))
    sure, unsure = (axes.xaxis.label.get_color() for axes in figure.axes)
    assert unsure == VERMILION != sure
    style.save(figure, tmp_path / "a.png", svg=True)
