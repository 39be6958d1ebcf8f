"""The network for inference against the one it was made from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from candid import CandidError, GenerativeClassifier, NonFiniteError, information_bottleneck_loss, save
from candid.models.flow import frozen as frozen_module
from candid.models.flow.coupling import ActNorm, AffineCoupling
from candid.models.flow.frozen import freeze
from candid.models.flow.invertible import Chain
from tests.helpers import randomise, small_classifier

LAYOUTS: dict[str, dict[str, Any]] = {
    "orthogonal": {},
    "permutation": {"mixing": "permutation"},
    "7x7": {"entry": "7x7"},
    "no entry": {"entry": "none", "preactivation": False},
    "released": {"actnorm": "released", "dct": "released", "mixing": "permutation"},
}


def images(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(n, 3, 16, 16, generator=torch.Generator().manual_seed(n)).to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 5])
def test_results_are_the_same(layout: str, dtype: torch.dtype, n: int) -> None:
    model = small_classifier(**LAYOUTS[layout]).to(dtype)
    fast, x = model.frozen(), images(n, dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    with torch.no_grad():
        for a, b in zip(fast(x), model(x), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(fast.log_likelihoods(x), model.log_likelihoods(x), rtol=1e-5, atol=0)
        torch.testing.assert_close(fast.posterior(x).sum(1), torch.ones(n, dtype=dtype))
        torch.testing.assert_close(fast.invert(model.latent(x)), x, rtol=0, atol=tolerance)
    draws = [m.sample([0, 2], 3, generator=torch.Generator().manual_seed(1)) for m in (fast, model)]
    assert (draws[0] - draws[1]).abs().max() < 1.5 / 255  # rounding may move a pixel by a grey level


def test_gradients_reach_the_image() -> None:
    model = small_classifier().double()
    found = []
    for m in (model, model.frozen()):
        x = images(2, torch.float64).requires_grad_()
        m.log_density(x).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 1)),
        (nn.ReLU(), nn.Conv2d(3, 4, 1)),
        (nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)),
        (nn.Conv2d(3, 6, 3, padding=1, groups=3), nn.ReLU(), nn.Conv2d(6, 4, 1)),
        (nn.Conv2d(3, 4, 3, padding=2, dilation=2), nn.Conv2d(4, 4, 1)),
        (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)),
    ],
)
def test_any_subnet_can_be_frozen(layers: tuple[nn.Module, ...]) -> None:
    coupling = AffineCoupling(5, lambda *_: nn.Sequential(*layers))
    chain = randomise(Chain([coupling, ActNorm(5)]).double()).eval()
    x = torch.randn(2, 5, 6, 6, dtype=torch.float64)
    for a, b in zip(freeze(chain)(x), chain(x), strict=True):
        torch.testing.assert_close(a, b)


def test_large_activations_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = small_classifier().frozen(), images(5)
    whole = fast(x)
    monkeypatch.setattr(frozen_module, "CACHED_NUMBERS", 2 * 4 * 16 * 16)
    for a, b in zip(fast(x), whole, strict=True):
        torch.testing.assert_close(a, b)


def test_packed_weights_follow_a_change_of_type() -> None:
    fast, x = small_classifier().frozen(), images(2)
    before = fast(x).logits
    torch.testing.assert_close(fast.double()(x.double()).logits.float(), before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast.float()(x).logits, before)


def test_it_is_a_copy() -> None:
    model = small_classifier()
    fast, x = model.frozen(), images(3)
    before = fast(x).logits.clone()
    information_bottleneck_loss(model.train(), x, torch.arange(3), beta=1).total.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad)
    assert torch.equal(fast(x).logits, before)
    assert not torch.equal(model.eval()(x).logits, before)
    assert not any(parameter.requires_grad for parameter in fast.parameters())
    assert fast.frozen() is fast


def test_it_refuses_to_be_trained_or_saved(tmp_path: Path) -> None:
    fast = small_classifier().frozen()
    with pytest.raises(CandidError, match="can't be trained: train the one it was made from"):
        fast.train()
    with pytest.raises(CandidError, match="can't be saved: save the one it was made from"):
        save(fast, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_model_in_training_mode_is_frozen_in_evaluation_mode() -> None:
    model = small_classifier().train()
    fast = model.frozen()
    assert model.training
    assert not fast.training
    torch.testing.assert_close(fast(images(2)).logits, model.eval()(images(2)).logits, rtol=1e-4, atol=1e-4)


def test_nan_weights_are_found_when_freezing() -> None:
    """ReLU while convolving turns NaN into 0: later it would not be seen."""
    model = small_classifier()
    model.get_parameter("flow.stage2_block1.coupling.strided.2.weight").data[0] = torch.nan
    with pytest.raises(NonFiniteError, match="'stage2_block1_coupling.strided.convolutions.0.weight'"):
        model.frozen()


def test_nan_pixels_are_still_found() -> None:
    x = images(2)
    x[1, 0, 3, 3] = torch.nan
    with pytest.raises(NonFiniteError, match="Image 1 of the batch has NaN"):
        small_classifier().frozen()(x)


@pytest.mark.parametrize("preset", ["tiny", "cifar", "digits"])
def test_presets(preset: str) -> None:
    model = randomise(GenerativeClassifier.from_preset(preset), strength=0.05).eval()
    x = torch.rand(2, *model.image_shape)
    with torch.inference_mode():
        a, b = model.frozen().log_density(x), model.log_density(x)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=0)
