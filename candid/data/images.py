"""Image files to 8-bit tensors, and what is wrong with those that can't be."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from candid._support.errors import CandidError
from candid.data.augment import Box, random_box

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


def centre_box(width: int, height: int, size: tuple[int, int], margin: float = 1.0) -> Box:
    """Where resizing and cropping the centre looks: the largest box of ``size``'s shape over ``margin``.

    A margin of 256 / 224 is the usual 'resize to 256, crop 224'.

    >>> centre_box(640, 480, (224, 224), margin=256 / 224)
    (110.0, 30.0, 530.0, 450.0)
    """
    scale = min(width / size[1], height / size[0]) / margin
    w, h = min(width, size[1] * scale), min(height, size[0] * scale)  # rounding must not lead outside
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


def resized(image: Image.Image, box: Box, size: tuple[int, int]) -> Image.Image:
    """The part ``box`` of ``image`` at ``size`` (height, width)."""
    if box == (0, 0, *image.size) and image.size == (size[1], size[0]):
        return image
    return image.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)


def fitted(images: Tensor, size: tuple[int, int]) -> Tensor:
    """8-bit images centred at ``size``: smaller ones are surrounded by zeros, larger ones cropped."""
    down, across = size[0] - images.shape[2], size[1] - images.shape[3]
    return F.pad(images, (across // 2, across - across // 2, down // 2, down - down // 2))


Crop = Literal["none", "shift", "wobble", "resized"]


@dataclass(frozen=True)
class Preprocessing:
    """How a model sees images.

    Training images are shifted by up to an eighth of their height (``"shift"``, for sets whose images all
    have the model's framing), moved, turned and resized a little (``"wobble"``, for drawings), or randomly
    cropped and resized (``"resized"``, for photos), and mirrored if ``flip``. Others are resized until they
    cover the model's size, ``margin`` times it for photos, and their centre is cropped.
    """

    channels: int
    height: int
    width: int
    crop: Crop = "none"
    flip: bool = False

    def __post_init__(self) -> None:
        if self.channels not in MODES:
            raise CandidError(
                f"Images have 1 or 3 channels: set the model's 'channels' to that, not {self.channels}."
            )

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def margin(self) -> float:
        return 256 / 224 if self.crop == "resized" else 1.0


def decode_as(
    source: Path | bytes,
    preprocessing: Preprocessing,
    numbers: Tensor | None,
    check: Callable[[Image.Image], None] | None = None,
) -> Tensor:
    """One image as ``preprocessing`` wants it, with its random resized crop if ``numbers`` are given."""

    def box(width: int, height: int) -> tuple[float, float, float, float]:
        if numbers is not None:
            return random_box(width, height, numbers)
        return centre_box(
            width,
            height,
            preprocessing.size,
            1.0 if (height, width) == preprocessing.size else preprocessing.margin,
        )

    return decode(source, preprocessing.channels, preprocessing.size, box, check)
