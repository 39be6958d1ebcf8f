"""Paths of attacks in a plane: they say what the model says, and the figure shows them."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.contour import QuadContourSet
from matplotlib.figure import Figure
from torch import Tensor

from candid import CandidError, GenerativeClassifier, ResNet, ResNetConfig
from candid._support.numbers import Array
from candid.models.decision_plane import DecisionPlane, plane_through
from candid.models.flow.config import preset
from candid.models.flow.means import planar_model
from candid.reports.plots.trajectories import trajectories as draw
from candid.robustness.attacks.trajectories import AttackPath, Trajectories, nearest_classes, trajectories
from tests.helpers import randomise
from tests.training.runs import MODEL

PRIORS = (0.05, 0.1, 0.15, 0.2, 0.1, 0.05, 0.05, 0.1, 0.15, 0.05)


def digits_model(**changes: Any) -> GenerativeClassifier:
    """Untrained, with means of about a trained one's size, in float64."""
    model = GenerativeClassifier(preset("digits", **(MODEL | changes)))
    return randomise(model, strength=0.5).double().eval()


MODELS: dict[tuple[float, ...] | None, GenerativeClassifier] = {
    priors: digits_model(priors=priors) for priors in (None, PRIORS)
}
TEN, TEN_IN_SINGLE = MODELS[None], digits_model().float()


def eight_bit_images(n: int = 2, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 1, 8, 8), generator=random, dtype=torch.uint8)


def margins_in_the_plane(found: Trajectories, path: AttackPath) -> Array:
    logits = found.plane.logits(path.points)
    others = [i for i, y in enumerate(found.classes) if y != found.target]
    return logits[:, found.classes.index(found.target)] - logits[:, others].max(1)


@settings(deadline=None, max_examples=5)
@given(
    classes=st.lists(st.integers(0, 9), min_size=2, max_size=10, unique=True),
    priors=st.sampled_from([None, PRIORS]),
    kappa=st.sampled_from([0.0, 0.01, 1.0, math.inf]),
    seed=st.integers(0, 99),
)
def test_a_planar_model_decides_where_the_path_is_drawn(
    classes: list[int], priors: tuple[float, ...] | None, kappa: float, seed: int
) -> None:
    model = planar_model(MODELS[priors], classes)
    images = eight_bit_images(seed=seed)
    found = trajectories(model, images, len(classes) - 1, kappa=kappa, c=1, steps=15)
    assert found.exact and found.classes == tuple(range(len(classes)))
    for i, path in enumerate(found.paths):
        np.testing.assert_allclose(margins_in_the_plane(found, path), path.margins, rtol=1e-6, atol=1e-6)
        ends = torch.stack((images[i].double() / 255, torch.from_numpy(path.attacked)))
        np.testing.assert_allclose(ends[0], path.original, rtol=1e-7)
        points = found.plane.project(model.latent(ends).detach().numpy())
        np.testing.assert_allclose(points, path.points[[0, -1]], rtol=1e-6, atol=1e-6)
        posterior = model.posterior(ends).detach()
        assert path.posterior == pytest.approx(float(posterior[1, found.target]), rel=1e-6)
        assert path.label == path.predicted == int(posterior[0].argmax())
        assert path.distance == pytest.approx(float((ends[1] - ends[0]).norm()))
        reached = path.margins > 0 if math.isinf(kappa) else path.margins >= kappa
        assert np.array_equal(path.fooled, reached)
        assert not path.fooled[: path.first].any() and path.fooled[path.first : path.first + 1].all()
        assert bool(path.fooled[-1]) == bool(path.fooled.any())


@pytest.mark.parametrize("classes", [2, 3])
def test_two_or_three_means_lie_in_the_fitted_plane(classes: int) -> None:
    model, images = digits_model(classes=classes), eight_bit_images()
    weak = trajectories(model, images, 1, c=0.1, steps=30, learning_rate=0.1)
    assert not any(path.fooled.any() or path.first < len(path.fooled) for path in weak.paths)
    found = trajectories(model, images, 1, labels=[0, 0], steps=30, learning_rate=0.1)
    assert not found.exact and set(found.classes) == set(range(classes))
    for path in found.paths:
        np.testing.assert_allclose(margins_in_the_plane(found, path), path.margins, rtol=1e-6, atol=1e-6)
        assert path.label == 0 and path.fooled[-1] and 0 < path.distance < 4


