"""Image files or bytes to 8-bit arrays as a model sees them, and 8-bit arrays to PNG."""

import math
import stat
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from candid._support.errors import CandidError
from candid._support.numbers import Array, as_array
from candid._support.old_formats import CROPS
from candid._support.randomness import draws
from candid.data import Crop
from candid.data.crops import Box, published_ten_crops, random_box

TYPES = ".avif .bmp .gif .heic .heif .jpeg .jpg .pgm .png .ppm .tif .tiff .webp"
EXTENSIONS = frozenset(TYPES.split())
PIL_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The only decoders of PIL that a file reaches."""
NAMES = "PNG, JPEG, HEIC, AVIF, WebP, GIF, BMP, TIFF or PPM"
LARGEST = 89_478_485
"""The largest number of pixels of an image. PIL warns above it and refuses twice as many."""
MODES = {1: "L", 3: "RGB"}
LYING, MIRRORED, UPSIDE_DOWN = (5, 6, 7, 8), (2, 3, 6, 7), (3, 4, 7, 8)
"""EXIF orientations that swap width and height, and those that flip left and right or top and bottom."""
ENDINGS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
Source = Path | bytes | BytesIO
"""A file, or its content."""
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # opened says it in a sentence


class BadImageError(CandidError):
    """An image can't be used. The message is the reason."""


def path_of(spec: str | Path) -> Path:
    """Return the path that ``spec`` names, with ~ replaced by the home folder."""
    try:
        return Path(spec).expanduser()
    except RuntimeError as error:
        raise CandidError(f"'{spec}' begins with an unknown user: give the whole path.") from error


def decode(
    source: Source,
    channels: int,
    size: tuple[int, int],
    box: Callable[[int, int], Box],
    check: Callable[[Image.Image], None] | None = None,
) -> Array:
    """Return the part ``box(width, height)`` of an image, upright, (channels, *size) uint8.

    ``check`` can refuse the image by its header, before it is decoded.

    Grey, paletted, transparent (over white), CMYK and 16-bit images become 8-bit grey or RGB. A JPEG is
    decoded at a half, a quarter or an eighth of its size where the crop needs no more.
    """
    return _read(source, lambda image: _cropped(image, channels, size, box), check)


def _read(
    source: Source,
    crop: Callable[[Image.Image], Array],
    check: Callable[[Image.Image], None] | None = None,
) -> Array:
    """Return what ``crop`` makes of an image file."""
    with _file(source) as file:
        image = opened(file)
        try:
            if check is not None:
                check(image)
            return crop(image)
        except BadImageError:
            raise
        except Exception as error:  # PIL's decoders raise whatever they like
            raise BadImageError(f"it is cut or damaged: {error}") from error


def _cropped(
    image: Image.Image, channels: int, size: tuple[int, int], box: Callable[[int, int], Box]
) -> Array:
    # PIL turns a TIFF by itself
    orientation = 1 if image.format == "TIFF" else image.getexif().get(ExifTags.Base.Orientation, 1)
    width, height = image.size[::-1] if orientation in LYING else image.size
    left, top, right, bottom = box(width, height)
    surplus = min((right - left) / size[1], (bottom - top) / size[0])
    scale = _reduce(image, surplus) if image.format == "JPEG" and surplus >= 2 else 1.0
    ImageOps.exif_transpose(image, in_place=True)  # a copy of a large photo takes hundreds of MB
    upright = _in_mode(image, MODES[channels])
    # a reduced JPEG ends with a pixel that only partly belongs to the image
    x = upright.size[0] - width * scale if orientation in MIRRORED else 0
    y = upright.size[1] - height * scale if orientation in UPSIDE_DOWN else 0
    right, bottom = min(right, width), min(bottom, height)
    scaled = (left * scale + x, top * scale + y, right * scale + x, bottom * scale + y)
    return pixels(resized(upright, scaled, size))


def pixels(image: Image.Image) -> Array:
    """Return a grey or RGB image as (C, H, W) uint8."""
    rows = np.array(image)
    return np.ascontiguousarray(rows.reshape(*rows.shape[:2], -1).transpose(2, 0, 1))


def _reduce(image: Image.Image, surplus: float) -> float:
    """Let a JPEG be decoded at no less than 1 / ``surplus`` of its size; return the scale."""
    width, height = image.size
    drafted = image.draft(None, (math.ceil(width / surplus), math.ceil(height / surplus)))
    return 1.0 if drafted is None else drafted[1][2] / width


def check_file(path: Path) -> None:
    """Check quickly that header and end are there; decode the image only without an end."""
    with _file(path) as file:
        ending = ENDINGS.get(str(opened(file).format), b"")
        file.seek(max(0, file.seek(0, SEEK_END) - 4096))
        if ending in file.read():
            return
    decode(path, 3, (1, 1), lambda width, height: (0, 0, width, height))


