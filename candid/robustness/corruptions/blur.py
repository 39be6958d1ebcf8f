"""Blurs; images (B, C, H, W) are floats in levels of 0 to 255, lengths are pixels."""

import math

import numpy as np

from candid._support.numbers import Array
from candid.robustness.corruptions import corruption
from candid.robustness.corruptions.noise import Generators, uniform


@corruption(  # radius, softness
    "blur", short="Defocus", alexnet=0.82, number=3, lengths=(0, 1),
    parameters={
        224: ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        64: ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
        32: ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    },
)  # fmt: skip
def defocus_blur(images: Array, _: Generators, radius: float, softness: float) -> Array:
    """Convolution with a disk of ``radius``, softened by a Gaussian."""
    return convolved(images, disk(radius, softness), "reflect")


@corruption(  # sigma, reach, passes
    "blur", short="Glass", alexnet=0.826, number=4, lengths=(0, 1),
    parameters={
        224: ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        64: ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
        32: ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    },
)  # fmt: skip
def glass_blur(images: Array, generators: Generators, sigma: float, reach: float, passes: float) -> Array:
    """Pixels taken from places up to ``reach`` away, ``passes`` times, between two Gaussian blurs."""
    reach = max(1, round(reach))
    blurred = truncated(gaussian_blur(images, sigma, 4.0, "nearest"))
    height, width = images.shape[2:]
    places = 2 * reach * uniform(generators, int(passes), height, width)
    down = np.floor(places)
    right = np.floor(2 * reach * (places - down))  # the same number says both
    source = _scattered(down[:, 0] - reach, right[:, 0] - reach, reach)
    for i in range(1, int(passes)):
        later = _scattered(down[:, i] - reach, right[:, i] - reach, reach)
        source = np.stack([first.take(second) for first, second in zip(source, later, strict=True)])
    flat = blurred.reshape(*images.shape[:2], -1)
    scattered = np.stack([image.take(places, 1) for image, places in zip(flat, source, strict=True)])
    return gaussian_blur(scattered.reshape(images.shape), sigma, 4.0, "nearest")


def _scattered(down: Array, right: Array, reach: int) -> Array:
    """Where each pixel comes from after one pass, as places in the flat image, (B, H W).

    The published pass goes through the pixels from the last to the first and overwrites each by the one at
    its offset, which may have been overwritten before: then the chain of sources is followed to its end.
    """
    batch, height, width = down.shape
    here = np.arange(down.size).reshape(down.shape)  # in all images, one after another
    inner = np.zeros((height, width), bool)
    inner[reach + 1 : height - reach + 1, reach + 1 : width - reach + 1] = True
    source = np.where(inner, here + (down * width + right).astype(int), here).ravel()
    overwritten = (down > 0) | (down == 0) & (right > 0)  # before its turn, the source was
    follow = (inner & overwritten).ravel()
    while follow.any():
        further = source.take(source)
        follow, source = follow & follow.take(source), np.where(follow, further, source)
    return source.reshape(batch, -1) - here[:, :1, 0]


@corruption(  # radius, sigma
    "blur", short="Motion", alexnet=0.786, number=5, lengths=(0, 1),
    parameters={
        224: ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        64: ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
        32: ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    },
)  # fmt: skip
def motion_blur(images: Array, generators: Generators, radius: float, sigma: float) -> Array:
    """A smear along a direction within 45 degrees of the horizontal, fading with ``sigma``."""
    angles = (uniform(generators) - 0.5) * math.pi / 2
    return streaked(images, angles, radius, sigma)


@corruption(  # zooms, step
    "blur", short="Zoom", alexnet=0.798, number=6,
    parameters={
        224: ((12, 0.01), (16, 0.01), (11, 0.02), (13, 0.02), (11, 0.03)),
        64: ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01)),
        32: ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01)),
    },
)  # fmt: skip
def zoom_blur(images: Array, _: Generators, zooms: float, step: float) -> Array:
    """The mean of the image and of ``zooms`` images enlarged 1, 1 + step, 1 + 2 step, ... times."""
    total = 2 * images
    for i in range(1, int(zooms)):
        total += zoomed(images, 1 + i * step)
    total /= zooms + 1
    return total


def truncated(levels: Array) -> Array:
    """Return whole levels of 0 to 255, rounded down, but not because of float32's own rounding.

    >>> truncated(np.array([-3.0, 6.9, 6.99999, 300.0]))
    array([  0.,   6.,   7., 255.])
    """
    whole = levels + levels.dtype.type(2**-8)
    np.clip(whole, 0, 255, out=whole)
    return np.floor(whole, out=whole)


def framed(images: Array, rows: int, columns: int, mode: str) -> Array:
    """Return images with this many more rows above and below and columns left and right.

    >>> framed(np.array([[[[1, 2, 3]]]]), 0, 2, "reflect")
    array([[[[3, 2, 1, 2, 3, 2, 1]]]])
    """
    return np.pad(images, ((0, 0), (0, 0), (rows, rows), (columns, columns)), mode)  # type: ignore[call-overload]


