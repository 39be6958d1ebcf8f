"""Models to measure: away from their start, folded, and how much they compute."""

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.flop_counter import FlopCounterMode

from candid import GenerativeClassifier, ResNet


def classifier(quick: bool, **changes: Any) -> GenerativeClassifier:
    """The imagenet preset, or a small one, with permutations if ``changes`` don't say otherwise."""
    settings = {"mixing": "permutation", **changes}
    return GenerativeClassifier.from_preset("tiny" if quick else "imagenet", **settings)


@torch.no_grad()
def moved(model: GenerativeClassifier, x: Tensor, strength: float = 0.1) -> GenerativeClassifier:
    """``model`` in evaluation mode with weights and statistics away from their start, near the identity."""
    random = torch.Generator().manual_seed(1)
    for p in model.flow.parameters():
        unit = 1.0 if p.dim() == 1 else p[0].numel() ** -0.5
        p.add_(torch.randn(p.shape, generator=random), alpha=strength * unit)
    model.train()
    for _ in range(3):  # batch norm's running statistics
        model(x)
    return model.eval()


def imagenet(quick: bool) -> tuple[GenerativeClassifier, Tensor]:
    """The imagenet preset, or a small one, as if it were trained; and eight images."""
    torch.manual_seed(0)
    model = classifier(quick)
    x = torch.rand(8, *model.image_shape)
    return moved(model, x[:4]), x


def folded(resnet: ResNet) -> ResNet:
    """A copy for inference with batch norm folded into the convolutions."""
    resnet = copy.deepcopy(resnet).eval()
    for module in list(resnet.modules()):
        for (name, conv), (following, norm) in pairwise(list(module.named_children())):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(module, name, fuse_conv_bn_eval(conv, norm))
                setattr(module, following, nn.Identity())
    resnet.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return resnet


def macs(model: GenerativeClassifier) -> tuple[float, float]:
    """GMAC of a forward pass in evaluation mode: for every image, and once a batch."""
    counts = []
    for batch in (1, 2):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model.eval()(torch.rand(batch, *model.image_shape))
        counts.append(counter.get_total_flops() / 2e9)
    return counts[1] - counts[0], 2 * counts[0] - counts[1]
