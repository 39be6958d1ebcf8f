"""What a network is made of: parameters, multiply-accumulates, sizes and receptive fields by stage."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from candid._support.errors import require_extra
from candid.models.checkpoint import PARTS
from candid.models.flow.config import ClassifierConfig, FlowConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from candid.models.flow.vector import VectorClassifier
    from candid.models.photo.adopted import AdoptedModel
    from candid.models.photo.model import PhotoModel
    from candid.models.protocol import Model
    from candid.models.resnet import ResNetConfig


@dataclass(frozen=True)
class Stage:
    """A row of the paper's Table 1."""

    layer: str
    blocks: int | None
    size: tuple[int, int]
    """Height and width of the feature maps."""
    channels: int
    receptive_field: int | None
    """Largest distance in pixels between two inputs of one feature; None: the whole image."""


def describe(config: ClassifierConfig) -> dict[str, Any]:
    """Return counts for the generative network of ``config`` and, under "resnet", for the matching ResNet.

    ``gmacs`` are 10^9 multiply-accumulates for one image; what a batch needs once is not counted.

    >>> from candid import PRESETS
    >>> describe(PRESETS["imagenet"])["network_parameters"]
    55412304
    """
    torch = require_extra("torch", "paper", "The size of a network")
    from candid.models.flow.classifier import GenerativeClassifier
    from candid.models.resnet import ResNet, ResNetConfig

    resnet_config = ResNetConfig.matching(config)
    with torch.device("meta"):
        flow, resnet = GenerativeClassifier(config).eval(), ResNet(resnet_config).eval()
    shape = flow.image_shape
    return {
        "network_parameters": _parameters(flow.flow),
        "means_parameters": _parameters(flow.mixture),
        "total_parameters": _parameters(flow),
        "gmacs": _gmacs(lambda x: flow.mixture.logits(flow.flow(x)[0]), shape),
        "stages": [asdict(stage) for stage in flow_stages(config.flow)],
        "resnet": {
            "network_parameters": _parameters(resnet) - _parameters(resnet.fc),
            "total_parameters": _parameters(resnet),
            "gmacs": _gmacs(resnet, shape),
            "stages": [asdict(stage) for stage in resnet_stages(resnet_config)],
        },
    }


def describe_head(model: "Model", folder: Path) -> dict[str, Any] | None:
    """Return what a model of features in ``folder`` consists of, and what its parts take on disk.

    ``eye`` is None if the features came from a file. None of a model that has neither an eye nor a density of
    features.
    """
    if model.density_of != "features" and "eye" not in model.can:
        return None
    model = cast("PhotoModel | AdoptedModel | VectorClassifier", model)
    eye = model.eye if "eye" in model.can else None
    files = {part: [*folder.glob(f"{part}-*.safetensors")] for part in PARTS}
    return {
        "kind": model.kind,
        "classes": len(model.class_names),
        "eye": eye
        and {
            "name": eye.name,
            "size": eye.size,
            "licence": eye.licence,
            "source": eye.source,
            "sha256": eye.sha256,
        },
        "statistics": model.feature_size,
        "posterior": model.posterior_name,
        "known_photos": len(model.thumbnails.get("labels", ())),
        "megabytes": {
            PARTS[part]: sum(file.stat().st_size for file in stored) / 1e6 for part, stored in files.items()
        },
    }


def _parameters(module: "nn.Module") -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _gmacs(run: "Callable[[Tensor], Tensor]", shape: tuple[int, ...]) -> float:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    def flops(batch: int) -> int:
        with FlopCounterMode(display=False) as counter:
            run(torch.empty(batch, *shape, device="meta"))
        return counter.get_total_flops()

    return (flops(2) - flops(1)) / 2 / 1e9


def flow_stages(config: FlowConfig) -> list[Stage]:
    """Return the stages; a 3 x 3 convolution widens the receptive field by two pixels of its resolution."""
    table = _Table(config.channels, config.height, config.width)
    if config.entry != "none":
        table.widen(4 if config.entry == "3x3" else 6)
        table.halve(channels=4 * config.channels)
        table.widen(2)
        table.add("Entry", blocks=1)
    table.widen(1)
    table.halve(channels=4 * table.channels)
    table.add("Haar pooling")
    for stage, blocks in enumerate(config.blocks, start=1):
        if stage > 1:
            table.widen(2)
            table.halve(channels=4 * table.channels)
        table.widen(2 * blocks)
        table.add(f"Stage {stage}", blocks)
    table.pool("DCT pooling", config.dimensions)
    return table.rows


def resnet_stages(config: "ResNetConfig") -> list[Stage]:
    """Return the same for the matching ResNet."""
    from candid.models.resnet import EXPANSION

    table = _Table(config.channels, config.height, config.width)
    table.widen(int(config.stem[0]) - 1)
    table.halve(channels=config.widths[0])
    table.add("Entry", blocks=1)
    if config.stem == "7x7":
        table.widen(2)
        table.halve(channels=config.widths[0])
        table.add("max pooling")
    for stage, (blocks, width) in enumerate(zip(config.blocks, config.widths, strict=True), start=1):
        table.channels = EXPANSION * width
        if stage > 1:
            table.widen(2)
            table.halve(channels=EXPANSION * width)
        table.widen(2 * (blocks if stage == 1 else blocks - 1))
        table.add(f"Stage {stage}", blocks)
    table.pool("mean pooling", table.channels)
    return table.rows


class _Table:
    def __init__(self, channels: int, height: int, width: int) -> None:
        self.channels, self.height, self.width = channels, height, width
        self.step, self.field = 1, 0  # input pixels a feature pixel; receptive field so far
        self.rows = [Stage("Input", None, (height, width), channels, 0)]

    def widen(self, pixels: int) -> None:
        self.field += pixels * self.step

    def halve(self, channels: int) -> None:
        self.channels = channels
        self.step, self.height, self.width = 2 * self.step, self.height // 2, self.width // 2

    def add(self, layer: str, blocks: int | None = None) -> None:
        self.rows.append(Stage(layer, blocks, (self.height, self.width), self.channels, self.field))

    def pool(self, layer: str, channels: int) -> None:
        self.rows.append(Stage(layer, None, (1, 1), channels, None))
