"""Files are refused by their first bytes if they can be, and never take much memory."""

import tracemalloc
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from candid.data.images import BadImageError
from candid.data.splits import View, decode_as
from candid.errors import CandidError
from candid.serve.limits import Limits, decoded
from tests.serve.helpers import huge_png, picture

VIEW = View(3, 16, 16)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_an_upload_is_seen_as_a_file_is(kind: str, tmp_path: Path) -> None:
    content = picture(1, (40, 30), kind)
    path = tmp_path / "image"
    path.write_bytes(content)
    assert torch.equal(decoded(content, VIEW, 10_000), decode_as(path, VIEW, None))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"not an image", "it is not an image"),
        (picture()[:20], "it is not an image"),
        (picture(0, (64, 64), "JPEG")[:700], "it is cut or damaged"),
        (picture(0, (64, 64))[:4000], "it is cut or damaged"),
        (picture(0, (64, 65)), "it has 65 x 64 pixels, more than the 4,096 allowed here"),
        (huge_png(), "it has more than 4,096 pixels"),
    ],
)
def test_bad_files_are_refused_with_a_reason(content: bytes, reason: str) -> None:
    with pytest.raises(BadImageError) as caught:
        decoded(content, VIEW, 4096)
    assert str(caught.value).startswith(reason)
    assert ":" not in str(caught.value) and "0x" not in str(caught.value)


def test_other_decoders_of_pil_are_not_reached() -> None:
    file = BytesIO()
    Image.new("RGB", (16, 16)).save(file, "ICO")
    with pytest.raises(BadImageError, match="not an image"):
        decoded(file.getvalue(), VIEW, 10_000)


def test_a_small_file_of_many_pixels_takes_no_memory() -> None:
    content = huge_png()
    assert len(content) < 100_000
    tracemalloc.start()
    with pytest.raises(BadImageError):
        decoded(content, VIEW, 25_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_queue", 0), ("batch", 0), ("max_pixels", 10**9), ("max_megabytes", 0), ("timeout", -1)],
)
def test_limits_are_checked(name: str, value: float) -> None:
    with pytest.raises(CandidError, match=f"--{name.replace('_', '-')}"):
        Limits(**{name: value})  # type: ignore[arg-type]
