"""One body holds every layer to the contract of models.flow.Invertible; the truth comes from autograd."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid.models.flow.backbone import released_dct_scale
from candid.models.flow.coupling import (
    ActNorm,
    AffineCoupling,
    CoefficientScale,
    DownsamplingCoupling,
    OrthogonalMixing,
    Permutation,
    random_orthogonal,
)
from candid.models.flow.frozen import freeze
from candid.models.flow.invertible import Chain, Invertible
from candid.models.flow.means import span_of
from candid.models.flow.mixture import LatentMixture
from candid.models.flow.pooling import DCTPooling, HaarPooling, dct_matrix
from candid.models.flow.subnets import bottleneck, low_resolution_entry, pointwise, strided_entry
from tests.helpers import autograd_log_det, randomise

narrow = partial(bottleneck, width=3)
strided = partial(bottleneck, width=3, stride=2)


def frozen_chain(mixing: Invertible) -> Invertible:
    """Every kind of layer that freezing changes."""
    coupling = DownsamplingCoupling(
        3, partial(strided_entry, width=4), partial(low_resolution_entry, width=4)
    )
    layers = [coupling, ActNorm(12), mixing, AffineCoupling(12, narrow)]
    return freeze(randomise(Chain(layers).double()))


def span_scaling() -> Invertible:
    """The span of random means, with a scale and a shift."""
    layer = span_of(LatentMixture(classes=4, constant=6, dimensions=24, rank=2)).layer
    layer.log_scale += 0.7
    layer.shift += 1.5
    return layer


LAYERS: dict[str, tuple[Callable[[], Invertible], tuple[int, ...]]] = {
    "coupling": (lambda: AffineCoupling(6, narrow), (6, 3, 5)),
    "coupling, odd channels": (lambda: AffineCoupling(5, narrow), (5, 4, 2)),
    "coupling, two channels": (lambda: AffineCoupling(2, partial(pointwise, width=3)), (2, 1, 1)),
    "downsampling": (lambda: DownsamplingCoupling(4, strided, narrow), (4, 4, 6)),
    "downsampling, odd channels": (lambda: DownsamplingCoupling(3, strided, narrow), (3, 4, 4)),
    "entry 3x3": (
        lambda: DownsamplingCoupling(
            3, partial(strided_entry, width=4), partial(low_resolution_entry, width=4)
        ),
        (3, 6, 4),
    ),
    "entry 7x7": (
        lambda: DownsamplingCoupling(
            3, partial(strided_entry, width=4, kernel=7), partial(low_resolution_entry, width=4)
        ),
        (3, 8, 8),
    ),
    "actnorm, paper": (lambda: ActNorm(3, "paper"), (3, 2, 4)),
    "actnorm, released": (lambda: ActNorm(3, "released"), (3, 2, 4)),
    "orthogonal mixing": (lambda: OrthogonalMixing(7), (7, 2, 3)),
    "permutation": (lambda: Permutation(7), (7, 2, 3)),
    "haar": (HaarPooling, (3, 4, 6)),
    "haar, orthonormal": (lambda: HaarPooling(scale=1.0), (1, 2, 2)),
    "dct": (lambda: DCTPooling(3, 4, 5), (3, 4, 5)),
    "coefficient scale": (lambda: CoefficientScale(released_dct_scale(3)), (18,)),
    "span": (span_scaling, (24,)),
    "frozen, orthogonal": (lambda: frozen_chain(OrthogonalMixing(12)), (3, 4, 6)),
    "frozen, permutation": (lambda: frozen_chain(Permutation(12)), (3, 4, 6)),
    "chain": (
        lambda: Chain([HaarPooling(), AffineCoupling(4, narrow), Chain([ActNorm(4), OrthogonalMixing(4)])]),
        (1, 4, 4),
    ),
}


@pytest.fixture(params=LAYERS)
def layer_and_input(request: pytest.FixtureRequest, generator: torch.Generator) -> tuple[Invertible, Tensor]:
    make, shape = LAYERS[request.param]
    layer = randomise(make().double()).eval()
    return layer, torch.randn(2, *shape, dtype=torch.float64, generator=generator)


def test_inverse_inverts_and_log_dets_cancel(layer_and_input: tuple[Invertible, Tensor]) -> None:
    layer, x = layer_and_input
    before = x.clone()
    z, log_det = layer(x)
    back, inverse_log_det = layer.inverse(z)
    assert torch.equal(x, before)
    assert log_det.shape == inverse_log_det.shape == (2,)
    assert log_det.dtype == inverse_log_det.dtype == x.dtype
    torch.testing.assert_close(back, x, rtol=0, atol=1e-9)
    torch.testing.assert_close(inverse_log_det, -log_det, rtol=1e-9, atol=1e-9)
    there, _ = layer(layer.inverse(z)[0])
    torch.testing.assert_close(there, z, rtol=0, atol=1e-9)


def test_log_det_is_autograds_in_both_directions(layer_and_input: tuple[Invertible, Tensor]) -> None:
    layer, x = layer_and_input
    z, log_det = layer(x)
    torch.testing.assert_close(log_det, autograd_log_det(lambda v: layer(v)[0], x), rtol=1e-9, atol=1e-9)
    _, inverse = layer.inverse(z)
    truth = autograd_log_det(lambda v: layer.inverse(v)[0], z.detach())
    torch.testing.assert_close(inverse, truth, rtol=1e-9, atol=1e-9)


def test_gradient_reaches_every_parameter(layer_and_input: tuple[Invertible, Tensor]) -> None:
    layer, x = layer_and_input
    for run, start in ((layer, x), (layer.inverse, layer(x)[0].detach())):
        layer.zero_grad()
        output, log_det = run(start.requires_grad_())
        (output.square().sum() + log_det.sum()).backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("input_too", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_backpropagation_by_inversion_gives_the_same_gradients(
    layer_and_input: tuple[Invertible, Tensor], input_too: bool, frozen: bool
) -> None:
    layer, x = layer_and_input
    for i, parameter in enumerate(layer.parameters()):
        parameter.requires_grad_(not frozen or i % 2 == 1)
    results = []
    for memory in ("plain", "inverse"):
        layer.zero_grad()
        start = x.clone().requires_grad_(input_too)
        z, log_det = Chain([layer], memory)(start)
        if not z.requires_grad:
            assert not input_too
            return
        (z.square().sum() + (log_det * torch.tensor([1.0, 2.0])).sum()).backward()
        results.append([start.grad, *(p.grad for p in layer.parameters())])
    for plain, inverse in zip(*results, strict=True):
        torch.testing.assert_close(inverse, plain, rtol=1e-9, atol=1e-9)


def test_result_of_a_sample_does_not_depend_on_its_batch(layer_and_input: tuple[Invertible, Tensor]) -> None:
    layer, x = layer_and_input
    torch.testing.assert_close(layer(x[:1])[0], layer(x)[0][:1], rtol=1e-12, atol=1e-12)


def test_one_channel_cannot_be_coupled() -> None:
    with pytest.raises(CandidError, match="at least 2, not 1"):
        AffineCoupling(1, narrow)
    with pytest.raises(CandidError, match="at least 2, not 1"):
        DownsamplingCoupling(1, strided, narrow)


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_log_scale_stays_within_the_clamp(scale: float) -> None:
    coupling = AffineCoupling(4, partial(pointwise, width=8), clamp=0.7).double()
    x = scale * torch.randn(3, 4, 2, 2, dtype=torch.float64)
    randomise(coupling, strength=100)
    _, log_det = coupling(x)
    assert (log_det.abs() <= 0.7 * 2 * 4).all()


def test_random_orthogonal_is_orthogonal_and_fair() -> None:
    """Under the Haar measure on O(n), entries have mean 0 and variance 1/n, and both signs of det occur."""
    torch.manual_seed(0)
    draws = torch.stack([random_orthogonal(4) for _ in range(4000)])
    identity = torch.eye(4, dtype=torch.float64).expand_as(draws)
    torch.testing.assert_close(draws @ draws.mT, identity, rtol=0, atol=1e-12)
    assert draws.mean(0).abs().max() < 5 * 0.5 / 4000**0.5
    assert (draws.square().mean(0) - 0.25).abs().max() < 0.02
    assert 0.45 < (torch.linalg.det(draws) > 0).double().mean() < 0.55


def test_dct_is_scipys() -> None:
    from scipy.fft import dctn

    x = torch.randn(1, 2, 3, 5, dtype=torch.float64)
    z, _ = DCTPooling(2, 3, 5).double()(x)
    truth = torch.from_numpy(dctn(x.numpy(), axes=(2, 3), norm="ortho")).permute(0, 3, 2, 1).flatten(1)
    torch.testing.assert_close(z, truth, rtol=0, atol=1e-7)
    torch.testing.assert_close(dct_matrix(6) @ dct_matrix(6).T, torch.eye(6, dtype=torch.float64))


def test_haar_groups_by_wavelet() -> None:
    top_left = torch.zeros(1, 2, 2, 2)
    top_left[0, 0, 0, 0] = 4.0
    z, _ = HaarPooling()(top_left)
    assert z.flatten().tolist() == [1, 0, 1, 0, 1, 0, 1, 0]
    columns = torch.tensor([[[[1.0, -1.0], [1.0, -1.0]]]])
    assert HaarPooling()(columns)[0].flatten().tolist() == [0, 1, 0, 0]


def test_a_layer_may_stand_in_a_chain_twice() -> None:
    pool = HaarPooling()
    z, log_det = Chain([pool, pool])(torch.rand(1, 1, 4, 4))
    assert z.shape == (1, 16, 1, 1)
    torch.testing.assert_close(log_det, 2 * pool(torch.rand(1, 1, 4, 4))[1])


@pytest.mark.parametrize("narrow_type", [torch.float32, torch.float16, torch.bfloat16])
def test_widening_restores_orthogonality_from_any_precision(narrow_type: torch.dtype) -> None:
    w = OrthogonalMixing(32).to(narrow_type).double().matrix.weight
    torch.testing.assert_close(w @ w.T, torch.eye(32, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("style", ["paper", "released"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_actnorm_starts_with_zero_mean_and_unit_variance(
    style: Literal["paper", "released"], dtype: torch.dtype, generator: torch.Generator
) -> None:
    spread, mean = torch.tensor([1e-2, 1.0, 5.0, 1e4]), torch.tensor([0.1, 0.0, -3.0, 1e4])
    x = torch.randn(8, 4, 3, 5, generator=generator) * spread[:, None, None] + mean[:, None, None]
    x, layer = x.to(dtype), randomise(ActNorm(4, style).to(dtype))
    layer.start_from(x)
    z, _ = layer(x)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-8
    torch.testing.assert_close(z.mean((0, 2, 3)), torch.zeros(4, dtype=dtype), rtol=0, atol=tolerance)
    torch.testing.assert_close(
        z.var((0, 2, 3), correction=0), torch.ones(4, dtype=dtype), rtol=0, atol=tolerance
    )
    assert all(p.requires_grad and p.grad_fn is None for p in layer.parameters())


@pytest.mark.parametrize("style", ["paper", "released"])
def test_actnorm_started_from_data_keeps_the_contract(
    style: Literal["paper", "released"], generator: torch.Generator
) -> None:
    x = 3 + 0.2 * torch.randn(6, 3, 2, 4, dtype=torch.float64, generator=generator)
    x[:, 1] = 0.7  # a constant channel
    layer = ActNorm(3, style).double()
    layer.start_from(x)
    z, log_det = layer(x[:2])
    assert z.isfinite().all() and log_det.isfinite().all()
    assert all(p.isfinite().all() for p in layer.parameters())
    torch.testing.assert_close(z[:, 1], torch.zeros(2, 2, 4, dtype=torch.float64), rtol=0, atol=1e-9)
    truth = autograd_log_det(lambda v: layer(v)[0], x[:2])
    torch.testing.assert_close(log_det, truth, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(layer.inverse(z)[0], x[:2], rtol=0, atol=1e-9)
