"""The same classifier in the straightforward formulation: what most of the benchmarks measure against.

It is how the equations read, and how the original code computes them: permutations as dense 1 x 1
convolutions, ActNorm, scale and shift one after another, batch norm and ReLU as separate layers, all
M x D means, images in NCHW order. It takes the subnets' modules from the model itself, so that the
results agree and only the formulation differs.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from candid import GenerativeClassifier
from candid.models.flow.coupling import (
    ActNorm,
    AffineCoupling,
    DownsamplingCoupling,
    OrthogonalMixing,
    Permutation,
)
from candid.models.flow.invertible import Chain
from candid.models.flow.pooling import DCTPooling, HaarPooling


class Block(nn.Module):
    """A coupling, ActNorm and a dense mixing matrix."""

    weight: Tensor

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        coupling, norm, mixing = (layer for _, layer in chain.leaves())
        assert isinstance(coupling, AffineCoupling | DownsamplingCoupling)
        assert isinstance(norm, ActNorm)
        for name, subnet in coupling.named_children():
            setattr(coupling, name, nn.Sequential(*subnet.children()))
        self.coupling, self.norm = coupling, norm
        if isinstance(mixing, Permutation):
            weight = torch.eye(len(mixing.index))[mixing.index]
        else:
            assert isinstance(mixing, OrthogonalMixing)
            weight = mixing.matrix.weight
        self.register_buffer("weight", weight[:, :, None, None].clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x1, x2 = x.split(self.coupling.split, dim=1)
        if isinstance(self.coupling, AffineCoupling):
            x2, log_det = self._affine(self.coupling.subnet, x1, x2)
        else:
            x2, log_det = self._affine(self.coupling.strided, x1, F.pixel_unshuffle(x2, 2))
            x1, more = self._affine(self.coupling.low_resolution, x2, F.pixel_unshuffle(x1, 2))
            log_det = log_det + more
        x = torch.cat((x1, x2), dim=1)
        scale = 0.1 * F.softplus(self.norm.gamma, beta=self.norm.sharpness)[None, :, None, None]
        x = x * scale + self.norm.offset[None, :, None, None]
        log_det = log_det + x.shape[2] * x.shape[3] * scale.log().sum()
        return F.conv2d(x, self.weight), log_det

    def _affine(self, subnet: nn.Module, condition: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        a = subnet(condition)
        half = a.shape[1] // 2
        log_scale = self.coupling.clamp * torch.tanh(self.coupling.scale_gain * a[:, :half])
        shift = self.coupling.shift_gain * a[:, half:]
        return x * torch.exp(log_scale) + shift, log_scale.sum(dim=(1, 2, 3))


class Haar(nn.Module):
    """Wavelets by a strided convolution."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], dtype=x.dtype)
        channels = x.shape[1]
        weight = 0.25 * signs.reshape(4, 1, 2, 2).repeat(channels, 1, 1, 1)
        z = F.conv2d(x, weight, stride=2, groups=channels)
        z = z.unflatten(1, (channels, 4)).transpose(1, 2).flatten(1, 2)
        return z, torch.full((len(x),), z[0].numel() * math.log(0.5))


class CosineTransform(nn.Module):
    def __init__(self, pooling: DCTPooling) -> None:
        super().__init__()
        self.pooling = pooling

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.pooling.over_height.weight @ x @ self.pooling.over_width.weight.T
        return z.permute(0, 3, 2, 1).flatten(1), torch.zeros(len(x))


class Straightforward(nn.Module):
    """A deep copy of ``model``, computed the straightforward way: z, log_det and logits.

    ``logits`` here are the joint log-likelihoods, log p(z | y) + log p(y).
    """

    def __init__(self, model: GenerativeClassifier) -> None:
        super().__init__()
        model = copy.deepcopy(model)
        layers: list[nn.Module] = []
        for layer in model.flow.children():
            if isinstance(layer, Chain):
                layers.append(Block(layer))
            elif isinstance(layer, HaarPooling):
                layers.append(Haar())
            else:
                assert isinstance(layer, DCTPooling)
                layers.append(CosineTransform(layer))
        self.layers = nn.ModuleList(layers)
        self.mixture = model.mixture
        self.noise: Tensor
        self.image_mean: Tensor
        self.image_std: Tensor
        for name in ("noise", "image_mean", "image_std"):
            self.register_buffer(name, getattr(model, name))
        self.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        noise = torch.rand_like(x) if self.training else self.noise
        x = (x + noise / 255 - self.image_mean) / self.image_std
        log_det = torch.zeros(len(x))
        for layer in self.layers:
            x, term = layer(x)
            log_det = log_det + term
        return x, log_det, self._joint(x)

    def _joint(self, z: Tensor) -> Tensor:
        mixture = self.mixture
        rest = mixture.prototypes if mixture.alpha is None else mixture.alpha @ mixture.prototypes
        means = torch.cat((mixture.mean, rest), dim=1)  # (M, D)
        squares = z.square().sum(1)[:, None] - 2 * z @ means.T + means.square().sum(1)
        return -0.5 * squares - 0.5 * z.shape[1] * math.log(2 * math.pi) + mixture.log_priors

    def loss(self, x: Tensor, y: Tensor, beta: float = 1.0) -> Tensor:
        """The information-bottleneck loss with label smoothing 0.05."""
        z, log_det, joint = self(x)
        l_x = -(joint.logsumexp(1) + log_det).mean() / z.shape[1]
        l_y = F.cross_entropy(joint, y, label_smoothing=0.05)
        return (l_x + beta * l_y) / (1 + beta)
