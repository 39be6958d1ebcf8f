"""Training steps of the couplings with gradients written out: less memory and time than autograd's own.

Autograd keeps every intermediate result. These keep what can't be computed again cheaply.
Their gradients can't be differentiated again; outside of training the plain formulation is used.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from candid._support.errors import CandidError
from candid.models.flow.network import is_autocast

aten = torch.ops.aten
PATCH_NUMBERS = 2**21
"""Numbers in the patches that are unfolded at once: 8 MB in float32, which stay in the cache."""


def norm_relu_conv(x: Tensor, norm: nn.BatchNorm2d, conv: nn.Conv2d) -> Tensor:
    """Return ``conv(relu(norm(x)))``, storing only x: the input of the convolution is computed again."""
    result: Tensor = _NormReluConv.apply(x, norm.weight, norm.bias, conv.weight, conv.bias, norm, conv)
    return result


def scale_relu_conv(x: Tensor, scale: Tensor, shift: Tensor, conv: nn.Conv2d) -> Tensor:
    """Return ``conv(relu(scale x + shift))`` with a scale and a shift for each channel, storing only x."""
    result: Tensor = _ScaleReluConv.apply(x, scale, shift, conv.weight, conv.bias, conv)
    return result


def is_trained(module: nn.Module) -> bool:
    """Return whether gradients of this module are wanted, and not left to torch's compiler."""
    return module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def is_plain(conv: nn.Conv2d) -> bool:
    """Return whether it has no groups, no dilation and nothing but zeros around the image."""
    return conv.groups == 1 and conv.dilation == (1, 1) and conv.padding_mode == "zeros"


def can_fuse(x: Tensor, norm: nn.Module, conv: nn.Conv2d) -> bool:
    """Return whether plain batch norm and convolution are being trained in full precision."""
    return type(norm) is nn.BatchNorm2d and is_trained(norm) and not is_autocast(x) and is_plain(conv)


