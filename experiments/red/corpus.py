"""Image files of all formats, and random damage to them: for the server and for the command."""

import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

HEIC = Path(__file__).parents[2] / "tests" / "data" / "turned.heic"
HEAD = 64
"""Bytes at the start of a file, where most of its numbers are."""


def _smooth(side: int, mode: str, seed: int) -> Image.Image:
    """Return a picture with flat and detailed parts, as photos have them."""
    draws = np.random.default_rng(seed)
    rows, columns = np.mgrid[:side, :side] / side
    waves = np.sin(9 * rows * draws.uniform(1, 3)) * np.cos(9 * columns * draws.uniform(1, 3))
    levels = 128 + 90 * waves[..., None] * draws.uniform(-1, 1, 3) + draws.normal(0, 9, (side, side, 3))
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8)).convert(mode)


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def seeds() -> list[tuple[str, bytes]]:
    """Return whole image files with their endings: every format and its usual kinds."""
    rgb, grey, clear = _smooth(96, "RGB", 0), _smooth(80, "L", 1), _smooth(72, "RGBA", 2)
    palette, ink, bits = rgb.convert("P"), rgb.convert("CMYK"), grey.convert("1")
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds: list[tuple[str, str, Image.Image, dict[str, Any]]] = [
        ("jpg", "JPEG", rgb, {"quality": 90}),
        ("jpg", "JPEG", rgb, {"quality": 30, "subsampling": 2}),
        ("jpg", "JPEG", rgb, {"progressive": True}),
        ("jpg", "JPEG", rgb, {"restart_marker_rows": 1}),
        ("jpg", "JPEG", rgb, {"exif": exif}),
        ("jpg", "JPEG", grey, {}),
        ("jpg", "JPEG", ink, {}),
        ("png", "PNG", rgb, {}),
        ("png", "PNG", clear, {}),
        ("png", "PNG", palette, {}),
        ("png", "PNG", deep, {}),
        ("png", "PNG", bits, {}),
        ("webp", "WEBP", rgb, {"quality": 80}),
        ("webp", "WEBP", clear, {"lossless": True}),
        ("webp", "WEBP", rgb, {"save_all": True, "append_images": [rgb.rotate(90)]}),
        ("gif", "GIF", palette, {}),
        ("gif", "GIF", palette, {"save_all": True, "append_images": [palette.rotate(90)]}),
        ("tif", "TIFF", rgb, {}),
        ("tif", "TIFF", rgb, {"compression": "tiff_lzw"}),
        ("tif", "TIFF", rgb, {"compression": "tiff_adobe_deflate"}),
        ("tif", "TIFF", rgb, {"compression": "jpeg"}),
        ("tif", "TIFF", bits, {"compression": "group4"}),
        ("tif", "TIFF", bits, {"compression": "group3"}),
        ("tif", "TIFF", deep, {}),
        ("bmp", "BMP", rgb, {}),
        ("bmp", "BMP", palette, {}),
        ("ppm", "PPM", rgb, {}),
        ("pgm", "PPM", grey, {}),
        ("avif", "AVIF", rgb, {}),
        ("jpg", "ICO", rgb, {}),
    ]
    found = [(ending, _saved(image, kind, **options)) for ending, kind, image, options in kinds]
    return [*found, ("heic", HEIC.read_bytes())]


def damaged(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """Return a file with one to four random changes; ``other`` is a file to take pieces from."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if not data:
            break
        at = draw.randrange(min(HEAD, len(data)) if draw.random() < 0.4 else len(data))
        size = min(draw.choice((1, 2, 4, 16, 300)), len(data) - at)
        how = draw.choice(("flip", "random", "zeros", "ones", "cut", "remove", "repeat", "insert", "splice"))
        if how == "flip":
            data[at] ^= 1 << draw.randrange(8)
        elif how == "random":
            data[at : at + size] = draw.randbytes(size)
        elif how in ("zeros", "ones"):
            data[at : at + size] = (b"\0" if how == "zeros" else b"\xff") * size
        elif how == "cut":
            del data[max(at, len(data) // 8) :]
        elif how == "remove":
            del data[at : at + size]
        elif how == "repeat":
            data[at:at] = data[at : at + size] * draw.choice((1, 3, 50))
        elif how == "insert":
            data[at:at] = draw.randbytes(size)
        else:
            start = draw.randrange(max(1, len(other)))
            data[at : at + size] = other[start : start + size]
    return bytes(data)


def files(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield ``count`` files with their endings: the whole ones first, then damaged ones of each in turn."""
    whole, draw = seeds(), random.Random(seed)
    yield from whole[:count]
    for number in range(count - len(whole)):
        ending, content = whole[number % len(whole)]
        yield ending, damaged(content, draw.choice(whole)[1], draw)
