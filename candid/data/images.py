"""Image files to 8-bit tensors, and what is wrong with those that can't be."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from candid.data.transforms import Box, resized
from candid.errors import CandidError

EXTENSIONS = frozenset([".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"])
LARGEST = 89_478_485
"""Pixels; PIL takes more for an attack on memory."""
MODES = {1: "L", 3: "RGB"}
ENDINGS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}


class BadImageError(CandidError):
    """An image can't be used; the message is the reason."""


def decode(
    source: Path | bytes, channels: int, size: tuple[int, int], box: Callable[[int, int], Box]
) -> Tensor:
    """The part ``box(width, height)`` of an image, upright, (channels, *size) uint8.

    Grey, paletted, transparent (over white), CMYK and 16-bit images become 8-bit grey or RGB. A JPEG is
    decoded at a half, a quarter or an eighth where the crop needs no more.
    """
    image = _open(source)
    try:
        lies = image.getexif().get(ExifTags.Base.Orientation, 1) > 4
        width, height = image.size[::-1] if lies else image.size
        left, top, right, bottom = box(width, height)
        surplus = min((right - left) / size[1], (bottom - top) / size[0])
        if image.format == "JPEG" and surplus >= 2:
            image.draft(None, (int(image.size[0] / surplus), int(image.size[1] / surplus)))
        image = _in_mode(ImageOps.exif_transpose(image), MODES[channels])
        across, down = image.size[0] / width, image.size[1] / height
        scaled = (left * across, top * down, min(right, width) * across, min(bottom, height) * down)
        image = resized(image, scaled, size)
    except BadImageError:
        raise
    except Exception as error:  # PIL's decoders raise whatever they like
        raise BadImageError(f"it is cut or damaged: {error}") from error
    return torch.from_numpy(np.array(image).reshape(*size, channels)).permute(2, 0, 1)


def check_file(path: Path) -> None:
    """A quick look without decoding: the header can be read and the end is there."""
    image = _open(path)
    ending = ENDINGS.get(str(image.format))
    if ending is not None:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            if ending not in file.read():
                raise BadImageError("its end is missing")


def _open(source: Path | bytes) -> Image.Image:
    try:
        image = Image.open(BytesIO(source) if isinstance(source, bytes) else source)
    except UnidentifiedImageError as error:
        raise BadImageError("it is empty, not an image, or its beginning is damaged") from error
    except Image.DecompressionBombError as error:
        raise BadImageError("it is too large") from error
    except Exception as error:
        raise BadImageError(str(error)) from error
    width, height = image.size
    if width * height > LARGEST:
        raise BadImageError(f"it has {width} x {height} pixels, more than {LARGEST:,}")
    return image


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == "F":
        raise BadImageError("its pixels are floating-point numbers of unknown range")
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.int64)
        image = Image.fromarray((levels >> 8 if levels.max(initial=0) > 255 else levels).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)
