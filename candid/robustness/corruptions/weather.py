"""Weather; images (B, C, H, W) are floats in levels of 0 to 255, lengths are pixels."""

import math
from functools import cache

import numpy as np
from PIL import Image

from candid._support.numbers import Array
from candid._support.randomness import draws
from candid.robustness.corruptions import corruption
from candid.robustness.corruptions.blur import enlarged, streaked
from candid.robustness.corruptions.noise import Generators, normal, uniform

WINDOWS = (  # mean colours, and deviations of the brightness, of frost on windows
    ((78.0, 149.0, 166.0), 18.0),
    ((201.0, 205.0, 214.0), 22.0),
    ((201.0, 205.0, 214.0), 22.0),
    ((138.0, 153.0, 165.0), 29.0),
    ((112.0, 123.0, 135.0), 43.0),
    ((71.0, 95.0, 105.0), 41.0),
)
TEXTURE = 256


@corruption(  # mean, deviation, flake, threshold, radius, sigma, kept
    "weather", short="Snow", alexnet=0.867, number=7, lengths=(2, 4, 5),
    parameters={
        224: (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8), (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7), (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        64: (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.8), (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7), (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
        ),
        32: (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9), (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    },
)  # fmt: skip
def snow(images: Array, generators: Generators, *parameters: float) -> Array:
    """Flakes blown downwards, and from below, over a whitened image.

    The ``parameters`` are the mean and the deviation of normal numbers, how many times these are enlarged to
    flakes, the threshold below which they are removed, radius and sigma of their streaks, and the share of
    the image that isn't whitened.
    """
    mean, deviation, flake, threshold, radius, sigma, kept = parameters
    height, width = images.shape[2:]
    flake = max(1.0, flake)
    small = normal(generators, 1, math.ceil(height / flake), math.ceil(width / flake))
    layer = enlarged(mean + deviation * small, flake, height, width)
    layer = np.where(layer < threshold, np.float32(0), layer.clip(0, 1))
    angles = -(0.25 + 0.5 * uniform(generators)) * math.pi
    layer = 255 * streaked(layer, angles, radius, sigma)
    white = np.maximum(images, 1.5 * _brightness(images) + 127.5)
    return kept * images + (1 - kept) * white + layer + layer[..., ::-1, ::-1]


def _brightness(images: Array) -> Array:
    if images.shape[1] == 1:
        return images
    red, green, blue = np.split(images, 3, 1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


@corruption(  # density, decay
    "weather", short="Fog", alexnet=0.819, number=9,
    parameters={
        224: ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        64: ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
        32: ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    },
)  # fmt: skip
def fog(images: Array, generators: Generators, density: float, decay: float) -> Array:
    """A cloud c of 0 to 255 ``density`` before x: (x + c) m / (m + 255 density), with m the maximum of x."""
    height, width = images.shape[2:]
    size = 1 << (max(height, width) - 1).bit_length()
    cloud = plasma(uniform(generators, size, size), decay)[:, None, :height, :width]
    highest = images.max((1, 2, 3), keepdims=True)
    return (images + 255 * density * cloud) * (highest / (highest + 255 * density))


def plasma(random: Array, decay: float) -> Array:
    """A cloud by the diamond-square algorithm, from 0 to 1, out of ``random`` numbers in [0, 1).

    Both are (B, size, size), and the size is a power of 2. Each halving of the grid divides the roughness by
    ``decay`` squared. Opposite sides fit together.
    """
    noise = 2 * random - 1
    heights = np.zeros_like(noise)
    step, rough = noise.shape[1], 1.0
    while step > 1:
        half = step // 2
        corners = heights[:, ::step, ::step]
        across = corners + np.roll(corners, -1, 2)
        middles = (across + np.roll(across, -1, 1)) / 4 + rough * noise[:, half::step, half::step]
        heights[:, half::step, half::step] = middles
        above_below = across + middles + np.roll(middles, 1, 1)
        heights[:, ::step, half::step] = above_below / 4 + rough * noise[:, ::step, half::step]
        beside = corners + np.roll(corners, -1, 1) + middles + np.roll(middles, 1, 2)
        heights[:, half::step, ::step] = beside / 4 + rough * noise[:, half::step, ::step]
        step, rough = half, rough / decay**2
    heights -= heights.min((1, 2), keepdims=True)
    return heights / heights.max((1, 2), keepdims=True)


@corruption(  # kept, strength, scale of the crystals
    "weather", short="Frost", alexnet=0.827, number=8, lengths=(2,),
    parameters={
        224: ((1, 0.4, 1), (0.8, 0.6, 1), (0.7, 0.7, 1), (0.65, 0.7, 1), (0.6, 0.75, 1)),
        64: ((1, 0.3, 0.3), (0.9, 0.4, 0.3), (0.8, 0.45, 0.3), (0.75, 0.5, 0.3), (0.7, 0.55, 0.3)),
        32: ((1, 0.2, 0.2), (1, 0.3, 0.2), (0.9, 0.4, 0.2), (0.85, 0.4, 0.2), (0.75, 0.45, 0.2)),
    },
)  # fmt: skip
def frost(images: Array, generators: Generators, kept: float, strength: float, scale: float) -> Array:
    """A part of a frosted window, enlarged ``scale`` times, before x: kept x + strength window."""
    windows = frosted_windows(max(2, round(TEXTURE * scale)))
    if images.shape[1] == 1:
        windows = _brightness(windows)
    size = windows.shape[2]
    frosted = kept * images
    for image, (which, top, left) in zip(frosted, uniform(generators, 3).tolist(), strict=True):
        rows = (int(top * size) + np.arange(images.shape[2])) % size
        columns = (int(left * size) + np.arange(images.shape[3])) % size
        image += strength * windows[int(which * len(windows))].take(rows, 1).take(columns, 2)
    return frosted


@cache
def frosted_windows(size: int) -> Array:
    """Draw six windows with ice crystals, (6, 3, size, size), in levels of 0 to 255; opposite sides fit.

    >>> frosted_windows(64).shape
    (6, 3, 64, 64)
    """
    if size != TEXTURE:
        channels = [Image.fromarray(channel) for window in frosted_windows(TEXTURE) for channel in window]
        resized = [
            np.asarray(channel.resize((size, size), Image.Resampling.BILINEAR)) for channel in channels
        ]
        return np.stack(resized).reshape(len(WINDOWS), 3, size, size)
    ice = np.zeros((len(WINDOWS), TEXTURE, TEXTURE), np.float32)
    for octave, crystals in enumerate((24, 60, 100)):
        ice += _crystals(crystals, octave) / 2**octave
    clouds = plasma(np.stack([_drawn(TEXTURE, TEXTURE, key=(8, i)) for i in range(len(WINDOWS))]), 1.6)
    mixed = 0.75 * _standardised(ice) + 0.65 * _standardised(clouds)
    colours = np.array([colour for colour, _ in WINDOWS], np.float32)[:, :, None, None]
    deviations = np.array([deviation for _, deviation in WINDOWS], np.float32)[:, None, None]
    return (colours + (deviations * _standardised(mixed))[:, None]).clip(0, 255)


def _drawn(*shape: int, key: tuple[int, int]) -> Array:
    """Draw numbers in [0, 1) that never change, in float32: windows are drawn once for all."""
    return (draws(*key).integers(1 << 24, math.prod(shape)) / 2**24).astype(np.float32).reshape(shape)


def _crystals(number: int, octave: int) -> Array:
    """Feathers of ice from random points in random directions; at each pixel the nearest one is seen."""
    at = np.arange(TEXTURE, dtype=np.float32) / TEXTURE
    nearest = np.full((len(WINDOWS), TEXTURE, TEXTURE), np.inf, np.float32)
    spine, side = np.zeros_like(nearest), np.zeros_like(nearest)
    for y, x, turn in _drawn(number, 3, len(WINDOWS), 1, 1, key=(9, octave)):
        down, right = (at[:, None] - y + 0.5) % 1 - 0.5, (at - x + 0.5) % 1 - 0.5
        cos, sin = np.cos(2 * math.pi * turn), np.sin(2 * math.pi * turn)
        along, beside = cos * right + sin * down, np.abs(cos * down - sin * right)
        distance = np.abs(along) + 2.5 * beside
        closer = distance < nearest
        for kept, new in ((spine, along), (side, beside), (nearest, distance)):
            np.copyto(kept, new, where=closer)
    rib = 0.04 / 2**octave  # from one barb of a feather to the next, as a share of the window
    barbs = np.cos(2 * math.pi * (spine - side) / rib) * np.exp(-side / (2 * rib))
    return barbs + 2 * np.exp(-12 * side / rib) - 6 * nearest


def _standardised(fields: Array) -> Array:
    centred = fields - fields.mean((1, 2), keepdims=True)
    return centred / centred.std((1, 2), ddof=1, keepdims=True)
