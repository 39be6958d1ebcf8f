"""Images of senders who are not trusted: checked by their header, decoded with limits of memory and time."""

import signal
import warnings
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageChops
from PIL.TiffImagePlugin import TILELENGTH, TILEWIDTH, TiffImageFile

from candid._support.numbers import Array
from candid._support.processes import answer_calls, limited_memory, return_memory
from candid.data.images import BadImageError, Preprocessing, decode_as, opened
from candid.data.thumbnails import MOST, jpeg_of_photo

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SCAN, SCANS, END = b"\xff\xda", 100, b"\xff\xd9"
"""How a scan of a JPEG begins, how many are decoded (each goes through all pixels), how the JPEG ends."""
SEGMENTS = 5000
"""Segments before the first scan of a JPEG."""
TILES = 10_000
"""Tiles or strips of an image."""
SLOW_PIXELS, SLOW_BYTES = 250_000, 1_000_000
"""Largest image and file for PIL's decoders in Python: they take about 2 microseconds for each pixel."""
FAX = ("group3", "group4", "tiff_ccitt")
"""Codings of black and white pages, of which a few kB can be decoded for as long as a photo of megapixels."""
SECONDS, SECONDS_PER_PIXEL = 1.0, 2e-7
"""CPU time to read a header, and to decode the rest: ten times of what any usual file takes."""
BYTES_PER_PIXEL, SPARE_MEMORY = 21, 256_000_000
"""Bytes to decode the most wasteful format (WebP with transparency), and for threads and files next to it."""
HOLE, LAST = bytes(64), 4
"""Zero bytes that are no data of a photo, and zero bytes with which the data may end."""
FILLER = bytes(range(1, 255)) * 16


def decode_upload(content: bytes, preprocessing: Preprocessing, max_pixels: int) -> Array:
    """Return an upload as the model sees it, decoded only if its header promises few enough pixels.

    Raises:
        BadImageError: tells the sender what is wrong and nothing about this machine.
        OSError, MemoryError: this machine lacks something; the image is not to blame.
    """
    kept: list[Image.Image] = []
    decoded: Array = _decoded(content, max_pixels, kept, partial(decode_as, preprocessing=preprocessing))
    if kept[0].format == "JPEG" and not (_has_no_hole(content) and _is_whole(content, kept[0])):
        raise BadImageError("it is incomplete, a part of its pixels is missing")
    return decoded


def upload_as_jpeg(content: bytes, max_pixels: int, most: int = MOST) -> bytes:
    """Return an upload as a JPEG that every browser shows: upright, whole, sides of at most ``most`` pixels.

    Raises:
        BadImageError: as :func:`decode_upload`.
    """
    jpeg: bytes = _decoded(content, max_pixels, [], partial(jpeg_of_photo, most=most))
    return jpeg


def _decoded(content: bytes, max_pixels: int, kept: list[Image.Image], decode: Callable[..., Any]) -> Any:
    """Return what ``decode(file, check=…)`` makes of an upload; ``kept`` gets the opened image."""
    file = _checked(content)

    def check(image: Image.Image) -> None:
        _check(image, max_pixels, len(content))
        if any(signal.getitimer(signal.ITIMER_PROF)):  # the time of :func:`limited`
            signal.setitimer(signal.ITIMER_PROF, SECONDS + SECONDS_PER_PIXEL * image.width * image.height)
        kept.append(image)

    try:
        return decode(file, check=check)
    except BadImageError as error:
        raise _plain(error) from error


def decode_small(content: bytes, preprocessing: Preprocessing, max_pixels: int, small: int) -> Array | int:
    """Return a small upload as :func:`decode_upload` does, and the :func:`decoding_cost` of a larger one."""
    cost = decoding_cost(content, max_pixels)
    return decode_upload(content, preprocessing, max_pixels) if cost <= small else cost


def decoding_cost(content: bytes, max_pixels: int) -> int:
    """Return about how many pixels have to be decoded, from the header; a usual JPEG counts a quarter.

    Raises:
        BadImageError: as :func:`decode_upload`.
    """
    try:
        with _checked(content) as file:
            image = opened(file)
            _check(image, max_pixels, len(content))
    except BadImageError as error:
        raise _plain(error) from error
    pixels = image.width * image.height
    return pixels // 4 if image.format == "JPEG" and not _is_progressive(image) else pixels


def decode_for(connection: "Connection") -> None:
    """Answer calls of :func:`limited` in a process of its own, until the other side is closed."""
    warnings.simplefilter("ignore")  # of odd files; what matters is in the answers
    return_memory(one_arena=True)
    answer_calls(connection)


