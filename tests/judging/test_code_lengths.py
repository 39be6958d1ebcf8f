from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.ndimage import uniform_filter

from candid._support.numbers import Array
from candid.judging.held_out import code_lengths, code_lengths_by_scale
from tests.data.helpers import encoded, pixels

Plane = list[list[int]]
NOTHING, PLAIN = 7, 8
"""Headers of rows that are not in a Rice code, whose header is its parameter."""


def prediction(plane: Plane, row: list[int]) -> int:
    """Of the next number of ``row``, ``plane`` being the rows above it."""
    x = len(row)
    up = plane[-1][x] if plane else 0
    if not x:
        return up
    left, corner = row[-1], plane[-1][x - 1] if plane else 0
    return sorted((left, up, left + up - corner))[1]


def rice(number: int, parameter: int) -> str:
    low = number % 2**parameter
    return "1" * (number >> parameter) + "0" + (f"{low:0{parameter}b}" if parameter else "")


def encode_row(numbers: list[int]) -> str:
    codes = {k: "".join(rice(n, k) for n in numbers) for k in range(7)}
    codes[PLAIN] = "".join(f"{n:08b}" for n in numbers)
    if not any(numbers):
        codes[NOTHING] = ""
    best = min(codes, key=lambda header: len(codes[header]))
    return f"{best:04b}{codes[best]}"


def encode(image: Array) -> str:
    """The documented code of a (C, H, W) image, as a string of bits."""
    planes = image.astype(np.int64)
    if len(planes) == 3:
        red, green, blue = planes
        planes = np.stack((green, (red - green) % 256, (blue - green) % 256))
    bits = ""
    for plane in planes.tolist():
        for y, row in enumerate(plane):
            numbers = []
            for x, value in enumerate(row):
                difference = (value - prediction(plane[:y], row[:x]) + 128) % 256 - 128
                numbers.append(2 * difference if difference >= 0 else -2 * difference - 1)
            bits += encode_row(numbers)
    return bits


def number(bits: Iterator[str], length: int) -> int:
    return int("0" + "".join(islice(bits, length)), 2)


def decode_number(bits: Iterator[str], header: int) -> int:
    if header == NOTHING:
        return 0
    if header == PLAIN:
        return number(bits, 8)
    quotient = 0
    while next(bits) == "1":
        quotient += 1
    return (quotient << header) + number(bits, header)


def decode(code: str, channels: int, height: int, width: int) -> Array:
    bits = iter(code)
    planes: list[Plane] = []
    for _ in range(channels):
        plane: Plane = []
        for _ in range(height):
            header, row = number(bits, 4), list[int]()
            for _ in range(width):
                n = decode_number(bits, header)
                row.append((prediction(plane, row) + (-(n + 1) // 2 if n % 2 else n // 2)) % 256)
            plane.append(row)
        planes.append(plane)
    assert not list(bits), "the code must end with the image"
    image = np.array(planes)
    if channels == 3:
        green, red, blue = image
        image = np.stack((red + green, green, blue + green)) % 256
    return image.astype(np.uint8)


@st.composite
def images(draw: st.DrawFn) -> Array:
    """(C, H, W): noise, noise of few levels, extremes, gradients and constants."""
    channels, height, width = draw(st.sampled_from([1, 3])), draw(st.integers(1, 7)), draw(st.integers(1, 9))
    count = channels * height * width
    noise = np.array(list(draw(st.binary(min_size=count, max_size=count)))).reshape(channels, height, width)
    kind = draw(st.sampled_from(["noise", "few levels", "extremes", "gradient", "constant"]))
    if kind == "few levels":
        noise = draw(st.integers(0, 255)) + noise % draw(st.integers(1, 8))
    elif kind == "extremes":
        noise = 255 * (noise % 2)
    elif kind == "gradient":
        right, down = draw(st.integers(-9, 9)), draw(st.integers(-9, 9))
        noise = noise[:, :1, :1] + right * np.arange(width) + down * np.arange(height)[:, None]
    elif kind == "constant":
        noise = np.broadcast_to(noise[:, :1, :1], (channels, height, width))
    return (noise % 256).astype(np.uint8)


@settings(deadline=None, max_examples=150)
@given(images())
def test_a_code_length_is_that_of_a_code_that_can_be_decoded(image: Array) -> None:
    code = encode(image)
    assert np.array_equal(decode(code, *image.shape), image)
    assert code_lengths(image[None]).tolist() == [len(code)]
    channels, height, width = image.shape
    assert len(code) <= channels * height * (8 * width + 4)


@pytest.mark.parametrize("channels", [1, 3])
def test_an_images_length_does_not_depend_on_its_batch(channels: int, generator: np.random.Generator) -> None:
    some = generator.integers(0, 256, size=(5, channels, 9, 13), dtype=np.uint8)
    some[1] //= 16
    some[3] = 255
    together = code_lengths(some)
    assert together.dtype == np.float64 and together.shape == (5,)
    assert together.tolist() == [code_lengths(image[None]).item() for image in some]
    strided = np.asfortranarray(some)
    assert np.array_equal(code_lengths(strided), together)


def test_noise_costs_a_little_more_than_its_bytes(generator: np.random.Generator) -> None:
    noise = generator.integers(0, 256, size=(20, 3, 32, 32), dtype=np.uint8)
    bits = code_lengths(noise) / noise[0].size
    assert bits.min() > 8
    assert bits.max() <= 8 + 4 / 32


def test_lengths_rise_with_those_of_png() -> None:
    smooth = np.stack([pixels(seed, 32, 32) for seed in range(6)]).astype(np.int64)
    noise = np.random.default_rng(0).integers(-128, 128, smooth.shape)
    series = [
        (smooth + noise * strength // 128).clip(0, 255).astype(np.uint8) for strength in (0, 4, 32, 128)
    ]
    found = np.stack([code_lengths(np.moveaxis(kind, -1, 1)) for kind in series])
    png = np.array([[8 * len(encoded(Image.fromarray(each))) for each in kind] for kind in series])
    assert (np.diff(found, axis=0) > 0).all()
    assert (np.diff(png, axis=0) > 0).all()
    assert np.corrcoef(found.ravel(), png.ravel())[0, 1] > 0.98


def test_smaller_versions_are_averages_of_pixels(generator: np.random.Generator) -> None:
    image = generator.integers(0, 256, size=(2, 3, 9, 16), dtype=np.uint8)
    found = code_lengths_by_scale(image)
    assert found.shape == (2, 2), "a quarter of 9 pixels is less than 4"
    averages = np.rint(image[..., :8, :].astype(np.float64).reshape(2, 3, 4, 2, 8, 2).mean(axis=(3, 5)))
    smaller = code_lengths(averages.astype(np.uint8))
    assert np.array_equal(found, np.stack((code_lengths(image), smaller), 1))
    assert code_lengths_by_scale(image[..., :3, :3]).shape == (2, 1)


def test_a_blurred_image_stands_out_by_how_its_lengths_fall_with_the_scale() -> None:
    sharp = np.moveaxis(np.stack([pixels(seed, 32, 32) for seed in range(30)]), -1, 1)
    noise = np.random.default_rng(0).integers(-20, 21, size=sharp.shape)
    noisy = (sharp + noise).clip(0, 255).astype(np.uint8)
    blurred = uniform_filter(noisy.astype(np.float32), (1, 1, 3, 3), mode="nearest").astype(np.uint8)
    ratios = [(lengths[:, 1] / lengths[:, 0]) for lengths in map(code_lengths_by_scale, (noisy, blurred))]
    assert ratios[1].min() > ratios[0].max()
