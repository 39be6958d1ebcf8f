"""The network for inference: everything that no longer changes is folded into its weights.

Batch norm goes into the convolution before it, the gains of a coupling into its last one, ActNorm and
mixing become one matrix or one index. On a CPU, convolutions have their weights packed once and apply
ReLU while the result is in the cache.
"""

import copy
import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from candid._support.errors import CandidError, NonFiniteError
from candid.models.flow.coupling import (
    ActNorm,
    AffineCoupling,
    DownsamplingCoupling,
    OrthogonalMixing,
    Permutation,
    mix,
)
from candid.models.flow.fused import is_plain
from candid.models.flow.invertible import Chain, Invertible
from candid.models.flow.network import is_autocast

CACHED_NUMBERS = 2**22
"""The largest activation of a subnet that is computed in one piece on a CPU: 16 MB in float32."""


class FrozenFlow(Chain):
    """The network that :func:`freeze` returns."""


@torch.no_grad()
def freeze(flow: Chain) -> FrozenFlow:
    """Return the same bijection as ``flow`` in evaluation mode, faster; it can't be trained.

    Gradients still reach its input.
    """
    layers: dict[str, Invertible] = {}
    leaves = list(flow.leaves())
    while leaves:
        match leaves:
            case (name, ActNorm() as norm), (_, OrthogonalMixing() as mixing), *leaves:
                layer: Invertible = ScaledMixing(norm, mixing)
            case (name, ActNorm() as norm), (_, Permutation() as permutation), *leaves:
                layer = ScaledPermutation(norm, permutation)
            case (name, other), *leaves:
                layer = _frozen_coupling(other)
        layers[name.replace(".", "_")] = layer
    frozen = FrozenFlow(layers).eval().requires_grad_(False)
    for name, weight in frozen.named_buffers():
        if not torch.isfinite(weight).all():
            raise NonFiniteError(
                f"The weights of '{name}' are not finite: the model can't be used, train it again."
            )
    return frozen


def _frozen_coupling(layer: Invertible) -> Invertible:
    """Return a coupling with frozen subnets, gains folded into them; any other layer as it is."""
    if not isinstance(layer, AffineCoupling | DownsamplingCoupling) or not all(
        map(_can_fold, layer.children())
    ):
        return copy.deepcopy(layer)
    frozen = copy.copy(layer)
    frozen._modules = {
        name: FrozenSubnet(subnet, layer.scale_gain, layer.shift_gain)
        for name, subnet in layer.named_children()
    }
    frozen.gains_folded = True
    return frozen


def _can_fold(subnet: nn.Module) -> bool:
    """Return whether it consists of plain convolutions, each followed by batch norm, ReLU or both."""
    kinds = {nn.BatchNorm2d: "N", nn.ReLU: "R", nn.Conv2d: "C"}
    layers = "".join(kinds.get(type(layer), "?") for layer in subnet.children())
    return re.fullmatch(r"(NR)?(CN?R?)*C", layers) is not None and all(
        is_plain(conv) for conv in subnet.children() if isinstance(conv, nn.Conv2d)
    )


