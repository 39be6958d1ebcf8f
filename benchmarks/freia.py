"""The network of Candid, built from FrEIA's public blocks: same stages, widths, blocks and subnets.

The subnets are Candid's (candid.models.flow.subnets). Two peers:

- "AllInOneBlock": coupling, ActNorm and hard permutation in one block. It permutes with a dense 1 x 1
  convolution, so it computes more than Candid's index permutation does.
- "FrEIA, composed": AffineCouplingOneSided, ActNorm and PermuteRandom, which permutes by index:
  the fastest that FrEIA's blocks allow, with exactly Candid's parameters.

What FrEIA has no block for, and what stands in its place:

- Downsampling coupling: IRevNetDownsampling and two couplings. The subnet of the first undoes the
  downsampling of its half (PixelShuffle) and so sees the full resolution, as Candid's does. Both peers
  permute once more between the two, AllInOneBlock also has one more ActNorm.
- 3-channel entry: AllInOneBlock splits 12 channels into 6 and 6 where Candid has 8 and 4; the 6 are
  padded to 8 before PixelShuffle, so that the wide convolutions are the same. The other peer splits at 8.
- DCT: Flatten, which computes nothing.
- Mixture with low-rank means: as a user would write it, M x D means from the factors and the expanded
  square.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import FrEIA.framework as Ff
import FrEIA.modules as Fm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from candid import FlowConfig, GenerativeClassifier
from candid.models.flow.mixture import LatentMixture
from candid.models.flow.subnets import bottleneck, low_resolution_entry, pointwise, strided_entry

Subnet = Callable[[int, int], nn.Module]
ALL_IN_ONE, COMPOSED = "FrEIA, AllInOneBlock", "FrEIA, composed"


class Peer(ABC):
    """Appends Candid's layers to a FrEIA sequence."""

    def __init__(self, config: FlowConfig) -> None:
        self.config = config
        self.sequence = Ff.SequenceINN(config.channels, config.height, config.width)

    @property
    def channels(self) -> int:
        return int(self.sequence.shapes[-1][0])

    @abstractmethod
    def coupling(self, subnet: Subnet) -> None: ...

    @abstractmethod
    def downsampling(self, strided: Subnet, low: Subnet) -> None: ...

    def build(self) -> nn.Module:
        config, add = self.config, self.sequence.append
        if config.entry != "none":
            width = config.entry_width
            self.downsampling(
                partial(strided_entry, width=width, kernel=int(config.entry[0])),
                partial(low_resolution_entry, width=width),
            )
        add(Fm.HaarDownsampling, order_by_wavelet=True, rebalance=0.5)
        self.coupling(partial(pointwise, width=config.pointwise_width))
        for stage, (blocks, width) in enumerate(zip(config.blocks, config.widths, strict=True)):
            subnet = partial(bottleneck, width=width)
            for block in range(blocks):
                if stage and not block:
                    self.downsampling(partial(subnet, stride=2), subnet)
                else:
                    self.coupling(subnet)
        add(Fm.Flatten)
        network: nn.Module = self.sequence
        return network


class AllInOne(Peer):
    def coupling(self, subnet: Subnet) -> None:
        self.sequence.append(
            Fm.AllInOneBlock,
            subnet_constructor=subnet,
            affine_clamping=self.config.clamp,
            permute_soft=False,
        )

    def downsampling(self, strided: Subnet, low: Subnet) -> None:
        self.sequence.append(Fm.IRevNetDownsampling)
        self.coupling(partial(at_full_resolution, strided))
        self.coupling(low)


