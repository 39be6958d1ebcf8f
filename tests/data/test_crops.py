import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from candid.data.crops import fitted, random_box, reflected_frame, ten_crops
from candid.data.images import centre_box, resized

SIDE = st.integers(1, 3000)
UNIFORM = st.floats(0, 1, exclude_max=True, width=32)
FIVE = st.lists(UNIFORM, min_size=5, max_size=5)


@settings(max_examples=300, deadline=None)
@given(SIDE, SIDE, FIVE)
def test_a_random_box_lies_in_the_image(width: int, height: int, numbers: list[float]) -> None:
    left, top, right, bottom = random_box(width, height, numbers)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


@settings(max_examples=300, deadline=None)
@given(SIDE, SIDE, FIVE)
def test_a_random_box_has_its_area_and_shape_where_it_fits(
    width: int, height: int, numbers: list[float]
) -> None:
    x, y, _, share, shape = numbers
    area = width * height * (0.08 + 0.92 * share)
    aspect = (4 / 3) ** (2 * shape - 1)
    wanted = math.sqrt(area * aspect), math.sqrt(area / aspect)
    left, top, right, bottom = random_box(width, height, numbers)
    assert right - left == pytest.approx(min(width, wanted[0]), abs=0.011)
    assert bottom - top == pytest.approx(min(height, wanted[1]), abs=0.011)
    assert left == pytest.approx(x * (width - min(width, wanted[0])), abs=0.011)
    assert top == pytest.approx(y * (height - min(height, wanted[1])), abs=0.011)


@settings(max_examples=300, deadline=None)
@given(SIDE, SIDE, st.integers(1, 300), st.integers(1, 300), st.floats(1, 1.5))
@example(393, 396, 49, 49, 1.0)
def test_the_centre_box_is_the_largest_of_its_shape(
    width: int, height: int, down: int, across: int, margin: float
) -> None:
    left, top, right, bottom = centre_box(width, height, (down, across), margin)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert left + right == pytest.approx(width)
    assert top + bottom == pytest.approx(height)
    assert (right - left) * down == pytest.approx((bottom - top) * across)
    assert max((right - left) / width, (bottom - top) / height) == pytest.approx(1 / margin)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 12), st.integers(0, 12))
def test_a_reflected_frame_is_reflect_padding(height: int, width: int, down: int, across: int) -> None:
    images = np.random.default_rng(0).integers(256, size=(2, 3, height, width), dtype=np.uint8)
    framed = reflected_frame(images, (height + down, width + across))
    sides = [(more // 2, more - more // 2) for more in (down, across)]
    assert np.array_equal(framed, np.pad(images, [(0, 0), (0, 0), *sides], "reflect"))


def test_ten_crops_are_corners_and_centre_and_their_mirror_images() -> None:
    images = np.arange(2 * 7 * 9).reshape(2, 1, 7, 9)
    crops = ten_crops(images, (4, 5))
    for i, (top, left) in enumerate([(0, 0), (0, 4), (3, 0), (3, 4), (1, 2)]):
        expected = images[:, :, top : top + 4, left : left + 5]
        assert np.array_equal(crops[:, i], expected)
        assert np.array_equal(crops[:, 5 + i], expected[..., ::-1])


def test_fitted_images_are_centred() -> None:
    image = np.ones((1, 1, 28, 28), np.uint8)
    framed = fitted(image, (32, 33))
    assert framed.shape == (1, 1, 32, 33)
    assert framed.sum() == 28 * 28
    assert framed[0, 0, 2:30, 2:30].all()
    cropped = fitted(np.arange(36).reshape(1, 1, 6, 6), (4, 4))
    assert np.array_equal(cropped, np.arange(36).reshape(1, 1, 6, 6)[:, :, 1:5, 1:5])


def test_an_image_of_the_right_size_is_not_resampled() -> None:
    image = Image.effect_noise((6, 5), 80)
    assert np.array_equal(np.asarray(resized(image, (0, 0, 6, 5), (5, 6))), np.asarray(image))
    assert resized(image, (1, 0, 5, 5), (5, 6)).size == (6, 5)
