import os
import socket
import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, features

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.data.crops import Box
from candid.data.formats import images_in
from candid.data.images import (
    LARGEST,
    NAMES,
    BadImageError,
    Preprocessing,
    check_file,
    decode,
    decode_as,
    image_keys,
    preprocess_image,
    resized,
    to_pil,
)
from candid.judging.examine import image_paths
from tests.data.helpers import encoded, picture, pixels

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def whole(width: int, height: int) -> Box:
    return 0, 0, width, height


def colour(source: Path | bytes, channels: int = 3) -> list[int]:
    """The colour of an image that has only one."""
    image = decode(source, channels, (4, 6), whole)
    values = np.unique(image.reshape(channels, -1), axis=1)
    assert values.shape[1] == 1
    return [*map(int, values[:, 0])]


def paletted(*, transparent: bool) -> Image.Image:
    image = Image.new("P", (6, 4), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    if transparent:
        image.info["transparency"] = 1
    return image


def sixteen_bit(level: int) -> Image.Image:
    return Image.fromarray(np.full((4, 6), level, dtype=np.uint16))


@pytest.mark.parametrize(
    ("image", "kind", "expected"),
    [
        (Image.new("L", (6, 4), 90), "PNG", [90, 90, 90]),
        (Image.new("LA", (6, 4), (90, 255)), "PNG", [90, 90, 90]),
        (Image.new("LA", (6, 4), (90, 0)), "PNG", [255, 255, 255]),
        (Image.new("RGB", (6, 4), (10, 20, 30)), "PNG", [10, 20, 30]),
        (Image.new("RGBA", (6, 4), (10, 20, 30, 255)), "PNG", [10, 20, 30]),
        (Image.new("RGBA", (6, 4), (0, 100, 200, 128)), "PNG", [127, 177, 227]),
        (paletted(transparent=False), "PNG", [200, 100, 50]),
        (paletted(transparent=True), "PNG", [255, 255, 255]),
        (paletted(transparent=False), "GIF", [200, 100, 50]),
        (Image.new("CMYK", (6, 4), (255, 0, 0, 0)), "TIFF", [0, 255, 255]),
        (Image.new("CMYK", (6, 4), (0, 0, 0, 255)), "JPEG", [0, 0, 0]),
        (Image.new("1", (6, 4), 1), "PNG", [255, 255, 255]),
        (Image.new("1", (6, 4), 0), "PNG", [0, 0, 0]),
        (sixteen_bit(90 * 256 + 200), "PNG", [90, 90, 90]),
        (sixteen_bit(90), "PNG", [90, 90, 90]),
        (sixteen_bit(65535), "TIFF", [255, 255, 255]),
        (Image.new("I", (6, 4), 2_000_000), "TIFF", [255, 255, 255]),
        (Image.new("RGB", (6, 4), (10, 20, 30)), "WEBP", [10, 20, 30]),
        (Image.new("RGB", (6, 4), (10, 20, 30)), "BMP", [10, 20, 30]),
        (Image.new("L", (6, 4), 90), "PPM", [90, 90, 90]),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else str(value),
)
def test_every_mode_becomes_eight_bit_colours(
    tmp_path: Path, image: Image.Image, kind: str, expected: list[int]
) -> None:
    content = encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {}))
    path = tmp_path / "image"
    path.write_bytes(content)
    assert colour(path) == colour(content) == expected
    if len(set(expected)) == 1:
        assert colour(path, channels=1) == expected[:1]


def test_colours_become_grey_by_their_brightness() -> None:
    content = encoded(Image.new("RGB", (6, 4), (255, 0, 0)))
    assert colour(content, channels=1) == [76]