class FrozenSubnet(nn.Module):
    """A subnet's convolutions with batch norm and the coupling's gains folded in."""

    scale: Tensor | None
    shift: Tensor | None

    def __init__(self, subnet: nn.Module, scale_gain: float, shift_gain: float) -> None:
        super().__init__()
        self.register_buffer("scale", None)
        self.register_buffer("shift", None)
        convolutions: list[FrozenConvolution] = []
        for layer in subnet.children():
            if isinstance(layer, nn.Conv2d):
                convolutions.append(FrozenConvolution(layer))
            elif isinstance(layer, nn.BatchNorm2d):
                scale, shift = _as_affine(layer)
                if convolutions:
                    convolutions[-1].then(scale, shift)
                else:
                    self.scale, self.shift = (v.to(layer.weight.dtype)[:, None, None] for v in (scale, shift))
            elif convolutions:
                convolutions[-1].relu = True
        gains = torch.ones_like(convolutions[-1].bias, dtype=torch.float64)
        gains[: len(gains) // 2] = 2 * scale_gain
        gains[len(gains) // 2 :] = shift_gain
        convolutions[-1].then(gains, torch.zeros_like(gains))
        self.convolutions = nn.Sequential(*convolutions)
        self.widest = max(len(convolution.bias) for convolution in convolutions)

    def train(self, mode: bool = True) -> "FrozenSubnet":
        if mode:
            raise CandidError("A frozen model can't be trained: train the one it was made from.")
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        images = max(1, CACHED_NUMBERS // (self.widest * x.shape[2] * x.shape[3]))
        if x.device.type != "cpu" or torch.compiler.is_compiling() or len(x) <= images:
            return self._run(x)
        return torch.cat([self._run(part) for part in x.split(images)])

    def _run(self, x: Tensor) -> Tensor:
        if self.scale is not None and self.shift is not None:
            x = torch.addcmul(self.shift, x, self.scale).relu_()
        result: Tensor = self.convolutions(x)
        return result


def _as_affine(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return scale and shift of each channel in float64."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight.double() * (norm.running_var.double() + norm.eps).rsqrt()
    return scale, norm.bias.double() - norm.running_mean.double() * scale


class FrozenConvolution(nn.Module):
    """A convolution, and what follows it for each of its channels."""

    weight: Tensor
    bias: Tensor

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.stride, self.padding = conv.stride, conv.padding
        self.relu = False
        weight = conv.weight.detach().clone(memory_format=torch.channels_last)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", weight.new_zeros(len(weight)))
        if conv.bias is not None:
            self.bias += conv.bias
        self._packed: dict[bool, Tensor] = {}

    def then(self, scale: Tensor, shift: Tensor) -> None:
        """Scale and shift the output channels, too."""
        assert not self.relu
        dtype = self.weight.dtype
        self.weight = (self.weight.double() * scale[:, None, None, None]).to(dtype)
        self.bias = (self.bias.double() * scale + shift).to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FrozenConvolution":
        self._packed = {}
        super()._apply(fn, recurse)
        return self

    def forward(self, x: Tensor) -> Tensor:
        if _can_pack(x):
            then = "relu" if self.relu else "none"
            return torch.ops.mkldnn._convolution_pointwise(
                x, self._packed_for(x), self.bias, self.padding, self.stride, (1, 1), 1, then, [], ""
            )
        x = F.conv2d(x, self.weight, self.bias, self.stride, self.padding)
        return x.relu_() if self.relu else x

    def _packed_for(self, x: Tensor) -> Tensor:
        """Return the weight in the order that is fastest for oneDNN, which differs for a single image."""
        single = len(x) == 1
        if single not in self._packed:
            self._packed[single] = torch.ops.aten.mkldnn_reorder_conv2d_weight(
                self.weight.to_mkldnn(), self.padding, self.stride, (1, 1), 1, list(x.shape)
            )
        return self._packed[single]


def _can_pack(x: Tensor) -> bool:
    """Return whether weights can be packed: packed ones have no gradients and are for float32 on a CPU."""
    return (
        x.device.type == "cpu"
        and x.dtype is torch.float32
        and not x.requires_grad
        and not is_autocast(x)
        and not torch.compiler.is_compiling()
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.mkldnn.is_available()
    )


class _Merged(Invertible):
    """What ActNorm and mixing share when merged."""

    def __init__(self, norm: ActNorm) -> None:
        super().__init__()
        self.log_scale = float(norm.scale().double().log().sum())

    def _log_det(self, x: Tensor) -> Tensor:
        return x.new_full((len(x),), x.shape[2] * x.shape[3] * self.log_scale)


class ScaledMixing(_Merged):
    """ActNorm and a dense mixing in one matrix: ``z = W (g x + o)``."""

    weight: Tensor
    bias: Tensor
    inverse_weight: Tensor
    inverse_bias: Tensor

    def __init__(self, norm: ActNorm, mixing: OrthogonalMixing) -> None:
        super().__init__(norm)
        w, g, o = (v.double() for v in (mixing.matrix.weight, norm.scale(), norm.offset))
        buffers = {"weight": w * g, "bias": w @ o, "inverse_weight": w.T / g[:, None], "inverse_bias": -o / g}
        for name, value in buffers.items():
            self.register_buffer(name, value.to(norm.gamma.dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return mix(x, self.weight, self.bias), self._log_det(x)

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return mix(z, self.inverse_weight, self.inverse_bias), -self._log_det(z)


class ScaledPermutation(_Merged):
    """ActNorm and a permutation: ``z[:, i] = (g x + o)[:, index[i]]``."""

    scale: Tensor
    offset: Tensor
    index: Tensor
    inverse_index: Tensor

    def __init__(self, norm: ActNorm, permutation: Permutation) -> None:
        super().__init__(norm)
        self.register_buffer("scale", norm.scale()[:, None, None])
        self.register_buffer("offset", norm.offset.detach().clone()[:, None, None])
        self.register_buffer("index", permutation.index.clone())
        self.register_buffer("inverse_index", permutation.inverse_index.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.addcmul(self.offset, x, self.scale).index_select(1, self.index), self._log_det(x)

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return (z.index_select(1, self.inverse_index) - self.offset) / self.scale, -self._log_det(z)