@settings(deadline=None, max_examples=10)
@given(
    classes=st.lists(st.integers(0, 9), min_size=2, max_size=7, unique=True),
    priors=st.sampled_from([None, PRIORS]),
)
def test_what_a_fitted_plane_leaves_out(classes: list[int], priors: tuple[float, ...] | None) -> None:
    """No plane is nearer to the means, and margins lack what the docstring says."""
    model = MODELS[priors]
    plane = plane_through(model, classes)
    means = model.mixture.means(torch.tensor(classes)).detach().numpy()
    np.testing.assert_allclose(plane.axes @ plane.axes.T, np.eye(2), rtol=1e-7, atol=1e-7)
    beyond = means - plane.origin - plane.means @ plane.axes
    least = np.square(np.linalg.svd(means - means.mean(0), compute_uv=False)[2:]).sum()
    np.testing.assert_allclose(np.square(beyond).sum(), least, rtol=1e-7, atol=1e-7)
    assert (plane.means.max(0) >= np.abs(plane.means).max(0) - 1e-12).all()
    z = 5 * np.random.default_rng(0).standard_normal((6, 64))
    logits = model.mixture.logits(torch.from_numpy(z)).detach().numpy()[:, classes]
    inside = plane.logits(plane.project(z))
    left_out = (z - plane.origin) @ beyond.T - np.square(beyond).sum(1) / 2
    for i in range(len(classes)):
        margins, said, lost = (each - each[:, i : i + 1] for each in (logits, inside, left_out))
        np.testing.assert_allclose(margins, said + lost, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 999), target=st.integers(0, 9), far=st.sampled_from([0.0, 300.0]))
def test_the_nearest_classes(seed: int, target: int, far: float) -> None:
    """Against each distance in float64, also where |z|^2 is 1e5 and the model has float32."""
    random = torch.Generator().manual_seed(seed)
    latents = [3 * torch.randn(n, 64, generator=random, dtype=torch.float64) for n in (4, 70)]
    means = TEN.mixture.means(torch.arange(10)).detach()
    away = torch.randn(64, generator=random, dtype=torch.float64)
    away -= torch.linalg.lstsq(means.T, away[:, None]).solution.T[0] @ means  # the same for every class
    latents = [z + far * away / away.norm() for z in latents]
    closeness = [-math.inf] * 10
    for z in torch.cat(latents):
        squares = [float((z - mean).square().sum()) for mean in means]
        for y in range(10):
            others = min(square for k, square in enumerate(squares) if k != y)
            closeness[y] = max(closeness[y], others - squares[y])
    ranked = sorted((y for y in range(10) if y != target), key=lambda y: -closeness[y])
    assert nearest_classes(TEN, [z.numpy() for z in latents], target) == (target, *ranked[:4])
    single = nearest_classes(TEN_IN_SINGLE, [z.float().numpy() for z in latents], target)
    assert single[0] == target and len(set(single)) == 5
    for y, expected in zip(single[1:], ranked, strict=False):
        assert closeness[y] == pytest.approx(closeness[expected], abs=1e-2)


def test_bad_input_gets_a_sentence() -> None:
    images = eight_bit_images()
    resnet: Any = ResNet(ResNetConfig.matching(preset("digits")))
    several: Any = [1, 2]
    for model, target, labels, message in (
        (resnet, 1, None, "from a ResNet"),
        (TEN, several, None, "All paths of a figure lead to one class"),
        (TEN, 10, None, "Classes go from 0 to 9: 10"),
        (TEN, 1, torch.tensor([0, 1]), "target of image 1 is its label"),
    ):
        with pytest.raises(CandidError, match=message):
            trajectories(model, images, target, labels=labels, steps=2)
    with pytest.raises(CandidError, match="batch of 1 x 8 x 8 images"):
        trajectories(TEN, images[0], 1, steps=2)


def axes_of(figure: Figure, column: int = 0) -> tuple[Axes, list[Axes]]:
    """The plane and the images."""
    upper, lower = figure.subfigs[column].subfigs
    return upper.axes[0], lower.axes


def lines_of(figure: Figure, style: str) -> list[Any]:
    return [
        line for line in axes_of(figure)[0].lines if line.get_linestyle() == style and line.get_zorder() == 4
    ]


def contours_of(figure: Figure) -> list[float]:
    """Levels of the lines in the plane."""
    drawn = [each for each in axes_of(figure)[0].collections if isinstance(each, QuadContourSet)]
    return [float(level) for each in drawn if not each.filled for level in each.levels]


