"""Small pictures of photos, for people: JPEG files in memory, and whole photos for figures."""

import base64
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path

from PIL import ExifTags, Image

from candid._support.numbers import Array
from candid.data.images import (
    LYING,
    BadImageError,
    Preprocessing,
    Source,
    _cropped,
    _read,
    decode_as,
    to_pil,
)

SIDE = 96
"""Pixels on each side of a thumbnail."""
QUALITY = 80
MOST = 512
"""Most pixels on a side of a whole photo."""


def thumbnail(path: Path, side: int = SIDE) -> bytes:
    """Return the centre square of a photo as a small JPEG file."""
    return _to_jpeg(decode_as(path, Preprocessing(3, side, side)))


def jpeg_of_photo(
    source: Source, most: int = MOST, check: Callable[[Image.Image], None] | None = None
) -> bytes:
    """Return a photo as a JPEG file, upright and uncropped, with sides of at most ``most`` pixels.

    ``check`` can refuse the photo by its header, before it is decoded.

    Raises:
        BadImageError: if it can't be read.
    """
    return _to_jpeg(_read(source, partial(_whole, most), check))


def _to_jpeg(image: Array) -> bytes:
    file = BytesIO()
    to_pil(image).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def inline_thumbnail(path: Path, side: int) -> str | None:
    """Return a thumbnail as a data URI, for pages that need no other file; None if it can't be read."""
    try:
        return data_uri(thumbnail(path, side), "jpeg")
    except BadImageError:
        return None


def data_uri(content: bytes, kind: str) -> str:
    """Return an image file as an address that contains it.

    >>> data_uri(b"abc", "png")
    'data:image/png;base64,YWJj'
    """
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def whole_photo(path: Path, most: int = MOST) -> Array | None:
    """Return a photo upright and uncropped, (3, H, W) uint8 with sides of at most ``most`` pixels.

    Returns:
        None if there is no such file, or if it can't be read.
    """
    try:
        return _read(path, partial(_whole, most))
    except BadImageError:
        return None


def _whole(most: int, image: Image.Image) -> Array:
    lying = image.format != "TIFF" and image.getexif().get(ExifTags.Base.Orientation, 1) in LYING
    width, height = image.size[::-1] if lying else image.size
    scale = min(1.0, most / max(width, height))
    size = max(1, round(height * scale)), max(1, round(width * scale))
    return _cropped(image, 3, size, lambda width, height: (0, 0, width, height))
