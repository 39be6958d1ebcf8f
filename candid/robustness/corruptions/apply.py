"""Corrupt batches of 8-bit images; importing this module registers all corruptions."""

import torch
from torch import Generator, Tensor

from candid._support.errors import CandidError
from candid.robustness.corruptions import blur, digital, noise, weather  # noqa: F401  they register themselves
from candid.robustness.corruptions.filters import truncated
from candid.robustness.corruptions.registry import CORRUPTIONS, SEVERITIES, check_names, check_severities

__all__ = ["CORRUPTIONS", "SEVERITIES", "check_names", "corrupted"]

SMALLEST = 8
VALUES = 1 << 20
"""Values of images that are corrupted at once: memory stays small, and the parts fit into the cache."""


def corrupted(images: Tensor, name: str, severity: int, generator: Generator) -> Tensor:
    """Return corrupted 8-bit images (B, C, H, W), C = 1 or 3; each image has random numbers of its own.

    The same generator gives the same bits, whatever the batch size. ``name`` is one of
    :data:`CORRUPTIONS`, ``severity`` 1 to 5; results are truncated to whole levels, as published.

    >>> from candid._support.randomness import generator
    >>> grey = torch.full((2, 3, 32, 32), 100, dtype=torch.uint8)
    >>> corrupted(grey, "brightness", 5, generator(0))[0, :, 0, 0]
    tensor([176, 176, 176], dtype=torch.uint8)
    """
    check_names([name])
    check_severities([severity])
    _check(images)
    if generator.device.type != "cpu":
        raise CandidError(f"The generator is on '{generator.device}': corruptions draw from one on the CPU.")
    corruption = CORRUPTIONS[name]
    parameters = corruption.parameters_for(min(images.shape[2:]), severity)
    seeds = torch.randint(1 << 62, (len(images),), generator=generator).tolist()
    at_once = max(1, VALUES // images.shape[1:].numel())
    found = torch.empty_like(images)
    for start in range(0, len(images), at_once):
        part = slice(start, start + at_once)
        generators = [Generator().manual_seed(seed) for seed in seeds[part]]
        levels = corruption.apply(images[part].float(), generators, *parameters)
        found[part] = truncated(levels)
    return found


def _check(images: Tensor) -> None:
    if images.dtype != torch.uint8:
        raise CandidError(f"Corruptions need 8-bit images (torch.uint8, 0 to 255), not {images.dtype}.")
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise CandidError(
            f"Corruptions need images of shape (B, C, H, W) with 1 or 3 channels, not {tuple(images.shape)}."
        )
    height, width = images.shape[2:]
    if min(height, width) < SMALLEST:
        raise CandidError(
            f"Images of {height} x {width} pixels are too small to be corrupted: "
            f"enlarge them to {SMALLEST} x {SMALLEST} or more."
        )
