"""The imagenet network of Candid beside the same network built from FrEIA's public blocks.

Both have the same stages, widths, blocks and subnets (candid.flow.subnets). Two peers:

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
  square. Rows "with head" have it, rows "network" compare the invertible networks alone.

Lower ratios are better: Candid's time over the peer's, in the same process and round.
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
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import Timing, alternate, console, parser, set_threads, show, write
from candid import FlowConfig, GenerativeClassifier, information_bottleneck_loss
from candid.flow.invertible import Memory
from candid.flow.subnets import bottleneck, low_resolution_entry, pointwise, strided_entry
from candid.mixture import LatentMixture, log_standard_normal

Subnet = Callable[[int, int], nn.Module]
BETA = 1.0


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

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        log_prob, log_det = self(x)
        joint = log_prob - math.log(log_prob.shape[1])
        l_x = -(joint.logsumexp(1) + log_det).mean() / x[0].numel()
        l_y = F.cross_entropy(joint, y, label_smoothing=0.05)
        return (l_x + BETA * l_y) / (1 + BETA)


def network_step(network: nn.Module, v: Tensor) -> None:
    """Maximum likelihood under a standard normal latent: what needs no head."""
    network.zero_grad()
    z, log_det = network(v)
    (-(log_standard_normal(z) + log_det).mean() / z.shape[1]).backward()


def classifier_step(model: GenerativeClassifier, memory: Memory, x: Tensor, y: Tensor) -> None:
    model.zero_grad()
    model.memory = memory
    information_bottleneck_loss(model, x, y, BETA).total.backward()


def peer_step(peer: PeerClassifier, x: Tensor, y: Tensor) -> None:
    peer.zero_grad()
    peer.loss(x, y).backward()


def inference(model: Callable[[Tensor], object], x: Tensor) -> None:
    with torch.inference_mode():
        model(x)


def macs(model: nn.Module, shape: tuple[int, ...]) -> tuple[float, float]:
    """GMAC of a forward pass: for every image, and once a batch."""
    counts = []
    for batch in (1, 2):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.rand(batch, *shape))
        counts.append(counter.get_total_flops() / 2e9)
    return counts[1] - counts[0], 2 * counts[0] - counts[1]


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def sizes(models: dict[str, nn.Module], shape: tuple[int, ...]) -> dict[str, tuple[int, float, float]]:
    """Trainable parameters, GMAC an image and GMAC a batch of each model."""
    return {name: (parameters(model), *macs(model.eval(), shape)) for name, model in models.items()}


def show_sizes(measured: dict[str, tuple[int, float, float]]) -> None:
    rows = [(name, f"{n:,}", f"{each:.2f}", f"{once:.2f}") for name, (n, each, once) in measured.items()]
    show("Sizes: is the comparison fair?", ("model", "parameters", "GMAC an image", "GMAC a batch"), rows)


def show_times(times: dict[str, dict[str, Timing]]) -> None:
    rows = []
    for case, timings in times.items():
        ours, *peers = timings.items()
        rows.append((case, ours[0], ours[1], ""))
        rows += [("", name, timing, f"{ours[1].ratio(timing):.2f}") for name, timing in peers]
    show("Times: median (fastest to slowest) in s", ("case", "", "s", "first / this"), rows)


def main() -> None:
    options = parser("benchmarks.freia", __doc__)
    options.add_argument(
        "--repeats", type=int, default=None, help="rounds of each case (default: 5, quick 2)"
    )
    chosen = options.parse_args()
    set_threads(chosen.threads)
    repeats = chosen.repeats or (2 if chosen.quick else 5)
    torch.manual_seed(0)

    name = "tiny" if chosen.quick else "imagenet"
    ours = GenerativeClassifier.from_preset(name, mixing="permutation")
    config, shape = ours.config.flow, ours.image_shape
    networks: dict[str, nn.Module] = {
        "Candid": ours.flow,
        "FrEIA, AllInOneBlock": AllInOne(config).build(),
        "FrEIA, composed": Composed(config).build(),
    }
    peers = {key: PeerClassifier(n, ours) for key, n in networks.items() if n is not ours.flow}
    whole: dict[str, nn.Module] = {"Candid": ours, **peers}
    kinds = {"network": networks, "with head": whole}
    x, y = torch.rand(8, *shape), torch.arange(8)
    v = (x - ours.image_mean) / ours.image_std
    with torch.no_grad():
        for network in networks.values():  # FrEIA's ActNorm starts from the data of its first batch
            network(v)

    both = {f"{key}, {kind}": model for kind, models in kinds.items() for key, model in models.items()}
    measured = sizes(both, shape)
    show_sizes(measured)
    times: dict[str, dict[str, Timing]] = {}
    with console.status("measuring"):
        for batch in (1, 8):
            for kind, models, images in (("network", networks, v), ("with head", whole, x)):
                times[f"forward, batch {batch}, {kind}"] = alternate(
                    {key: partial(inference, model.eval(), images[:batch]) for key, model in models.items()},
                    repeats,
                )
        for model in whole.values():
            model.train()
        times["training step, batch 8, network"] = alternate(
            {key: partial(network_step, network, v) for key, network in networks.items()}, repeats
        )
        plain = partial(classifier_step, ours, "plain", x, y)
        steps = {key: partial(peer_step, peer, x, y) for key, peer in peers.items()}
        times["training step, batch 8, with head"] = alternate({"Candid": plain, **steps}, repeats)
        times["training step, batch 8, less memory"] = alternate(
            {'Candid, memory="inverse"': partial(classifier_step, ours, "inverse", x, y), "Candid": plain},
            repeats,
        )
    show_times(times)
    seconds = {case: {key: t.seconds for key, t in timings.items()} for case, timings in times.items()}
    write("freia", chosen.quick, {"sizes": measured, "seconds": seconds})


if __name__ == "__main__":
    main()
