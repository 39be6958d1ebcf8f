"""Files are refused by their first bytes if they can be, and never take much memory."""

import struct
import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from candid._support.errors import CandidError
from candid.data.images import SCAN, BadImageError, Preprocessing, decode_as, decode_upload
from candid.serve.limits import Limits
from tests.serve.helpers import huge_png, picture

PREPROCESSING = Preprocessing(3, 16, 16)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_an_upload_is_seen_as_a_file_is(kind: str, tmp_path: Path) -> None:
    content = picture(1, (40, 30), kind)
    path = tmp_path / "image"
    path.write_bytes(content)
    assert torch.equal(decode_upload(content, PREPROCESSING, 10_000), decode_as(path, PREPROCESSING, None))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"not an image", "it is empty, not an image (PNG, JPEG"),
        (picture()[:20], "its beginning is damaged"),
        (picture(0, (64, 64), "JPEG")[:700], "it is cut or damaged"),
        (picture(0, (64, 64))[:4000], "it is cut or damaged"),
        (picture(0, (64, 65)), "it has 65 x 64 pixels, more than the 4,096 allowed here"),
        (huge_png(), "it has too many pixels"),
    ],
)
def test_bad_files_are_refused_with_a_reason(content: bytes, reason: str) -> None:
    with pytest.raises(BadImageError) as caught:
        decode_upload(content, PREPROCESSING, 4096)
    assert str(caught.value).startswith(reason)
    assert ":" not in str(caught.value) and "0x" not in str(caught.value)


def test_other_decoders_of_pil_are_not_reached() -> None:
    file = BytesIO()
    Image.new("RGB", (16, 16)).save(file, "ICO")
    with pytest.raises(BadImageError, match="not an image"):
        decode_upload(file.getvalue(), PREPROCESSING, 10_000)


def tiled_tiff(side: int = 26_000) -> bytes:
    """A pixel in a tile of side x side: a small file, but decoders unpack the whole tile."""
    packer = zlib.compressobj(9)
    row = bytes(side)
    tile = b"".join([*(packer.compress(row) for _ in range(side)), packer.flush()])
    tags = {256: 1, 257: 1, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side}
    place = 8 + 2 + 12 * (len(tags) + 2) + 4
    entries = sorted([*tags.items(), (324, place), (325, len(tile))])
    head = struct.pack("<2sHIH", b"II", 42, 8, len(entries))
    return head + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries) + bytes(4) + tile


WATCHED = """
import resource, sys
from candid.data.images import BadImageError
from candid.data.splits import Preprocessing
from candid.data.images import decode_upload

preprocessing = Preprocessing(3, 16, 16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode_upload(sys.stdin.buffer.read(), preprocessing, 25_000_000)
except BadImageError as error:
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(grown / 1000, error)
"""


@pytest.mark.parametrize(
    ("content", "reason"),
    [(huge_png(), "it has too many pixels"), (tiled_tiff(), "it has tiles of more than")],
    ids=["PNG", "TIFF"],
)
def test_a_small_file_of_many_pixels_takes_no_memory(content: bytes, reason: str) -> None:
    assert len(content) < 2_000_000
    done = subprocess.run([sys.executable, "-c", WATCHED], input=content, capture_output=True, check=True)
    megabytes, _, said = done.stdout.decode().partition(" ")
    assert float(megabytes) < 30 and said.startswith(reason)


def test_a_jpeg_of_endless_scans_is_refused() -> None:
    content = picture(0, (16, 16), "JPEG")
    before, scan, after = content.partition(SCAN)
    assert decode_upload(content, PREPROCESSING, 10_000).shape == (3, 16, 16)
    with pytest.raises(BadImageError, match="more than 100 scans"):
        decode_upload(before + (scan + after[:-2]) * 101 + after[-2:], PREPROCESSING, 10_000)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_queue", 0), ("batch", 0), ("max_pixels", 10**9), ("max_megabytes", 0), ("timeout", -1)],
)
def test_limits_are_checked(name: str, value: float) -> None:
    with pytest.raises(CandidError, match=f"'{name}' must be"):
        Limits(**{name: value})  # type: ignore[arg-type]


def test_a_tiff_whose_tiles_have_no_size_is_refused() -> None:
    numbers = [(256, 8), (257, 8), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, 8), (279, 64)]
    tags = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in numbers)
    tags += b"".join(struct.pack("<HHI", tag, 2, 4) + b"abc\0" for tag in (322, 323))
    content = b"II*\0" + struct.pack("<I", 72) + bytes(64) + struct.pack("<H", 11) + tags + bytes(4)
    with pytest.raises(BadImageError, match="its tiles have no valid size"):
        decode_upload(content, PREPROCESSING, 10_000)
