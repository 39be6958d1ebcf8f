"""Class similarity is what the paper's integrals, a simulation and the explicit means say."""

import math
from collections.abc import Callable
from itertools import combinations

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from mpmath import mp, mpf

from candid import CandidError, ClassifierConfig, FlowConfig, GenerativeClassifier, ResNet, ResNetConfig
from candid._support.numbers import Array
from candid.explanations.similarity import (
    Similarity,
    chosen_classes,
    expected_uncertainty,
    log_expected_uncertainty,
    similarity,
)
from candid.models.flow.mixture import LatentMixture
from candid.reports.plots.explanations import similarity as draw
from candid.reports.plots.explanations import similarity_groups
from tests.helpers import LargestTensor, randomise

LONG = "a class, whose name is much too long, and costs $5 or $\\undefined$"
IMAGENET = ["tench, Tinca tinca", "cat", "tiger cat", "dog", "crane", "crane", "a*b", "7"]


def model_with(mixture: LatentMixture, names: list[str] | None = None) -> GenerativeClassifier:
    flow = FlowConfig(1, 2, 2, blocks=(1,), widths=(1,), entry="none", pointwise_width=1)
    model = GenerativeClassifier(ClassifierConfig(flow, mixture.classes), names)
    model.mixture = mixture
    return model


def some_model(
    classes: int, rank: int | None = 3, seed: int = 0, strength: float = 5
) -> GenerativeClassifier:
    torch.manual_seed(seed)
    return model_with(randomise(LatentMixture(classes, 3, 12, rank), seed, strength))


def grouped(groups: int = 3, each: int = 4) -> GenerativeClassifier:
    """Class y is in the group y % groups; groups are 10 apart, classes of a group 1."""
    mixture = LatentMixture(groups * each, groups * (each + 1), 64, rank=1)
    with torch.no_grad():
        mixture.prototypes.zero_()
        mixture.mean.zero_()
        for y in range(groups * each):
            mixture.mean[y, y % groups] = 10 / math.sqrt(2)
            mixture.mean[y, groups + y] = 1 / math.sqrt(2)
    return model_with(mixture)


def rho_du(u: mpf, d: mpf) -> mpf:
    """The paper's rho(c) dc / du with c = 1 / (1 + exp(-u)), where c - c^2 keeps its digits."""
    c_minus_square = 1 / (2 + mpmath.exp(u) + mpmath.exp(-u))
    return c_minus_square ** mpf(-1.5) * mpmath.exp(-(u**2) / (2 * d**2)) * c_minus_square


def papers_uncertainty(distance: float) -> tuple[mpf, mpf]:
    """1 - C-bar and A, by quadrature of the paper's integrals in the logit u of c."""
    d = mpf(distance)
    peak = d**2 / 2
    around = [peak + k * d for k in (-9, -4, 0, 4, 9) if peak + k * d > 0]
    near = [k * min(d, mpf(2)) for k in (2, 8, 20, 60)]
    whole = mpmath.quad(lambda u: rho_du(u, d), [0, *around])
    doubt = mpmath.quad(lambda u: rho_du(u, d) / (1 + mpmath.exp(u)), [0, *near])
    return doubt / whole, whole


@pytest.mark.parametrize("distance", [1e-3, 0.1, 1, 3.8, 10, 40, 100])
def test_the_expected_uncertainty_is_that_of_the_papers_integrals(distance: float) -> None:
    with mp.workdps(20):
        truth, normalisation = papers_uncertainty(distance)
        d = mpf(distance)
        closed = d * mpmath.sqrt(2 * mpmath.pi) * mpmath.exp(d**2 / 8)
        assert abs(normalisation / closed - 1) < 1e-14  # the A that docs/theory.md derives
        found, log = float(expected_uncertainty(distance)), float(log_expected_uncertainty(distance))
        assert abs(found - truth) < 1e-14
        assert abs(log / mpmath.log(truth) - 1) < 1e-14
        if distance < 75:
            assert abs(found / truth - 1) < 1e-13


