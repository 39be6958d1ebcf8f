"""Adopted models: the old posteriors, a Gaussian of features, and the classifiers that can be adopted."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from scipy.stats import multivariate_normal
from torch import Tensor, nn

import candid
from candid import CandidError, ResNet, ResNetConfig
from candid.inference.predictions import predict
from candid.models import checkpoint
from candid.models.eyes.efficientnet import EfficientNetLite, read_weights
from candid.models.eyes.registry import EYES
from candid.models.heads.adopted import AdoptedModel
from candid.models.heads.softmax import ModuleSoftmax, open_softmax
from tests.helpers import randomise

SMALL = ResNetConfig(3, 16, 16, classes=4, blocks=(1, 1), widths=(3, 3), stem="3x3")


def resnet() -> ResNet:
    return randomise(ResNet(SMALL, ("a", "b", "c", "d"))).eval()


def fitted(eye: object) -> AdoptedModel:
    """Return the model with a density that is not the one it starts with."""
    model = AdoptedModel.of(open_softmax(eye))
    f = model.feature_size
    mixed = torch.randn(f, f, dtype=torch.float64) / f + 2 * torch.eye(f, dtype=torch.float64)
    whitening = torch.linalg.cholesky(mixed @ mixed.T)
    priors = torch.rand(len(model.class_names)).log_softmax(0)
    return model.set_density(torch.randn(f), whitening, priors)


# the density


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_posteriors_are_those_of_the_classifier(dtype: torch.dtype, tolerance: float) -> None:
    network, images = resnet(), torch.rand(5, 3, 16, 16)
    expected = network.to(dtype).posterior(images.to(dtype))
    model = fitted(network)
    assert (model.outputs(images.to(dtype)).logits.softmax(1) - expected).abs().max() <= tolerance
    assert (model.posterior(images.to(dtype)) - expected).abs().max() <= tolerance


def test_bayes_gives_the_posterior_back() -> None:
    """Of p(f | y) and p(y): the joint density has the old posteriors, whatever p(f) is."""
    network = resnet()
    images = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    found = predict(fitted(network), images, torch.full((5,), -1), ("",) * 5)
    assert found.log_likelihoods is not None and found.log_density is not None
    joint = found.log_likelihoods + found.log_priors.double()
    expected = network.posterior(images / 255).double().detach()
    assert (joint.softmax(1) - expected).abs().max() < 1e-6
    assert (joint.logsumexp(1) - found.log_density).abs().max() < 1e-9
    assert found.log_priors.exp().sum() == pytest.approx(1)


def test_the_density_is_a_gaussian_of_the_features() -> None:
    model, images = fitted(resnet()), torch.rand(6, 3, 16, 16)
    outputs = model.outputs(images)
    factor = model._factor(outputs.features).double() / model.scale.double()
    covariance = torch.linalg.inv(factor.T @ factor)
    features = outputs.features.detach().double().numpy()
    expected = multivariate_normal.logpdf(features, model.centre.double().numpy(), covariance.numpy())
    assert outputs.log_density_terms is not None and outputs.novelty is not None
    assert torch.allclose(outputs.log_density_terms.sum(1), torch.from_numpy(expected), rtol=1e-5)
    distance, energy = outputs.novelty.double().T
    assert torch.allclose(-0.5 * distance, torch.from_numpy(expected) - float(_mode(model)), rtol=1e-4)
    assert torch.allclose(energy, -outputs.logits.double().logsumexp(1))


def _mode(model: AdoptedModel) -> Tensor:
    """The log density at the mean."""
    factor = model._factor(model.centre).double() / model.scale.double()
    return factor.diagonal().log().sum() - 0.5 * model.feature_size * np.log(2 * np.pi)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_half_precision_holds_features_of_any_size(size: float) -> None:
    model = AdoptedModel.of(open_softmax(resnet()))
    f = model.feature_size
    whitening = torch.tril(torch.randn(f, f, dtype=torch.float64) / f) + torch.eye(f, dtype=torch.float64)
    model.set_density(torch.zeros(f), whitening / size, model.priors)
    stored = model._factor(model.centre).double() / model.scale.double()
    assert torch.allclose(stored * size, whitening, rtol=1e-3, atol=1e-4)


def test_loaded_weights_count_after_a_pass_with_others() -> None:
    network, images = resnet(), torch.rand(2, 3, 16, 16)
    used, other = AdoptedModel.of(open_softmax(network)), fitted(network)
    used.outputs(images)
    used.load_state_dict(other.state_dict())
    own, expected = used.outputs(images), other.outputs(images)
    assert own.log_density_terms is not None and expected.log_density_terms is not None
    assert torch.equal(own.log_density_terms, expected.log_density_terms)


def test_gradients_reach_the_images() -> None:
    images = torch.rand(2, 3, 16, 16, requires_grad=True)
    outputs = fitted(resnet()).outputs(images)
    assert outputs.novelty is not None
    outputs.novelty.sum().backward()
    assert images.grad is not None
    assert (images.grad.abs().amax((0, 1)) > 0).double().mean() > 0.9


def test_gradients_after_a_pass_without_them(tmp_path: Path) -> None:
    candid.save(resnet(), tmp_path / "resnet")
    model = candid.load(candid.save(fitted(str(tmp_path / "resnet")), tmp_path / "adopted"))
    with torch.inference_mode():
        model.outputs(torch.rand(1, 3, 16, 16))
    images = torch.rand(1, 3, 16, 16, requires_grad=True)
    model.outputs(images).logits.sum().backward()
    assert images.grad is not None


# the packaged classifiers


def test_lite0_has_its_published_classifier() -> None:
    info = EYES["lite0"]
    model, images = AdoptedModel.of(open_softmax("lite0")), torch.rand(1, 3, 224, 224)
    weights = read_weights(info.weights_file())
    network = EfficientNetLite(weights, info)
    pooled = network.pooled(network.maps(images))
    expected = pooled @ weights["_fc.weight"].T + weights["_fc.bias"]
    fast = model.outputs(images)
    slow = model.outputs(images.clone().requires_grad_())
    assert (slow.logits.softmax(1) - expected.softmax(1)).abs().max() <= 1e-6
    assert torch.allclose(fast.features, slow.features, rtol=0, atol=1e-4)
    assert torch.allclose(fast.logits.softmax(1), slow.logits.softmax(1), rtol=0, atol=1e-4)
    assert model.class_names[281:286] == ("tabby", "tiger cat", "Persian cat", "Siamese cat", "Egyptian cat")
    double = model.outputs(images.double())
    exact = network.double().pooled(network.maps(images.double()))
    exact = exact @ weights["_fc.weight"].double().T + weights["_fc.bias"].double()
    assert (double.logits.softmax(1) - exact.softmax(1)).abs().max() <= 1e-12


@pytest.mark.parametrize(("name", "side"), [("lite0", 224), ("lite2", 260)])
def test_imagenet_models_see_the_crop_of_their_training(name: str, side: int) -> None:
    from candid.data.images import Preprocessing

    seen = Preprocessing(3, side, side, border=EYES[name].border)
    left, top, right, bottom = seen.box(1000, 500)
    assert right - left == bottom - top == pytest.approx(500 * side / (side + 32))
    assert (left + right, top + bottom) == (1000, 500)


def test_the_model_uses_this_crop() -> None:
    assert AdoptedModel.of(open_softmax("lite0")).preprocessing.margin == 256 / 224
    known = checkpoint.load("cifar10-resnet")
    assert AdoptedModel.of(open_softmax("cifar10-resnet")).preprocessing == known.preprocessing


# saved and loaded


def test_it_is_saved_without_its_network(tmp_path: Path) -> None:
    candid.save(resnet(), tmp_path / "resnet")
    model, images = fitted(str(tmp_path / "resnet")), torch.rand(2, 3, 16, 16)
    loaded = candid.load(candid.save(model, tmp_path / "adopted"))
    assert loaded.kind == "adopted"
    assert loaded.fingerprint() == model.fingerprint()
    for own, expected in zip(loaded.outputs(images), model.outputs(images), strict=True):
        assert expected is None or torch.equal(own, expected)
    (weights,) = (tmp_path / "adopted").glob("weights*")
    assert weights.stat().st_size < 2 * model.feature_size**2 + 2000
    candid.save(randomise(resnet(), seed=5), tmp_path / "resnet")
    with pytest.raises(CandidError, match="other weights"):
        candid.load(tmp_path / "adopted").outputs(images)


def test_a_network_of_python_is_attached_after_loading(tmp_path: Path) -> None:
    network, images = resnet(), torch.rand(2, 3, 16, 16)
    model = fitted(network)
    candid.save(model, tmp_path)
    loaded = candid.load(tmp_path)
    with pytest.raises(CandidError, match=r"model\.attach\(network\)"):
        loaded.outputs(images)
    with pytest.raises(CandidError, match="other weights"):
        loaded.attach(randomise(resnet(), seed=5))
    assert torch.equal(loaded.attach(network).logits(images), model.logits(images))


# networks of the user's own


def test_features_of_a_module_are_the_input_of_its_last_layer() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 7), nn.ReLU(), nn.Linear(7, 3))
    images = torch.rand(2, 3, 4, 4)
    eye = ModuleSoftmax(network, 4, ("x", "y", "z"), mean=(0.1, 0.2, 0.3), std=(0.5,))
    inputs = (images - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / 0.5
    logits, features = eye.logits_and_features(images)
    assert torch.allclose(logits, network(inputs))
    assert torch.allclose(features, network[:3](inputs))
    assert not any(module._forward_hooks for module in eye.module.modules())


def test_the_users_network_stays_as_it_is() -> None:
    module, images = nn.Sequential(nn.Flatten(), nn.Linear(48, 3)), torch.rand(2, 3, 4, 4).double()
    own, larger = resnet().train(), torch.rand(2, 3, 16, 16).double()
    ModuleSoftmax(module, 4).logits_and_features(images)
    AdoptedModel.of(open_softmax(own)).outputs(larger)
    for network in (module, own):
        assert network.training
        assert all(each.requires_grad and each.dtype == torch.float32 for each in network.parameters())


def test_features_of_a_module_without_a_last_layer_are_its_logits() -> None:
    network = nn.Sequential(nn.Conv2d(3, 5, 4), nn.Flatten())
    logits, features = ModuleSoftmax(network, 4).logits_and_features(torch.rand(2, 3, 4, 4))
    assert features is logits


def test_a_module_without_logits() -> None:
    with pytest.raises(CandidError, match="instead of logits"):
        ModuleSoftmax(nn.Conv2d(3, 5, 1), 4)
    with pytest.raises(CandidError, match="ModuleSoftmax"):
        open_softmax(nn.Linear(3, 5))


def onnx_classifier(path: Path, outputs: list[str], names: list[str] | None = None) -> tuple[Tensor, Tensor]:
    """Write maps, their means and logits of these; return the weights of both layers."""
    first, last = torch.randn(4, 3, 1, 1), torch.randn(3, 4)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["maps"]),
        helper.make_node("ReduceMean", ["maps", "axes"], ["features"], keepdims=0),
        helper.make_node("MatMul", ["features", "v"], ["logits"]),
        helper.make_node("Identity", ["logits"], ["scores"]),
    ]
    weights = [("w", first.numpy()), ("v", last.T.numpy()), ("axes", np.array([2, 3], np.int64))]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 12, 12])],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * (4 if name == "maps" else 2))
            for name in outputs
        ],
        [numpy_helper.from_array(np.ascontiguousarray(values), name) for name, values in weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 10
    if names is not None:
        helper.set_model_props(model, {"class_names": json.dumps(names)})
    path.write_bytes(model.SerializeToString())
    return first, last


@pytest.mark.parametrize(
    ("outputs", "features"),
    [(["features", "logits"], 4), (["maps", "scores"], 8), (["scores"], 3), (["scores", "features"], 4)],
)
def test_logits_of_an_onnx_file(tmp_path: Path, outputs: list[str], features: int) -> None:
    first, last = onnx_classifier(tmp_path / "net.onnx", outputs, ["x", "y", "z"])
    model, images = fitted(str(tmp_path / "net.onnx")), torch.rand(2, 3, 12, 12)
    expected = nn.functional.conv2d(images, first).mean((2, 3)) @ last.T
    found = model.outputs(images)
    assert torch.allclose(found.logits, expected, atol=1e-5)
    assert (model.class_names, found.features.shape) == (("x", "y", "z"), (2, features))


def test_an_onnx_file_without_logits(tmp_path: Path) -> None:
    onnx_classifier(tmp_path / "net.onnx", ["maps"])
    with pytest.raises(CandidError, match="no output of the shape"):
        open_softmax(str(tmp_path / "net.onnx"))


def test_an_output_called_logits_that_is_none(tmp_path: Path) -> None:
    onnx_classifier(tmp_path / "net.onnx", ["maps", "features"])
    model, names = onnx.load(tmp_path / "net.onnx"), {"maps": "logits", "logits": "others"}
    for node in model.graph.node:
        for part in (node.input, node.output):
            part[:] = [names.get(name, name) for name in part]
    model.graph.output[0].name = "logits"
    onnx.save(model, tmp_path / "net.onnx")
    with pytest.raises(CandidError, match=r"its output 'logits' has the shape \(2, 4, 12, 12\) for 2 images"):
        open_softmax(str(tmp_path / "net.onnx"))


def test_an_exported_program(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 16), nn.Flatten()).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(network, (torch.rand(2, 3, 16, 16),), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "net.pt2")
    eye, images = open_softmax(str(tmp_path / "net.pt2"), "wxyz"), torch.rand(3, 3, 16, 16)
    assert torch.allclose(eye.logits_and_features(images)[0], network(images), atol=1e-5)
    assert eye.class_names == ("w", "x", "y", "z")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lite9", "no classifier 'lite9'"),
        ("cifar10-beta1", "a density already"),
        ("net.onnx", "net.onnx"),
    ],
)
def test_what_cannot_be_adopted(name: str, message: str) -> None:
    with pytest.raises(CandidError, match=message) as caught:
        open_softmax(name)
    assert "\n" not in str(caught.value)
