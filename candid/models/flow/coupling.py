"""Affine couplings, ActNorm and channel mixing: the parts of a coupling block."""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from candid._support.errors import CandidError
from candid.models.flow.fused import affine, is_trained, scaled_tanh
from candid.models.flow.invertible import Gradients, Invertible, ParameterGradients, PulledBack
from candid.models.flow.network import full_precision
from candid.models.flow.subnets import normal

SubnetBuilder = Callable[[int, int], nn.Module]


def _halves(channels: int) -> tuple[int, int]:
    """Return the channels of the half that conditions and of the half that changes."""
    if channels < 2:
        raise CandidError(f"A coupling splits its channels in two and needs at least 2, not {channels}.")
    return channels - channels // 2, channels // 2


class _Coupling(Invertible):
    """What the couplings share: ``z = x s(c) + t(c)``, s and t predicted by a subnet, s softly clamped."""

    def __init__(self, clamp: float, scale_gain: float, shift_gain: float) -> None:
        super().__init__()
        self.clamp, self.scale_gain, self.shift_gain = clamp, scale_gain, shift_gain
        self.gains_folded = False

    def _affine(self, subnet: nn.Module, condition: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``x s(c) + t(c)`` and the sum of log s, (B,)."""
        if is_trained(self):
            a = subnet(condition).to(condition.dtype)
            return affine(a, x, self.clamp, self.scale_gain, self.shift_gain)
        log_s, t = self._log_scale_and_shift(subnet, condition)
        return torch.addcmul(t, x, log_s.exp()), log_s.flatten(1).sum(1)

    def _log_scale_and_shift(self, subnet: nn.Module, condition: Tensor) -> tuple[Tensor, Tensor]:
        a_scale, a_shift = subnet(condition).to(condition.dtype).chunk(2, dim=1)
        if self.gains_folded:
            return scaled_tanh(a_scale.sigmoid(), self.clamp), a_shift
        return scaled_tanh((2 * self.scale_gain * a_scale).sigmoid(), self.clamp), self.shift_gain * a_shift

    def _pull_back_affine(
        self, subnet: nn.Module, condition: Tensor, z: Tensor, gradients: Gradients, condition_too: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, ParameterGradients]:
        """Return x, dL/dx, dL/dc, dL/dparameters of ``z = x s(c) + t(c)`` from one evaluation of the subnet.

        With g = dL/dz: dL/dx = g s, dL/dt = g, and dL/dlog s = g s x + dL/dlog_det.
        """
        parameters = [p for p in subnet.parameters() if p.requires_grad]
        with torch.enable_grad():
            c = condition.detach().requires_grad_(condition_too)
            log_s, t = self._log_scale_and_shift(subnet, c)
        scale = log_s.detach().exp()
        x = (z - t.detach()) / scale
        grad_x = gradients.z * scale
        wanted = [c, *parameters] if condition_too else parameters
        if not wanted:
            return x, grad_x, None, {}
        grad_log_s = grad_x * x + gradients.log_det[:, None, None, None]
        results = iter(torch.autograd.grad((log_s, t), wanted, (grad_log_s, gradients.z)))
        grad_c = next(results) if condition_too else None
        return x, grad_x, grad_c, dict(zip(parameters, results, strict=True))


class AffineCoupling(_Coupling):
    """Half of the channels scales and shifts the other half (Dinh et al., 2016).

    With x = [x1, x2] split at ceil(C/2) and a = [a_s, a_t] = subnet(x1)::

        log s = clamp * tanh(scale_gain * a_s),   z = [x1, x2 * s + shift_gain * a_t]
        log |det| = sum log s

    ``subnet(channels_in, channels_out)`` builds the network that predicts a.

    >>> from candid.models.flow.subnets import pointwise
    >>> coupling = AffineCoupling(5, lambda c_in, c_out: pointwise(c_in, c_out, width=8))
    >>> z, log_det = coupling(torch.rand(2, 5, 4, 4))
    >>> z.shape, log_det.shape
    (torch.Size([2, 5, 4, 4]), torch.Size([2]))
    """

    def __init__(
        self,
        channels: int,
        subnet: SubnetBuilder,
        clamp: float = 0.7,
        scale_gain: float = 0.1,
        shift_gain: float = 0.1,
    ) -> None:
        super().__init__(clamp, scale_gain, shift_gain)
        self.split = _halves(channels)
        self.subnet = subnet(self.split[0], 2 * self.split[1])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x1, x2 = x.split(self.split, dim=1)
        z2, log_det = self._affine(self.subnet, x1, x2)
        return torch.cat((x1, z2), dim=1), log_det

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        z1, z2 = z.split(self.split, dim=1)
        log_s, t = self._log_scale_and_shift(self.subnet, z1)
        return torch.cat((z1, (z2 - t) * (-log_s).exp()), dim=1), -log_s.flatten(1).sum(1)

    def pull_back(self, z: Tensor, gradients: Gradients, goes_on: bool) -> PulledBack:
        z1, z2 = z.split(self.split, dim=1)
        g1, g2 = gradients.z.split(self.split, dim=1)
        x2, g2, grad_condition, of_parameters = self._pull_back_affine(
            self.subnet, z1, z2, Gradients(g2, gradients.log_det), goes_on
        )
        grad_x = None if grad_condition is None else torch.cat((g1 + grad_condition, g2), dim=1)
        return PulledBack(torch.cat((z1, x2), dim=1), grad_x, of_parameters)


class DownsamplingCoupling(_Coupling):
    """Space-to-depth inside one coupling: (B, C, H, W) -> (B, 4C, H/2, W/2).

    With x = [x1, x2] split at ceil(C/2) and ``down`` turning 2 x 2 pixels into four channels::

        z2 = down(x2) * s(a) + t(a),   a = strided(x1)        (sees the full resolution)
        z1 = down(x1) * s(b) + t(b),   b = low_resolution(z2)
        log |det| = sum log s(a) + sum log s(b)

    s and t as in :class:`AffineCoupling`. H and W must be even.
    """

    def __init__(
        self,
        channels: int,
        strided: SubnetBuilder,
        low_resolution: SubnetBuilder,
        clamp: float = 0.7,
        scale_gain: float = 0.2,
        shift_gain: float = 1.0,
    ) -> None:
        super().__init__(clamp, scale_gain, shift_gain)
        self.split = c1, c2 = _halves(channels)
        self.split_after = 4 * c1, 4 * c2
        self.strided = strided(c1, 2 * 4 * c2)
        self.low_resolution = low_resolution(4 * c2, 2 * 4 * c1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x1, x2 = x.split(self.split, dim=1)
        z2, log_det2 = self._affine(self.strided, x1, F.pixel_unshuffle(x2, 2))
        z1, log_det1 = self._affine(self.low_resolution, z2, F.pixel_unshuffle(x1, 2))
        return torch.cat((z1, z2), dim=1), log_det1 + log_det2

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        z1, z2 = z.split(self.split_after, dim=1)
        log_s1, t1 = self._log_scale_and_shift(self.low_resolution, z2)
        x1 = F.pixel_shuffle((z1 - t1) * (-log_s1).exp(), 2)
        log_s2, t2 = self._log_scale_and_shift(self.strided, x1)
        x2 = F.pixel_shuffle((z2 - t2) * (-log_s2).exp(), 2)
        return torch.cat((x1, x2), dim=1), -log_s1.flatten(1).sum(1) - log_s2.flatten(1).sum(1)

    def pull_back(self, z: Tensor, gradients: Gradients, goes_on: bool) -> PulledBack:
        z1, z2 = z.split(self.split_after, dim=1)
        g1, g2 = gradients.z.split(self.split_after, dim=1)
        x1, g1, more2, found1 = self._pull_back_affine(
            self.low_resolution, z2, z1, Gradients(g1, gradients.log_det), condition_too=True
        )
        assert more2 is not None
        x1, g1 = F.pixel_shuffle(x1, 2), F.pixel_shuffle(g1, 2)
        x2, g2, more1, found2 = self._pull_back_affine(
            self.strided, x1, z2, Gradients(g2 + more2, gradients.log_det), goes_on
        )
        x = torch.cat((x1, F.pixel_shuffle(x2, 2)), dim=1)
        grad_x = None if more1 is None else torch.cat((g1 + more1, F.pixel_shuffle(g2, 2)), dim=1)
        return PulledBack(x, grad_x, found1 | found2)


ACTNORM_STYLES = {"paper": (1.0, 10.0), "released": (0.5, 7.0)}
"""Sharpness b of the softplus and the initial gamma."""


class ActNorm(Invertible):
    """One scale and one offset per channel (Kingma & Dhariwal, 2018), positive by softplus.

    ``z = g x + offset`` with ``g = 0.1 softplus_b(gamma)``, ``softplus_b(x) = log(1 + exp(b x)) / b``;
    ``log |det| = H W sum log g``. The paper has b = 1 and starts at gamma = 10 (g = 1), the released
    models have b = 0.5 and start at gamma = 7 (g = 0.71).
    """

    def __init__(self, channels: int, style: Literal["paper", "released"] = "paper") -> None:
        super().__init__()
        self.sharpness, start = ACTNORM_STYLES[style]
        self.gamma = nn.Parameter(torch.full((channels,), start))
        self.offset = nn.Parameter(torch.zeros(channels))

    @torch.no_grad()
    def start_from(self, x: Tensor) -> None:
        """Set scale and offset so that ``forward(x)`` has zero mean and unit variance in every channel."""
        variance, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
        scale = variance.clamp(min=1e-6).rsqrt()
        b, softplus = self.sharpness, 10 * scale
        self.gamma.copy_(softplus + torch.log(-torch.expm1(-b * softplus)) / b)
        self.offset.copy_(-mean * scale)

    def scale(self) -> Tensor:
        """The scale g, (C,)."""
        return 0.1 * F.softplus(self.gamma, beta=self.sharpness)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.scale()
        z = torch.addcmul(_per_channel(self.offset), x, _per_channel(scale))
        return z, self._log_det(scale, x)

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.scale()
        return (z - _per_channel(self.offset)) / _per_channel(scale), -self._log_det(scale, z)

    @staticmethod
    def _log_det(scale: Tensor, x: Tensor) -> Tensor:
        pixels = x.shape[2] * x.shape[3]
        return (pixels * scale.log().sum()).expand(x.shape[0])


def _per_channel(v: Tensor) -> Tensor:
    return v[:, None, None]


class Permutation(Invertible):
    """A fixed shuffle of the channels, ``z[:, i] = x[:, index[i]]``; volume-preserving."""

    index: Tensor
    inverse_index: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        index = torch.randperm(channels)
        self.register_buffer("index", index)
        self.register_buffer("inverse_index", index.argsort())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return _permuted(x, self.index, self.inverse_index), x.new_zeros(x.shape[0])

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return _permuted(z, self.inverse_index, self.index), z.new_zeros(z.shape[0])


def _permuted(x: Tensor, index: Tensor, inverse_index: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return x.index_select(1, index)
    z: Tensor = _Permute.apply(x, index, inverse_index)
    return z


class _Permute(torch.autograd.Function):
    """``x[:, index]``, with a gradient that is a permutation again instead of a sum."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse_index: Tensor) -> Tensor:
        return x.index_select(1, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        index, inverse_index = ctx.saved_tensors
        return _Permute.apply(gradient, inverse_index, index), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.index_select(1, ctx.saved_tensors[0])


class OrthogonalMatrix(nn.Module):
    """A fixed orthogonal matrix that stays orthogonal to the last digit of its dtype.

    A matrix that was rounded to float32 is orthogonal to 1e-7 only; when the module is widened
    (``model.double()``), Newton steps ``W <- W (3 I - W^T W) / 2`` square that error each.
    """

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.to(torch.get_default_dtype()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "OrthogonalMatrix":
        digits_before = torch.finfo(self.weight.dtype).bits
        super()._apply(fn, recurse)
        if torch.finfo(self.weight.dtype).bits > digits_before:
            for _ in range(3):
                self.weight = 1.5 * self.weight - 0.5 * self.weight @ (self.weight.T @ self.weight)
        return self


def random_orthogonal(n: int) -> Tensor:
    """Return a matrix from the Haar measure on O(n), from torch's default generator, in float64.

    The Q of a Gaussian matrix's QR decomposition, with the signs of R's diagonal moved into Q:
    without that, Q is not uniformly distributed (Mezzadri, 2007).
    """
    gaussian = normal(n, n, dtype=torch.float64)
    if gaussian.is_meta:  # a model that is being loaded; torch would load its compiler to compute nothing
        return gaussian
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal().sign()


class OrthogonalMixing(Invertible):
    """A fixed random rotation of the channels, ``z = W x`` at every pixel; volume-preserving."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.matrix = OrthogonalMatrix(random_orthogonal(channels))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return mix(x, self.matrix.weight), x.new_zeros(x.shape[0])

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return mix(z, self.matrix.weight.T), z.new_zeros(z.shape[0])


def mix(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``W x + b`` at every pixel, channels last. Convolutions would be rounded to TF32 on GPUs."""
    with full_precision(x):
        return F.linear(x.permute(0, 2, 3, 1), matrix, bias).permute(0, 3, 1, 2)


class CoefficientScale(Invertible):
    """A fixed positive factor for each pooled coefficient of a flat, coefficient-major latent.

    The released models scale their cosine coefficients unevenly; this diagonal, after the
    orthonormal :class:`~candid.models.flow.pooling.DCTPooling`, reproduces it with the true log-determinant.
    """

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale.to(torch.get_default_dtype()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._times(x, self.scale), self._log_det(x)

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self._times(z, 1 / self.scale), -self._log_det(z)

    def _times(self, z: Tensor, factor: Tensor) -> Tensor:
        channels = z.shape[1] // len(factor)
        return (z.unflatten(1, (len(factor), channels)) * factor[:, None]).flatten(1)

    def _log_det(self, z: Tensor) -> Tensor:
        channels = z.shape[1] / len(self.scale)
        return (channels * self.scale.log().sum()).expand(z.shape[0])