@pytest.mark.parametrize("distance", [0.5, 1, 2.5, 3.8])
def test_the_expected_uncertainty_is_that_of_the_papers_integral_over_c(distance: float) -> None:
    def rho(c: mpf) -> mpf:
        return (c - c**2) ** mpf(-1.5) * mpmath.exp(-(mpmath.log(1 / c - 1) ** 2) / (2 * mpf(distance) ** 2))

    with mp.workdps(35):
        points = [mpf("0.5"), *(1 - mpf(10) ** -k for k in (1, 3, 7, 12, 18, 25))]
        confidence = mpmath.quad(lambda c: c * rho(c), points) / mpmath.quad(rho, points)
        assert abs(float(expected_uncertainty(distance)) - (1 - confidence)) < 1e-10


def test_the_uncertainty_at_both_ends() -> None:
    assert float(expected_uncertainty(0)) == 0.5
    assert float(log_expected_uncertainty(0)) == pytest.approx(-math.log(2), rel=1e-15)
    assert float(expected_uncertainty(100)) == 0
    assert float(log_expected_uncertainty(100)) == pytest.approx(-1254.8313611, rel=1e-10)
    assert float(expected_uncertainty(math.inf)) == 0
    assert expected_uncertainty(np.zeros((2, 3))).shape == (2, 3)
    assert expected_uncertainty(np.ones(1, np.float32)).dtype == np.float64


@pytest.mark.parametrize("distance", [0.3, 1.7, 3.8])
def test_the_uncertainty_is_that_of_two_gaussians(distance: float, generator: torch.Generator) -> None:
    count, dimensions = 200_000, 5
    means = torch.randn(2, dimensions, generator=generator, dtype=torch.float64)
    means[1] = means[0] + distance * torch.nn.functional.normalize(means[1], dim=0)
    y = torch.randint(0, 2, (count,), generator=generator)
    z = means[y] + torch.randn(count, dimensions, generator=generator, dtype=torch.float64)
    posterior = (-0.5 * torch.cdist(z, means).square()).softmax(1)
    doubt = 1 - posterior.amax(1)
    truth = float(expected_uncertainty(distance))
    assert abs(float(doubt.mean()) - truth) < 5 * float(doubt.std()) / math.sqrt(count)
    errors = float((posterior.argmax(1) != y).double().mean())
    assert abs(errors - truth) < 5 * math.sqrt(truth / count)