def is_special(path: Path) -> bool:
    """Return whether it is a pipe, a device or a socket: to open it could take forever."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return any(kind(mode) for kind in (stat.S_ISFIFO, stat.S_ISCHR, stat.S_ISBLK, stat.S_ISSOCK))


def _file(source: Source) -> BinaryIO:
    if isinstance(source, Path) and is_special(source):
        raise BadImageError("it is a pipe, a device or a socket, not a file")
    try:
        if isinstance(source, BytesIO):
            return source
        return BytesIO(source) if isinstance(source, bytes) else source.open("rb")
    except OSError as error:
        raise BadImageError(str(error)) from error


def _formats(file: BinaryIO) -> tuple[str, ...]:
    """Return the decoders that a file may reach; those of HEIC and AVIF are loaded only for such files."""
    kind = file.read(12)[4:]
    file.seek(0)
    if kind in (b"ftypavif", b"ftypavis"):
        if not _reads_avif():
            raise BadImageError("it is an AVIF, which needs Pillow 11.3 or newer; as PNG it can be used")
        return ("AVIF",)
    if kind not in (b"ftypheic", b"ftypheix", b"ftypmif1"):
        return PIL_FORMATS
    from pi_heif import register_heif_opener

    register_heif_opener()
    return ("HEIF",)


def _reads_avif() -> bool:
    try:
        from PIL import AvifImagePlugin
    except ImportError:  # before Pillow 11.3
        return False
    return bool(AvifImagePlugin.SUPPORTED)


def opened(file: BinaryIO) -> Image.Image:
    """Read the header of an image."""
    formats = _formats(file)
    try:
        image = Image.open(file, formats=formats)
    except UnidentifiedImageError as error:
        raise BadImageError(f"it is empty, not an image ({NAMES}), or its beginning is damaged") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImageError(f"it has too many pixels, more than {LARGEST:,}") from error
    except BadImageError:
        raise
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
        levels = np.asarray(image)
        levels = levels >> 8 if levels.max(initial=0) > 255 else levels
        image = Image.fromarray(levels.clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


def resized(image: Image.Image, box: Box, size: tuple[int, int]) -> Image.Image:
    """Return the part ``box`` of ``image``, resized to ``size`` (height, width)."""
    if box == (0, 0, *image.size) and image.size == (size[1], size[0]):
        return image
    return image.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)


@dataclass(frozen=True)
class Preprocessing:
    """How a model sees images.

    Training images are shifted by up to an eighth of their height (``"shift"``, for sets whose images all
    have the model's framing), moved, turned and resized a little (``"jitter"``, for drawings), or randomly
    cropped and resized (``"resized"``, for photos), and mirrored if ``flip``. All other images are resized
    until they cover the model's size, ``margin`` times it for photos, and their centre is cropped.

    Args:
        channels: 1 for grey images, 3 for RGB.
        height: pixels.
        width: pixels.
        crop: the random crops of training images.
        flip: whether half of the training images are mirrored.
        published: show images as the paper's authors did in testing: their centre, or ten crops of each.
        border: pixels of the height that are cut off a resized image; with 0, ``crop`` decides.
    """

    channels: int
    height: int
    width: int
    crop: Crop = "none"
    flip: bool = False
    published: Literal["centre", "ten crops"] | None = None
    border: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "crop", CROPS.get(self.crop, self.crop))
        if self.channels not in MODES:
            raise CandidError(
                f"Images have 1 or 3 channels: set the model's 'channels' to that, not {self.channels}."
            )
        if self.crop not in get_args(Crop):
            raise CandidError(f"'crop' must be one of {', '.join(get_args(Crop))}, not {self.crop!r}.")

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def margin(self) -> float:
        usual = 256 / 224 if self.crop == "resized" else 1.0
        return 1 + self.border / self.height if self.border else usual

    def box(self, width: int, height: int) -> Box:
        """Return the part of an image that the model sees if it is not augmented."""
        return centre_box(width, height, self.size, 1.0 if (height, width) == self.size else self.margin)


def decode_as(
    source: Source,
    preprocessing: Preprocessing,
    numbers: Array | None = None,
    check: Callable[[Image.Image], None] | None = None,
) -> Array:
    """Return one image as the model sees it, (C, H, W); randomly cropped if ``numbers`` (5,) are given.

    Ten published crops are (10, C, H, W).
    """
    if preprocessing.published is not None:
        return _read(source, partial(_as_published, preprocessing), check)
    box = preprocessing.box if numbers is None else partial(random_box, numbers=numbers)
    return decode(source, preprocessing.channels, preprocessing.size, box, check)


def _as_published(preprocessing: Preprocessing, image: Image.Image) -> Array:
    """Return crops of the whole image as torchvision makes them from files.

    The shorter side is resized to 8/7 of the model's (256 pixels for 224) by PIL's bilinear filter, which
    averages over all pixels if it makes an image smaller. Orientations in EXIF data are ignored.
    """
    image = _in_mode(image, MODES[preprocessing.channels])
    side, shorter = round(preprocessing.height * 256 / 224), min(image.size)
    width, height = (int(side * length / shorter) for length in image.size)
    if width * height > LARGEST:
        raise BadImageError(f"it would have {width} x {height} pixels with a shorter side of {side}")
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    crops = published_ten_crops(pixels(image)[None], preprocessing.size)[0]
    return crops if preprocessing.published == "ten crops" else crops[4]


def decode_batch(
    sources: Sequence[Path | bytes],
    preprocessing: Preprocessing,
    numbers: Array | None,
    blame: Callable[[int, BadImageError], CandidError],
) -> Array:
    """Return images (B, C, H, W), randomly cropped if ``numbers`` (B, 5) are given and crops are "resized".

    ``blame(i, error)`` returns the error to raise for a bad image.
    """
    images = []
    for i, source in enumerate(sources):
        crop = numbers[i] if numbers is not None and preprocessing.crop == "resized" else None
        try:
            images.append(decode_as(source, preprocessing, crop))
        except BadImageError as error:
            raise blame(i, error) from error
    return np.stack(images)


def to_png(image: Array) -> bytes:
    """Return an 8-bit image (C, H, W) as a PNG file."""
    file = BytesIO()
    to_pil(image).save(file, "PNG")
    return file.getvalue()


def to_pil(image: Array) -> Image.Image:
    """Return an 8-bit image (C, H, W) as an image of PIL."""
    rows = np.ascontiguousarray(image.transpose(1, 2, 0))
    return Image.fromarray(rows[..., 0] if rows.shape[2] == 1 else rows)


def image_keys(images: Array) -> Array:
    """Return a hash of the pixels of each 8-bit image, (B,) int64.

    It is their sum with fixed random weights, modulo 2^64.
    """
    levels = images.reshape(len(images), -1).astype(np.int64)
    keys: Array = levels @ draws(levels.shape[1]).words(levels.shape[1])
    return keys


def preprocess_image(image: Any, preprocessing: Preprocessing) -> Array:
    """Return an image in memory as ``preprocessing`` wants it, (C, H, W) uint8.

    Args:
        image: an array (H, W, C) or (H, W) or a tensor of torch (C, H, W), of 8-bit numbers or floats in
            [0, 1]; or a PIL image. Pixels of the right size stay as they are.
        preprocessing: how the model sees images.

    Raises:
        BadImageError: if these are not the pixels of an image.
    """
    if not isinstance(image, Image.Image):
        levels = _eight_bit(as_array(image))
        if not hasattr(image, "detach"):
            levels = levels[None] if levels.ndim == 2 else np.moveaxis(levels, -1, 0)
        if levels.shape == (preprocessing.channels, *preprocessing.size):
            return np.ascontiguousarray(levels)
        if levels.ndim != 3 or levels.shape[0] not in (1, 3, 4) or 0 in levels.shape:
            shape = tuple(image.shape)
            raise BadImageError(f"its shape {shape} is not that of an image with 1, 3 or 4 channels")
        image = to_pil(levels)
    return _cropped(image, preprocessing.channels, preprocessing.size, preprocessing.box)


def _eight_bit(levels: Array) -> Array:
    if levels.dtype.kind == "f":
        if levels.size and not (np.isfinite(levels).all() and levels.min() >= 0 and levels.max() <= 1):
            raise BadImageError("its numbers are not all between 0 and 1: scale them, or give 8-bit numbers")
        levels = np.rint(255 * levels).astype(np.uint8)
    if levels.dtype != np.uint8:
        raise BadImageError(f"its numbers are {levels.dtype}: give 8-bit numbers or floats between 0 and 1")
    return levels


def centre_box(width: int, height: int, size: tuple[int, int], margin: float = 1.0) -> Box:
    """Return the box to crop and resize: the largest one of ``size``'s shape, divided by ``margin``.

    A margin of 256 / 224 is the usual 'resize to 256, crop 224'.

    >>> centre_box(640, 480, (224, 224), margin=256 / 224)
    (110.0, 30.0, 530.0, 450.0)
    """
    scale = min(width / size[1], height / size[0]) / margin
    w, h = min(width, size[1] * scale), min(height, size[0] * scale)  # rounding must not lead outside
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


def to_float(images: Array) -> Array:
    """Turn 8-bit images to floats in [0, 1]."""
    return images.astype(np.float32) / np.float32(255)
