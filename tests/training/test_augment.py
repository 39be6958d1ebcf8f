import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from candid.training.loader import jittered, padded_crops, random_flips

UNIFORM = st.floats(0, 1, exclude_max=True, width=32)
FIVE = st.lists(UNIFORM, min_size=5, max_size=5)


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