@settings(max_examples=50, deadline=None)
@given(near=st.floats(0, 1e4), step=st.floats(0, 1e4))
def test_the_uncertainty_falls_from_a_half_to_zero(near: float, step: float) -> None:
    both = np.array([near, near + step])
    uncertainty, logs = expected_uncertainty(both), log_expected_uncertainty(both)
    assert 0 <= uncertainty[1] <= uncertainty[0] <= 0.5
    assert logs[1] <= logs[0] <= 0
    np.testing.assert_allclose(np.exp(logs), uncertainty, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("function", [expected_uncertainty, log_expected_uncertainty])
@pytest.mark.parametrize("bad", [-1e-9, math.nan, -math.inf])
def test_what_is_no_distance_is_refused(function: Callable[[Array | float], Array], bad: float) -> None:
    with pytest.raises(CandidError, match=f"from 0 on, not {bad}"):
        function(bad)
    with pytest.raises(CandidError, match=f"from 0 on, not {bad}"):
        function(np.array([[1, bad]]))


@settings(max_examples=20, deadline=None)
@given(
    classes=st.integers(2, 15),
    rank=st.sampled_from([None, 1, 4]),
    seed=st.integers(0, 99),
    order=st.sampled_from(["clustering", "given"]),
)
def test_distances_are_those_of_the_explicit_means(
    classes: int, rank: int | None, seed: int, order: str
) -> None:
    model = some_model(classes, rank, seed)
    found = similarity(model, order=order)  # type: ignore[arg-type]
    assert sorted(found.classes) == list(range(classes))
    assert found.names == tuple(model.class_names[c] for c in found.classes)
    means = model.mixture.double().means(torch.tensor(found.classes)).detach()
    truth = torch.linalg.vector_norm(means[:, None] - means, dim=2)
    np.testing.assert_allclose(found.distances, truth, rtol=1e-7, atol=1e-7)
    assert np.array_equal(found.distances, found.distances.T) and not found.distances.diagonal().any()
    assert np.array_equal(found.uncertainty, expected_uncertainty(found.distances))
    assert (found.uncertainty.diagonal() == 0.5).all()
    pairs = found.closest_pairs(7)
    by_number = {c: i for i, c in enumerate(found.classes)}
    everything = sorted(
        float(found.distances[by_number[a], by_number[b]]) for a, b in combinations(range(classes), 2)
    )
    assert [pair.distance for pair in pairs] == everything[:7]
    for pair in pairs:
        assert pair.first < pair.second
        assert pair.distance == found.distances[by_number[pair.first], by_number[pair.second]]
        assert pair.uncertainty == float(expected_uncertainty(pair.distance))
    assert len({pair[:2] for pair in pairs}) == len(pairs) == min(7, classes * (classes - 1) // 2)


def test_clustering_brings_similar_classes_together_and_given_leaves_them() -> None:
    model = grouped()
    found = similarity(model)
    assert [{c % 3 for c in found.classes[i : i + 4]} for i in (0, 4, 8)] in (
        [[{a}, {b}, {3 - a - b}] for a in range(3) for b in range(3) if a != b]
    )
    assert [pair.distance for pair in found.closest_pairs(18)] == pytest.approx([1] * 18)
    assert {(pair.second - pair.first) % 3 for pair in found.closest_pairs(18)} == {0}
    far = [pair.distance for pair in found.closest_pairs(10**6)[18:]]
    assert far == pytest.approx([math.sqrt(101)] * 48)
    assert similarity(model, order="given").classes == tuple(range(12))
    chosen = similarity(model, [7, 0, 4, 5], order="given")
    assert chosen.classes == (7, 0, 4, 5)
    assert chosen.distances[0].round().tolist() == [0, 10, 1, 10]
    assert [c % 3 for c in similarity(model, "7,0,4,3").classes] in ([0, 0, 1, 1], [1, 1, 0, 0])


def test_a_frozen_model_has_the_same_similarity() -> None:
    model = some_model(5).eval()
    first, second = similarity(model), similarity(model.frozen())
    assert first.classes == second.classes
    assert np.array_equal(first.distances, second.distances)


def test_no_classes_by_dimensions_matrix_is_ever_formed() -> None:
    model = model_with(LatentMixture(200, 4, 2000, rank=3))
    with LargestTensor() as largest:
        similarity(model)
    assert largest.numel <= 200 * 200


def test_a_thousand_classes() -> None:
    model = model_with(LatentMixture(1000, 16, 400, rank=8))
    found = similarity(model)
    assert sorted(found.classes) == list(range(1000))
    distances = found.distances + np.diag([math.inf] * 1000)
    assert found.closest_pairs(1)[0].distance == distances.min()


def test_measured_uncertainties_stand_where_the_expected_ones_do() -> None:
    model = some_model(4)
    measured = np.random.default_rng(1).random((4, 4)) / 2
    measured = (measured + measured.T) / 2
    measured[0, 2] = measured[2, 0] = math.nan
    found = similarity(model, [3, 0, 2], order="given", measured=measured)
    assert found.measured is not None
    pairs = {(pair.first, pair.second): pair for pair in found.closest_pairs()}
    assert pairs[0, 2].measured is None and not pairs[0, 2].differs
    for y in (0, 2):
        expected = pairs[y, 3].uncertainty
        assert pairs[y, 3].measured == float(measured[y, 3])
        ratio = float(measured[y, 3]) / expected
        assert pairs[y, 3].differs == (max(ratio, 1 / ratio) > 1.5)
    assert similarity(model).measured is None
    panel, axes, _ = checked(draw(found)).axes
    assert (panel.get_title(), axes.get_title()) == ("expected", "measured on images")
    assert panel.images[0].get_clim() == axes.images[0].get_clim()
    cells = {text.get_position(): float(text.get_text()) for text in axes.texts}
    for row, column in ((0, 1), (1, 0), (0, 2), (1, 2)):
        shown = found.pair(row, column).measured
        assert (shown is None) == ((column, row) not in cells)
        if shown is not None:
            assert cells[column, row] == pytest.approx(100 * shown, rel=0.006)


def test_distances_are_those_measured_on_images_if_there_are_any() -> None:
    model = some_model(3)
    means = model.geometry.distances()
    assert similarity(model).of_means
    swapped = means[::-1, ::-1]
    found = similarity(model, order="given", distances=swapped)
    assert not found.of_means and (found.distances == 0.5 * (swapped + swapped.T)).all()
    assert found.pair(0, 1).distance == found.distances[0, 1]
    unknown = swapped.copy()
    unknown[0, 1] = math.nan
    assert similarity(model, order="given", distances=unknown).of_means


def test_what_has_no_similarity_is_refused() -> None:
    net = ResNet(ResNetConfig(height=8, width=8, classes=3, blocks=(1,), widths=(4,), stem="3x3"))
    with pytest.raises(CandidError, match="from a ResNet"):
        similarity(net)
    model = some_model(3)
    with pytest.raises(CandidError, match="at least two"):
        similarity(model, "1,1")
    with pytest.raises(CandidError, match="'clustering' or 'given', not 'alphabet'"):
        similarity(model, order="alphabet")  # type: ignore[arg-type]
    with pytest.raises(CandidError, match="at least 1, not 0"):
        similarity(model).closest_pairs(0)
    with torch.no_grad():
        model.mixture.mean[0, 0] = math.nan
    with pytest.raises(CandidError, match="infinite or NaN"):
        similarity(model, [1, 2])


@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        ("dog", [3]),
        (" dog , cat,", [3, 1]),
        ("*cat,3,dog,c*", [1, 2, 3, 4, 5]),
        ("dog,tench, Tinca tinca,cat", [3, 0, 1]),
        ("tench*", [0]),
        ("[dt]*", [0, 2, 3]),
        ("crane", [4, 5]),
        ("5,crane", [5, 4]),
        ("a*b", [6]),
        ("7", [7]),
        ("06", [6]),
        (["7", "tench, Tinca tinca", 0, 6, "?at"], [7, 0, 6, 1]),
        ([7], [7]),
        (("cat", "dog"), [1, 3]),
    ],
)
def test_classes_are_chosen_by_name_number_and_pattern(
    spec: str | list[str | int], chosen: list[int]
) -> None:
    assert chosen_classes(IMAGENET, spec) == chosen


