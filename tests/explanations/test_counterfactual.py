"""Counterfactuals have the posterior they aim at, as latents exactly and as 8-bit images closely."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from candid import GenerativeClassifier, ResNet, ResNetConfig
from candid._support.errors import CandidError
from candid.explanations.counterfactual import (
    CLOSE,
    LatentPath,
    _turned,
    counterfactual,
    interpolate,
    path_towards,
    samples,
)
from tests.explanations.mixtures import decided_classifier, latents, mixture_model
from tests.helpers import randomise


@settings(max_examples=30, deadline=None)
@given(
    classes=st.integers(2, 7),
    scale=st.floats(0.5, 20),
    spread=st.floats(0, 8),
    y=st.integers(0, 6),
    target=st.floats(0.01, 0.999),
    seed=st.integers(0, 1000),
)
def test_a_path_ends_where_the_posterior_is_the_target(
    classes: int, scale: float, spread: float, y: int, target: float, seed: int
) -> None:
    y %= classes
    model = mixture_model(classes, scale=scale, seed=seed)
    z = latents(model, 1, spread, seed)[0]
    if model.mixture.posterior(z[None]).detach()[0, y] >= target:
        with pytest.raises(CandidError, match="already has"):
            path_towards(model, z, y, target)
        return
    path = path_towards(model, z, y, target)
    assert path.at(torch.zeros(1))[0].equal(z)
    on_the_way = model.mixture.posterior(path.at(torch.linspace(0, 1, 60).double()))[:, y].detach()
    assert float(on_the_way[-1]) == pytest.approx(target, abs=1e-8)
    assert on_the_way.diff().min() > -1e-9
    differences = model.mixture.means(torch.arange(classes)).detach()
    differences = (differences - differences[y])[torch.arange(classes) != y]
    first = torch.cosine_similarity(-path.corners[1:2] + path.corners[:1], differences)
    assert float(first.max()) == pytest.approx(1, abs=1e-6)


def on_a_line(*places: float) -> GenerativeClassifier:
    """With the means at these places of one line through latent space."""
    model = mixture_model(len(places), scale=0.0)
    with torch.no_grad():
        model.mixture.mean[:, 0] = torch.tensor(places, dtype=torch.float64)
    return model


def test_a_path_can_go_between_two_other_classes() -> None:
    """Away from the class on the left, the one on the far right would gain ten times as much."""
    model = on_a_line(0.0, -1.0, 10.0)
    z = torch.zeros(model.dimensions).double()
    z[0] = 4.48  # the class on the left is still the second most probable
    assert model.mixture.posterior(z[None])[0].argsort(descending=True).tolist() == [0, 1, 2]
    path = path_towards(model, z, 0, 0.99)
    reached = float(model.mixture.posterior(path.at(torch.ones(1)))[0, 0].detach())
    assert reached == pytest.approx(0.99, abs=1e-8) and float(path.corners[-1][0]) < 4.48
    with pytest.raises(CandidError, match="lower the target"):
        path_towards(on_a_line(0.0, -0.1, 0.1), torch.zeros(model.dimensions).double(), 0, 0.9)


def test_a_leg_without_length_is_where_it_is() -> None:
    path = LatentPath(torch.tensor([[1.0, 2.0], [1.0, 2.0]]))
    assert torch.equal(path.at(torch.tensor([0.0, 0.5, 1.0])), torch.tensor([[1.0, 2.0]] * 3))


def test_places_on_a_path_are_by_length() -> None:
    path = LatentPath(torch.tensor([[0.0, 0.0], [3.0, 0.0], [3.0, 1.0]]))
    assert path.lengths.tolist() == [0, 3, 4]
    places = path.at(torch.tensor([0.0, 0.5, 0.75, 1.0, 1.5]))
    assert places.tolist() == [[0, 0], [2, 0], [3, 0], [3, 1], [3, 3]]


@pytest.fixture(scope="module")
def model() -> GenerativeClassifier:
    return decided_classifier()


@pytest.mark.parametrize("target", [0.5, 0.8])
def test_8_bit_counterfactuals_are_close_to_their_target(model: GenerativeClassifier, target: float) -> None:
    random = torch.Generator().manual_seed(1)
    for image in torch.randint(40, 216, (3, 3, 16, 16), generator=random, dtype=torch.uint8):
        before = model.posterior(image[None] / 255)[0]
        y = int(before.argmin())
        found = counterfactual(model, image.numpy(), y, target)
        assert found.image.dtype == np.uint8 and found.reached
        changed = torch.from_numpy(found.image)[None] / 255
        again = float(model.posterior(changed)[0, y])
        assert again == pytest.approx(target, abs=CLOSE + 1e-4)
        assert float(found.posterior[y]) == pytest.approx(again, abs=1e-4)
        assert found.in_pixels == pytest.approx(target, abs=1e-3)
        np.testing.assert_array_equal(found.steps[0], image)
        np.testing.assert_array_equal(found.steps[-1], found.image)
        np.testing.assert_array_equal(found.difference, found.image.astype(int) - image.int().numpy())
        np.testing.assert_allclose(found.posteriors[0], before, atol=1e-4)
        assert found.length > 0 and len(found.shares) == len(found.steps) == 7
        bits = -model.log_density(changed) / (model.dimensions * math.log(2))
        assert found.bits_per_dim[1] == pytest.approx(float(bits), rel=1e-4)


def test_rounding_is_corrected_and_reported() -> None:
    """With 64 pixels, rounding alone moves posteriors by far more than the limit."""
    model = randomise(GenerativeClassifier.from_preset("digits"), strength=0.1).eval()
    with torch.no_grad():
        for part in (model.mixture.mean, model.mixture.prototypes):
            part.mul_(10)
    random = torch.Generator().manual_seed(0)
    images = torch.randint(60, 196, (6, 1, 8, 8), generator=random, dtype=torch.uint8)
    moved = []
    for image in images:
        y = int(model.posterior(image[None] / 255).argmin())
        found = counterfactual(model, image.numpy(), y)
        moved.append(abs(found.when_rounded - 0.5))
        assert found.reached
    assert max(moved) > 2 * CLOSE


def test_an_interpolation_keeps_its_ends_and_its_distance_from_the_means(model: GenerativeClassifier) -> None:
    first, second = torch.randint(60, 196, (2, 3, 16, 16), dtype=torch.uint8).numpy()
    found = interpolate(model, first, second, steps=5)
    np.testing.assert_array_equal(found.images[[0, -1]], (first, second))
    np.testing.assert_allclose(found.posteriors.sum(1), 1)
    z = model.latent(torch.from_numpy(found.images) / 255).detach()
    means = model.mixture.means(torch.from_numpy(found.posteriors[[0, -1]].argmax(1))).detach()
    middle = (z[2] - means.mean(0)).norm()
    ends = (z[[0, -1]] - means).norm(dim=1).mean()
    straight = (0.5 * (z[0] + z[-1]) - means.mean(0)).norm()
    assert float(middle) == pytest.approx(float(ends), rel=0.03) and float(straight) < 0.95 * float(ends)
    a, b = torch.randn(2, 50)
    turned = _turned(a, b, torch.linspace(0, 1, 5)[:, None])
    assert turned[0].allclose(a, atol=1e-6) and turned[-1].allclose(b, atol=1e-6)
    assert turned.norm(dim=1).allclose(torch.linspace(float(a.norm()), float(b.norm()), 5), rtol=1e-5)
    same = interpolate(model, first, first, steps=3)
    assert np.abs(same.images[1].astype(int) - first).max() <= 1
    with pytest.raises(CandidError, match="2 steps or more"):
        interpolate(model, first, second, steps=1)


def test_samples_share_their_noise_over_temperatures(model: GenerativeClassifier) -> None:
    drawn = samples(model, [2, 0], (0.0, 0.5), n=3, seed=4)
    assert drawn.shape == (2, 2, 3, 3, 16, 16) and drawn.dtype == np.uint8
    assert (drawn[0, :, 0] == drawn[0, :, 1]).all() and (drawn[1, 0, 0] != drawn[1, 0, 1]).any()
    np.testing.assert_array_equal(drawn[1], samples(model, [2, 0], (0.5,), n=3, seed=4)[0])


def test_mistakes_are_said(model: GenerativeClassifier) -> None:
    image = np.full((3, 16, 16), 100, np.uint8)
    for target in (0.0, 1.0, math.nan):
        with pytest.raises(CandidError, match="between 0 and 1"):
            counterfactual(model, image, 0, target)
    with pytest.raises(CandidError, match="0 to 2"):
        counterfactual(model, image, 3)
    with pytest.raises(CandidError, match="8-bit image of 3 x 16 x 16"):
        counterfactual(model, image / 255, 0)
    with pytest.raises(CandidError, match="8-bit image"):
        interpolate(model, image, image[:, :8])
    resnet = ResNet(ResNetConfig(height=16, width=16, classes=3, blocks=(1,), widths=(4,), stem="3x3"))
    with pytest.raises(CandidError, match="from a ResNet"):
        counterfactual(resnet, image, 0)  # type: ignore[arg-type]