def test_a_heic_photo_is_turned_upright_once() -> None:
    """Its decoder turns it; what its EXIF data says must not turn it again."""
    sizes = []

    def box(width: int, height: int) -> Box:
        sizes.append((width, height))
        return whole(width, height)

    image = decode(Path(__file__).parent / "turned.heic", 3, (64, 48), box).astype(int)
    assert sizes == [(48, 64)]
    expected = np.array([[5, 232, 202], [2, 2, 198], [254, 233, 44], [248, 2, 39]])
    corners = np.stack([image[:, y, x] for y in (0, -1) for x in (0, -1)])
    assert abs(corners - expected).max() <= 12


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_an_avif_photo_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "photos" / "photo.avif"
    path.parent.mkdir()
    Image.new("RGB", (64, 48), (200, 30, 40)).save(path)
    found = decode_as(path, Preprocessing(3, 16, 16))
    assert np.abs(found.astype(int).mean((1, 2)) - (200, 30, 40)).max() < 4
    assert images_in(path.parent) == [path] and "AVIF" in NAMES
    monkeypatch.setattr("PIL.AvifImagePlugin.SUPPORTED", False)
    with pytest.raises(BadImageError, match="Pillow 11.3"):
        decode_as(path, Preprocessing(3, 16, 16))


def test_pipes_and_sockets_are_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket.jpg"))
        for path in (tmp_path / "pipe.jpg", tmp_path / "socket.jpg", Path("/dev/zero")):
            with pytest.raises(BadImageError, match="a pipe, a device or a socket"):
                decode_as(path, Preprocessing(3, 16, 16))
            for named in (str(path), str(path).replace(".jpg", ".j*")):
                with pytest.raises(CandidError, match="name image files"):
                    image_paths([named])


def test_floating_point_images_are_refused() -> None:
    with pytest.raises(BadImageError, match="floating-point"):
        decode(encoded(Image.new("F", (6, 4)), "TIFF"), 1, (4, 6), whole)


def oriented(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(Image.fromarray(pixels(3, 40, 64)), kind, exif=exif)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_turned_upright_before_it_is_cropped(tmp_path: Path, orientation: int, kind: str) -> None:
    path = tmp_path / "photo"
    path.write_bytes(oriented(kind, orientation))
    sizes = []

    def box(width: int, height: int) -> Box:
        sizes.append((width, height))
        return 3.5, 2.0, 33.5, 38.0

    result = decode(path, 3, (20, 25), box)
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image)
    assert sizes == [upright.size]
    expected = np.asarray(resized(upright, (3.5, 2.0, 33.5, 38.0), (20, 25)))
    assert np.array_equal(result.transpose(1, 2, 0), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(20, 30), (75, 110), (9, 10)])