@settings(max_examples=50, deadline=None)
@given(names=st.lists(st.text("ab,* 1[-", min_size=1), min_size=1, unique=True), data=st.data())
def test_a_list_of_exact_names_is_always_understood(names: list[str], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(names) - 1), min_size=1, unique=True))
    assert chosen_classes(names, [names[c] for c in chosen]) == chosen


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dgo", "The model has no class 'dgo': did you mean 'dog'?"),
        ("tench,dog", "The model has no class 'tench': choose one of tench, Tinca tinca."),
        ("Tiger Cat", "The model has no class 'Tiger Cat': did you mean 'tiger cat'?"),
        ("z*", "The model has no class 'z*': choose one of 7, a*b, cat, crane, crane, dog, tench, "),
        ("cat,8", "The model has no class 8: class numbers go from 0 to 7."),
        ("-1", "The model has no class -1: class numbers go from 0 to 7."),
        ([-1], "The model has no class -1: class numbers go from 0 to 7."),
        (" , ", "No classes are chosen: "),
        ([], "No classes are chosen: "),
    ],
)
def test_an_unknown_class_is_refused(spec: str | list[str | int], message: str) -> None:
    with pytest.raises(CandidError) as caught:
        chosen_classes(IMAGENET, spec)
    assert str(caught.value).startswith(message)


def test_the_hint_does_not_list_a_thousand_names() -> None:
    names = [f"kind {i}" for i in range(1000)]
    with pytest.raises(CandidError, match="choose from its 1000 names, such as 'kind 0'"):
        chosen_classes(names, "zebra")
    with pytest.raises(CandidError, match="did you mean 'kind 71"):
        chosen_classes(names, "knd 71")


