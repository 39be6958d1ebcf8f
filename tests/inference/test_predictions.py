import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from safetensors.torch import save_file
from torch import Tensor

from candid import GenerativeClassifier, ResNet, ResNetConfig, information_bottleneck_loss
from candid._support.numbers import Array
from candid._support.randomness import draws
from candid.data.batches import NamedBatch
from candid.data.images import to_float
from candid.inference.metrics import bits_per_dimension
from candid.inference.predictions import FEATURES, Measure, Predictions, half_features, predict_batches
from candid.judging.held_out import MEASURES as CODE_LENGTHS
from candid.judging.held_out import code_lengths_by_scale
from candid.models.protocol import Outputs
from tests.helpers import randomise, small_classifier

Make = Callable[[], GenerativeClassifier | ResNet]


def small_resnet() -> ResNet:
    config = ResNetConfig(3, 16, 16, classes=3, blocks=(1, 1), widths=(4, 8), stem="3x3")
    return randomise(ResNet(config, seed=0)).eval()


def unequal_classifier() -> GenerativeClassifier:
    """With class priors that matter."""
    model = small_classifier()
    model.mixture.log_priors.copy_(torch.tensor([0.2, 0.7, 0.1]).log())
    return model


@pytest.fixture
def images() -> Array:
    return draws(0).integers(256, 11 * 3 * 16 * 16).reshape(11, 3, 16, 16).astype(np.uint8)


LABELS = np.arange(11) % 3
NAMES = tuple(f"image {i}" for i in range(11))
MEASURES: dict[str, Measure] = {**CODE_LENGTHS, **FEATURES}
both = pytest.mark.parametrize("make", [small_classifier, small_resnet])


def floats(images: Array) -> Tensor:
    """What the network sees."""
    return torch.from_numpy(to_float(images))


def batches(images: Array, size: int) -> Iterator[NamedBatch]:
    for start, end in pairwise([*range(0, len(images), size), len(images)]):
        yield images[start:end], LABELS[start:end], NAMES[start:end]


def assert_equal(one: Predictions | None, other: Predictions) -> None:
    assert one is not None
    for field in fields(Predictions):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name == "columns":
            assert a.keys() == b.keys()
            assert all(a[key].dtype == b[key].dtype and np.array_equal(a[key], b[key]) for key in a)
        elif field.name == "paths":
            assert a == b
        else:
            assert a.dtype == b.dtype and np.array_equal(a, b), field.name


@both
def test_predictions_do_not_depend_on_the_batch_size(make: Make, images: Array) -> None:
    model = make()
    whole = predict_batches(model, batches(images, 11), CODE_LENGTHS)
    assert_allclose(whole.logits, model.logits(floats(images)).detach(), rtol=1e-5, atol=1e-5)
    for size in (1, 4):
        parts = predict_batches(model, batches(images, size), CODE_LENGTHS)
        for found in (whole, parts):
            assert np.array_equal(found.labels, LABELS) and found.paths == NAMES
            assert np.array_equal(found.columns["complexity"], code_lengths_by_scale(images))
        assert_allclose(parts.logits, whole.logits, rtol=1e-5, atol=1e-5)
        if whole.log_density is None or parts.log_density is None:
            assert parts.log_density is whole.log_density is None
        else:
            assert_allclose(parts.log_density, whole.log_density, rtol=1e-6)


def test_densities_are_the_models(images: Array) -> None:
    model = unequal_classifier()
    found = predict_batches(model, batches(images, 4))
    assert found.log_density is not None and found.log_density.dtype == np.float64
    density = model.log_density(floats(images)).detach().numpy()
    for log_density in (found.log_density, found.columns["log_density_terms"].sum(1)):
        assert_allclose(log_density, density, rtol=1e-6)
    likelihoods = found.log_posterior + found.log_density[:, None] - found.log_priors  # by Bayes
    truth = model.log_likelihoods(floats(images)).detach().numpy()
    assert_allclose(likelihoods, truth, rtol=1e-6)
    assert_allclose(likelihoods - likelihoods[:, :1], truth - truth[:, :1], rtol=0, atol=1e-4)


@both
def test_posteriors_are_the_models_and_sum_to_one(make: Make, images: Array) -> None:
    model = make()
    found = predict_batches(model, batches(images, 4))
    assert_allclose(found.posterior.sum(1), 1, rtol=0, atol=1e-12)
    assert_allclose(np.exp(found.log_posterior), found.posterior, rtol=1e-7, atol=1e-7)
    assert_allclose(found.posterior, model.posterior(floats(images)).detach(), rtol=0, atol=1e-5)
    assert np.exp(found.log_priors).sum() == pytest.approx(1)


def test_a_baseline_has_no_density(images: Array) -> None:
    found = predict_batches(small_resnet(), batches(images, 4))
    assert found.log_density is None and not found.columns


def test_features_are_a_column_in_half_precision_if_asked_for(images: Array) -> None:
    """Those of a pixel model are the first coefficients of the latent."""
    model = small_classifier()
    assert "features" not in predict_batches(model, batches(images, 4)).columns
    found = predict_batches(model, batches(images, 4), MEASURES).columns["features"]
    features = model.latent(floats(images))[:, :192].detach()
    assert found.dtype == np.float16
    assert_allclose(found, features, rtol=1e-3, atol=1e-5)


