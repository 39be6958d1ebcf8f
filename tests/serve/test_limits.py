"""Files are refused by their first bytes if they can be, and never take much memory."""

import struct
import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from candid._support.errors import CandidError
from candid.data.images import BadImageError, Preprocessing, decode_as
from candid.data.uploads import SCAN, decode_upload
from candid.serve import Limits
from candid.serve.service import Service
from candid.serve.worker import Decoder
from tests.serve.helpers import Running, huge_png, picture, running

PREPROCESSING = Preprocessing(3, 16, 16)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_an_upload_is_seen_as_a_file_is(kind: str, tmp_path: Path) -> None:
    content = picture(1, (40, 30), kind)
    path = tmp_path / "image"
    path.write_bytes(content)
    assert np.array_equal(decode_upload(content, PREPROCESSING, 10_000), decode_as(path, PREPROCESSING, None))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"not an image", "it is empty, not an image (PNG, JPEG"),
        (picture()[:20], "its beginning is damaged"),
        (picture(0, (64, 64), "JPEG")[:700], "it is incomplete"),
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
from candid.data.uploads import decode_upload

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


def test_bodies_of_all_requests_have_a_limit() -> None:
    assert Limits().held_bytes == 1_000_000_000
    assert Limits(max_queue=2, max_megabytes=1).held_bytes == 2_000_000
    assert Limits(max_megabytes=5000).held_bytes == 5_000_000_000


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_queue", 0), ("batch", 0), ("max_pixels", 10**9), ("max_megabytes", 0), ("timeout", -1)],
)
def test_limits_are_checked(name: str, value: float) -> None:
    with pytest.raises(CandidError, match=f"'{name}' must be"):
        Limits(**{name: value})  # type: ignore[arg-type]


def tiff_with_tiles(kind: int, value: bytes) -> bytes:
    """A TIFF of 8 x 8 pixels whose sizes of tiles are ``value``, of a type of TIFF."""
    numbers = [(256, 8), (257, 8), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, 8), (279, 64)]
    tags = b"".join(struct.pack("<HHII", tag, 4, 1, number) for tag, number in numbers)
    count = len(value) if kind == 2 else 1
    place = 72 + 2 + 12 * 11 + 4
    where = value if len(value) == 4 else struct.pack("<I", place)
    tags += b"".join(struct.pack("<HHI", tag, kind, count) + where for tag in (322, 323))
    return b"II*\0" + struct.pack("<I", 72) + bytes(64) + struct.pack("<H", 11) + tags + bytes(4) + value


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (2, b"abc\0"),
        (11, struct.pack("<f", float("nan"))),
        (11, struct.pack("<f", float("inf"))),
        (5, struct.pack("<II", 0, 0)),
        (12, struct.pack("<d", float("inf"))),
    ],
    ids=["text", "nan", "inf", "0/0", "double inf"],
)
def test_a_tiff_whose_tiles_have_no_size_is_refused_alone(server: Running, kind: int, value: bytes) -> None:
    good, bad = server.examine(picture(), tiff_with_tiles(kind, value)).json()["results"]
    assert good["status"] == "judged" and bad["status"] == "unusable"
    assert "its tiles have no valid size" in bad["error"]


def photo(**options: object) -> bytes:
    """A JPEG without grey at its end."""
    file = BytesIO()
    pixels = np.random.default_rng(0).normal(60, 15, (96, 128, 3)).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(file, "JPEG", **options)
    return file.getvalue()


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}], ids=str)
def test_a_jpeg_that_ends_early_is_incomplete(options: dict[str, object]) -> None:
    content = photo(**options)
    assert decode_upload(content, PREPROCESSING, 100_000).shape == (3, 16, 16)
    assert decode_upload(content + content, PREPROCESSING, 100_000).shape == (3, 16, 16)  # a second image
    first = content.index(SCAN) + 14
    for share in (0.1, 0.5, 0.9):
        cut = content[: first + round(share * (len(content) - first))].rstrip(b"\xff")
        for end in (b"", b"\xff\xd9", b"\xff\xd9" + content):
            with pytest.raises(BadImageError, match="it is (incomplete|cut or damaged)"):
                decode_upload(cut + end, PREPROCESSING, 100_000)


@pytest.mark.parametrize(
    ("mode", "level"), [("L", 128), ("RGB", (128, 128, 128)), ("CMYK", (127, 127, 127, 127))]
)
def test_a_jpeg_that_is_grey_is_complete(mode: str, level: Any) -> None:
    for progressive in (False, True):
        file = BytesIO()
        Image.new(mode, (64, 40), level).save(file, "JPEG", progressive=progressive)
        assert decode_upload(file.getvalue(), PREPROCESSING, 10_000).shape == (3, 16, 16)


