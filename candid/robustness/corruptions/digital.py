"""What displays, formats and lenses do; images (B, C, H, W) are floats in levels of 0 to 255."""

from io import BytesIO

import numpy as np
from PIL import Image

from candid._support.numbers import Array
from candid.robustness.corruptions import corruption
from candid.robustness.corruptions.blur import gaussian_blur
from candid.robustness.corruptions.noise import Generators, uniform


@corruption(  # added, as a share of 255
    "weather", short="Bright", alexnet=0.565, number=10,
    parameters={
        224: (0.1, 0.2, 0.3, 0.4, 0.5),
        64: (0.1, 0.2, 0.3, 0.4, 0.5),
        32: (0.05, 0.1, 0.15, 0.2, 0.3),
    },
)  # fmt: skip
def brightness(images: Array, _: Generators, amount: float) -> Array:
    """The value V = max(R, G, B) of HSV grows by 255 ``amount``, to 255 at most; hue and saturation stay."""
    value = images.max(1, keepdims=True)
    brighter = (value + 255 * amount).clip(max=255)
    return np.where(value > 0, images * (brighter / value.clip(min=1)), brighter)


@corruption(  # what is left of it
    "digital", short="Contrast", alexnet=0.853, number=11,
    parameters={
        224: (0.4, 0.3, 0.2, 0.1, 0.05),
        64: (0.4, 0.3, 0.2, 0.1, 0.05),
        32: (0.75, 0.5, 0.4, 0.3, 0.15),
    },
)  # fmt: skip
def contrast(images: Array, _: Generators, share: float) -> Array:
    """Each channel drawn to its mean m: m + share (x - m)."""
    mean = images.mean((2, 3), np.float64, keepdims=True).astype(images.dtype)
    return mean + share * (images - mean)


@corruption(  # amplitude, sigma, skew; for 224 those of the package imagecorruptions
    "digital", short="Elastic", alexnet=0.646, number=12, lengths=(0, 1, 2),
    parameters={
        224: ((14, 2.24, 0), (18.2, 2.24, 0), (23.8, 2.24, 0), (28, 2.24, 0), (33.6, 2.24, 0)),
        64: ((0, 0, 5.12), (3.2, 19.2, 3.84), (6.4, 5.12, 3.84), (6.4, 1.92, 1.92), (10.24, 1.92, 1.28)),
        32: ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)),
    },
)  # fmt: skip
def elastic_transform(
    images: Array, generators: Generators, amplitude: float, sigma: float, skew: float
) -> Array:
    """An affine map, then a smooth random displacement.

    The map moves three points, a third of the image from its centre, by up to ``skew`` pixels each way. The
    displacement is uniform noise of ``amplitude`` pixels, blurred by ``sigma`` pixels.
    """
    height, width = images.shape[2:]
    if skew:
        moves = skew * (2 * uniform(generators, 3, 2) - 1)
        rows, columns = _affine(moves, height, width)
        images = _mapped(images, _mirrored(rows, height), _mirrored(columns, width))
    noise = 2 * uniform(generators, 2, height, width) - 1
    down, right = amplitude * gaussian_blur(noise, sigma, 3.0, "reflect").swapaxes(0, 1)
    rows = np.arange(height, dtype=np.float32)[:, None] + down
    columns = np.arange(width, dtype=np.float32) + right
    return _mapped(images, _reflected(rows, height), _reflected(columns, width))


