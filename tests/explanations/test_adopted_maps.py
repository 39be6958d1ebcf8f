"""Heatmaps of adopted models add up to the score."""

from pathlib import Path

import pytest
import torch
from torch import nn

import candid
from candid import CandidError, ResNet, ResNetConfig
from candid.explanations.adopted_maps import adopted_maps
from candid.models.heads.adopted import AdoptedModel
from candid.models.heads.softmax import ModuleSoftmax, open_softmax
from tests.helpers import candid_command, randomise

CONFIG = ResNetConfig(3, 32, 32, classes=5, blocks=(1, 1), widths=(4, 6), stem="3x3")


def adopted(network: object) -> AdoptedModel:
    model = AdoptedModel.of(open_softmax(network))
    size = model.feature_size
    return model.set_density(torch.rand(size), torch.eye(size), model.priors)


def test_maps_add_up_to_logits_minus_those_of_the_average_image() -> None:
    network = randomise(ResNet(CONFIG)).eval()
    model, image = adopted(network), torch.rand(3, 32, 32)
    found = adopted_maps(model, image, top=3)
    logits = network.logits(image[None])[0].double()
    average = network.fc(model.centre).double()
    own, usual = (values - values.mean() for values in (logits, average))
    order = logits.argsort(descending=True)[:3]
    assert found.classes == tuple(order.tolist())
    assert torch.allclose(found.scores, own[order], atol=1e-4)
    assert torch.allclose(found.baselines, usual[order], atol=1e-4)
    assert torch.allclose(found.maps.sum((1, 2)), (own - usual)[order], atol=1e-4)
    assert found.maps.shape == (3, 8, 8)
    assert found.maps.std() > 0


def test_what_matters_is_where_it_is() -> None:
    """With one convolution of one pixel, a map is the weighted pixels themselves."""
    network = randomise(ResNet(CONFIG)).eval()
    network.feature_maps = lambda x: torch.cat([x] * 8, 1)  # type: ignore[method-assign]
    model, image = adopted(network), torch.zeros(3, 32, 32)
    image[:, 5, 9] = 1
    (first,) = adopted_maps(model, image, top=1).maps
    away = (first - first.median()).abs()
    assert divmod(int(away.argmax()), 32) == (5, 9)


def test_a_network_without_maps_says_so() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    with pytest.raises(CandidError, match="no heatmaps"):
        adopted_maps(adopted(ModuleSoftmax(network, 4)), torch.rand(3, 4, 4))


def test_the_page_of_an_image(tmp_path: Path) -> None:
    candid.save(randomise(ResNet(CONFIG)).eval(), tmp_path / "resnet")
    candid.save(adopted(str(tmp_path / "resnet")), tmp_path / "model")
    photo = Path(candid.__file__).parent / "cli" / "samples" / "everyday" / "cat.jpg"
    done = candid_command("examine", tmp_path / "model", photo, "--figures", tmp_path / "pages", "--json")
    assert done.exit_code == 0, done
    assert (tmp_path / "pages" / "cat.page.png").stat().st_size > 10_000
    done = candid_command(
        "examine", tmp_path / "model", photo, "--figures", tmp_path / "pages", "--towards", "1"
    )
    assert "A counterfactual can't come from an adopted model" in str(done.exception)