def test_features_beyond_half_precision_are_clipped() -> None:
    features = np.array([[1e9, -1e9, 1.0]], np.float32)
    found = half_features(np.empty(0), Outputs(features, features, None, None))
    assert found.tolist() == [[65504.0, -65504.0, 1.0]]


@both
def test_no_images_give_empty_predictions_of_the_same_kind(make: Make, images: Array) -> None:
    model = make()
    some = predict_batches(model, batches(images, 4))
    none = predict_batches(model, iter(()))
    assert len(none) == 0
    assert_equal(none, some[np.arange(0)])


def test_parts_join_and_split(images: Array) -> None:
    whole = predict_batches(small_classifier(), batches(images, 11), MEASURES)
    first, rest = whole[np.arange(4)], whole[np.arange(4, 11)]
    assert (len(first), first.paths) == (4, NAMES[:4])
    assert_equal(Predictions.joined([first, rest]), whole)
    assert_equal(Predictions.joined([rest, whole[np.arange(0)], first])[(np.arange(11) - 4) % 11], whole)


ODD_NAMES = ("päth/ü 1.png", "two\nlines\r.png", " ", "", "猫/🐈.png", "no utf-8: \udcff\udc80")


@both
def test_saved_predictions_come_back(make: Make, images: Array, tmp_path: Path) -> None:
    model = make()
    saved = replace(predict_batches(model, batches(images, 4)), paths=(*ODD_NAMES, *NAMES[:5]))
    for some in (saved, saved[np.array([3])], saved[np.arange(0)]):
        some.save(tmp_path / "new folder" / "found.safetensors")
        assert_equal(Predictions.load(tmp_path / "new folder" / "found.safetensors"), some)
    assert len(list((tmp_path / "new folder").iterdir())) == 1


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), max_size=5))
def test_any_path_comes_back(tmp_path_factory: pytest.TempPathFactory, paths: list[str]) -> None:
    n, file = len(paths), tmp_path_factory.getbasetemp() / "any.safetensors"
    numbers, random = np.arange(n), np.random.default_rng(n).random((n + 1, 4), np.float32)
    columns: dict[str, Array] = {"keys": -numbers, "complexity": random[:n, 2]}
    some = Predictions(tuple(paths), numbers, random[:n, :2], random[n, :2], columns)
    some.save(file)
    assert_equal(Predictions.load(file), some)


def test_cut_files_are_not_loaded(images: Array, tmp_path: Path) -> None:
    file = tmp_path / "whole"
    predict_batches(small_classifier(), batches(images, 11), MEASURES).save(file)
    content = file.read_bytes()
    for length in [*range(0, len(content), 37), len(content) - 1]:
        cut = tmp_path / f"cut at {length}"  # loaded arrays may be views of their file
        cut.write_bytes(content[:length])
        assert Predictions.load(cut) is None


def other_files(whole: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Safetensors that are no predictions."""
    yield {}
    yield {"paths": torch.zeros(0)}
    for name in ("paths", "labels", "logits", "log_priors"):
        yield {key: value for key, value in whole.items() if key != name}
    for name in ("labels", "logits", "complexity", "terms", "features"):
        yield {**whole, name: torch.zeros(())}
        yield {**whole, name: torch.zeros(3)}
    yield {**whole, "paths": torch.zeros(3, dtype=torch.uint8)}
    yield {**whole, "paths": torch.zeros(2, dtype=torch.bfloat16)}
    yield {**whole, "paths": torch.full((9,), 255, dtype=torch.uint8)}


def test_foreign_files_are_not_loaded(tmp_path: Path) -> None:
    whole = {
        "paths": torch.tensor(list(b"a\0b\0"), dtype=torch.uint8),
        "labels": torch.zeros(2, dtype=torch.long),
        "keys": torch.zeros(2, dtype=torch.long),
        "logits": torch.zeros(2, 3),
        "log_priors": torch.zeros(3),
        "complexity": torch.zeros(2),
    }
    save_file(whole, tmp_path / "whole")
    assert Predictions.load(tmp_path / "whole") is not None
    for i, tensors in enumerate(other_files(whole)):
        save_file(tensors, tmp_path / str(i))
        assert Predictions.load(tmp_path / str(i)) is None, tensors.keys()
    (tmp_path / "text").write_text("no tensors at all")
    for path in (tmp_path / "text", tmp_path / "missing", tmp_path):
        assert Predictions.load(path) is None


def test_the_loss_in_bits_is_the_density_in_bits(images: Array) -> None:
    model = small_classifier().double()
    x = torch.from_numpy(images).double() / 255
    density = model.log_density(x)
    torch.testing.assert_close(model.log_density_of(model(x)), density, rtol=0, atol=0)
    losses = information_bottleneck_loss(model, x, torch.from_numpy(LABELS), beta=1)
    bits = losses.L_X.item() / math.log(2) + model.bits_offset
    assert bits == pytest.approx(bits_per_dimension(density.detach().numpy(), model.dimensions), rel=1e-9)