def made_up(classes: int, exact: bool, names: str = "class {}", kappa: float = 1.0) -> Trajectories:
    """Three paths among means on a circle: fooled on the way, from the start, never."""
    turn = np.arange(classes) / classes * 2 * math.pi
    plane = DecisionPlane(
        tuple(names.format(i) for i in range(classes)), np.zeros(2), np.eye(2),
        np.stack((np.cos(turn), np.sin(turn)), 1), np.zeros(classes),
    )  # fmt: skip
    paths = []
    for i, first in enumerate((20, 0, 30)):
        random = np.random.default_rng(i)
        points = 2 * random.standard_normal((30, 2)).cumsum(0)
        image = 0.9 * random.random((3, 4, 4))
        outcome = (image, image + 0.009, 0.5, 0.3, 1, i % 2)
        paths.append(AttackPath(points, np.zeros(30), np.arange(30) >= first, *outcome))
    drawn = tuple(range(classes)) if exact else tuple(range(0, 5 * (classes // 5), classes // 5))
    if not exact:
        kept = {"means": plane.means[list(drawn)], "log_priors": plane.log_priors[list(drawn)]}
        named = tuple(plane.class_names[y] for y in drawn)
        return Trajectories(
            dataclasses.replace(plane, class_names=named, **kept), False, drawn, plane.class_names, 0, kappa,
            tuple(paths),
        )  # fmt: skip
    return Trajectories(plane, True, drawn, plane.class_names, 0, kappa, tuple(paths))


@pytest.mark.parametrize(
    ("exact", "kappa", "levels"),
    [(True, 1.0, {0, 1}), (True, math.inf, {0}), (True, 0.0, {0}), (False, 1.0, set())],
)
def test_dotted_before_and_solid_after(exact: bool, kappa: float, levels: set[float]) -> None:
    found = made_up(10, exact, kappa=kappa)
    figure = draw([found], "a title")
    dotted, solid = lines_of(figure, ":"), lines_of(figure, "-")
    assert [len(line.get_xdata()) for line in dotted] == [21, 1, 30]
    assert [len(line.get_xdata()) for line in solid] == [10, 30, 0]
    assert [a.get_color() for a in dotted] == [b.get_color() for b in solid]
    assert len({line.get_color() for line in dotted}) == 3
    assert set(contours_of(figure)) == levels
    plane, pictures = axes_of(figure)
    assert ("a projection" in plane.get_title()) != exact and "standard deviations" in plane.get_xlabel()
    assert [each.get_title() for each in pictures] == [
        "1: class 0\nseen as class 1", "2: class 1", "3: class 0\nseen as class 1",
        "p(target) = 30 %", "p(target) = 30 %", "p(target) = 30 %\nnot enough",
        "L2 = 0.5", "L2 = 0.5", "L2 = 0.5",
    ]  # fmt: skip
    assert [each.get_ylabel() for each in pictures][::3] == ["original", "attacked", "difference × 100"]
    everything = np.concatenate([found.plane.means, *(path.points for path in found.paths)])
    low, high = (list(ends) for ends in zip(plane.get_xlim(), plane.get_ylim(), strict=True))
    assert (everything > low).all() and (everything < high).all()


@pytest.mark.parametrize(
    ("classes", "exact", "names"),
    [
        (2, True, "{}"),
        (10, True, "a name of a class that is much too long to be drawn, {}"),
        (1000, False, "$n_{}, great grey owl, great gray owl, Strix nebulosa"),
    ],
)
def test_names_do_not_overlap(classes: int, exact: bool, names: str) -> None:
    figure = draw([made_up(classes, exact, names)])
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes_of(figure)[0].texts if text.get_text()]
    assert len(boxes) == (classes if exact else 5)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_column_for_each_kappa() -> None:
    """One legend says what all columns show."""
    figure = draw([made_up(10, True, kappa=kappa) for kappa in (0.01, 1.0, math.inf)], "a title")
    titles = [axes_of(figure, i)[0].get_title() for i in range(3)]
    assert titles == ["κ = 0.01", "κ = 1", "κ = ∞"]
    (legend,) = figure.subfigs[3].legends
    said = [text.get_text() for text in legend.get_texts()]
    assert len(said) == len(set(said)) and {"1: class 0", "ahead by κ", "decision boundary"} <= set(said)


def test_too_much_to_draw() -> None:
    found = made_up(10, True)
    with pytest.raises(CandidError, match="9 paths are too many to see: draw at most 6"):
        draw([dataclasses.replace(found, paths=3 * found.paths)])
    with pytest.raises(CandidError, match="40 classes are too many to see: draw at most 30"):
        draw([made_up(40, True)])