def gaussian_blur(images: Array, sigma: float, truncate: float, mode: str) -> Array:
    """Convolve with a Gaussian of ``sigma`` pixels, cut off at ``truncate`` sigmas.

    >>> gaussian_blur(np.eye(3)[None, None], 0.4, 2.0, "nearest")[0, 0, 0].round(4)
    array([0.9225, 0.0759, 0.0016])
    """
    from scipy.ndimage import gaussian_filter

    blurred: Array = gaussian_filter(images, sigma, truncate=truncate, mode=mode, axes=(2, 3))
    return blurred


def bell(reach: int, sigma: float) -> Array:
    """Return the weights of a Gaussian at -reach, ..., reach; they sum to 1."""
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    return weights / weights.sum()


def convolved(images: Array, kernel: Array, mode: str) -> Array:
    """Convolve with a square ``kernel`` (2r + 1, 2r + 1), by Fourier transforms."""
    from scipy.fft import irfft2, next_fast_len, rfft2

    height, width = images.shape[2:]
    reach = len(kernel) // 2
    wide = framed(images, reach, reach, mode)
    size = [next_fast_len(side, real=True) for side in wide.shape[2:]]
    full: Array = irfft2(rfft2(wide, size) * rfft2(kernel.astype(images.dtype), size), size)
    return full[..., 2 * reach : 2 * reach + height, 2 * reach : 2 * reach + width]


def disk(radius: float, softness: float) -> Array:
    """Return the picture of a point out of focus: a softened disk of ``radius`` pixels that sums to 1.

    >>> (disk(1, 0.1) * 5).round()[1:4, 1:4]
    array([[0., 1., 0.],
           [1., 1., 1.],
           [0., 1., 0.]])
    """
    from scipy.ndimage import convolve

    margin = 1 if radius <= 8 else 2  # of the softening kernel, as published
    reach = int(radius) + margin
    at = np.arange(-reach, reach + 1)
    inside = (at[:, None] ** 2 + at**2 <= radius**2).astype(np.float64)
    soft = bell(margin, softness)
    kernel: Array = convolve(inside, np.outer(soft, soft), mode="constant")
    return kernel / kernel.sum()


def streaked(images: Array, angles: Array, radius: float, sigma: float) -> Array:
    """Return each image smeared one way along its angle (radians), 2 ``radius`` pixels far.

    out(p) = sum_i w_i x(p + i (cos angle, sin angle), rounded), with w_i a Gaussian of ``sigma`` pixels,
    i >= 0. What lies outside is the edge.
    """
    reach = 2 * max(1, round(radius))
    fading = bell(reach, sigma)[reach:]
    weights = (fading / fading.sum()).tolist()
    steps, angles = np.arange(reach + 1), angles[:, None]
    down = np.ceil(steps * np.sin(angles) - 0.5).astype(int)  # (B, taps)
    right = np.ceil(steps * np.cos(angles) - 0.5).astype(int)
    height, width = images.shape[2:]
    rows, columns = int(np.abs(down).max()), int(np.abs(right).max())
    wide = framed(images, rows, columns, "edge")
    out, weighted = np.zeros_like(images), np.empty_like(images[0])
    tops, lefts = (down + rows).tolist(), (right + columns).tolist()
    for image, source, ys, xs in zip(out, wide, tops, lefts, strict=True):
        for weight, y, x in zip(weights, ys, xs, strict=True):
            np.multiply(source[:, y : y + height, x : x + width], weight, out=weighted)
            image += weighted
    return out


def zoomed(images: Array, factor: float) -> Array:
    """Return the middle of each image, enlarged to the size of the image.

    >>> zoomed(np.arange(16.0).reshape(1, 1, 4, 4), 2.0)[0, 0, 0].round(4)
    array([5.    , 5.3333, 5.6667, 6.    ])
    """
    height, width = images.shape[2:]
    rows, columns = math.ceil(height / factor), math.ceil(width / factor)
    top, left = (height - rows) // 2, (width - columns) // 2
    return enlarged(images[..., top : top + rows, left : left + columns], factor, height, width)


def enlarged(images: Array, factor: float, height: int, width: int) -> Array:
    """Return the middle of each image enlarged ``factor`` times, bilinear, (B, C, height, width)."""
    for axis, side in ((3, width), (2, height)):
        before, after, share = _between(images.shape[axis], factor, side)
        share = share.astype(images.dtype)
        share = share if axis == 3 else share[:, None]
        first, second = images.take(before, axis), images.take(after, axis)
        second -= first
        second *= share
        images = np.add(first, second, out=first)
    return images


def _between(size: int, factor: float, side: int) -> tuple[Array, Array, Array]:
    """Return between which two of ``size`` pixels each of the middle ``side`` of an enlarged line lies.

    The third array is how far each lies from the first of its two, as a share.
    """
    large = max(side, round(size * factor))
    start = (large - side) // 2
    at = np.arange(start, start + side) * ((size - 1) / max(1, large - 1))
    before = at.astype(int)
    return before, np.minimum(before + 1, size - 1), at - before
