"""A stand-in for timm: its calls, and the three layouts of its networks.

With the folder of timm's own files in ``CANDID_TIMM``, tests use these instead, with random weights. What
they import of torchvision is replaced by empty classes: its builds often do not fit the torch at hand.
"""

import enum
import importlib
import importlib.machinery
import os
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

REAL = (
    *("mobilenetv3_large_100", "mobilenetv4_conv_small", "convnext_tiny", "swin_tiny_patch4_window7_224"),
    *("fastvit_t8", "efficientvit_b1", "tiny_vit_5m_224", "vit_small_patch14_dinov2"),
    *("vit_small_patch16_dinov3", "resnet18"),
)
STAND_INS = ("convolutions", "channels_last", "tokens", "lying")


class StandIn(nn.Module):
    """Four stages of 2 x 2 patches. Inside, maps are (B, C, h, w), (B, h, w, C) or (B, 1 + h w, C)."""

    def __init__(self, layout: str, img_size: int) -> None:
        super().__init__()
        widths = (4, 6, 8, 16)
        self.layout, self.size = layout, img_size
        self.layers = nn.ModuleList(
            nn.Conv2d(before, after, 2, 2) for before, after in zip((3, *widths), widths, strict=False)
        )
        self.feature_info = [
            {"num_chs": width, "reduction": 2 ** (number + 1)} for number, width in enumerate(widths)
        ]
        if layout == "tokens":
            self.pos_embed = nn.Parameter(torch.zeros(1))

    def forward_intermediates(
        self, x: Tensor, indices: int, output_fmt: str = "NCHW"
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the last maps in the network's own layout, and the last ``indices`` ones in the other."""
        assert x.shape[-1] == self.size
        assert output_fmt == "NCHW"
        maps = []
        for layer in self.layers:
            x = F.gelu(layer(x))
            maps.append(x.permute(0, 2, 3, 1) if self.layout == "lying" else x)
        own = x.permute(0, 2, 3, 1)
        return own if self.layout == "channels_last" else x, maps[-indices:]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return pooled features."""
        assert pre_logits
        return x.mean((1, 2) if self.layout == "channels_last" else (2, 3))


def stand_in() -> types.ModuleType:
    """Return a module that is called as timm is; the size of its transformer is 448."""
    timm: Any = types.ModuleType("timm")

    def create_model(name: str, pretrained: bool, img_size: int | None = None) -> nn.Module:
        if name not in STAND_INS:
            raise RuntimeError(f"Unknown model ({name})")
        torch.manual_seed(0)
        return StandIn(name, img_size or (448 if name == "tokens" else 32))

    def resolve_model_data_config(network: Any) -> dict[str, Any]:
        return {"input_size": (3, network.size, network.size), "mean": (0.5, 0.4, 0.3), "std": (0.2,) * 3}

    timm.create_model = create_model
    timm.data = types.SimpleNamespace(resolve_model_data_config=resolve_model_data_config)
    return timm


class _Filter(enum.Enum):
    """The names that timm asks torchvision's filters for."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _empty(asked: str) -> type:
    if asked.startswith("__"):
        raise AttributeError(asked)
    return type(asked, (), {})


def real() -> types.ModuleType:
    """Return timm's own files, with networks of random weights."""
    sys.path.insert(0, os.environ["CANDID_TIMM"])
    for name in (
        "",
        ".transforms",
        ".transforms.functional",
        ".ops",
        ".ops.misc",
        ".datasets",
        ".models",
        ".models.feature_extraction",
    ):
        module: Any = types.ModuleType(f"torchvision{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        module.__path__, module.InterpolationMode = [], _Filter
        module.__getattr__ = _empty
        sys.modules[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    timm: Any = importlib.import_module("timm")
    make = timm.create_model

    def create_model(name: str, pretrained: bool, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        return make(name, pretrained=False, **options)

    timm.create_model = create_model
    return timm
