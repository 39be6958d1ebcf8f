"""Image files to 8-bit tensors, and what is wrong with those that can't be."""

import math
from collections.abc import Callable
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from candid._support.errors import CandidError
from candid.data.augment import Box, resized

EXTENSIONS = frozenset([".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"])
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The only decoders of PIL that a file reaches."""
NAMES = "PNG, JPEG, WebP, GIF, BMP, TIFF or PPM"
LARGEST = 89_478_485
"""Pixels; PIL takes more for an attack on memory."""
MODES = {1: "L", 3: "RGB"}
LYING, MIRRORED, UPSIDE_DOWN = (5, 6, 7, 8), (2, 3, 6, 7), (3, 4, 7, 8)
"""EXIF orientations whose width is the height, and whose far end across or down is the near one."""
ENDINGS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}


class BadImageError(CandidError):
    """An image can't be used; the message is the reason."""


def path_of(spec: str | Path) -> Path:
    """Where ``spec`` is; ~ is somebody's home."""
    try:
        return Path(spec).expanduser()
    except RuntimeError as error:
        raise CandidError(
            f"'{spec}' begins with a user who is not known here: give the whole path."
        ) from error


def decode(
    source: Path | bytes,
    channels: int,
    size: tuple[int, int],
    box: Callable[[int, int], Box],
    check: Callable[[Image.Image], None] | None = None,
) -> Tensor:
    """The part ``box(width, height)`` of an image, upright, (channels, *size) uint8.

    ``check`` may refuse it by its header, before it is decoded.

    Grey, paletted, transparent (over white), CMYK and 16-bit images become 8-bit grey or RGB. A JPEG is
    decoded at a half, a quarter or an eighth where the crop needs no more.
    """
    with _file(source) as file:
        image = _open(file)
        if check is not None:
            check(image)
        try:
            return _cropped(image, channels, size, box)
        except BadImageError:
            raise
        except Exception as error:  # PIL's decoders raise whatever they like
            raise BadImageError(f"it is cut or damaged: {error}") from error


def _cropped(
    image: Image.Image, channels: int, size: tuple[int, int], box: Callable[[int, int], Box]
) -> Tensor:
    # PIL turns a TIFF by itself
    orientation = 1 if image.format == "TIFF" else image.getexif().get(ExifTags.Base.Orientation, 1)
    width, height = image.size[::-1] if orientation in LYING else image.size
    left, top, right, bottom = box(width, height)
    surplus = min((right - left) / size[1], (bottom - top) / size[0])
    scale = _reduce(image, surplus) if image.format == "JPEG" and surplus >= 2 else 1.0
    upright = _in_mode(ImageOps.exif_transpose(image), MODES[channels])
    # a reduced JPEG ends with a pixel that only partly belongs to the image
    x = upright.size[0] - width * scale if orientation in MIRRORED else 0
    y = upright.size[1] - height * scale if orientation in UPSIDE_DOWN else 0
    right, bottom = min(right, width), min(bottom, height)
    scaled = (left * scale + x, top * scale + y, right * scale + x, bottom * scale + y)
    pixels = np.array(resized(upright, scaled, size))
    return torch.from_numpy(pixels.reshape(*size, channels)).permute(2, 0, 1)


def _reduce(image: Image.Image, surplus: float) -> float:
    """Have a JPEG decoded at no less than 1 / ``surplus`` of its size; the share that it will have."""
    width, height = image.size
    drafted = image.draft(None, (math.ceil(width / surplus), math.ceil(height / surplus)))
    return 1.0 if drafted is None else drafted[1][2] / width


def check_file(path: Path) -> None:
    """A quick look: the header can be read and the end is there; only without an end it is decoded."""
    with _file(path) as file:
        ending = ENDINGS.get(str(_open(file).format), b"")
        file.seek(max(0, file.seek(0, SEEK_END) - 4096))
        if ending in file.read():
            return
    decode(path, 3, (1, 1), lambda width, height: (0, 0, width, height))


def _file(source: Path | bytes) -> BinaryIO:
    try:
        return BytesIO(source) if isinstance(source, bytes) else source.open("rb")
    except OSError as error:
        raise BadImageError(str(error)) from error


def _open(file: BinaryIO) -> Image.Image:
    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise BadImageError(f"it is empty, not an image ({NAMES}), or its beginning is damaged") from error
    except Image.DecompressionBombError as error:
        raise BadImageError("it has too many pixels") from error
    except Exception as error:
        raise BadImageError(f"its beginning is damaged: {error}") from error
    width, height = image.size
    if width * height > LARGEST:
        raise BadImageError(f"it has {width} x {height} pixels, more than {LARGEST:,}")
    return image


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == "F":
        raise BadImageError("its pixels are floating-point numbers of unknown range")
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.int64)
        levels = levels >> 8 if levels.max(initial=0) > 255 else levels
        image = Image.fromarray(levels.clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)