def run_length_bmp(side: int) -> bytes:
    rows = (b"\xff\x01" * (side // 255) + bytes([side % 255, 1]) + b"\0\0") * side + b"\0\1"
    head = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(rows), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + 40 + 1024) + head + bytes(1024) + rows


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"P6 600 600 200\n" + bytes(600 * 600 * 3), "it is a rare kind of PPM"),
        (run_length_bmp(600), "it is a rare kind of BMP"),
        (b"P2 2 2 255\n1 2 3 4\n", "it is a PPM, PGM or PBM in text form"),
        (b"\xff\xd8" + b"\xff\xfe\0\2" * 6000 + photo()[2:], "it is a JPEG of more than 5,000 segments"),
    ],
    ids=["PPM", "BMP", "plain", "segments"],
)
def test_what_is_slow_to_decode_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(BadImageError, match=reason):
        decode_upload(content, PREPROCESSING, 25_000_000)


def test_rare_kinds_are_decoded_if_they_are_small() -> None:
    for content in (b"P6 60 60 200\n" + bytes(60 * 60 * 3), run_length_bmp(60)):
        assert decode_upload(content, PREPROCESSING, 25_000_000).shape == (3, 16, 16)


def test_no_header_is_read_for_long() -> None:
    slow = b"P6\n#" + b"a" * 20_000_000 + b"\n4 4 255\n" + bytes(48)  # PIL reads byte after byte
    assert decode_upload(slow[:100] + slow[-60:], PREPROCESSING, 10_000).shape == (3, 16, 16)
    decoder = Decoder(10_000, patience=60.0)
    try:
        with pytest.raises(BadImageError, match="it takes too long to decode"):
            decoder(decode_upload, slow, PREPROCESSING, 10_000)
    finally:
        decoder.end()


def test_a_machine_without_memory_is_not_the_fault_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("candid.data.images.resized", full)
    with pytest.raises(MemoryError):
        decode_upload(picture(), PREPROCESSING, 10_000)


def test_a_request_has_a_budget_of_pixels(service: Service) -> None:
    with running(service, max_pixels=300_000) as server:
        results = server.examine(picture(0, (510, 510)), picture(), *[picture(0, (500, 520))] * 10).json()[
            "results"
        ]
    assert [each["status"] for each in results] == ["judged"] * 10 + ["unusable"] * 2
    assert "send fewer images at a time" in results[-1]["error"]


@pytest.mark.parametrize("coding", ["group3", "group4", "tiff_ccitt"])
def test_fax_pages_are_refused_in_one_sentence(coding: str) -> None:
    file = BytesIO()
    Image.new("1", (64, 64)).save(file, "TIFF", compression=coding)
    with pytest.raises(BadImageError, match="fax machines"):
        decode_upload(file.getvalue(), Preprocessing(3, 16, 16), 10_000)


@pytest.mark.parametrize("options", [{}, {"optimize": True}, {"subsampling": 0}])
def test_a_jpeg_with_a_zeroed_part_is_incomplete(options: dict[str, Any]) -> None:
    """Not where zero bits mean a flat area: then a hole can't be told from one cheaply."""
    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (40, 60, 3), dtype=np.uint8)).resize((480, 320))
    file = BytesIO()
    coarse.save(file, "JPEG", quality=90, **options)
    content = file.getvalue()
    decode_upload(content, PREPROCESSING, 10**6)
    start = content.rindex(SCAN) + 14
    for share in (0.1, 0.5, 0.9):
        at = start + int(share * (len(content) - 2 - start))
        for length in (200, len(content)):
            end = min(at + length, len(content) - 2)
            damaged = content[:at] + bytes(end - at) + content[end:]
            with pytest.raises(BadImageError, match="incomplete|damaged"):
                decode_upload(damaged, PREPROCESSING, 10**6)


@pytest.mark.parametrize("level", [0, 127, 128, 255])
@pytest.mark.parametrize("options", [{}, {"optimize": True}, {"quality": 5}, {"quality": 100}])
def test_flat_jpegs_are_whole(level: int, options: dict[str, Any]) -> None:
    file = BytesIO()
    Image.new("RGB", (1600, 1200), (level, level, 255 - level)).save(file, "JPEG", **options)
    decode_upload(file.getvalue(), PREPROCESSING, 10**7)
    padded = file.getvalue()[:-2] + bytes(300) + file.getvalue()[-2:]
    decode_upload(padded, PREPROCESSING, 10**7)
