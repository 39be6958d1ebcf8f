"""The paper in one file: an invertible classifier of digits in plain torch, without Candid.

    python examples/paper.py [BETA EPOCHS]          # 98.1 % and 6.98 bits/dim with the defaults, 1 and 120

Mackowiak, Ardizzone, Köthe, Rother (2021): Generative Classifiers as a Basis for Trustworthy Image
Classification. An invertible network turns an image x into z, a Gaussian mixture with one component per
class says p(z | y), the change of variables gives p(x | y) exactly, and Bayes' rule gives p(y | x).
Weights of ``candid.GenerativeClassifier.from_preset("digits")`` give the same numbers here: the layers have
the same names (tests/test_examples.py). What makes the package fast and frugal is left out.
"""

import math
import sys

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

CLASSES, MEAN, STD, CLAMP = 10, 0.3, 0.38, 0.7
Moved = tuple[Tensor, Tensor]  # what a layer returns in either direction: its output, and log |det|, (B,)


def bottleneck(c_in: int, c_out: int, width: int, stride: int = 1) -> nn.Sequential:
    """Predict scales and shifts: batch norm, ReLU and convolution, four times. It is never inverted."""
    layers: list[nn.Module] = []
    sizes = (c_in, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1), (4 * width, c_out, 1, 1)
    for i, (a, b, kernel, step) in enumerate(sizes):
        conv = nn.Conv2d(a, b, kernel, step, padding=kernel // 2, bias=i == 3)
        layers += [nn.BatchNorm2d(a, momentum=0.05), nn.ReLU(), conv]
    return nn.Sequential(*layers)


def affine(x: Tensor, predicted: Tensor, gains: tuple[float, float], back: bool) -> Moved:
    """Scale and shift x, or undo it. The log-scale is softly clamped."""
    a, b = predicted.chunk(2, 1)
    log_s, t = CLAMP * torch.tanh(gains[0] * a), gains[1] * b
    y = (x - t) / log_s.exp() if back else x * log_s.exp() + t
    return y, log_s.flatten(1).sum(1) * (-1 if back else 1)


class Coupling(nn.Module):
    """Half of the channels scales and shifts the other half: z = [x1, x2 s(x1) + t(x1)]."""

    def __init__(self, channels: int, predict: nn.Module) -> None:
        super().__init__()
        self.split, self.subnet = (channels - channels // 2, channels // 2), predict

    def forward(self, x: Tensor, back: bool = False) -> Moved:
        x1, x2 = x.split(self.split, 1)
        z2, log_det = affine(x2, self.subnet(x1), (0.1, 0.1), back)
        return torch.cat((x1, z2), 1), log_det


class Downsampling(nn.Module):
    """(C, H, W) -> (4C, H/2, W/2): both halves become smaller, and each is changed by the other."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.split = c1, c2 = channels - channels // 2, channels // 2
        self.strided = bottleneck(c1, 8 * c2, width, stride=2)
        self.low_resolution = bottleneck(4 * c2, 8 * c1, width)

    def forward(self, x: Tensor, back: bool = False) -> Moved:
        gains = 0.2, 1.0
        if back:
            z1, z2 = x.split([4 * c for c in self.split], 1)
            x1, log_det1 = affine(z1, self.low_resolution(z2), gains, back)
            x1 = F.pixel_shuffle(x1, 2)
            x2, log_det2 = affine(z2, self.strided(x1), gains, back)
            return torch.cat((x1, F.pixel_shuffle(x2, 2)), 1), log_det1 + log_det2
        x1, x2 = x.split(self.split, 1)
        z2, log_det2 = affine(F.pixel_unshuffle(x2, 2), self.strided(x1), gains, back)
        z1, log_det1 = affine(F.pixel_unshuffle(x1, 2), self.low_resolution(z2), gains, back)
        return torch.cat((z1, z2), 1), log_det1 + log_det2


class ActNorm(nn.Module):
    """A scale and an offset per channel; the scale is positive by softplus and starts at 1."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), 10.0))
        self.offset = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, back: bool = False) -> Moved:
        scale, offset = (0.1 * F.softplus(self.gamma))[:, None, None], self.offset[:, None, None]
        log_det = (x.shape[2] * x.shape[3] * scale.log().sum()).expand(len(x))
        return ((x - offset) / scale, -log_det) if back else (x * scale + offset, log_det)


class Permutation(nn.Module):
    """A fixed shuffle of the channels, so that each of them is changed sooner or later."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("index", torch.randperm(channels))

    def forward(self, x: Tensor, back: bool = False) -> Moved:
        return x[:, self.index.argsort() if back else self.index], x.new_zeros(len(x))


class Haar(nn.Module):
    """2 x 2 Haar wavelets in place of pooling: (C, H, W) -> (4C, H/2, W/2), means first."""

    signs = 0.5 * torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])

    def forward(self, x: Tensor, back: bool = False) -> Moved:
        log_det = x.new_full((len(x),), x[0].numel() * math.log(0.5))
        if back:
            patches = torch.einsum("wp,bwchv->bcphv", self.signs.to(x), x.unflatten(1, (4, -1)) / 0.5)
            return F.pixel_shuffle(patches.flatten(1, 2), 2), -log_det
        patches = F.pixel_unshuffle(x, 2).unflatten(1, (x.shape[1], 4))
        return 0.5 * torch.einsum("wp,bcphv->bwchv", self.signs.to(x), patches).flatten(1, 2), log_det


class DCT(nn.Module):
    """The cosine transform of each channel in place of mean pooling; constant coefficients come first."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.shape, n = (size, size, channels), torch.arange(size).double()
        self.basis = math.sqrt(2 / size) * torch.cos(math.pi / size * n[:, None] * (n + 0.5))
        self.basis[0] /= math.sqrt(2)  # orthonormal rows: log |det| = 0

    def forward(self, x: Tensor, back: bool = False) -> Moved:
        basis, x = self.basis.to(x), x.unflatten(1, self.shape) if back else x
        pattern = "ih,jw,bjic->bchw" if back else "ih,jw,bchw->bjic"
        y = torch.einsum(pattern, basis, basis, x)
        return y if back else y.flatten(1), x.new_zeros(len(x))


INVERTIBLE = Coupling, Downsampling, ActNorm, Permutation, Haar, DCT


def block(coupling: nn.Module, channels: int) -> nn.Module:
    parts = {"coupling": coupling, "actnorm": ActNorm(channels), "mixing": Permutation(channels)}
    return nn.ModuleDict(parts)


class Classifier(nn.Module):
    """Stages of couplings, each with ActNorm and a permutation; then the cosine transform and the mixture."""

    def __init__(self, size: int = 8, blocks: tuple[int, ...] = (1, 2, 1)) -> None:
        super().__init__()
        look = nn.Sequential(nn.Conv2d(2, 16, 1), nn.ReLU(), nn.Conv2d(16, 4, 1))
        channels, parts = 4, {"haar": Haar(), "pointwise": block(Coupling(4, look), 4)}
        for stage, (count, width) in enumerate(zip(blocks, (24, 48, 64), strict=True), start=1):
            for number in range(1, count + 1):
                if stage > 1 and number == 1:
                    coupling: nn.Module = Downsampling(channels, width)
                    channels *= 4
                else:
                    coupling = Coupling(channels, bottleneck(channels // 2, channels, width))
                parts[f"stage{stage}_block{number}"] = block(coupling, channels)
        parts["dct"] = DCT(channels, size // 2 ** len(blocks))
        self.flow, rest = nn.ModuleDict(parts), size * size - channels
        means = {"mean": 0.4 / channels**0.5 * torch.randn(CLASSES, channels)}
        means["prototypes"] = 0.3 / max(rest, 1) ** 0.5 * torch.randn(CLASSES, rest)
        self.mixture = nn.ParameterDict(means)
        self.register_buffer("noise", torch.rand(1, size, size))

    def layers(self) -> list[nn.Module]:
        """Return the invertible layers in their order."""
        return [layer for layer in self.flow.modules() if isinstance(layer, INVERTIBLE)]

    def normalise(self, x: Tensor) -> Tensor:
        """Spread each 8-bit level over its width: fixed noise in evaluation, new noise in training."""
        return (x + (torch.rand_like(x) if self.training else self.noise) / 255 - MEAN) / STD

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return z, the logits, and what all log p(x | y) share: log N(z; 0, 1) and the log-determinants."""
        z, log_det = self.normalise(x), -x[0].numel() * math.log(255 * STD)
        for layer in self.layers():
            z, step = layer(z)
            log_det = log_det + step
        mu = torch.cat((self.mixture["mean"], self.mixture["prototypes"]), 1)  # one mean a class
        logits = z @ mu.T - mu.square().sum(1) / 2 - math.log(CLASSES)
        return z, logits, log_det - z.square().sum(1) / 2 - z.shape[1] / 2 * math.log(2 * math.pi)

    def log_likelihoods(self, x: Tensor) -> Tensor:
        """Return log p(x | y) of the 8-bit image in nats, (B, M)."""
        _, logits, shared = self(x)
        return logits + math.log(CLASSES) + shared[:, None]

    def invert(self, z: Tensor) -> Tensor:
        """Return the image of a latent."""
        for layer in reversed(self.layers()):
            z, _ = layer(z, back=True)
        return z * STD + MEAN - self.noise / 255


def information_bottleneck_loss(model: Classifier, x: Tensor, y: Tensor, beta: float) -> Tensor:
    """Return (L_X + beta L_Y) / (1 + beta): how well images are described, and classes separated."""
    z, logits, shared = model(x)
    l_x = -(logits.logsumexp(1) + shared).mean() / z.shape[1] - math.log(255 * STD)
    return (l_x + beta * F.cross_entropy(logits, y, label_smoothing=0.05)) / (1 + beta)


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1438 training images with labels, and 359 test images: 17 grey levels, spread over 0..254."""
    data, random = load_digits(), np.random.default_rng(0)
    levels = 15 * data.images[:, None] + random.integers(15, size=(len(data.images), 1, 8, 8))
    order = torch.from_numpy(random.permutation(len(levels)))
    x, y = torch.from_numpy(levels / 255).float()[order], torch.from_numpy(data.target)[order]
    return x[359:], y[359:], x[:359], y[:359]


def train(model: Classifier, x: Tensor, y: Tensor, beta: float, epochs: int) -> None:
    """AdamW with one rise and fall of the rate; ActNorm starts with the statistics of a first batch."""
    v = model.train().normalise(x[:128])
    for layer in model.layers():
        if isinstance(layer, ActNorm):  # every channel gets zero mean and unit variance
            scale = v.var((0, 2, 3)).clamp(min=1e-6).rsqrt()
            layer.gamma.data = 10 * scale + torch.log(-torch.expm1(-10 * scale))
            layer.offset.data = -v.mean((0, 2, 3)) * scale
        v = layer(v)[0].detach()
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=1e-4)
    schedule = OneCycleLR(optimiser, 6e-3, epochs * (len(x) // 96), pct_start=0.15, cycle_momentum=False)
    most = torch.tensor([[0.2], [0.14], [0.25], [0.25]])  # radians, log of the zoom, shifts by an eighth
    for _ in range(epochs):
        for rows in torch.randperm(len(x))[: len(x) // 96 * 96].split(96):
            angle, zoom, *move = (most * (2 * torch.rand(4, 96) - 1)).unbind()  # every image its own
            cos, sin = angle.cos() * zoom.exp(), angle.sin() * zoom.exp()
            turned = torch.stack((cos, -sin, move[0], sin, cos, move[1]), 1).view(-1, 2, 3)
            grid = F.affine_grid(turned, [96, 1, 8, 8], align_corners=False)
            jittered = F.grid_sample(x[rows], grid, padding_mode="reflection", align_corners=False)
            optimiser.zero_grad()
            information_bottleneck_loss(model, jittered, y[rows], beta).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 8.0)
            optimiser.step()
            schedule.step()
    model.eval()


if __name__ == "__main__":
    torch.manual_seed(0)
    beta, epochs = sys.argv[1:] or (1, 120)
    (x, y, test, labels), model = digits(), Classifier()
    train(model, x, y, float(beta), int(epochs))
    with torch.no_grad():
        right = (model(test)[1].argmax(1) == labels).float().mean()
        likely, strange = (model.log_likelihoods(v).logsumexp(1) - math.log(10) for v in (test, 1 - test))
    found = roc_auc_score([0] * len(test) + [1] * len(test), -torch.cat((likely, strange)))
    print(f"test accuracy                        {100 * right:5.1f} %")
    print(f"bits per dimension                   {-likely.mean() / (64 * math.log(2)):5.2f}")
    print(f"negatives found by log p(x), AUROC   {100 * found:5.1f} %")
