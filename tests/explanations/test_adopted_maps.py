"""Heatmaps of adopted models add up to the score."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import candid
from candid import CandidError, ResNet, ResNetConfig
from candid.explanations.class_maps import class_maps
from candid.models.flow.network import array_of
from candid.models.photo.adopted import AdoptedModel
from candid.models.photo.opening import open_softmax
from candid.models.photo.torch_eyes import ModuleSoftmax
from candid.reports.demo import SAMPLES
from tests.helpers import candid_command, randomise

CONFIG = ResNetConfig(3, 32, 32, classes=5, blocks=(1, 1), widths=(4, 6), stem="3x3")


def adopted(network: object) -> AdoptedModel:
    model = AdoptedModel.of(open_softmax(network))
    size = model.feature_size
    mean = np.random.default_rng(0).random(size, np.float32)
    return model.set_density(mean, np.eye(size, dtype=np.float32), model.priors)


def test_maps_add_up_to_logits_minus_those_of_the_average_image() -> None:
    network = randomise(ResNet(CONFIG)).eval()
    model, image = adopted(network), np.random.default_rng(0).random((3, 32, 32), np.float32)
    found = class_maps(model, image, top=3)
    logits = network.outputs(image[None]).logits[0].astype(np.float64)
    average = array_of(network.fc(torch.from_numpy(model.centre))).astype(np.float64)
    scores, usual = (values - values.mean() for values in (logits, average))
    order = np.argsort(-logits)[:3]
    assert found.classes == tuple(order.tolist())
    np.testing.assert_allclose(found.scores, scores[order], atol=1e-4)
    np.testing.assert_allclose(found.baselines, usual[order], atol=1e-4)
    np.testing.assert_allclose(found.values.sum((1, 2)), (scores - usual)[order], atol=1e-4)
    assert found.values.shape == (3, 8, 8) and found.largest_error < 1e-6
    assert found.values.std() > 0


def test_what_matters_is_where_it_is() -> None:
    """With one convolution of one pixel, a map is the weighted pixels themselves."""
    network = randomise(ResNet(CONFIG)).eval()
    network.feature_maps = lambda x: torch.cat([x] * 8, 1)  # type: ignore[method-assign]
    model, image = adopted(network), np.zeros((3, 32, 32), np.float32)
    image[:, 5, 9] = 1
    (first,) = class_maps(model, image, top=1).values
    away = np.abs(first - np.median(first))
    assert divmod(int(away.argmax()), 32) == (5, 9)


def test_a_network_without_maps_says_so() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    with pytest.raises(CandidError, match="no heatmaps"):
        class_maps(adopted(ModuleSoftmax(network, 4)), np.zeros((3, 4, 4), np.float32))


def test_the_page_of_an_image(tmp_path: Path) -> None:
    candid.save(randomise(ResNet(CONFIG)).eval(), tmp_path / "resnet")
    candid.save(adopted(str(tmp_path / "resnet")), tmp_path / "model")
    photo = SAMPLES / "everyday" / "cat.jpg"
    done = candid_command("examine", tmp_path / "model", photo, "--figures", tmp_path / "pages", "--json")
    assert done.exit_code == 0, done
    assert (tmp_path / "pages" / "cat.page.png").stat().st_size > 10_000
    done = candid_command(
        "examine", tmp_path / "model", photo, "--figures", tmp_path / "pages", "--towards", "1"
    )
    assert "A counterfactual can't come from an adopted model" in str(done.exception)
