"""Class maps of photo models add up to the score."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import candid
from candid.data.images import to_float
from candid.explanations.class_maps import class_maps, maps_of_all_classes, smooth, spread
from candid.judging.examine import Examiner
from candid.models.photo.head import Posterior, fit_head
from candid.models.photo.model import PhotoModel
from candid.models.photo.torch_eyes import ModuleEye
from candid.trust.verdict import Examination
from tests.photo_models import PhotoRun


@cache
def small_model(posterior: Posterior) -> PhotoModel:
    """A model of three kinds of noise through an eye with maps of 15 x 15 and 7 x 7 positions."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2))
    eye = ModuleEye(network, ["0", "2"], size=32)
    random, labels = np.random.default_rng(0), np.arange(90) % 3
    images = random.random((90, 3, 32, 32), np.float32) * (0.4 + 0.2 * labels[:, None, None, None])
    head = fit_head(eye.statistics(images.astype(np.float32)), labels, 3, eye.groups, logistic=False)
    weights = 3 * random.standard_normal((3, eye.dimensions)), random.standard_normal(3)
    return PhotoModel.of(replace(head, posterior=posterior, logistic=weights), eye, ["a", "b", "c"])


@given(st.sampled_from(["mixture", "second-stage", "logistic"]), st.integers(0, 10**6), st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_maps_add_up_to_the_logits(posterior: Posterior, seed: int, contrast: float) -> None:
    model = small_model(posterior)
    noise = np.random.default_rng(seed).random((2, 3, 32, 32)) - 0.5
    images = (0.5 + contrast * noise).astype(np.float32)
    maps, _, baseline = maps_of_all_classes(model, images)
    logits = model.outputs(images).logits
    average = model.logits_of(model.centre[None])
    np.testing.assert_allclose(baseline, average, rtol=0, atol=1e-4)
    assert np.abs(maps.sum((2, 3)) + baseline - logits).max() < 1e-4 * max(np.abs(logits).max(), 1)
    found = class_maps(model, images[0], top=2, against=0)
    assert len(found.classes) == 3 and found.against == 0
    for i, y in enumerate(found.classes):
        other = logits[0].mean() if i < 2 else logits[0, 0]
        assert found.scores[i] == pytest.approx(float(logits[0, y] - other), abs=1e-3, rel=1e-4)
        assert found.values[i].sum() + found.baselines[i] == pytest.approx(found.scores[i], abs=1e-6)


def test_maps_of_the_default_eye_add_up_to_what_the_model_says(photo_run: PhotoRun) -> None:
    model = candid.load(photo_run.model)
    for examined in Examiner(model, photo_run.model, evidence=True).examine([*photo_run.photos]):
        assert isinstance(examined, Examination) and examined.evidence is not None
        image, outputs = to_float(examined.evidence.image), examined.evidence.outputs
        maps, _, baseline = maps_of_all_classes(model, image[None])
        assert np.abs(maps.sum((2, 3)) + baseline - outputs.logits).max() < 1e-4
        assert maps.shape == (1, 3, 14, 14)


def test_why_not_another_class_is_on_request(photo_run: PhotoRun) -> None:
    model = candid.load(photo_run.model)
    image = np.random.default_rng(0).random((3, 224, 224), np.float32)
    order = np.argsort(-model.outputs(image[None]).logits[0]).tolist()
    maps = class_maps(model, image, 2)
    assert maps.classes == tuple(order[:2]) and maps.against is None
    for other, y in ((order[2], order[0]), (order[0], order[1])):
        maps = class_maps(model, image, 1, other)
        assert (maps.classes[-1], maps.against) == (y, other)


def test_a_cell_is_shared_out_and_a_blur_keeps_the_sum() -> None:
    maps = np.random.default_rng(0).standard_normal((2, 5, 7))
    for changed in (spread(maps, 14, 14), spread(maps, 10, 9), smooth(maps)):
        np.testing.assert_allclose(changed.sum((1, 2)), maps.sum((1, 2)))
    finer = spread(maps, 10, 14)
    np.testing.assert_allclose(finer[:, ::2, ::2], maps / 4)
