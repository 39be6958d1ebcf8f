import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from candid.data.augment import jittered, padded_crops, random_box, random_flips, reflected_frame, ten_crops
from candid.data.images import centre_box, fitted, resized

SIDE = st.integers(1, 3000)
UNIFORM = st.floats(0, 1, exclude_max=True, width=32)
FIVE = st.lists(UNIFORM, min_size=5, max_size=5)


@settings(max_examples=300, deadline=None)
@given(SIDE, SIDE, FIVE)
def test_a_random_box_lies_in_the_image(width: int, height: int, numbers: list[float]) -> None:
    left, top, right, bottom = random_box(width, height, torch.tensor(numbers))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


@settings(max_examples=300, deadline=None)
@given(SIDE, SIDE, FIVE)
def test_a_random_box_has_its_area_and_shape_where_it_fits(
    width: int, height: int, numbers: list[float]
) -> None:
    x, y, _, share, shape = torch.tensor(numbers).tolist()
    area = width * height * (0.08 + 0.92 * share)
    aspect = (4 / 3) ** (2 * shape - 1)
    wanted = math.sqrt(area * aspect), math.sqrt(area / aspect)
    left, top, right, bottom = random_box(width, height, torch.tensor(numbers))
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
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.lists(FIVE, min_size=1, max_size=4))
def test_a_padded_crop_is_reflect_padding_and_slicing(
    height: int, width: int, padding: int, numbers: list[list[float]]
) -> None:
    images = torch.randint(256, (len(numbers), 2, height, width), dtype=torch.uint8)
    crops = padded_crops(images, torch.tensor(numbers), padding)
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (padding, padding), (padding, padding)), "reflect")
    places = (torch.tensor(numbers) * (2 * padding + 1)).int()  # in float32: 0.04 * 25 is 1 there
    for i, (left, top, *_) in enumerate(places.tolist()):
        expected = padded[i, :, top : top + height, left : left + width]
        assert np.array_equal(crops[i].numpy(), expected)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 12), st.integers(0, 12))
def test_a_reflected_frame_is_reflect_padding(height: int, width: int, down: int, across: int) -> None:
    images = torch.randint(256, (2, 3, height, width), dtype=torch.uint8)
    framed = reflected_frame(images, (height + down, width + across))
    sides = [(more // 2, more - more // 2) for more in (down, across)]
    assert np.array_equal(framed.numpy(), np.pad(images.numpy(), [(0, 0), (0, 0), *sides], "reflect"))


def test_every_shift_occurs_equally_often() -> None:
    numbers = torch.rand(21_000, 5)
    ramp = torch.arange(9).view(1, 1, 1, 9).expand(len(numbers), 1, 9, 9)
    centre = padded_crops(ramp, numbers, padding=3)[:, 0, 4, 4]
    counts = torch.bincount(centre)
    assert counts.nonzero().flatten().tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert (counts[1:8] - 3000).abs().max() < 5 * math.sqrt(3000)


def test_an_image_is_mirrored_by_its_own_number() -> None:
    images = torch.randint(256, (4, 3, 5, 6), dtype=torch.uint8)
    numbers = torch.zeros(4, 5)
    numbers[:, 2] = torch.tensor([0.0, 0.5, 0.49, 0.99])
    flipped = random_flips(images, numbers)
    for i, mirrored in enumerate((True, False, True, False)):
        expected = images[i].numpy()[:, :, ::-1] if mirrored else images[i].numpy()
        assert np.array_equal(flipped[i].numpy(), expected)


def test_ten_crops_are_corners_and_centre_and_their_mirror_images() -> None:
    images = torch.arange(2 * 7 * 9).view(2, 1, 7, 9)
    crops = ten_crops(images, (4, 5))
    for i, (top, left) in enumerate([(0, 0), (0, 4), (3, 0), (3, 4), (1, 2)]):
        expected = images.numpy()[:, :, top : top + 4, left : left + 5]
        assert np.array_equal(crops[:, i].numpy(), expected)
        assert np.array_equal(crops[:, 5 + i].numpy(), expected[..., ::-1])


def test_fitted_images_are_centred() -> None:
    image = torch.ones(1, 1, 28, 28, dtype=torch.uint8)
    framed = fitted(image, (32, 33))
    assert framed.shape == (1, 1, 32, 33)
    assert framed.sum() == 28 * 28
    assert framed[0, 0, 2:30, 2:30].all()
    cropped = fitted(torch.arange(36).view(1, 1, 6, 6), (4, 4))
    assert torch.equal(cropped, torch.arange(36).view(1, 1, 6, 6)[:, :, 1:5, 1:5])


def test_an_image_of_the_right_size_is_not_resampled() -> None:
    image = Image.effect_noise((6, 5), 80)
    assert np.array_equal(np.asarray(resized(image, (0, 0, 6, 5), (5, 6))), np.asarray(image))
    assert resized(image, (1, 0, 5, 5), (5, 6)).size == (6, 5)


def test_wobbling_moves_turns_and_resizes() -> None:
    image = torch.zeros(1, 1, 16, 16, dtype=torch.uint8)
    image[0, 0, 7:9, 3:13] = 200  # a bar across the middle
    still = torch.full((1, 5), 0.5)
    assert torch.equal(jittered(image, still), image)

    def spread(numbers: list[float], axis: int) -> float:
        weights = jittered(image, torch.tensor([numbers]))[0, 0].float().sum(1 - axis)
        places = torch.arange(16.0)
        mean = (weights * places).sum() / weights.sum()
        return float(((weights * (places - mean) ** 2).sum() / weights.sum()).sqrt())

    middle = [0.5] * 5
    assert spread([0.5, 0.5, 0.5, 0.5, 1.0], axis=0) > 1.3 * spread(middle, axis=0)  # turned
    assert spread([0.5, 0.5, 0.5, 0.0, 0.5], axis=1) > 1.1 * spread(middle, axis=1)  # larger
    moved = jittered(image, torch.tensor([[1.0, 0.5, 0.5, 0.5, 0.5]]))
    assert torch.equal(moved[..., :13], image[..., 2:15])  # by an eighth of the width
    assert moved.dtype == torch.uint8