def _affine(moves: Array, height: int, width: int) -> tuple[Array, Array]:
    """From which row and column each pixel comes if three points (x, y) are moved, (B, H, W) each.

    ``moves`` is (B, 3, 2).
    """
    third = min(height, width) // 3
    points = np.array([width // 2, height // 2]) + third * np.array([[1, 1], [1, -1], [-1, -1]])
    corners = np.concatenate((points + moves, np.ones((len(moves), 3, 1))), 2)
    by_x, by_y, fixed = np.linalg.solve(corners, points[None]).swapaxes(0, 1)[..., None, None]  # (B, 2, 1, 1)
    columns, rows = np.moveaxis(by_x * np.arange(width) + by_y * np.arange(height)[:, None] + fixed, 1, 0)
    return rows, columns


def _mirrored(places: Array, size: int) -> Array:
    """Return places on a line of ``size`` pixels that goes on as its mirror image, the edge seen once."""
    inside = places % (2 * (size - 1))
    return np.minimum(inside, 2 * (size - 1) - inside)


def _reflected(places: Array, size: int) -> Array:
    """Return places on a line of ``size`` pixels that goes on as its mirror image, the edge seen twice."""
    inside = (places + 0.5) % (2 * size)
    return (np.minimum(inside, 2 * size - inside) - 0.5).clip(0, size - 1)


def _mapped(images: Array, rows: Array, columns: Array) -> Array:
    """Return images read between their pixels at ``rows`` and ``columns`` (B, H, W), bilinear."""
    height, width = images.shape[2:]
    top, left = rows.astype(int).clip(max=height - 2), columns.astype(int).clip(max=width - 2)
    down, right = ((a - b).astype(images.dtype)[:, None] for a, b in ((rows, top), (columns, left)))
    first = top * width + left
    flat = images.reshape(*images.shape[:2], -1)

    def taken(offset: int) -> Array:
        return np.stack([image.take(at + offset, 1) for image, at in zip(flat, first, strict=True)])

    upper, lower = taken(0), taken(width)
    upper += right * (taken(1) - upper)
    lower += right * (taken(width + 1) - lower)
    return upper + down * (lower - upper)


@corruption(  # share of the resolution
    "digital", short="Pixel", alexnet=0.718, number=13,
    parameters={
        224: (0.6, 0.5, 0.4, 0.3, 0.25),
        64: (0.9, 0.8, 0.7, 0.6, 0.5),
        32: (0.95, 0.9, 0.85, 0.75, 0.65),
    },
)  # fmt: skip
def pixelate(images: Array, _: Generators, share: float) -> Array:
    """Shrunk to a ``share`` of the height and width by averaging, and enlarged by repeating."""
    small = _averaged(_averaged(images, 3, share), 2, share)
    rows, columns = (
        ((np.arange(size) + 0.5) * boxes / size).astype(int)
        for size, boxes in zip(images.shape[2:], small.shape[2:], strict=True)
    )
    return small.take(rows, 2).take(columns, 3)


def _averaged(images: Array, axis: int, share: float) -> Array:
    """Return whole levels: means over the pixels whose middles lie in each of some equal parts of a line.

    There are ``share`` times as many parts as pixels. PIL rounds after each of the two axes, too.
    """
    size = images.shape[axis]
    parts = max(1, int(size * share))
    part = np.ceil((np.arange(size) + 0.5) * parts / size) - 1
    starts = part.searchsorted(np.arange(parts))
    pixels = np.diff(starts, append=size).astype(images.dtype)
    sums = np.add.reduceat(images, starts, axis)
    return np.floor(sums / (pixels if axis == 3 else pixels[:, None]) + 0.5)


@corruption(  # quality
    "digital", short="JPEG", alexnet=0.607, number=14,
    parameters={
        224: (25, 18, 15, 10, 7),
        64: (65, 58, 50, 40, 25),
        32: (80, 65, 58, 50, 40),
    },
)  # fmt: skip
def jpeg_compression(images: Array, _: Generators, quality: float) -> Array:
    """Written as a JPEG of a ``quality`` from 1 to 95 and read again."""
    pixels = images.astype(np.uint8).transpose(0, 2, 3, 1)
    read = np.stack([_through_jpeg(image, int(quality)) for image in pixels])
    return read.transpose(0, 3, 1, 2).astype(images.dtype)


def _through_jpeg(pixels: Array, quality: int) -> Array:
    """Return an image (H, W, C) after it was written and read."""
    file = BytesIO()
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    image.save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file)).reshape(pixels.shape)