class Composed(Peer):
    def coupling(self, subnet: Subnet) -> None:
        self._affine(subnet, self.channels - self.channels // 2)
        self.sequence.append(Fm.ActNorm)
        self.sequence.append(Fm.PermuteRandom)

    def downsampling(self, strided: Subnet, low: Subnet) -> None:
        c1, c2 = self.channels - self.channels // 2, self.channels // 2
        self.sequence.append(Fm.IRevNetDownsampling)
        self._affine(partial(at_full_resolution, strided), 4 * c1)
        self.sequence.append(Fm.PermuteRandom)
        self._affine(low, 4 * c2)
        self.sequence.append(Fm.ActNorm)
        self.sequence.append(Fm.PermuteRandom)

    def _affine(self, subnet: Subnet, split: int) -> None:
        self.sequence.append(
            Fm.AffineCouplingOneSided,
            subnet_constructor=partial(damped, subnet),
            clamp=self.config.clamp,
            clamp_activation="TANH",
            split_len=split,
        )


class Damped(nn.Module):
    """A tenth of a subnet's output, the damping that AllInOneBlock and Candid have built in."""

    def __init__(self, subnet: nn.Module) -> None:
        super().__init__()
        self.subnet = subnet

    def forward(self, x: Tensor) -> Tensor:
        a: Tensor = self.subnet(x)
        return 0.1 * a


def damped(subnet: Subnet, channels_in: int, channels_out: int) -> nn.Module:
    return Damped(subnet(channels_in, channels_out))


def at_full_resolution(subnet: Subnet, channels_in: int, channels_out: int) -> nn.Module:
    """A strided subnet that takes its input space-to-depth, padded to whole 2 x 2 pixels."""
    missing = -channels_in % 4
    shuffle: list[nn.Module] = [nn.ConstantPad3d((0, 0, 0, 0, 0, missing), 0.0)] if missing else []
    return nn.Sequential(*shuffle, nn.PixelShuffle(2), subnet((channels_in + missing) // 4, channels_out))


class MaterialisedMixture(nn.Module):
    """log p(z|y) from an M x D matrix of means."""

    def __init__(self, mixture: LatentMixture) -> None:
        super().__init__()
        self.mean = nn.Parameter(mixture.mean.detach().clone())
        self.prototypes = nn.Parameter(mixture.prototypes.detach().clone())
        self.alpha = None if mixture.alpha is None else nn.Parameter(mixture.alpha.detach().clone())

    def forward(self, z: Tensor) -> Tensor:
        rest = self.prototypes if self.alpha is None else self.alpha @ self.prototypes
        means = torch.cat((self.mean, rest), dim=1)  # (M, D)
        squares = z.square().sum(1)[:, None] - 2 * z @ means.T + means.square().sum(1)
        return -0.5 * squares - 0.5 * z.shape[1] * math.log(2 * math.pi)


class PeerClassifier(nn.Module):
    """A FrEIA network with pixels in and log p(z|y) out."""

    image_mean: Tensor
    image_std: Tensor

    def __init__(self, network: nn.Module, like: GenerativeClassifier) -> None:
        super().__init__()
        self.network = network
        self.head = MaterialisedMixture(like.mixture)
        self.register_buffer("image_mean", like.image_mean)
        self.register_buffer("image_std", like.image_std)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.rand_like(x) if self.training else 0.5
        v = (x + noise / 255 - self.image_mean) / self.image_std
        z, log_det = self.network(v)
        return self.head(z), log_det

    def loss(self, x: Tensor, y: Tensor, beta: float = 1.0) -> Tensor:
        log_prob, log_det = self(x)
        joint = log_prob - math.log(log_prob.shape[1])
        l_x = -(joint.logsumexp(1) + log_det).mean() / x[0].numel()
        l_y = F.cross_entropy(joint, y, label_smoothing=0.05)
        return (l_x + beta * l_y) / (1 + beta)


def peers(like: GenerativeClassifier, x: Tensor) -> dict[str, PeerClassifier]:
    """Both peers of ``like``; FrEIA's ActNorm starts from ``x``, the images of its first batch."""
    networks = {ALL_IN_ONE: AllInOne(like.config.flow).build(), COMPOSED: Composed(like.config.flow).build()}
    classifiers = {name: PeerClassifier(network, like) for name, network in networks.items()}
    with torch.no_grad():
        for network in networks.values():
            network((x - like.image_mean) / like.image_std)
    return classifiers
