import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from candid import GenerativeClassifier, ResNet, ResNetConfig, information_bottleneck_loss
from candid.evaluation import bits_per_dimension, predict_batches
from tests.helpers import randomise, small_classifier

Make = Callable[[], GenerativeClassifier | ResNet]


def small_resnet() -> ResNet:
    config = ResNetConfig(3, 16, 16, classes=3, blocks=(1, 1), widths=(4, 8), stem="3x3")
    return randomise(ResNet(config, seed=0)).eval()


@pytest.fixture
def images(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 256, (11, 3, 16, 16), generator=generator, dtype=torch.uint8)


LABELS = torch.arange(11) % 3


def batches(images: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for start, end in pairwise([*range(0, len(images), size), len(images)]):
        yield images[start:end], LABELS[start:end]


@pytest.mark.parametrize("make", [small_classifier, small_resnet])
def test_predictions_do_not_depend_on_the_batch_size(make: Make, images: Tensor) -> None:
    model = make()
    whole = predict_batches(model, batches(images, 11))
    assert torch.equal(whole.labels, LABELS)
    torch.testing.assert_close(whole.logits, model.logits(images / 255), rtol=1e-5, atol=1e-5)
    for size in (1, 4):
        parts = predict_batches(model, batches(images, size))
        assert torch.equal(parts.labels, LABELS)
        torch.testing.assert_close(parts.logits, whole.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(parts.log_density, whole.log_density, rtol=1e-6, atol=0)


def test_density_is_the_models(images: Tensor) -> None:
    model = small_classifier()
    found = predict_batches(model, batches(images, 4)).log_density
    assert found is not None and found.dtype == torch.float64
    torch.testing.assert_close(found, model.log_density(images / 255), rtol=1e-6, atol=0)


def test_a_baseline_has_no_density(images: Tensor) -> None:
    assert predict_batches(small_resnet(), batches(images, 4)).log_density is None


@pytest.mark.parametrize("make", [small_classifier, small_resnet])
def test_no_images_give_empty_predictions_of_the_same_kind(make: Make, images: Tensor) -> None:
    model = make()
    some = predict_batches(model, batches(images, 4))
    none = predict_batches(model, iter(()))
    for full, empty in zip(some, none, strict=True):
        if full is None or empty is None:
            assert full is empty
        else:
            assert empty.shape == (0, *full.shape[1:]) and empty.dtype == full.dtype


def test_the_loss_in_bits_is_the_density_in_bits(images: Tensor) -> None:
    model = small_classifier().double()
    x = images.double() / 255
    density = model.log_density(x)
    torch.testing.assert_close(model.log_density_of(model(x)), density, rtol=0, atol=0)
    losses = information_bottleneck_loss(model, x, LABELS, beta=1)
    bits = losses.L_X.item() / math.log(2) + model.bits_offset
    assert bits == pytest.approx(bits_per_dimension(density, model.dimensions), rel=1e-9)
