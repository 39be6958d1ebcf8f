"""The fifteen corruptions of ImageNet-C (Hendrycks & Dietterich 2019), five severities each, on batches.

The parameters are the published ones of ImageNet-C (224 pixels), Tiny-ImageNet-C (64) and CIFAR-10-C (32).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Generator, Tensor

from candid._support.errors import CandidError, did_you_mean
from candid.robustness.corruptions import blur, digital, noise, weather
from candid.robustness.corruptions.filters import truncated

Kind = Literal["noise", "blur", "weather", "digital"]
SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST, SMALLEST_PUBLISHED = 8, 32
VALUES = 1 << 20
"""So many values of images are corrupted at once: memory stays small, and the parts in the cache."""


@dataclass(frozen=True)
class Corruption:
    """A function of float images in levels of 0 to 255, a generator for each, and parameters.

    ``parameters[size]`` has those of severity 1 to 5, published for images of that many pixels a side;
    ``lengths`` says which of them are pixels.
    """

    kind: Kind
    apply: Callable[..., Tensor] = field(repr=False)
    parameters: Mapping[int, tuple[tuple[float, ...], ...]]
    lengths: tuple[int, ...] = ()

    def parameters_for(self, side: int, severity: int) -> tuple[float, ...]:
        """Those of the nearest published size; lengths grow and shrink with the image.

        Images below 32 pixels have the lengths of 32: these are of a pixel or less.

        >>> CORRUPTIONS["motion_blur"].parameters_for(448, severity=1)
        (20.0, 6.0)
        """
        nearest = min(self.parameters, key=lambda size: abs(math.log(size / side)))
        scale = max(side, SMALLEST_PUBLISHED) / nearest
        published = self.parameters[nearest][severity - 1]
        return tuple(value * scale if i in self.lengths else value for i, value in enumerate(published))


def _each(*values: float) -> tuple[tuple[float, ...], ...]:
    return tuple((value,) for value in values)


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": Corruption(  # standard deviation, as a share of 255
        "noise",
        noise.gaussian_noise,
        {
            224: _each(0.08, 0.12, 0.18, 0.26, 0.38),
            64: _each(0.04, 0.08, 0.12, 0.15, 0.18),
            32: _each(0.04, 0.06, 0.08, 0.09, 0.10),
        },
    ),
    "shot_noise": Corruption(  # photons at full brightness
        "noise",
        noise.shot_noise,
        {
            224: _each(60, 25, 12, 5, 3),
            64: _each(250, 100, 50, 30, 15),
            32: _each(500, 250, 100, 75, 50),
        },
    ),
    "impulse_noise": Corruption(  # share of values
        "noise",
        noise.impulse_noise,
        {
            224: _each(0.03, 0.06, 0.09, 0.17, 0.27),
            64: _each(0.01, 0.02, 0.05, 0.08, 0.14),
            32: _each(0.01, 0.02, 0.03, 0.05, 0.07),
        },
    ),
    "defocus_blur": Corruption(  # radius, softness
        "blur",
        blur.defocus_blur,
        {
            224: ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
            64: ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
            32: ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        },
        lengths=(0, 1),
    ),
    "glass_blur": Corruption(  # sigma, reach, passes
        "blur",
        blur.glass_blur,
        {
            224: ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
            64: ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
            32: ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        },
        lengths=(0, 1),
    ),
    "motion_blur": Corruption(  # radius, sigma
        "blur",
        blur.motion_blur,
        {
            224: ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
            64: ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
            32: ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        },
        lengths=(0, 1),
    ),
    "zoom_blur": Corruption(  # zooms, step
        "blur",
        blur.zoom_blur,
        {
            224: ((12, 0.01), (16, 0.01), (11, 0.02), (13, 0.02), (11, 0.03)),
            64: ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01)),
            32: ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01)),
        },
    ),
    "snow": Corruption(  # mean, deviation, flake, threshold, radius, sigma, kept
        "weather",
        weather.snow,
        {
            224: (
                (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
                (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
                (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
                (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
                (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
            ),
            64: (
                (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
                (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
                (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
                (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
                (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
            ),
            32: (
                (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
                (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
                (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
                (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
                (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
            ),
        },
        lengths=(2, 4, 5),
    ),
    "frost": Corruption(  # kept, strength, scale of the crystals
        "weather",
        weather.frost,
        {
            224: ((1, 0.4, 1), (0.8, 0.6, 1), (0.7, 0.7, 1), (0.65, 0.7, 1), (0.6, 0.75, 1)),
            64: ((1, 0.3, 0.3), (0.9, 0.4, 0.3), (0.8, 0.45, 0.3), (0.75, 0.5, 0.3), (0.7, 0.55, 0.3)),
            32: ((1, 0.2, 0.2), (1, 0.3, 0.2), (0.9, 0.4, 0.2), (0.85, 0.4, 0.2), (0.75, 0.45, 0.2)),
        },
        lengths=(2,),
    ),
    "fog": Corruption(  # density, decay
        "weather",
        weather.fog,
        {
            224: ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
            64: ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
            32: ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        },
    ),
    "brightness": Corruption(  # added, as a share of 255
        "weather",
        digital.brightness,
        {
            224: _each(0.1, 0.2, 0.3, 0.4, 0.5),
            64: _each(0.1, 0.2, 0.3, 0.4, 0.5),
            32: _each(0.05, 0.1, 0.15, 0.2, 0.3),
        },
    ),
    "contrast": Corruption(  # what is left of it
        "digital",
        digital.contrast,
        {
            224: _each(0.4, 0.3, 0.2, 0.1, 0.05),
            64: _each(0.4, 0.3, 0.2, 0.1, 0.05),
            32: _each(0.75, 0.5, 0.4, 0.3, 0.15),
        },
    ),
    "elastic_transform": Corruption(  # amplitude, sigma, skew; for 224 those of the package imagecorruptions
        "digital",
        digital.elastic_transform,
        {
            224: ((14, 2.24, 0), (18.2, 2.24, 0), (23.8, 2.24, 0), (28, 2.24, 0), (33.6, 2.24, 0)),
            64: ((0, 0, 5.12), (3.2, 19.2, 3.84), (6.4, 5.12, 3.84), (6.4, 1.92, 1.92), (10.24, 1.92, 1.28)),
            32: ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)),
        },
        lengths=(0, 1, 2),
    ),
    "pixelate": Corruption(  # share of the resolution
        "digital",
        digital.pixelate,
        {
            224: _each(0.6, 0.5, 0.4, 0.3, 0.25),
            64: _each(0.9, 0.8, 0.7, 0.6, 0.5),
            32: _each(0.95, 0.9, 0.85, 0.75, 0.65),
        },
    ),
    "jpeg_compression": Corruption(  # quality
        "digital",
        digital.jpeg_compression,
        {
            224: _each(25, 18, 15, 10, 7),
            64: _each(65, 58, 50, 40, 25),
            32: _each(80, 65, 58, 50, 40),
        },
    ),
}


def corrupt(images: Tensor, name: str, severity: int, generator: Generator) -> Tensor:
    """Corrupted 8-bit images (B, C, H, W), C = 1 or 3, each with randomness of its own.

    The same generator gives the same bits, however the images are cut into batches. ``name`` is one of
    :data:`CORRUPTIONS`, ``severity`` 1 to 5; results are truncated to whole levels, as published.

    >>> from candid._support.randomness import generator
    >>> grey = torch.full((2, 3, 32, 32), 100, dtype=torch.uint8)
    >>> corrupt(grey, "brightness", 5, generator(0))[0, :, 0, 0]
    tensor([176, 176, 176], dtype=torch.uint8)
    """
    if name not in CORRUPTIONS:
        raise CandidError(f"Unknown corruption '{name}': {did_you_mean(name, CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise CandidError(f"Severity {severity} does not exist: choose 1, 2, 3, 4 or 5.")
    _check(images)
    if generator.device.type != "cpu":
        raise CandidError(f"The generator is on '{generator.device}': corruptions draw from one on the CPU.")
    corruption = CORRUPTIONS[name]
    parameters = corruption.parameters_for(min(images.shape[2:]), severity)
    seeds = torch.randint(1 << 62, (len(images),), generator=generator).tolist()
    at_once = max(1, VALUES // images.shape[1:].numel())
    corrupted = torch.empty_like(images)
    for start in range(0, len(images), at_once):
        part = slice(start, start + at_once)
        generators = [Generator().manual_seed(seed) for seed in seeds[part]]
        levels = corruption.apply(images[part].float(), generators, *parameters)
        corrupted[part] = truncated(levels)
    return corrupted


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
