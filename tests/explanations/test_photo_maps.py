from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import candid
from candid.explanations.photo_maps import class_maps, photo_maps, smooth, spread
from candid.models.eyes.eye import ModuleEye
from candid.models.heads.closed_form import Posterior, fit_head
from candid.models.heads.photo import PhotoModel
from candid.trust.examine import Examiner
from candid.trust.verdict import Examination
from tests.photo_models import PhotoRun


@cache
def small_model(posterior: Posterior) -> PhotoModel:
    """A model of three kinds of noise through an eye with maps of 15 x 15 and 7 x 7 positions."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2))
    eye = ModuleEye(network, ["0", "2"], size=32)
    labels = torch.arange(90) % 3
    images = torch.rand(90, 3, 32, 32) * (0.4 + 0.2 * labels[:, None, None, None])
    head = fit_head(eye.statistics(images), labels, 3, eye.groups, logistic=False)
    weights = 3 * torch.randn(3, eye.dimensions, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    return PhotoModel.of(replace(head, posterior=posterior, logistic=weights), eye, ["a", "b", "c"])


@given(st.sampled_from(["mixture", "second-stage", "logistic"]), st.integers(0, 10**6), st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_maps_add_up_to_the_logits(posterior: Posterior, seed: int, contrast: float) -> None:
    model = small_model(posterior)
    images = 0.5 + contrast * (torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) - 0.5)
    maps, _, baseline = class_maps(model, images)
    logits = model.logits(images)
    average = model.logits_of(model.centre[None])[0]
    torch.testing.assert_close(baseline.float(), average, rtol=0, atol=1e-4)
    assert (maps.sum((2, 3)) + baseline - logits).abs().max() < 1e-4 * logits.abs().max().clamp(min=1)
    found = photo_maps(model, images[0], top=2, against=0)
    for why in found.why:
        other = logits[0].mean() if why.other is None else logits[0, why.other]
        assert why.score == pytest.approx(float(logits[0, why.y] - other), abs=1e-3, rel=1e-4)
        assert float(why.values.sum()) + why.baseline == pytest.approx(why.score, abs=1e-6)


def test_maps_of_the_default_eye_add_up_to_what_the_model_says(photo_run: PhotoRun) -> None:
    model = candid.load(photo_run.model)
    for examined in Examiner(model, photo_run.model, evidence=True).examine([*photo_run.photos]):
        assert isinstance(examined, Examination) and examined.evidence is not None
        image, outputs = examined.evidence.image / 255, examined.evidence.outputs
        maps, _, baseline = class_maps(model, image[None])
        assert (maps.sum((2, 3)) + baseline - outputs.logits).abs().max() < 1e-4
        assert maps.shape == (1, 3, 14, 14)


def test_why_not_another_class_is_on_request(photo_run: PhotoRun) -> None:
    model = candid.load(photo_run.model)
    image = torch.rand(3, 224, 224)
    order = model.logits(image[None])[0].argsort(descending=True).tolist()
    assert [(why.y, why.other) for why in photo_maps(model, image, 2).why] == [(y, None) for y in order[:2]]
    for other, y in ((order[2], order[0]), (order[0], order[1])):
        why = photo_maps(model, image, 1, other).why[-1]
        assert (why.y, why.other) == (y, other)


def test_a_cell_is_shared_out_and_a_blur_keeps_the_sum() -> None:
    maps = torch.randn(2, 5, 7, dtype=torch.float64)
    for changed in (spread(maps, 14, 14), spread(maps, 10, 9), smooth(maps)):
        torch.testing.assert_close(changed.sum((1, 2)), maps.sum((1, 2)))
    own = spread(maps, 10, 14)
    torch.testing.assert_close(own[:, ::2, ::2], maps / 4)
