import pytest
import torch

from candid import PRESETS, GenerativeClassifier
from candid.models.info import describe
from candid.models.resnet import ResNet, ResNetConfig


def test_imagenet_counts_are_the_papers() -> None:
    found = describe(PRESETS["imagenet"])
    assert found["network_parameters"] == 55_412_304
    assert found["total_parameters"] == 77_486_672
    assert found["gmacs"] == pytest.approx(9.08, rel=0.02)
    resnet = found["resnet"]
    assert resnet["network_parameters"] == pytest.approx(23.5e6, rel=1e-3)
    assert resnet["total_parameters"] == 25_557_032
    assert resnet["gmacs"] == pytest.approx(4.1, rel=0.01)


def test_imagenet_stages_are_table_1() -> None:
    found = describe(PRESETS["imagenet"])
    rows = [(r["size"][0], r["channels"], r["receptive_field"]) for r in found["stages"]]
    assert rows == [
        (224, 3, 0),
        (112, 12, 8),
        (56, 48, 10),
        (56, 48, 34),
        (28, 192, 106),
        (14, 768, 314),
        (7, 3072, 538),
        (1, 150_528, None),
    ]
    resnet = [(r["channels"], r["receptive_field"]) for r in found["resnet"]["stages"]]
    assert resnet == [
        (3, 0),
        (64, 6),
        (64, 10),
        (256, 34),
        (512, 90),
        (1024, 266),
        (2048, 426),
        (2048, None),
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_a_resnet_stands_beside_every_preset(name: str) -> None:
    found = describe(PRESETS[name])
    assert len(found["stages"]) == len(found["resnet"]["stages"])
    assert [r["size"] for r in found["stages"]] == [r["size"] for r in found["resnet"]["stages"]]


def test_counts_are_those_of_a_real_model() -> None:
    model = GenerativeClassifier.from_preset("digits", mixing="permutation")
    found = describe(model.config)
    assert found["total_parameters"] == sum(p.numel() for p in model.parameters())


def test_resnet_50_has_torchvisions_names() -> None:
    with torch.device("meta"):
        state = ResNet(ResNetConfig()).state_dict()
    assert len(state) == 320
    assert state["conv1.weight"].shape == (64, 3, 7, 7)
    assert state["layer1.0.downsample.0.weight"].shape == (256, 64, 1, 1)
    assert state["layer4.2.bn3.num_batches_tracked"].shape == ()
    assert state["fc.weight"].shape == (1000, 2048)


def test_resnet_gives_posteriors() -> None:
    config = ResNetConfig.matching(PRESETS["digits"])
    net = ResNet(config).eval()
    x = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(net.posterior(x).sum(1), torch.ones(3))
    assert torch.equal(net.predict(x), net.logits(x).argmax(1))