def limited(memory: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)`` in a process that ends if that takes too much CPU time.

    The time is :data:`SECONDS` until the header is read, then more by the number of pixels. A signal without
    a handler ends the process, also inside a library.

    Args:
        memory: bytes that may be allocated, besides :data:`SPARE_MEMORY`; where Linux runs.
        function: what works.
        arguments: its arguments.

    Raises:
        BadImageError: if it needs more memory.
    """
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with limited_memory(memory + SPARE_MEMORY) as own:
            return function(*arguments)
    except MemoryError as error:
        if not own:  # the machine, or whoever started the server, allows less
            raise
        raise BadImageError("it takes too much memory to decode") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _checked(content: bytes) -> BytesIO:
    """Check what can be seen without PIL."""
    if not content:
        raise BadImageError("it is empty")
    if content.startswith(b"\xff\xd8"):
        if content.count(SCAN) > SCANS:
            raise BadImageError(f"it is a JPEG of more than {SCANS} scans")
        _jpeg_end(content)
    if content[:1] == b"P" and content[1:2] in b"123":
        raise BadImageError("it is a PPM, PGM or PBM in text form, and only the binary form can be used")
    return BytesIO(content)


def _check(image: Image.Image, max_pixels: int, size: int) -> None:
    """Refuse an image by its header."""
    width, height = image.size
    tiles: Any = getattr(image, "tile", ())
    if width * height > max_pixels:
        raise BadImageError(f"it has {width} x {height} pixels, more than the {max_pixels:,} allowed here")
    if len(tiles) > TILES:
        raise BadImageError(f"it has more than {TILES:,} tiles or strips")
    slow = any(tile[0] in Image.DECODERS for tile in tiles)
    if slow and (width * height > SLOW_PIXELS or size > SLOW_BYTES):
        raise BadImageError(
            f"it is a rare kind of {image.format}, which can't be decoded quickly; as PNG it can be used"
        )
    if not isinstance(image, TiffImageFile):
        return
    if image.info.get("compression") in FAX:
        raise BadImageError("it is a TIFF in the coding of fax machines (CCITT); as PNG it can be used")
    try:  # a TIFF's tile is decoded whole, however small the image is
        tile = int(image.tag_v2.get(TILEWIDTH, 0)) * int(image.tag_v2.get(TILELENGTH, 0))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise BadImageError("its tiles have no valid size") from error
    if tile > max_pixels:
        raise BadImageError(f"it has tiles of more than the {max_pixels:,} pixels allowed here")


def _plain(error: BadImageError) -> Exception:
    """Return an error without a decoder's own words, which may be anything; or what this machine lacks."""
    cause = error.__cause__
    if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno is not None):
        return cause
    return BadImageError(str(error).split(":")[0])


def _jpeg_end(content: bytes) -> int:
    """Return where the first image ends; thumbnails lie in segments before its scans."""
    at = 2
    for _ in range(SEGMENTS):
        while content[at : at + 2] == b"\xff\xff":
            at += 1
        if content[at : at + 1] != b"\xff":
            at = content.find(b"\xff", at)  # PIL skips what is no marker
            if at < 0:
                break
            continue
        if content[at : at + 2] == SCAN:
            end = content.find(END, at)
            if end < 0:
                break
            return end
        at += 2 + int.from_bytes(content[at + 2 : at + 4], "big")
    else:
        raise BadImageError(f"it is a JPEG of more than {SEGMENTS:,} segments")
    raise BadImageError("it is incomplete, its end is missing")


def _has_no_hole(content: bytes) -> bool:
    """Return whether the only scan of a usual JPEG has no long run of zero bytes that no encoder writes.

    Where zero bits mean a flat area, such a run is possible. In the usual codes they mean blocks whose
    coefficients are all -1.
    """
    start = _scan_start(content)
    if start is None:
        return True
    scan = content[start : _jpeg_end(content)]
    body = scan.rstrip(b"\0\xff")
    if HOLE in body:
        return False
    return len(scan) - len(body) < len(HOLE) or _has_all_pixels(content[: start + len(body) + LAST])


def _scan_start(content: bytes) -> int | None:
    """Return where the scan of a sequential JPEG begins; None if zero bytes may mean a flat area."""
    at, first = 2, {}
    while content[at : at + 1] == b"\xff" and at + 4 <= len(content):
        kind, size = content[at + 1], int.from_bytes(content[at + 2 : at + 4], "big")
        segment = content[at + 4 : at + 2 + size]
        if 0xC2 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # progressive, lossless, arithmetic
            return None
        while kind == 0xC4 and len(segment) > 17:  # tables of codes: the first symbol is that of zero bits
            first[segment[0]] = segment[17]
            segment = segment[17 + sum(segment[1:17]) :]
        if kind == 0xDA:
            tables = segment[2 : 2 + 2 * segment[0] : 2] if segment else b""
            used = [part for both in tables for part in (both >> 4, 16 | both & 15)]
            return at + 2 + size if any(first.get(each, 0) for each in used) else None
        at += 2 + size
    return None


def _is_progressive(image: Image.Image) -> bool:
    return bool(image.info.get("progressive"))


def _is_whole(content: bytes, image: Image.Image) -> bool:
    """Return whether a decoded JPEG has data for all of its pixels.

    The decoder fills what is missing with grey, or leaves out details of a progressive JPEG. Then it would go
    on with whatever data comes before the end; for a whole JPEG, more data there change nothing.
    """
    last = image.getpixel((image.width - 1, image.height - 1))
    levels = last if isinstance(last, tuple) else (last,)
    if not _is_progressive(image) and not all(abs(float(level or 0) - 128) <= 1 for level in levels):
        return True
    return _has_all_pixels(content[: _jpeg_end(content)].rstrip(b"\xff"))  # the first half of a marker


def _has_all_pixels(data: bytes) -> bool:
    plain, filled = (_half(data + filler + END) for filler in (b"", FILLER))
    return ImageChops.difference(plain, filled).getbbox() is None


def _half(content: bytes) -> Image.Image:
    image = opened(BytesIO(content))
    image.draft(None, (image.width // 2, image.height // 2))
    image.load()
    return image
