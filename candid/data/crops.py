"""Boxes and crops of images that the model sees."""

import math
from collections.abc import Sequence

import numpy as np

from candid._support.numbers import Array

Box = tuple[float, float, float, float]
"""The left, upper, right and lower edge, in pixels."""


def random_box(
    width: int,
    height: int,
    numbers: Sequence[float] | Array,
    area: tuple[float, float] = (0.08, 1.0),
    log_aspect: float = math.log(4 / 3),
) -> Box:
    """Return the box of a random resized crop that uniform ``numbers`` in [0, 1) decide.

    Its share of the image is uniform in ``area``, the logarithm of its aspect ratio in
    [-log_aspect, log_aspect]. A side longer than the image's is cut to it.

    Args:
        width, height: of the image, in pixels.
        numbers: five of them: two for the position, one that is not used, one each for area and shape.
        area: the smallest and the largest share of the image.
        log_aspect: the logarithm of the largest aspect ratio.

    >>> random_box(100, 50, [0.5, 0.5, 0, 0.999, 0.5], area=(1, 1))
    (14.64, 0.0, 85.36, 50.0)
    """
    x, y, _, share, shape = map(float, numbers)
    pixels = width * height * (area[0] + (area[1] - area[0]) * share)
    aspect = math.exp(log_aspect * (2 * shape - 1))
    w, h = min(width, math.sqrt(pixels * aspect)), min(height, math.sqrt(pixels / aspect))
    left, top = x * (width - w), y * (height - h)
    return round(left, 2), round(top, 2), round(left + w, 2), round(top + h, 2)


def fitted(images: Array, size: tuple[int, int]) -> Array:
    """Return 8-bit images centred at ``size``: smaller ones are padded with zeros, larger ones cropped.

    >>> fitted(np.ones((1, 1, 2, 4), np.uint8), (4, 2))[0, 0].tolist()
    [[0, 0], [1, 1], [1, 1], [0, 0]]
    """
    for axis, wanted in zip((2, 3), size, strict=True):
        gap = wanted - images.shape[axis]
        before, after = gap // 2, gap - gap // 2
        widths = [(0, 0)] * images.ndim
        widths[axis] = (max(before, 0), max(after, 0))
        kept = slice(max(-before, 0), images.shape[axis] - max(-after, 0))
        images = np.pad(images[(slice(None),) * axis + (kept,)], widths)
    return images


def reflected_frame(images: Array, size: tuple[int, int]) -> Array:
    """Return images in the middle of larger ones of ``size``, surrounded by their reflection."""
    rows, columns = (
        _reflected(np.arange(wanted) - (wanted - length) // 2, length)
        for length, wanted in zip(images.shape[2:], size, strict=True)
    )
    return images[:, :, rows[:, None], columns]


def _reflected(index: Array, size: int) -> Array:
    period = max(1, 2 * (size - 1))
    return np.minimum(index % period, -index % period)


def ten_crops(images: Array, size: tuple[int, int]) -> Array:
    """Return the four corners and the centre, and their mirror images, (B, 10, C, height, width).

    >>> ten_crops(np.zeros((2, 3, 36, 36)), (32, 32)).shape
    (2, 10, 3, 32, 32)
    """
    centre = tuple((n - m) // 2 for n, m in zip(images.shape[2:], size, strict=True))
    crops = _five_crops(images, size, centre)
    return np.concatenate((crops, crops[..., ::-1]), axis=1)


def published_ten_crops(images: Array, size: tuple[int, int]) -> Array:
    """Return the ten crops of the paper's authors, those of torchvision: (B, 10, C, height, width).

    They differ from :func:`ten_crops` where a margin is odd. The images are mirrored before they are cropped,
    and half a pixel is rounded to an even number, so the centre of the mirror image may be one pixel off.

    >>> published_ten_crops(np.zeros((2, 3, 73, 90)), (64, 64)).shape
    (2, 10, 3, 64, 64)
    """
    centre = tuple(round((n - m) / 2) for n, m in zip(images.shape[2:], size, strict=True))
    return np.concatenate([_five_crops(side, size, centre) for side in (images, images[..., ::-1])], axis=1)


def _five_crops(images: Array, size: tuple[int, int], centre: tuple[int, ...]) -> Array:
    """Return the four corners, row by row, and the crop at ``centre``, (B, 5, C, height, width)."""
    height, width = size
    bottom, right = images.shape[2] - height, images.shape[3] - width
    places = [(0, 0), (0, right), (bottom, 0), (bottom, right), centre]
    return np.stack([images[:, :, t : t + height, s : s + width] for t, s in places], axis=1)