def test_a_reduced_jpeg_is_close_to_the_full_one(size: tuple[int, int], orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(Image.fromarray(pixels(5, 301, 450)), "JPEG", quality=95, exif=exif)
    full = encoded(Image.fromarray(pixels(5, 301, 450)), "PNG", exif=exif)

    def box(width: int, height: int) -> Box:
        return 0.1 * width, 0.05 * height, 0.95 * width, 0.9 * height

    difference = abs(decode(content, 3, size, box).astype(int) - decode(full, 3, size, box))
    assert difference.max() <= 3
    assert difference.mean() < 0.7


def test_a_jpeg_is_never_reduced_below_the_size_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(image: Image.Image, box: Box, size: tuple[int, int]) -> Image.Image:
        seen.append(((box[2] - box[0]) / size[1], (box[3] - box[1]) / size[0]))
        return resized(image, box, size)

    monkeypatch.setattr("candid.data.images.resized", watched)
    content = picture(5, 100, 100, kind="JPEG")
    for side in range(1, 36):
        decode(content, 3, (side, side), lambda *_: (0, 0, 77, 77))
    assert len(seen) == 35
    assert min(map(min, seen)) >= 1
    assert max(map(max, seen[9:])) < 2


@pytest.fixture(params=["JPEG", "PNG"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "cut"
    content = picture(1, 200, 200, kind=request.param)
    path.write_bytes(content[: len(content) // 2])
    return path


def test_a_cut_image_is_noticed_without_and_with_decoding(damaged: Path) -> None:
    with pytest.raises(BadImageError, match="cut"):
        check_file(damaged)
    with pytest.raises(BadImageError, match="cut"):
        decode(damaged, 3, (10, 10), whole)


@pytest.mark.parametrize(
    "content", [b"", b"not an image\n", b"\x89PNG\r\n\x1a\n"], ids=["empty", "text", "start"]
)
def test_a_file_that_is_no_image_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.png"
    path.write_bytes(content)
    for look in (lambda: check_file(path), lambda: decode(path, 3, (4, 4), whole)):
        with pytest.raises(BadImageError, match=r"it is empty, not an image \(PNG, .* damaged"):
            look()


def test_a_missing_file_is_a_bad_image(tmp_path: Path) -> None:
    with pytest.raises(BadImageError, match="No such file"):
        check_file(tmp_path / "missing.png")


def forged_png(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    )


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("side", "reason"), [(10_000, "10000 x 10000 pixels"), (30_000, "too many pixels")])
def test_an_image_too_large_to_decode_is_refused(side: int, reason: str) -> None:
    assert side**2 > LARGEST
    with pytest.raises(BadImageError, match=reason):
        decode(forged_png(side, side), 3, (4, 4), whole)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF"])
def test_good_files_pass_the_quick_look(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "image"
    path.write_bytes(picture(1, 30, 30, kind=kind))
    check_file(path)


def test_data_behind_the_end_of_a_photo_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(picture(1, 30, 30, kind="JPEG") + bytes(10_000))
    check_file(path)


def decoded_or_refused(content: bytes) -> Array | None:
    try:
        return decode(content, 3, (4, 5), whole)
    except BadImageError:
        return None


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"P6 "]),
)
def test_random_bytes_are_an_image_or_refused(content: bytes, start: bytes) -> None:
    image = decoded_or_refused(start + content)
    assert image is None or image.shape == (3, 4, 5)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([picture(1, kind=kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")]),
    st.floats(0, 1, exclude_max=True),
    st.none() | st.integers(1, 255),
)
def test_damaged_images_are_decoded_or_refused(content: bytes, place: float, flip: int | None) -> None:
    at = int(place * len(content))
    bad = content[:at] if flip is None else content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :]
    image = decoded_or_refused(bad)
    assert image is None or image.shape == (3, 4, 5)
    assert decoded_or_refused(content) is not None


def published_by_pil(image: Image.Image, side: int) -> list[Image.Image]:
    """The ten crops of torchvision's Resize and TenCrop, by PIL alone."""
    shorter = round(side * 8 / 7)
    width, height = image.size
    size = (shorter, int(shorter * height / width))
    if width > height:
        size = (int(shorter * width / height), shorter)
    image = image.resize(size, Image.Resampling.BILINEAR)
    crops = []
    for each in (image, ImageOps.mirror(image)):
        right, bottom = each.size[0] - side, each.size[1] - side
        middle = round(right / 2), round(bottom / 2)
        for x, y in ((0, 0), (right, 0), (0, bottom), (right, bottom), middle):
            crops.append(each.crop((x, y, x + side, y + side)))
    return crops


@settings(max_examples=30, deadline=None)
@given(
    width=st.integers(5, 90),
    height=st.integers(5, 90),
    side=st.integers(8, 40),
    channels=st.sampled_from([1, 3]),
    kind=st.sampled_from(["PNG", "JPEG"]),
)
def test_published_crops_are_those_of_the_whole_image(
    width: int, height: int, side: int, channels: int, kind: str
) -> None:
    source = picture(width * height, height, width, kind)
    mode = "RGB" if channels == 3 else "L"
    expected = published_by_pil(Image.open(BytesIO(source)).convert(mode), side)
    ten = decode_as(source, Preprocessing(channels, side, side, "resized", published="ten crops"))
    assert ten.shape == (10, channels, side, side) and ten.dtype == np.uint8
    for found, crop in zip(ten, expected, strict=True):
        assert np.array_equal(found[0] if channels == 1 else found.transpose(1, 2, 0), np.asarray(crop))
    centre = decode_as(source, Preprocessing(channels, side, side, "resized", published="centre"))
    assert np.array_equal(centre, ten[4])


def test_published_resizing_averages_over_all_pixels() -> None:
    """PIL's bilinear filter, against torch's with antialiasing, to one grey level."""
    torch = pytest.importorskip("torch")
    image = np.random.default_rng(0).integers(0, 256, (3, 90, 120), dtype=np.uint8)
    source = encoded(to_pil(image))
    ten = decode_as(source, Preprocessing(3, 28, 28, "resized", published="ten crops"))
    pixels = torch.from_numpy(image)[None].float()
    smaller = torch.nn.functional.interpolate(pixels, (32, 42), mode="bilinear", antialias=True)[0].numpy()
    assert abs(ten[0] - smaller[:, :28, :28]).max() <= 1
    assert abs(ten[3] - smaller[:, 4:, 14:]).max() <= 1


def test_published_crops_ignore_the_orientation_and_refuse_a_line() -> None:
    image, exif = Image.fromarray(pixels(0, 20, 30)), Image.Exif()
    exif[0x0112] = 6
    view = Preprocessing(3, 16, 16, "resized", published="centre")
    assert np.array_equal(decode_as(encoded(image, exif=exif), view), decode_as(encoded(image), view))
    with pytest.raises(BadImageError, match="would have 15360000 x 256"):
        decode_as(picture(0, 1, 60_000), Preprocessing(3, 224, 224, "resized", published="centre"))


def test_keys_of_images_are_those_that_models_store() -> None:
    """Written down from version 0.1.0: models hold such keys of their training images."""
    small = np.arange(120, dtype=np.uint8).reshape(2, 3, 4, 5)
    assert image_keys(small).tolist() == [-6754931467938817483, 4202258844640037397]
    assert image_keys(np.full((1, 1, 8, 8), 255, np.uint8)).tolist() == [5653922323372690772]
    photo = (np.arange(3 * 224 * 224) * 7919 % 256).astype(np.uint8).reshape(1, 3, 224, 224)
    assert image_keys(photo).tolist() == [-753184021087333500]
    assert image_keys(photo).dtype == np.int64


@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.float64])
def test_arrays_and_tensors_in_memory_are_seen_alike(kind: type) -> None:
    torch = pytest.importorskip("torch")
    rows = pixels(4, 20, 30) if kind is np.uint8 else (pixels(4, 20, 30) / 255).astype(kind)
    tensor = torch.from_numpy(rows).permute(2, 0, 1)
    for view in (Preprocessing(3, 20, 30), Preprocessing(3, 16, 16), Preprocessing(1, 20, 30)):
        seen = preprocess_image(rows, view)
        assert seen.shape == (view.channels, *view.size) and seen.dtype == np.uint8
        assert np.array_equal(seen, preprocess_image(tensor, view))
        assert np.array_equal(seen, preprocess_image(Image.fromarray(pixels(4, 20, 30)), view))
    assert np.array_equal(
        preprocess_image(rows, Preprocessing(3, 20, 30)), pixels(4, 20, 30).transpose(2, 0, 1)
    )


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (np.full((4, 4, 3), 1.5), "not all between 0 and 1"),
        (np.full((4, 4, 3), np.nan), "not all between 0 and 1"),
        (np.zeros((4, 4, 3), np.int64), "its numbers are int64"),
        (np.zeros((4, 4, 2), np.uint8), r"its shape \(4, 4, 2\) is not"),
        (np.zeros((0, 4, 3), np.float32), r"its shape \(0, 4, 3\) is not"),
        (np.zeros(4, np.uint8), r"its shape \(4,\) is not"),
    ],
)
def test_arrays_that_are_no_image_are_refused(image: Array, said: str) -> None:
    with pytest.raises(BadImageError, match=said):
        preprocess_image(image, Preprocessing(3, 8, 8))
