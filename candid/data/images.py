"""Image files or bytes to 8-bit tensors as a model sees them, and 8-bit tensors to PNG."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.randomness import generator
from candid.data.augment import Box, augmented, published_ten_crops, random_box

EXTENSIONS = frozenset(
    [".bmp", ".gif", ".heic", ".heif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"]
)
PIL_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The only decoders of PIL that a file reaches."""
NAMES = "PNG, JPEG, WebP, GIF, BMP, TIFF or PPM"
LARGEST = 89_478_485
"""The largest number of pixels of an image. PIL warns above it and refuses twice as many."""
MODES = {1: "L", 3: "RGB"}
LYING, MIRRORED, UPSIDE_DOWN = (5, 6, 7, 8), (2, 3, 6, 7), (3, 4, 7, 8)
"""EXIF orientations that swap width and height, and those that flip left and right or top and bottom."""
ENDINGS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
Source = Path | bytes | BytesIO
"""A file, or its content."""
Crop = Literal["none", "shift", "jitter", "resized"]
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
) -> Tensor:
    """Return the part ``box(width, height)`` of an image, upright, (channels, *size) uint8.

    ``check`` can refuse the image by its header, before it is decoded.

    Grey, paletted, transparent (over white), CMYK and 16-bit images become 8-bit grey or RGB. A JPEG is
    decoded at a half, a quarter or an eighth of its size where the crop needs no more.
    """
    return _read(source, lambda image: _cropped(image, channels, size, box), check)


def _read(
    source: Source,
    crop: Callable[[Image.Image], Tensor],
    check: Callable[[Image.Image], None] | None = None,
) -> Tensor:
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
    return _pixels(resized(upright, scaled, size))


def _pixels(image: Image.Image) -> Tensor:
    """Return a grey or RGB image as (C, H, W)."""
    pixels = np.array(image)
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1)


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


def _file(source: Source) -> BinaryIO:
    try:
        if isinstance(source, BytesIO):
            return source
        return BytesIO(source) if isinstance(source, bytes) else source.open("rb")
    except OSError as error:
        raise BadImageError(str(error)) from error


def _formats(file: BinaryIO) -> tuple[str, ...]:
    """Return the decoders that a file may reach; HEIC needs a package of its own."""
    is_heic = file.read(12)[4:] in (b"ftypheic", b"ftypheix", b"ftypmif1")
    file.seek(0)
    if not is_heic:
        return PIL_FORMATS
    try:
        from pi_heif import register_heif_opener
    except ImportError as error:
        raise BadImageError(
            "it is a HEIC photo, which needs a package: pip install 'candid-vision[heic]'"
        ) from error
    register_heif_opener()
    return ("HEIF",)


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
        levels = np.asarray(image).astype(np.int64)
        levels = levels >> 8 if levels.max(initial=0) > 255 else levels
        image = Image.fromarray(levels.clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


def centre_box(width: int, height: int, size: tuple[int, int], margin: float = 1.0) -> Box:
    """Return the box to crop and resize: the largest one of ``size``'s shape, divided by ``margin``.

    A margin of 256 / 224 is the usual 'resize to 256, crop 224'.

    >>> centre_box(640, 480, (224, 224), margin=256 / 224)
    (110.0, 30.0, 530.0, 450.0)
    """
    scale = min(width / size[1], height / size[0]) / margin
    w, h = min(width, size[1] * scale), min(height, size[0] * scale)  # rounding must not lead outside
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


def resized(image: Image.Image, box: Box, size: tuple[int, int]) -> Image.Image:
    """Return the part ``box`` of ``image``, resized to ``size`` (height, width)."""
    if box == (0, 0, *image.size) and image.size == (size[1], size[0]):
        return image
    return image.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)


