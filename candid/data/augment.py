"""Random crops and flips of training images, and ten crops for testing.

A random transform takes uniform numbers in [0, 1) instead of a generator. What happens to an image then
depends only on its place in the epoch, not on the process or the worker that does it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

NUMBERS = 5
"""Uniform numbers per image: two for the position of its crop, one each for flip, area and shape."""
Box = tuple[float, float, float, float]


def random_box(
    width: int,
    height: int,
    numbers: Tensor,
    area: tuple[float, float] = (0.08, 1.0),
    log_aspect: float = math.log(4 / 3),
) -> Box:
    """Return the box of a random resized crop: (left, top, right, bottom).

    Its share of the image is uniform in ``area``, the logarithm of its aspect ratio in
    [-log_aspect, log_aspect]. A side longer than the image's is cut to it.

    >>> random_box(100, 50, torch.tensor([0.5, 0.5, 0, 0.999, 0.5]), area=(1, 1))
    (14.64, 0.0, 85.36, 50.0)
    """
    x, y, _, share, shape = numbers.tolist()
    pixels = width * height * (area[0] + (area[1] - area[0]) * share)
    aspect = math.exp(log_aspect * (2 * shape - 1))
    w, h = min(width, math.sqrt(pixels * aspect)), min(height, math.sqrt(pixels / aspect))
    left, top = x * (width - w), y * (height - h)
    return round(left, 2), round(top, 2), round(left + w, 2), round(top + h, 2)


def padded_crops(images: Tensor, numbers: Tensor, padding: int) -> Tensor:
    """Return each image moved by up to ``padding`` pixels; its reflection fills the gap.

    A black frame would be learned by the density.

    >>> padded_crops(torch.arange(9).view(1, 1, 3, 3), torch.tensor([[0.0, 0.99, 0, 0, 0]]), padding=1)
    tensor([[[[4, 3, 4],
              [7, 6, 7],
              [4, 3, 4]]]])
    """
    height, width = images.shape[2:]
    shift = (numbers[:, :2] * (2 * padding + 1)).long() - padding
    columns = _reflected(torch.arange(width) + shift[:, :1], width)  # (B, W)
    rows = _reflected(torch.arange(height) + shift[:, 1:], height)  # (B, H)
    return images[torch.arange(len(images))[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(
        0, 3, 1, 2
    )


def reflected_frame(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return images in the middle of larger ones of ``size``, surrounded by their reflection."""
    lengths = images.shape[2:]
    rows, columns = (
        _reflected(torch.arange(wanted) - (wanted - had) // 2, had)
        for had, wanted in zip(lengths, size, strict=True)
    )
    return images[:, :, rows[:, None], columns]


def jittered(
    images: Tensor, numbers: Tensor, angle: float = 0.2, zoom: float = 0.15, shift: float = 0.125
) -> Tensor:
    """Return each image turned by up to ``angle`` (radians), resized by up to 1 + ``zoom``, and moved.

    ``shift`` is the largest move as a share of the image. Its reflection fills the gaps.
    """
    x, y, _, size, turn = (2 * numbers - 1).unbind(1)
    scale = torch.exp(math.log1p(zoom) * size)
    cos, sin = torch.cos(angle * turn) * scale, torch.sin(angle * turn) * scale
    rows = torch.stack([cos, -sin, 2 * shift * x, sin, cos, 2 * shift * y], dim=1)
    grid = F.affine_grid(rows.view(-1, 2, 3), list(images.shape), align_corners=False)
    moved = F.grid_sample(images.float(), grid, padding_mode="reflection", align_corners=False)
    return moved.round().to(images.dtype)


def _reflected(index: Tensor, size: int) -> Tensor:
    period = max(1, 2 * (size - 1))
    return (index % period).minimum(-index % period)


def augmented(images: Tensor, numbers: Tensor, crop: str, flip: bool) -> Tensor:
    """Return training images (B, C, H, W) shifted or jittered, as ``crop`` says, and mirrored if ``flip``."""
    if crop == "shift":
        images = padded_crops(images, numbers, padding=max(1, images.shape[2] // 8))
    if crop == "jitter":
        images = jittered(images, numbers)
    return random_flips(images, numbers) if flip else images


def random_flips(images: Tensor, numbers: Tensor) -> Tensor:
    """Return the images, half of them mirrored left to right."""
    mirrored = numbers[:, 2] < 0.5
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)


def ten_crops(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the four corners and the centre, and their mirror images, (B, 10, C, height, width).

    >>> ten_crops(torch.rand(2, 3, 36, 36), (32, 32)).shape
    torch.Size([2, 10, 3, 32, 32])
    """
    centre = tuple((n - m) // 2 for n, m in zip(images.shape[2:], size, strict=True))
    crops = _five_crops(images, size, centre)
    return torch.cat((crops, crops.flip(4)), dim=1)


def published_ten_crops(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the ten crops of the paper's authors, those of torchvision: (B, 10, C, height, width).

    They differ from :func:`ten_crops` where a margin is odd. The images are mirrored before they are cropped,
    and half a pixel is rounded to an even number, so the centre of the mirror image may be one pixel off.

    >>> published_ten_crops(torch.rand(2, 3, 73, 90), (64, 64)).shape
    torch.Size([2, 10, 3, 64, 64])
    """
    centre = tuple(round((n - m) / 2) for n, m in zip(images.shape[2:], size, strict=True))
    return torch.cat([_five_crops(each, size, centre) for each in (images, images.flip(3))], dim=1)


def _five_crops(images: Tensor, size: tuple[int, int], centre: tuple[int, ...]) -> Tensor:
    """Return the four corners, row by row, and the crop at ``centre``, (B, 5, C, height, width)."""
    height, width = size
    bottom, right = images.shape[2] - height, images.shape[3] - width
    places = [(0, 0), (0, right), (bottom, 0), (bottom, right), centre]
    return torch.stack([images[:, :, t : t + height, s : s + width] for t, s in places], dim=1)
