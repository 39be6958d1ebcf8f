"""Eyes of timm: maps of all layouts become (B, C, h, w), and a layout that is not what timm says is refused.

Networks have random weights; see :mod:`tests.models.photo.timm_stand_in`.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import candid
from candid import CandidError
from candid.data.images import preprocess_image, to_float
from candid.explanations.class_maps import class_maps
from candid.models.photo.opening import open_eye
from candid.models.photo.torch_eyes import TimmEye, described
from candid.models.photo.torch_models import network_of
from tests.models.photo.timm_stand_in import REAL, STAND_INS, real, stand_in
from tests.photo_models import CLASSES, photo, write_photos

NAMES = REAL if "CANDID_TIMM" in os.environ else STAND_INS[:3]


@pytest.fixture(scope="module", autouse=True)
def timm() -> object:
    with pytest.MonkeyPatch.context() as patch:
        if "CANDID_TIMM" in os.environ:
            yield real()
        else:
            patch.setitem(sys.modules, "timm", stand_in())
            yield sys.modules["timm"]


@pytest.mark.parametrize("name", NAMES)
def test_a_network_of_timm_is_an_eye(name: str, tmp_path: Path) -> None:
    eye = open_eye(f"timm:{name}")
    assert isinstance(eye, TimmEye) and len(eye.groups) == 9 and eye.size <= 256
    random = np.random.default_rng(0)
    images = random.random((2, 3, eye.size, eye.size), np.float32)
    pooled, *maps = eye.maps(images)
    assert [each.shape[1] for each in maps] == list(eye.groups[1::2]) == list(eye.groups[2::2])
    statistics = eye.statistics(images)
    assert np.allclose(statistics, described([torch.tensor(each) for each in (pooled, *maps)]), atol=1e-5)
    # maps have places: what is changed in a corner of the photo changes most there in the first ones
    images[:, :, : eye.size // 4, : eye.size // 4] = 1 - images[:, :, : eye.size // 4, : eye.size // 4]
    change = np.abs(eye.maps(images)[1] - maps[0]).mean((0, 1))
    assert change[: len(change) // 4, : len(change) // 4].mean() > 1.5 * change.mean()


@pytest.mark.parametrize("name", NAMES[:1] if "CANDID_TIMM" not in os.environ else NAMES)
def test_a_model_through_timm(name: str, tmp_path: Path) -> None:
    """Trained, saved, opened, asked; heatmaps add up, and gradients reach the photo."""
    data = write_photos(tmp_path / "photos", CLASSES, 6)
    candid.train(str(data), out=tmp_path / "run", eye=f"timm:{name}")
    model = candid.load(tmp_path / "run")
    assert len(candid.examine(model, sorted(data.rglob("*.png")))) == 18
    image = to_float(preprocess_image(photo("dots", 3), model.preprocessing))
    maps = class_maps(model, image)
    assert np.allclose(maps.values.sum((1, 2)), maps.scores - maps.baselines, atol=1e-5)
    x = torch.tensor(image[None]).requires_grad_()
    network_of(model.eye)(x).square().sum().backward()
    assert x.grad is not None and x.grad.abs().max() > 0


@pytest.mark.skipif("CANDID_TIMM" in os.environ, reason="networks of timm do what timm says")
def test_a_wrong_order_of_channels_is_refused() -> None:
    with pytest.raises(CandidError, match=r"are \[\(16, 16, 4\).*timm says that they are \[\(4, 16, 16\)"):
        open_eye("timm:lying")


def test_a_name_that_timm_does_not_know() -> None:
    with pytest.raises(CandidError, match="timm can't open 'zebra'"):
        open_eye("timm:zebra")