class _NormReluConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm: nn.BatchNorm2d,
        conv: nn.Conv2d,
    ) -> Tensor:
        if x.numel() == x.shape[1]:
            raise CandidError(
                "Batch norm can't be trained on one number a channel: use a larger batch or larger images."
            )
        h, mean, inverse_std = torch.native_batch_norm(
            x, gamma, beta, *_running_statistics(norm), True, _momentum(norm), norm.eps
        )
        ctx.save_for_backward(x, gamma, beta, weight, mean, inverse_std)
        ctx.eps, ctx.conv = norm.eps, conv
        return F.conv2d(h.relu_(), weight, bias, conv.stride, conv.padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, weight, mean, inverse_std = ctx.saved_tensors
        needs_x, needs_gamma, needs_beta, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        scale = gamma * inverse_std
        h = _scaled_relu(x, scale, beta - mean * scale)
        wants_h = needs_x or needs_gamma or needs_beta
        grad_h, grad_weight = convolution_gradients(g, h, weight, ctx.conv, wants_h, needs_weight)
        grad_bias = g.sum((0, 2, 3)) if needs_bias else None
        if grad_h is None:
            return None, None, None, grad_weight, grad_bias, None, None
        aten.threshold_backward.grad_input(grad_h, h, 0, grad_input=grad_h)
        del h
        wanted = [needs_x, needs_gamma, needs_beta]
        grads = aten.native_batch_norm_backward(
            grad_h, x, gamma, None, None, mean, inverse_std, True, ctx.eps, wanted
        )
        return *grads, grad_weight, grad_bias, None, None


class _ScaleReluConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv: nn.Conv2d,
    ) -> Tensor:
        ctx.save_for_backward(x, scale, shift, weight)
        ctx.conv = conv
        return F.conv2d(_scaled_relu(x, scale, shift), weight, bias, conv.stride, conv.padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, shift, weight = ctx.saved_tensors
        h = _scaled_relu(x, scale, shift)
        grad_h, grad_weight = convolution_gradients(g, h, weight, ctx.conv, True, ctx.needs_input_grad[3])
        assert grad_h is not None
        aten.threshold_backward.grad_input(grad_h, h, 0, grad_input=grad_h)
        grad_scale = torch.mul(grad_h, x, out=h).sum((0, 2, 3))
        grad_shift = grad_h.sum((0, 2, 3))
        grad_bias = g.sum((0, 2, 3)) if ctx.needs_input_grad[4] else None
        return grad_h.mul_(_channels(scale)), grad_scale, grad_shift, grad_weight, grad_bias, None


def _scaled_relu(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.addcmul(_channels(shift), x, _channels(scale)).relu_()


def _running_statistics(norm: nn.BatchNorm2d) -> tuple[Tensor | None, Tensor | None]:
    return (norm.running_mean, norm.running_var) if norm.track_running_stats else (None, None)


def _momentum(norm: nn.BatchNorm2d) -> float:
    """Count the batch and return the weight of its statistics among the running ones."""
    if norm.track_running_stats and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            return 1 / int(norm.num_batches_tracked)
    return norm.momentum or 0.0


def _channels(v: Tensor) -> Tensor:
    return v[:, None, None]


def convolution_gradients(
    g: Tensor, x: Tensor, weight: Tensor, conv: nn.Conv2d, of_input: bool, of_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a convolution's input x and of its weight from that of its output, g."""
    by_product = of_weight and _product_is_faster(g, x, conv)
    mask = [of_input, of_weight and not by_product, False]
    grad_x, grad_weight, _ = aten.convolution_backward(
        g, x, weight, None, conv.stride, conv.padding, conv.dilation, False, [0, 0], conv.groups, mask
    )
    return grad_x, weight_gradient(g, x, weight, conv) if by_product else grad_weight


def _product_is_faster(g: Tensor, x: Tensor, conv: nn.Conv2d) -> bool:
    """Return whether oneDNN is slower on a CPU with AVX2, by up to a factor of two, as measured."""
    if x.device.type != "cpu":
        return False
    if conv.kernel_size == conv.stride == (1, 1):
        return min(conv.in_channels, conv.out_channels) >= 48 and g[:, 0].numel() <= 2**13
    return conv.in_channels >= 64 and x[0].numel() >= 2**14


def weight_gradient(g: Tensor, x: Tensor, weight: Tensor, conv: nn.Conv2d) -> Tensor:
    """Return the gradient of a convolution's weight as a product with the unfolded patches of its input x.

    Few patches are unfolded at once, so that they stay in the cache.
    """
    g, x = (t.permute(0, 2, 3, 1).contiguous() for t in (g, x))  # (B, H, W, C)
    if conv.kernel_size == conv.stride == (1, 1):
        grad = g.flatten(0, 2).T @ x.flatten(0, 2)
        return grad.as_strided(weight.shape, weight.stride())
    patches = _patches(x, conv, g.shape[1:3])
    rows = max(1, PATCH_NUMBERS // patches[0, 0].numel())
    images = max(1, rows // g.shape[1])
    grad = g.new_zeros(g.shape[3], patches[0, 0, 0].numel())
    for g_part, part in zip(g.split(images), patches.split(images), strict=True):
        for g_band, band in zip(g_part.split(rows, dim=1), part.split(rows, dim=1), strict=True):
            grad.addmm_(g_band.reshape(-1, grad.shape[0]).T, band.reshape(-1, grad.shape[1]))
    return grad.unflatten(1, patches.shape[3:]).permute(0, 3, 1, 2)


def _patches(x: Tensor, conv: nn.Conv2d, size: Sequence[int]) -> Tensor:
    """Return what the kernel sees at each position, a view of the padded x, (B, H, W, kernel, kernel, C)."""
    kernel, stride, padding = conv.kernel_size[0], conv.stride[0], int(conv.padding[0])
    x = F.pad(x, (0, 0, padding, padding, padding, padding))
    by_image, by_row, by_column, by_channel = x.stride()
    return x.as_strided(
        (len(x), *size, kernel, kernel, x.shape[3]),
        (by_image, stride * by_row, stride * by_column, by_row, by_column, by_channel),
    )


def affine(a: Tensor, x: Tensor, clamp: float, scale_gain: float, shift_gain: float) -> tuple[Tensor, Tensor]:
    """Return ``z = x s + shift_gain a_t`` with ``log s = clamp tanh(scale_gain a_s)``, and ``sum log s``."""
    z, log_det = _Affine.apply(a, x, clamp, scale_gain, shift_gain)
    return z, log_det


def scaled_tanh(sigmoid: Tensor, clamp: float) -> Tensor:
    """Return ``clamp tanh(a)`` from ``sigmoid(2 a)``, which torch computes faster than tanh."""
    return torch.rsub(sigmoid, -clamp, alpha=-2 * clamp)


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, x: Tensor, clamp: float, scale_gain: float, shift_gain: float
    ) -> tuple[Tensor, Tensor]:
        a_scale, a_shift = a.chunk(2, dim=1)
        sigmoid = (2 * scale_gain * a_scale).sigmoid_()
        log_scale = scaled_tanh(sigmoid, clamp)
        log_det = log_scale.sum((1, 2, 3))
        ctx.save_for_backward(sigmoid, x)
        ctx.constants = clamp, scale_gain, shift_gain
        return log_scale.exp_().mul_(x).add_(a_shift, alpha=shift_gain), log_det

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, g_log_det: Tensor) -> tuple[Tensor | None, ...]:
        sigmoid, x = ctx.saved_tensors
        clamp, scale_gain, shift_gain = ctx.constants
        grad_x = scaled_tanh(sigmoid, clamp).exp_().mul_(g)
        grad_log_scale = torch.addcmul(g_log_det[:, None, None, None], grad_x, x)
        shape = (len(g), 2 * g.shape[1], *g.shape[2:])
        grad_a = torch.empty(shape, dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
        grad_a_scale, grad_a_shift = grad_a.chunk(2, dim=1)
        aten.sigmoid_backward.grad_input(grad_log_scale, sigmoid, grad_input=grad_a_scale)
        grad_a_scale *= 4 * clamp * scale_gain
        torch.mul(g, shift_gain, out=grad_a_shift)
        return grad_a, grad_x, None, None, None
