"""What displays, formats and lenses do; images (B, C, H, W) are floats in levels of 0 to 255."""

from io import BytesIO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from candid.robustness.corruptions.filters import gaussian_blur
from candid.robustness.corruptions.noise import Generators, uniform
from candid.robustness.corruptions.registry import corruption


@corruption(  # added, as a share of 255
    "weather", short="Bright", alexnet=0.565, number=10,
    parameters={
        224: (0.1, 0.2, 0.3, 0.4, 0.5),
        64: (0.1, 0.2, 0.3, 0.4, 0.5),
        32: (0.05, 0.1, 0.15, 0.2, 0.3),
    },
)  # fmt: skip
def brightness(images: Tensor, _: Generators, amount: float) -> Tensor:
    """The value V = max(R, G, B) of HSV grows by 255 ``amount``, to 255 at most; hue and saturation stay."""
    value = images.amax(1, keepdim=True)
    brighter = (value + 255 * amount).clamp(max=255)
    return torch.where(value > 0, images * (brighter / value.clamp(min=1)), brighter)


@corruption(  # what is left of it
    "digital", short="Contrast", alexnet=0.853, number=11,
    parameters={
        224: (0.4, 0.3, 0.2, 0.1, 0.05),
        64: (0.4, 0.3, 0.2, 0.1, 0.05),
        32: (0.75, 0.5, 0.4, 0.3, 0.15),
    },
)  # fmt: skip
def contrast(images: Tensor, _: Generators, share: float) -> Tensor:
    """Each channel drawn to its mean m: m + share (x - m)."""
    return images.mean((2, 3), keepdim=True).lerp(images, share)


@corruption(  # amplitude, sigma, skew; for 224 those of the package imagecorruptions
    "digital", short="Elastic", alexnet=0.646, number=12, lengths=(0, 1, 2),
    parameters={
        224: ((14, 2.24, 0), (18.2, 2.24, 0), (23.8, 2.24, 0), (28, 2.24, 0), (33.6, 2.24, 0)),
        64: ((0, 0, 5.12), (3.2, 19.2, 3.84), (6.4, 5.12, 3.84), (6.4, 1.92, 1.92), (10.24, 1.92, 1.28)),
        32: ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)),
    },
)  # fmt: skip
def elastic_transform(
    images: Tensor, generators: Generators, amplitude: float, sigma: float, skew: float
) -> Tensor:
    """An affine map, then a smooth random displacement.

    The map moves three points, a third of the image from its centre, by up to ``skew`` pixels each way. The
    displacement is uniform noise of ``amplitude`` pixels, blurred by ``sigma`` pixels.
    """
    height, width = images.shape[2:]
    if skew:
        moves = skew * (2 * uniform(generators, 3, 2, device=images.device) - 1)
        images = _mapped(images, _affine(moves, height, width), corners=True)
    noise = 2 * uniform(generators, 2, height, width, device=images.device) - 1
    moved = amplitude * gaussian_blur(noise, sigma, 3.0, "mirror edge")
    rows = torch.arange(height, device=images.device)[:, None] + moved[:, 0]
    columns = torch.arange(width, device=images.device) + moved[:, 1]
    return _mapped(images, torch.stack((columns, rows), dim=3), corners=False)


def _affine(moves: Tensor, height: int, width: int) -> Tensor:
    """Where each pixel (x, y) comes from if three points are moved by ``moves``, (B, H, W, 2)."""
    middle = moves.new_tensor([width // 2, height // 2])
    third = min(height, width) // 3
    points = middle + third * moves.new_tensor([[1, 1], [1, -1], [-1, -1]])
    ones = moves.new_ones(len(moves), 3, 1)
    matrix = torch.linalg.solve(torch.cat((points + moves, ones), dim=2), points.expand_as(moves))
    pixels = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1).to(moves)  # (H W, 2)
    places = pixels @ matrix[:, :2] + matrix[:, 2:]
    return places.view(-1, height, width, 2)


def _mapped(images: Tensor, places: Tensor, corners: bool) -> Tensor:
    """Images read at ``places`` (x, y); outside, the edge is seen once if ``corners``, else twice."""
    places = places.to(images.dtype)
    size = places.new_tensor([images.shape[3], images.shape[2]])
    grid = places * (2 / (size - 1)) - 1 if corners else (places + 0.5) * (2 / size) - 1
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=corners)


@corruption(  # share of the resolution
    "digital", short="Pixel", alexnet=0.718, number=13,
    parameters={
        224: (0.6, 0.5, 0.4, 0.3, 0.25),
        64: (0.9, 0.8, 0.7, 0.6, 0.5),
        32: (0.95, 0.9, 0.85, 0.75, 0.65),
    },
)  # fmt: skip
def pixelate(images: Tensor, _: Generators, share: float) -> Tensor:
    """Shrunk to a ``share`` of the height and width by averaging, and enlarged by repeating."""
    height, width = images.shape[2:]
    rows, columns = max(1, int(height * share)), max(1, int(width * share))
    narrow = (images @ _boxes(width, columns).to(images).T + 0.5).floor_()  # PIL rounds in between, too
    small = (_boxes(height, rows).to(images) @ narrow + 0.5).floor_()
    return F.interpolate(small, size=(height, width), mode="nearest-exact")


def _boxes(size: int, boxes: int) -> Tensor:
    """Averages over the pixels whose middles lie in each of ``boxes`` equal parts, (boxes, size)."""
    part = ((torch.arange(size) + 0.5) * boxes / size).ceil() - 1
    member = (part == torch.arange(boxes)[:, None]).float()
    return member / member.sum(1, keepdim=True)


@corruption(  # quality
    "digital", short="JPEG", alexnet=0.607, number=14,
    parameters={
        224: (25, 18, 15, 10, 7),
        64: (65, 58, 50, 40, 25),
        32: (80, 65, 58, 50, 40),
    },
)  # fmt: skip
def jpeg_compression(images: Tensor, _: Generators, quality: float) -> Tensor:
    """Written as a JPEG of a ``quality`` from 1 to 95 and read again."""
    pixels = images.to("cpu", torch.uint8).permute(0, 2, 3, 1).contiguous().squeeze(3).numpy()
    read = torch.from_numpy(np.stack([_through_jpeg(each, int(quality)) for each in pixels]))
    return read.view(len(images), *images.shape[2:], -1).permute(0, 3, 1, 2).to(images)


def _through_jpeg(pixels: np.ndarray, quality: int) -> np.ndarray:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file))
