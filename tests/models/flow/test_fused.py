"""Gradients written out, against autograd's own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from candid._support.errors import CandidError
from candid.models.flow import fused
from candid.models.flow.coupling import AffineCoupling
from candid.models.flow.fused import affine, norm_relu_conv, weight_gradient
from candid.models.flow.subnets import Subnet, bottleneck
from tests.helpers import randomise

sizes = st.integers(1, 6)


class Layers(nn.Module):
    """Norm, ReLU and convolution one after another, in float64."""

    def __init__(self, channels: int, channels_out: int, kernel: int, stride: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels_out, kernel, stride, kernel // 2, bias=bias)
        randomise(self.double())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(F.relu(self.norm(x)))
        return y

    def written_out(self, x: Tensor) -> Tensor:
        return norm_relu_conv(x, self.norm, self.conv)


def gradients(run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x)
    y.backward(g)
    return [y.detach(), *(t.grad for t in (x, *module.parameters()) if t.grad is not None)]


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(2, 4), sizes, sizes, sizes),
    sizes,
    st.sampled_from([(1, 1), (3, 1), (3, 2), (7, 2), (1, 2)]),
    st.booleans(),
    st.booleans(),
)
def test_norm_relu_conv_is_autograds(
    shape: tuple[int, int, int, int], channels_out: int, kernel: tuple[int, int], bias: bool, last: bool
) -> None:
    plain = Layers(shape[1], channels_out, *kernel, bias)
    written = copy.deepcopy(plain)
    g = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, dtype=torch.float64, generator=g)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    pull = torch.randn(plain(x).shape, dtype=torch.float64, generator=g)
    written(x)  # both have counted one batch
    truth = gradients(plain, plain, x, pull)
    found = gradients(written.written_out, written, x, pull)
    assert len(found) == len(truth)
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    for (name, a), b in zip(written.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("frozen", ["norm", "conv", "input"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(frozen: str) -> None:
    module = Layers(3, 2, 3, 1, bias=True)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=frozen != "input")
    if frozen != "input":
        module.get_submodule(frozen).requires_grad_(False)
    module.written_out(x).sum().backward()
    found = [t.grad for t in (x, *module.parameters())]
    module.zero_grad()
    x.grad = None
    module(x).sum().backward()
    for a, b in zip(found, (t.grad for t in (x, *module.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_statistics_are_averaged_alike_without_momentum() -> None:
    plain = Layers(3, 2, 1, 1, bias=False)
    plain.norm.momentum = None
    plain.norm.reset_running_stats()
    written = copy.deepcopy(plain)
    for seed in range(3):
        x = torch.randn(4, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        plain(x)
        written.written_out(x)
    for a, b in zip(plain.buffers(), written.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (3, 2), (7, 2), (1, 2)])
@pytest.mark.parametrize("at_once", [1, 300, 10**6])
def test_weight_gradient_does_not_depend_on_what_is_computed_at_once(
    kernel: int, stride: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "PATCH_NUMBERS", at_once)
    conv = nn.Conv2d(3, 4, kernel, stride, kernel // 2).double()
    x = torch.randn(3, 3, 9, 7, dtype=torch.float64)
    y = conv(x)
    g = torch.randn_like(y)
    (truth,) = torch.autograd.grad(y, conv.weight, g)
    torch.testing.assert_close(weight_gradient(g, x, conv.weight, conv), truth)


@settings(deadline=None, max_examples=40)
@given(sizes, sizes, sizes, st.floats(0.1, 3), st.floats(0.05, 2), st.floats(0.05, 2))
def test_affine_is_autograds(
    images: int, channels: int, side: int, clamp: float, scale_gain: float, shift_gain: float
) -> None:
    g = torch.Generator().manual_seed(channels)
    shape = (images, channels, side, side)
    a = torch.randn(images, 2 * channels, side, side, dtype=torch.float64, generator=g, requires_grad=True)
    x, pull = (torch.randn(shape, dtype=torch.float64, generator=g) for _ in range(2))
    x.requires_grad_()
    pull_log_det = torch.randn(images, dtype=torch.float64, generator=g)
    a_scale, a_shift = a.chunk(2, dim=1)
    log_s = clamp * torch.tanh(scale_gain * a_scale)
    truth = x * log_s.exp() + shift_gain * a_shift, log_s.sum((1, 2, 3))
    found = affine(a, x, clamp, scale_gain, shift_gain)
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other)
    grads = [torch.autograd.grad(result, (a, x), (pull, pull_log_det)) for result in (found, truth)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_subnet_in_training_is_its_layers(autocast: bool) -> None:
    subnet = randomise(bottleneck(4, 6, width=3))
    x = torch.randn(3, 4, 5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = subnet(x)
        assert type(subnet) is Subnet
        truth = nn.Sequential(*subnet)(x)
    torch.testing.assert_close(y, truth, rtol=1e-5, atol=1e-5)


def test_a_training_step_keeps_fewer_numbers_than_autograd() -> None:
    """Of each norm, ReLU and convolution one tensor, of a coupling's scale and shift two."""
    coupling = AffineCoupling(8, lambda i, o: bottleneck(i, o, width=4)).train()
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    kept: dict[bool, int] = {}
    for written_out in (True, False):
        numbers: dict[int, int] = {}

        def keep(t: Tensor, numbers: dict[int, int] = numbers) -> Tensor:
            numbers[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            if written_out:
                coupling(x)
            else:
                x1, x2 = x.split(coupling.split, dim=1)
                a_scale, a_shift = nn.Sequential(*coupling.subnet.children())(x1).chunk(2, dim=1)
                log_s = coupling.clamp * torch.tanh(coupling.scale_gain * a_scale)
                torch.cat((x1, x2 * log_s.exp() + coupling.shift_gain * a_shift), dim=1)
        kept[written_out] = sum(numbers.values())
    assert kept[True] < 0.75 * kept[False]


def test_gradients_written_out_are_not_differentiated_again() -> None:
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    module = Layers(3, 2, 1, 1, bias=False).float()
    (g,) = torch.autograd.grad(module.written_out(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        g.sum().backward()


def test_one_number_a_channel_is_refused() -> None:
    with pytest.raises(CandidError, match="one number a channel: use a larger batch or larger images"):
        bottleneck(3, 4, width=2)(torch.randn(1, 3, 1, 1))


@pytest.mark.parametrize("settings", [{"groups": 2}, {"dilation": 2}, {"padding_mode": "reflect"}])
def test_other_convolutions_are_left_to_autograd(settings: dict[str, Any]) -> None:
    layers = nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, **settings)
    x = torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(Subnet(*layers)(x), nn.Sequential(*layers)(x))


def test_in_evaluation_a_coupling_can_be_differentiated_twice() -> None:
    coupling = randomise(AffineCoupling(4, lambda i, o: bottleneck(i, o, width=3)).double()).eval()
    x = torch.randn(1, 4, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda v: F.softplus(coupling(v)[0]), x)
