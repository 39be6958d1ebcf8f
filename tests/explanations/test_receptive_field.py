"""Receptive fields against autograd's Jacobian, closed forms and the law of the projections."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from candid import (
    CandidError,
    ClassifierConfig,
    FlowConfig,
    GenerativeClassifier,
    NonFiniteError,
    ResNet,
    ResNetConfig,
)
from candid._support.numbers import Array
from candid.explanations.receptive_field import (
    Cell,
    ReceptiveField,
    _error_share,
    full_width,
    receptive_field,
)
from candid.models.flow.coupling import ActNorm, AffineCoupling, DownsamplingCoupling
from candid.models.flow.network import ImageClassifier
from candid.models.protocol import Model
from candid.reports.plots.explanations import receptive_fields
from tests.helpers import RecordedProgress, randomise

LAYOUTS: dict[str, dict[str, Any]] = {
    "orthogonal": {"height": 8},
    "permutation": {"mixing": "permutation", "width": 8},
    "no entry, wide": {"entry": "none", "width": 20},
    "released": {"actnorm": "released", "dct": "released", "height": 8, "width": 8},
}


def classifier(std: float = 0.25, **changes: Any) -> GenerativeClassifier:
    flow: dict[str, Any] = {"channels": 3, "height": 16, "width": 16, "blocks": (1, 1), "widths": (4, 4)}
    flow |= {"entry_width": 4, "pointwise_width": 4}
    config = ClassifierConfig(FlowConfig(**(flow | changes)), classes=3, rank=2, std=(std,))
    return randomise(GenerativeClassifier(config)).eval().double()


def resnet(stem: str = "3x3") -> ResNet:
    config = ResNetConfig(3, 20, 15, classes=3, blocks=(1, 1), widths=(2, 3), stem=stem)  # type: ignore[arg-type]
    return randomise(ResNet(config, seed=0)).eval().double()


def tiny() -> GenerativeClassifier:
    """One colour, 16 features, 2 x 2 cells, frozen: quick."""
    return randomise(
        GenerativeClassifier.from_preset("digits", blocks=(1, 1), widths=(4, 4)).double()
    ).frozen()


def downsampling_alone(side: int = 24) -> tuple[GenerativeClassifier, float]:
    """Couplings that do nothing, permutations, and one scale a layer; with the sensitivity in a cell.

    A pixel goes into four Haar coefficients with the weight 1/4 each, and once through each scale.
    """
    model = classifier(std=0.125, height=side, width=side, mixing="permutation")
    product = 1.0
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, AffineCoupling | DownsamplingCoupling):
                for p in layer.parameters():
                    p.zero_()
            elif isinstance(layer, ActNorm):
                layer.gamma.fill_(float(layer.gamma[0]))
                product *= float(layer.scale()[0])
    return model, product * 3 / 0.125


def images(model: Model, n: int, seed: int = 0) -> Array:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, *model.image_shape), generator=g, dtype=torch.uint8).numpy()


def scaled(pixels: Array) -> Tensor:
    """Floats in [0, 1]."""
    return torch.from_numpy(pixels).double() / 255


def from_jacobian(model: ImageClassifier, pixels: Array) -> Array:
    """The definition, (H, W)."""

    def column(x: Tensor) -> Tensor:
        maps = model.feature_maps(x[None])[0]
        return maps[:, maps.shape[1] // 2, maps.shape[2] // 2]

    found = []
    for x in scaled(pixels):
        jacobian: Any = torch.autograd.functional.jacobian(column, x, vectorize=True)
        found.append(jacobian.abs().sum((0, 1)))
    return torch.stack(found).mean(0).detach().numpy()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_feature_maps_are_what_the_dct_transforms(layout: str) -> None:
    model = classifier(**LAYOUTS[layout])
    x = scaled(images(model, 2))
    maps = model.feature_maps(x)
    flow = model.config.flow
    assert maps.shape[1:] == (
        flow.constant_coefficients,
        flow.height // flow.downsampling,
        flow.width // flow.downsampling,
    )
    z = maps
    for name, layer in model.flow.leaves():
        if name.startswith("dct"):
            z, _ = layer(z)
    torch.testing.assert_close(z, model.latent(x))
    torch.testing.assert_close(model.frozen().feature_maps(x), maps)
    with pytest.raises(NonFiniteError, match="Image 1"):
        model.feature_maps(torch.stack((x[0], x[1] / 0)))


def test_features_of_a_resnet_are_the_mean_of_the_maps() -> None:
    model = resnet("7x7")
    x = scaled(images(model, 2))
    maps = model.feature_maps(x)
    assert maps.shape == (2, 12, 3, 2)
    torch.testing.assert_close(model.features(x), maps.mean((2, 3)))
    torch.testing.assert_close(model.logits(x), model.fc(maps.mean((2, 3))))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sensitivity_is_the_jacobians(layout: str) -> None:
    model = classifier(**LAYOUTS[layout])
    pixels = images(model, 2)
    field = receptive_field(model, pixels)
    np.testing.assert_allclose(field.sensitivity, from_jacobian(model, pixels), rtol=1e-9, atol=1e-12)
    assert (field.images, field.projections, field.standard_error) == (2, None, None)
    assert field.cross_section_error is None


@pytest.mark.parametrize("stem", ["3x3", "7x7"])
def test_sensitivity_of_a_resnet_is_the_jacobians_and_its_mode_is_left_alone(stem: str) -> None:
    model = resnet(stem)
    pixels = images(model, 3)
    truth = from_jacobian(model, pixels)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        field = receptive_field(model.train(), pixels)
    np.testing.assert_allclose(field.sensitivity, truth, rtol=1e-9, atol=1e-12)
    assert field.cell == (Cell(8, 7, 4, 5) if stem == "3x3" else Cell(6, 7, 8, 8))
    assert model.training and all(p.requires_grad for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])


def test_float32_is_close_to_float64() -> None:
    model = classifier(entry="none")
    pixels = images(model, 2)
    exact = receptive_field(model, pixels).sensitivity
    found = receptive_field(model.float(), pixels).sensitivity
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-4 * float(exact.max()))


@pytest.mark.parametrize("projections", [None, 200])
def test_downsampling_alone_sees_its_cell(projections: int | None) -> None:
    model, inside = downsampling_alone()
    field = receptive_field(model, images(model, 2), projections)
    assert field.cell == Cell(8, 8, 8, 8)
    truth = np.zeros((24, 24))
    truth[8:16, 8:16] = inside
    tolerance = 1e-9 if projections is None else 0.3
    np.testing.assert_allclose(field.sensitivity, truth, rtol=tolerance, atol=0)
    if projections is None:
        assert field.width_at_half_maximum == pytest.approx(8)
        np.testing.assert_allclose(field.cross_section, truth[12], rtol=1e-7)
    else:
        assert field.standard_error is not None and field.cross_section_error is not None
        assert np.array_equal(field.standard_error > 0, truth > 0)
        np.testing.assert_allclose(field.cross_section_error, field.standard_error[8:16].mean(0))


def moment(t: float) -> float:
    """E |v|^t of a standard Cauchy v: with v = e^s, the integral of e^(ts) / (pi cosh s)."""
    s = np.linspace(-300, 300, 60_001)
    return float(np.trapezoid(np.exp(t * s - np.logaddexp(s, -s)) * 2 / math.pi, s))


@settings(deadline=None, max_examples=20)
@given(m=st.integers(3, 300))
def test_the_error_is_that_of_a_geometric_mean_of_cauchy_numbers(m: int) -> None:
    first, second = moment(1 / m) ** m, moment(2 / m) ** m
    assert first * math.cos(math.pi / (2 * m)) ** m == pytest.approx(1)
    assert _error_share(m) == pytest.approx(1 - first**2 / second)
    assert m * _error_share(m) == pytest.approx(math.pi**2 / 4, rel=6 / m)


@pytest.mark.parametrize("projections", [3, 6])
def test_estimates_are_unbiased(projections: int) -> None:
    model = tiny()
    pixels = images(model, 1)
    truth = receptive_field(model, pixels).sensitivity
    field = receptive_field(model, np.tile(pixels, (3000, 1, 1, 1)), projections)
    assert field.standard_error is not None
    assert (field.standard_error < 0.04 * truth).all()
    assert np.abs((field.sensitivity - truth) / field.standard_error).max() < 4.5


@pytest.mark.parametrize(("colours", "least", "most"), [(1, 0.85, 1.15), (3, 0.4, 1.1)])
def test_errors_are_as_large_as_they_are_said_to_be(colours: int, least: float, most: float) -> None:
    """For one colour exactly; for several at most."""
    model = tiny() if colours == 1 else classifier(entry="none", height=8, width=8).frozen()
    pixels = images(model, 4)
    truth = receptive_field(model, pixels).sensitivity
    z = []
    for seed in range(25):
        field = receptive_field(model, np.tile(pixels, (5, 1, 1, 1)), 12, seed=seed)
        assert field.standard_error is not None
        z.append((field.sensitivity - truth) / field.standard_error)
    spread = float(np.sqrt(np.square(z).mean()))
    assert least < spread < most


@settings(deadline=None, max_examples=8)
@given(
    n=st.integers(1, 5),
    batch=st.integers(1, 7),
    projections=st.sampled_from([None, 3, 5]),
    seed=st.integers(0, 2**63),
)
def test_parts_do_not_change_the_result(n: int, batch: int, projections: int | None, seed: int) -> None:
    model = tiny()
    pixels = images(model, n)
    progress = RecordedProgress()
    whole = receptive_field(model, pixels, projections, seed=seed)
    found = receptive_field(model, pixels, projections, batch, seed, progress)
    np.testing.assert_allclose(found.sensitivity, whole.sensitivity, rtol=1e-7)
    assert (found.standard_error is None) == (whole.standard_error is None)
    if found.standard_error is not None and whole.standard_error is not None:
        np.testing.assert_allclose(found.standard_error, whole.standard_error, rtol=1e-7)
    passes = math.ceil(n / batch) * (projections or 16)
    ((_, total, each, seen),) = progress.loops
    assert (total, each, len(seen)) == (passes, min(n, batch), passes)
    again = receptive_field(model, pixels / 255, projections, seed=seed)
    np.testing.assert_array_equal(again.sensitivity, whole.sensitivity)


def test_projections_differ_by_seed_and_image() -> None:
    model = tiny()
    pixels = images(model, 1)
    first = receptive_field(model, pixels, 3).sensitivity
    assert not np.allclose(first, receptive_field(model, pixels, 3, seed=1).sensitivity, rtol=0.01)
    assert not np.allclose(
        first, receptive_field(model, np.tile(pixels, (2, 1, 1, 1)), 3).sensitivity, rtol=0.01
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"projections": 2}, "at least 3 projections, not 2"),
        ({"batch": 0}, "'batch' must be at least 1, not 0"),
        ({"images": np.zeros((2, 1, 8, 9))}, "a batch of 1 x 8 x 8 images .* not an array of 2 x 1 x 8 x 9"),
        ({"images": np.zeros((0, 1, 8, 8))}, "not an array of 0 x 1 x 8 x 8"),
        ({"images": np.zeros((2, 1, 8, 8), np.int64)}, "not int64"),
        ({"images": np.full((2, 1, 8, 8), math.nan)}, "Image 0"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], words: str) -> None:
    model = tiny()
    with pytest.raises(CandidError, match=words):
        receptive_field(model, **({"images": images(model, 2)} | change))


def test_gradients_that_overflow_are_named() -> None:
    model = resnet()
    grey = model.image_mean.expand(model.image_shape)[None]
    with torch.no_grad():
        model.image_std *= 1e-200  # of the mean, which is normalised to zero
        model.conv1.weight *= 1e200
        model.bn1.bias.fill_(1)
    assert torch.isfinite(model.feature_maps(grey)).all()
    with pytest.raises(NonFiniteError, match="not finite"):
        receptive_field(model, grey.detach().numpy().copy())


@settings(deadline=None, max_examples=30)
@given(
    left=st.floats(1.5, 20), right=st.floats(1.5, 20), peak=st.integers(22, 28), height=st.floats(1e-30, 1e30)
)
def test_width_of_a_triangle(left: float, right: float, peak: int, height: float) -> None:
    x = np.arange(50.0) - peak
    curve = height * np.maximum(np.where(x < 0, 1 + x / (2 * left), 1 - x / (2 * right)), 0)
    assert full_width(curve) == pytest.approx(left + right, rel=0.2)  # corners are cut
    assert full_width(curve[::-1]) == pytest.approx(full_width(curve))
    assert full_width(height * (1 - np.abs(x) / 40)) == pytest.approx(40)


@pytest.mark.parametrize(
    ("curve", "width"),
    [
        ([0, 0, 1, 1, 1, 0], 3),  # a box
        ([0, 1, 0.2, 0.2, 0.8, 0], 0.5 + 3 + 0.375),  # the outermost crossings
        ([0.4, 1, 0.5], 1 + 5 / 6),
        ([0.6, 1, 0.1], None),
        ([0, 1, 0.6], None),
        ([0, 0, 0], None),
        ([1], None),
    ],
)
def test_width_at_half_maximum(curve: list[float], width: float | None) -> None:
    found = full_width(np.array(curve, np.float64))
    assert found == (None if width is None else pytest.approx(width))


def field_of(sensitivity: Array, cell: Cell, error: float | None = None) -> ReceptiveField:
    standard_error = None if error is None else error * sensitivity
    return ReceptiveField(sensitivity, standard_error, cell, 4, None if error is None else 8)


def bump(side: int, width: float) -> Array:
    x = np.arange(side) + 0.5 - side / 2
    curve: Array = 7 * np.exp(-(x[:, None] ** 2 + x**2) / (2 * width**2))
    return curve


def all_axes(figure: Figure) -> list[Axes]:
    return [axes for part in figure.subfigs for axes in part.axes]


def test_the_figure_shows_the_curves_and_maps() -> None:
    cell = Cell(12, 12, 8, 8)
    fields = {
        "narrow": field_of(bump(32, 3), cell),
        "broad": field_of(bump(32, 5), cell, 0.1),
        "flat": field_of(bump(32, 1000), cell),
        "dead": field_of(np.zeros((32, 32)), cell),
        "a fifth, and the name of the fifth is a long one": field_of(bump(32, 4), cell),
    }
    figure = receptive_fields(fields)
    figure.draw_without_rendering()
    curves, *maps, bar = all_axes(figure)
    assert [axes.get_title() for axes in maps] == ["narrow", "broad", "flat", "dead"]  # most different widths
    assert "maximum" in bar.get_ylabel() and curves.get_yscale() == "log"
    x, y = np.asarray(curves.lines[0].get_xydata()).T
    np.testing.assert_allclose(x, np.arange(-15.5, 16))
    np.testing.assert_allclose(y, fields["narrow"].cross_section / fields["narrow"].cross_section.max())
    legend = curves.get_legend()
    assert legend is not None
    texts = [text.get_text().replace("\n", " ") for text in legend.get_texts()]
    assert texts[:2] == [f"{name}: {fields[name].width_at_half_maximum:.1f}" for name in ("narrow", "broad")]
    assert texts[2:4] == ["flat: reaches beyond the image", "dead: zero"]
    assert texts[5:] == ["downsampling alone: 8", "half of the maximum"]
    (band,) = curves.collections
    heights = np.asarray(band.get_paths()[0].vertices)[:, 1]
    assert (heights.max(), heights.min()) == pytest.approx((1.2, 0.8 * float(y_of(fields["broad"]).min())))
    low, high = maps[0].images[0].get_clim()
    assert high == 1 and low == pytest.approx(max(1e-5, float(bump(32, 3).min() / bump(32, 3).max())))


def y_of(field: ReceptiveField) -> Array:
    curve: Array = field.cross_section / field.cross_section.max()
    return curve


@pytest.mark.parametrize("count", [1, 5])
def test_nothing_of_the_figure_is_cut_off(count: int) -> None:
    name = "imagenet-corrupted/gaussian_noise/severity-5-of-5, centre crops of 224 pixels"
    cells = [Cell(16, 16, 32, 32), Cell(32, 32, 16, 16)]
    figure = receptive_fields(
        {f"{name} {i}": field_of(bump(64, 5 + i), cells[i % 2], 0.7) for i in range(count)}
    )
    figure.draw_without_rendering()
    width, height = figure.get_size_inches()
    box = figure.get_tightbbox()
    assert box.x0 > -0.03 and box.y0 > -0.03 and box.x1 < width + 0.03 and box.y1 < height + 0.03
    curves, *maps, _ = all_axes(figure)
    assert (
        len({(line.get_color(), line.get_linestyle()) for line in curves.lines if line.get_linewidth() > 1})
        == count
    )
    titles = [axes.title.get_window_extent() for axes in maps]
    assert all(left.x1 < right.x0 for left, right in pairwise(titles))
