"""The discriminative baseline: a ResNet with bottleneck blocks (He et al., 2016).

Parameters are named as torchvision names them, so that its published ResNet-50 weights fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.options import check_fields, check_range, checked_names
from candid.models.flow.config import IMAGENET_MEAN, IMAGENET_STD, ClassifierConfig
from candid.models.flow.network import ImageClassifier, TensorOutputs, array_of, check_batch
from candid.models.protocol import Ability, DensityOf, TrainingRecord

EXPANSION = 4


@dataclass(frozen=True)
class ResNetConfig:
    """The layout of a ResNet; the defaults are those of ResNet-50.

    >>> sum(ResNetConfig().blocks)
    16
    """

    channels: int = 3
    """Channels of the image."""
    height: int = 224
    width: int = 224
    classes: int = 1000
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    """Bottleneck blocks per stage."""
    widths: tuple[int, ...] = (64, 128, 256, 512)
    """Inner width of the blocks, one number per stage."""
    stem: Literal["7x7", "3x3"] = "7x7"
    """7 x 7 with stride 2 and max pooling, or for small images 3 x 3 with stride 2 alone."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Subtracted from the image in [0, 1]; the result is divided by ``std``."""
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, 1, 65_536, "channels", "height", "width", "widths")
        check_range(self, 1, 1000, "blocks")
        check_range(self, 1, 10_000_000, "classes")
        if not 1 <= len(self.blocks) == len(self.widths) <= 16:
            raise CandidError("'blocks' and 'widths' of a ResNet need one entry for each of 1 to 16 stages.")
        if not {len(self.mean), len(self.std)} <= {1, self.channels} or min(self.std) <= 0:
            raise CandidError(
                f"'mean' and 'std' of a ResNet need one number or one a channel ({self.channels}), "
                "and 'std' must be positive."
            )

    @classmethod
    def matching(cls, generative: ClassifierConfig) -> "ResNetConfig":
        """Return the ResNet with the same stages and widths; ResNet-50 for the imagenet preset."""
        flow = generative.flow
        return cls(
            channels=flow.channels,
            height=flow.height,
            width=flow.width,
            classes=generative.classes,
            blocks=flow.blocks,
            widths=flow.widths,
            stem="3x3" if flow.entry == "none" else "7x7",
            mean=generative.mean,
            std=generative.std,
        )


class ResNet(ImageClassifier):
    """Maps images in [0, 1] to class posteriors; normalisation is included.

    Args:
        config: the layout.
        class_names: one name per class; the class numbers if None.
        seed: the seed of the initial weights; torch's default generator if None.

    >>> net = ResNet(ResNetConfig(height=32, width=32, classes=10, blocks=(1, 1), widths=(8, 16), stem="3x3"))
    >>> net.posterior(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    kind: ClassVar = "resnet"
    density_of: ClassVar[DensityOf] = None
    can: ClassVar[frozenset[Ability]] = frozenset(("gradients", "network"))
    config: ResNetConfig
    image_std: Tensor

    def __init__(
        self, config: ResNetConfig, class_names: Sequence[str] | None = None, seed: int | None = None
    ) -> None:
        super().__init__(checked_names(class_names, config.classes))
        self.config = config
        self.image_shape = (config.channels, config.height, config.width)
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.default_generator.manual_seed(seed)
            self._build(config)
        for name, values in (("image_mean", config.mean), ("image_std", config.std)):
            per_channel = torch.tensor(values, device="cpu")[:, None, None]
            self.register_buffer(name, per_channel, persistent=False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _build(self, config: ResNetConfig) -> None:
        entry = config.widths[0]
        kernel = int(config.stem[0])
        self.conv1 = _conv(config.channels, entry, kernel, stride=2)
        self.bn1 = nn.BatchNorm2d(entry)
        channels = entry
        for stage, (blocks, width) in enumerate(zip(config.blocks, config.widths, strict=True), start=1):
            layer = nn.Sequential()
            for block in range(blocks):
                layer.append(_Bottleneck(channels, width, stride=2 if stage > 1 and block == 0 else 1))
                channels = EXPANSION * width
            self.add_module(f"layer{stage}", layer)
        self.fc = nn.Linear(channels, config.classes)

    @property
    def record(self) -> TrainingRecord:
        """How the model was trained; a ResNet has no beta."""
        return replace(super().record, beta=None)

    @property
    def feature_size(self) -> int:
        """Number of mean-pooled features."""
        return self.fc.in_features

    @property
    def log_priors(self) -> Array:
        """Log p(y), uniform, (M,)."""
        return array_of(torch.full((self.config.classes,), 1 / self.config.classes).log())

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))

    def tensor_outputs(self, x: Tensor) -> TensorOutputs:
        """Make one forward pass."""
        features = self.features(x)
        return TensorOutputs(self.fc(features), features, None, None)

    def features(self, x: Tensor) -> Tensor:
        """Return mean-pooled features, (B, 4 x last width)."""
        return self.feature_maps(x).mean(dim=(2, 3))

    def feature_maps(self, x: Tensor) -> Tensor:
        """Return the last maps before pooling, (B, 4 x last width, h, w)."""
        check_batch(x, self.image_shape)
        # A network without memory (meta) has these two on the CPU.
        mean, std = self.image_mean.to(x.device), self.image_std.to(x.device)
        x = x.to(self.conv1.weight.dtype, memory_format=torch.channels_last)
        x = F.relu(self.bn1(self.conv1((x - mean) / std)))
        if self.config.stem == "7x7":
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        for stage in range(1, len(self.config.blocks) + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Return the unnormalised log posterior, (B, M)."""
        logits: Tensor = self(x)
        return logits


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(channels, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, EXPANSION * width, 1), nn.BatchNorm2d(EXPANSION * width)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or channels != EXPANSION * width:
            self.downsample = nn.Sequential(
                _conv(channels, EXPANSION * width, 1, stride), nn.BatchNorm2d(EXPANSION * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


def _conv(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    if not conv.weight.is_meta:  # there torch would load its compiler to draw nothing
        nn.init.kaiming_normal_(conv.weight, mode="fan_out")
    return conv