def checked(figure: Figure) -> Figure:
    """Drawn, with nothing cut off."""
    figure.draw_without_rendering()
    (width, height), box = figure.get_size_inches(), figure.get_tightbbox()
    assert box.x0 > -0.03 and box.y0 > -0.03 and box.x1 < width + 0.03 and box.y1 < height + 0.03
    return figure


def named(classes: int, name: str, scale: float = 5) -> Similarity:
    names = [f"{i} {name}" for i in range(classes)]
    return similarity(model_with(some_model(classes, strength=scale).mixture, names))


@pytest.mark.parametrize(
    ("classes", "name", "scale"),
    [(2, "cat", 5), (4, LONG, 500), (10, "cat", 5), (40, LONG, 5), (60, LONG, 5)],
)
def test_the_figure_shows_the_distances_under_the_names(classes: int, name: str, scale: float) -> None:
    found = named(classes, name, scale)
    figure = checked(draw(found, LONG))
    axes, bar = figure.axes
    (image,) = axes.images
    shown = np.ma.filled(image.get_array(), math.nan)  # type: ignore[arg-type]
    assert np.isnan(shown.diagonal()).all()
    off = ~np.eye(classes, dtype=bool)
    assert (shown[off] == found.distances[off]).all()
    low, high = image.get_clim()
    assert low <= shown[off].min() and shown[off].max() <= high
    for axis in (axes.xaxis, axes.yaxis):
        assert len(axis.get_ticklocs()) == min(classes, 40)
        for label, tick in zip(axis.get_ticklabels(), axis.get_ticklocs(), strict=True):
            assert len(label.get_text()) <= 24
            assert found.names[int(tick)].startswith(label.get_text().rstrip("…"))
    cells = [text for text in axes.texts if text.get_text()]
    assert len(cells) == (classes * (classes - 1) if classes <= 12 else 0)
    (other,) = bar.child_axes
    assert "standard deviations" in bar.get_ylabel() and "(%)" in other.get_ylabel()
    ticks = bar.get_yticks()
    assert len(ticks) >= 3 and low <= ticks.min() and ticks.max() <= high
    assert other.get_yticks().tolist() == ticks.tolist()
    for label, tick in zip(other.get_yticklabels(), ticks, strict=True):
        check_percent(label.get_text(), tick)
    for cell in cells:
        column, row = cell.get_position()
        check_percent(cell.get_text(), float(found.distances[int(row), int(column)]))


def check_percent(text: str, distance: float) -> None:
    log10 = float(log_expected_uncertainty(distance)) / math.log(10) + 2
    if text.startswith("$10^{"):
        assert log10 < -2.9
        assert abs(int(text.removeprefix("$10^{").removesuffix("}$")) - log10) <= 0.5
    else:
        assert float(text) == pytest.approx(10**log10, rel=0.006)


def test_many_classes_in_their_own_order_have_numbers() -> None:
    found = similarity(model_with(LatentMixture(300, 3, 12, rank=2)), order="given")
    axes = checked(draw(found)).axes[0]
    assert axes.get_xlabel() == axes.get_ylabel() == "class number"
    assert {"0", "100", "200"} <= {label.get_text() for label in axes.get_xticklabels()}


def test_classes_at_one_place_can_be_drawn() -> None:
    model = some_model(3)
    with torch.no_grad():
        model.mixture.mean.zero_()
        model.mixture.prototypes.zero_()
    checked(draw(similarity(model)))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_groups_share_a_colour_scale(count: int) -> None:
    groups = {f"group {k}": named(3 + 9 * k, LONG, 1 + 5 * k) for k in range(count)}
    *panels, bar = checked(similarity_groups(groups)).axes
    assert [axes.get_title() for axes in panels] == list(groups)
    limits = {axes.images[0].get_clim() for axes in panels}
    off = np.concatenate([g.distances[~np.eye(len(g.classes), dtype=bool)] for g in groups.values()])
    assert limits == {(float(off.min()), float(off.max()))}
    assert bar.child_axes
