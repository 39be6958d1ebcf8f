"""What a server takes, and what it refuses before it looks any closer."""

from dataclasses import dataclass
from functools import partial

from PIL import Image
from PIL.TiffImagePlugin import TILELENGTH, TILEWIDTH, TiffImageFile
from torch import Tensor

from candid._support.errors import CandidError
from candid.data.images import LARGEST, BadImageError, Preprocessing, decode_as

FILES = 16
"""In one request."""
SCAN, SCANS = b"\xff\xda", 100
"""How a scan of a JPEG begins, and how many it may have: each goes through all pixels; usual are 1 to 12."""


@dataclass(frozen=True)
class Limits:
    """Of one server."""

    max_queue: int = 64
    """Requests that are read, wait or are answered at a time; one more is refused."""
    batch: int = 64
    """Images that pass the network together, at most; a request is not divided."""
    max_megabytes: float = 16
    """Of a request."""
    max_pixels: int = 25_000_000
    """Of an image; while it is decoded, it takes up to 24 bytes a pixel, a JPEG much less."""
    timeout: float = 30
    """Seconds from the first byte of a request to its answer."""

    def __post_init__(self) -> None:
        for name in ("max_queue", "batch", "max_pixels"):
            if getattr(self, name) < 1:
                raise CandidError(f"--{name.replace('_', '-')} is a number from 1 on: raise it.")
        for name in ("max_megabytes", "timeout"):
            if not 0 < getattr(self, name) < 1e6:
                raise CandidError(f"--{name.replace('_', '-')} lies between 0 and a million: change it.")
        if self.max_pixels > LARGEST:
            raise CandidError(f"--max-pixels is at most {LARGEST:,}: lower it.")

    @property
    def max_bytes(self) -> int:
        return int(self.max_megabytes * 1_000_000)


def decoded(content: bytes, preprocessing: Preprocessing, max_pixels: int) -> Tensor:
    """The image in ``content`` as the model sees it, decoded only if its header promises few enough pixels.

    Raises a BadImageError that tells the sender what is wrong and nothing of this machine.
    """
    if not content:
        raise BadImageError("it is empty")
    if content.startswith(b"\xff\xd8") and content.count(SCAN) > SCANS:
        raise BadImageError(f"it is a JPEG of more than {SCANS} scans")
    try:
        return decode_as(content, preprocessing, None, partial(_check, max_pixels))
    except BadImageError as error:
        raise BadImageError(str(error).split(":")[0]) from error  # what a decoder says may be anything


def _check(max_pixels: int, image: Image.Image) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise BadImageError(f"it has {width} x {height} pixels, more than the {max_pixels:,} allowed here")
    if _tile(image) > max_pixels:
        raise BadImageError(f"it has tiles of more than the {max_pixels:,} pixels allowed here")


def _tile(image: Image.Image) -> int:
    """Pixels of a TIFF's tile, which is decoded whole, however small the image is."""
    if not isinstance(image, TiffImageFile):
        return 0
    return int(image.tag_v2.get(TILEWIDTH, 0)) * int(image.tag_v2.get(TILELENGTH, 0))