def fitted(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return 8-bit images centred at ``size``: smaller ones are padded with zeros, larger ones cropped."""
    down, across = size[0] - images.shape[2], size[1] - images.shape[3]
    return F.pad(images, (across // 2, across - across // 2, down // 2, down - down // 2))


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
        object.__setattr__(self, "crop", current_crop(self.crop))
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


def current_crop(crop: str) -> str:
    """Return the present name of a random crop: models of older versions have other names."""
    return "jitter" if crop == "wobble" else crop


def decode_as(
    source: Source,
    preprocessing: Preprocessing,
    numbers: Tensor | None = None,
    check: Callable[[Image.Image], None] | None = None,
) -> Tensor:
    """Return one image as the model sees it, (C, H, W); randomly cropped if ``numbers`` (5,) are given.

    Ten published crops are (10, C, H, W).
    """
    if preprocessing.published is not None:
        return _read(source, partial(_as_published, preprocessing), check)
    box = preprocessing.box if numbers is None else partial(random_box, numbers=numbers)
    return decode(source, preprocessing.channels, preprocessing.size, box, check)


def _as_published(preprocessing: Preprocessing, image: Image.Image) -> Tensor:
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
    crops = published_ten_crops(_pixels(image)[None], preprocessing.size)[0]
    return crops if preprocessing.published == "ten crops" else crops[4]


def decode_batch(
    sources: Sequence[Path | bytes],
    preprocessing: Preprocessing,
    numbers: Tensor | None,
    blame: Callable[[int, BadImageError], CandidError],
) -> Tensor:
    """Return images (B, C, H, W), augmented if ``numbers`` (B, 5) are given.

    ``blame(i, error)`` returns the error to raise for a bad image.
    """
    images = []
    for i, source in enumerate(sources):
        crop = numbers[i] if numbers is not None and preprocessing.crop == "resized" else None
        try:
            images.append(decode_as(source, preprocessing, crop))
        except BadImageError as error:
            raise blame(i, error) from error
    stacked = torch.stack(images)
    return stacked if numbers is None else augmented(stacked, numbers, preprocessing.crop, preprocessing.flip)


def to_png(image: Tensor) -> bytes:
    """Return an 8-bit image (C, H, W) as a PNG file."""
    pixels = image.permute(1, 2, 0).numpy()
    file = BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return file.getvalue()


def image_keys(images: Tensor) -> Tensor:
    """Return a hash of the pixels of each 8-bit image, (B,) int64.

    It is their sum with fixed random weights, modulo 2^64.
    """
    pixels = images.flatten(1).long()
    weights = torch.empty(pixels.shape[1], dtype=torch.int64)
    weights.random_(-(2**63), None, generator=generator(pixels.shape[1]))
    return (pixels * weights).sum(1)


def preprocess_image(
    image: Tensor | np.ndarray[Any, Any] | Image.Image, preprocessing: Preprocessing
) -> Tensor:
    """Return an image in memory as ``preprocessing`` wants it, (C, H, W) uint8.

    Args:
        image: a tensor (C, H, W) or an array (H, W, C) or (H, W), of 8-bit numbers or floats in [0, 1]; or
            a PIL image. Pixels of the right size stay as they are.
        preprocessing: how the model sees images.

    Raises:
        BadImageError: if these are not the pixels of an image.
    """
    wanted = (preprocessing.channels, *preprocessing.size)
    if not isinstance(image, Image.Image):
        pixels = _eight_bit(image if isinstance(image, Tensor) else torch.from_numpy(np.array(image)))
        if not isinstance(image, Tensor):
            pixels = pixels[None] if pixels.ndim == 2 else pixels.movedim(-1, 0)
        if pixels.shape == wanted:
            return pixels
        if pixels.ndim != 3 or pixels.shape[0] not in (1, 3, 4) or 0 in pixels.shape:
            shape = tuple(image.shape)
            raise BadImageError(f"its shape {shape} is not that of an image with 1, 3 or 4 channels")
        rows = pixels.movedim(0, -1).numpy()
        image = Image.fromarray(np.ascontiguousarray(rows[..., 0] if rows.shape[2] == 1 else rows))
    return _cropped(image, preprocessing.channels, preprocessing.size, preprocessing.box)


def _eight_bit(pixels: Tensor) -> Tensor:
    if pixels.is_floating_point():
        if not (pixels.isfinite().all() and pixels.min() >= 0 and pixels.max() <= 1):
            raise BadImageError("its numbers are not all between 0 and 1: scale them, or give 8-bit numbers")
        pixels = (255 * pixels).round().to(torch.uint8)
    if pixels.dtype != torch.uint8:
        raise BadImageError(f"its numbers are {pixels.dtype}: give 8-bit numbers or floats between 0 and 1")
    return pixels.detach().cpu()
