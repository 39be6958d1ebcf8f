"""The cosine coefficients are scipy's, and the spread of the means is that of the explicit ones."""

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from scipy.fft import dctn

from candid import CandidError, ClassifierConfig, FlowConfig, GenerativeClassifier, ResNet, ResNetConfig
from candid.explanations.similarity import dct_basis, mean_spread
from candid.models.flow.pooling import DCTPooling
from candid.reports.plots.explanations import dct_basis as draw_basis
from candid.reports.plots.explanations import mean_spread as draw_spread
from tests.helpers import randomise


def some_model(height: int, width: int, classes: int = 4, **config: Any) -> GenerativeClassifier:
    flow = FlowConfig(1, 2 * height, 2 * width, blocks=(1,), widths=(1,), entry="none", pointwise_width=1)
    model = GenerativeClassifier(ClassifierConfig(flow, classes, **config))
    randomise(model.mixture, strength=3)
    return model


@settings(max_examples=15, deadline=None)
@given(height=st.integers(1, 8), width=st.integers(1, 8), seed=st.integers(0, 99))
def test_products_with_the_basis_are_the_cosine_transform(height: int, width: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    maps = torch.randn(3, height, width, generator=g, dtype=torch.float64)
    basis = dct_basis(height, width)
    assert basis.dtype == np.float64
    found = np.einsum("ijab,cab->ijc", basis, maps.numpy())
    np.testing.assert_allclose(found, dctn(maps, axes=(1, 2), norm="ortho").transpose(1, 2, 0), atol=1e-12)
    z, _ = DCTPooling(3, height, width).double()(maps[None])
    np.testing.assert_allclose(z.view(width, height, 3).transpose(0, 1), found, rtol=0, atol=1e-6)
    flat = basis.reshape(height * width, -1)
    np.testing.assert_allclose(flat @ flat.T, np.eye(height * width), rtol=0, atol=1e-12)


@settings(max_examples=15, deadline=None)
@given(
    size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    classes=st.integers(1, 6),
    means=st.sampled_from([{}, {"rank": 1}, {"rank": 9}, {"planar": True}]),
)
def test_the_spread_is_that_of_the_explicit_means(
    size: tuple[int, int], classes: int, means: dict[str, Any]
) -> None:
    model = some_model(*size, classes, **means)
    found = mean_spread(model)
    assert found.shape == size and found.dtype == np.float64
    channels = model.config.flow.constant_coefficients
    explicit = model.mixture.double().means(torch.arange(classes)).detach()
    pooling = DCTPooling(channels, *size).double()
    maps, _ = pooling.inverse(explicit)
    coefficients = dctn(maps, axes=(2, 3), norm="ortho")  # (M, C, h, w)
    np.testing.assert_allclose(found, coefficients.std(axis=0).mean(axis=0), atol=1e-5)
    by_frequency = explicit.view(classes, size[1], size[0], channels)
    truth = by_frequency.std(0, correction=0).mean(2).T
    np.testing.assert_allclose(found, truth, rtol=1e-6, atol=1e-7)


def test_a_spread_is_at_its_frequency() -> None:
    model = some_model(3, 5)
    with torch.no_grad():
        for p in (model.mixture.mean, model.mixture.prototypes):
            p.zero_()
        place = (4 * 3 + 2) * 4  # along the width 4, along the height 2, channel 0 of 4
        model.mixture.prototypes[:, place - 4] = torch.tensor([1.0, -1, 1, -1])
    expected = np.zeros((3, 5))
    expected[2, 4] = 1 / 4
    np.testing.assert_allclose(mean_spread(model), expected, rtol=1e-7, atol=1e-7)


def test_no_classes_by_dimensions_matrix_is_ever_formed() -> None:
    model = some_model(16, 16, classes=3000, rank=3)
    mean_spread(model)  # what is imported on the way takes memory, too
    tracemalloc.start()
    mean_spread(model)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3000 * 1024  # all means would take 24 576 000 bytes


def test_what_has_no_coefficients_is_refused() -> None:
    net = ResNet(ResNetConfig(height=8, width=8, classes=3, blocks=(1,), widths=(4,), stem="3x3"))
    with pytest.raises(CandidError, match="from a ResNet"):
        mean_spread(net)
    with pytest.raises(CandidError, match="at least 1 x 1 positions, not 0 x 3"):
        dct_basis(0, 3)


def checked(figure: Figure) -> Figure:
    """Drawn, with nothing cut off."""
    figure.draw_without_rendering()
    (width, height), box = figure.get_size_inches(), figure.get_tightbbox()
    assert box.x0 > -0.03 and box.y0 > -0.03 and box.x1 < width + 0.03 and box.y1 < height + 0.03
    assert figure.axes[0].get_xlabel() == "frequency along the width"
    assert figure.axes[0].get_ylabel() == "frequency along the height"
    return figure


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (7, 7)])
def test_the_figure_has_every_basis_image_at_its_frequency(size: tuple[int, int]) -> None:
    basis = dct_basis(*size)
    axes = checked(draw_basis(basis)).axes[0]
    assert len(axes.images) == math.prod(size)
    for image in axes.images:
        left, right, bottom, top = image.get_extent()
        i, j = round((bottom + top) / 2), round((left + right) / 2)
        assert top < bottom  # the first row is on top
        np.testing.assert_array_equal(image.get_array(), basis[i, j])
        low, high = image.get_clim()
        assert high == -low == np.abs(basis).max()


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (7, 7), (12, 20)])
def test_the_figure_has_every_spread_and_its_number(size: tuple[int, int]) -> None:
    spread = np.random.default_rng(0).random(size)
    axes = checked(draw_spread(spread)).axes[0]
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), spread)
    assert image.get_clim() == (0, float(spread.max()))
    assert len(axes.texts) == (math.prod(size) if max(size) <= 10 else 0)
    for text in axes.texts:
        column, row = text.get_position()
        assert float(text.get_text()) == pytest.approx(float(spread[int(row), int(column)]), rel=0.06)
    assert image.get_cmap().name == "viridis"


def test_no_spread_at_all_can_be_drawn() -> None:
    checked(draw_spread(mean_spread(some_model(2, 2, classes=1))))
