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
from candid._support.numbers import Array, log_softmax, logsumexp, softmax
from candid.inference.predictions import predict
from candid.models import checkpoint
from candid.models.photo.adopted import AdoptedModel
from candid.models.photo.efficientnet import Network, read_weights, weights_file
from candid.models.photo.eyes import EYES
from candid.models.photo.opening import open_softmax
from candid.models.photo.torch_eyes import EfficientNetLite, ModuleSoftmax
from candid.models.photo.torch_models import photo_module
from tests.helpers import randomise

SMALL = ResNetConfig(3, 16, 16, classes=4, blocks=(1, 1), widths=(3, 3), stem="3x3")


def resnet() -> ResNet:
    return randomise(ResNet(SMALL, ("a", "b", "c", "d"))).eval()


def fitted(eye: object) -> AdoptedModel:
    """Return the model with a density that is not the one it starts with."""
    model = AdoptedModel.of(open_softmax(eye))
    f, random = model.feature_size, np.random.default_rng(0)
    mixed = random.normal(size=(f, f)) / f + 2 * np.eye(f)
    whitening = np.linalg.cholesky(mixed @ mixed.T)
    priors = log_softmax(random.random(len(model.class_names)))
    return model.set_density(random.normal(size=f), whitening, priors)


def some_images(count: int, size: int = 16) -> Array:
    return np.random.default_rng(1).random((count, 3, size, size), np.float32)


# the density


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_posteriors_are_those_of_the_classifier(dtype: torch.dtype, tolerance: float) -> None:
    network, images = resnet(), torch.rand(5, 3, 16, 16).to(dtype)
    expected = network.to(dtype).posterior(images).detach()
    model = fitted(network)
    assert abs(softmax(model.outputs(images.numpy()).logits) - expected.numpy()).max() <= tolerance
    module = photo_module(model)
    assert (module.posterior(images) - expected).abs().max() <= tolerance
    assert (module.tensor_outputs(images).logits.softmax(1) - expected).abs().max() <= tolerance


def test_a_pass_gives_the_old_posteriors_and_the_density() -> None:
    network = resnet()
    model, images = fitted(network), np.random.default_rng(0).integers(0, 256, (5, 3, 16, 16), np.uint8)
    found = predict(model, images, np.full(5, -1), ("",) * 5)
    assert found.log_density is not None
    expected = network.posterior(torch.from_numpy(images) / 255).double().detach().numpy()
    assert abs(softmax(found.logits.astype(np.float64)) - expected).max() < 1e-6
    terms = model.outputs(images.astype(np.float32) / 255).log_density_terms
    assert terms is not None and abs(terms.sum(1) - found.log_density).max() < 1e-9
    assert np.exp(found.log_priors).sum() == pytest.approx(1)


def test_the_density_is_a_gaussian_of_the_features() -> None:
    model, images = fitted(resnet()), some_images(6)
    outputs = model.outputs(images)
    factor = stored_factor(model)
    covariance = np.linalg.inv(factor.T @ factor)
    features = outputs.features.astype(np.float64)
    expected = multivariate_normal.logpdf(features, model.centre.astype(np.float64), covariance)
    assert outputs.log_density_terms is not None and outputs.novelty is not None
    assert np.allclose(outputs.log_density_terms.sum(1), expected, rtol=1e-5)
    distance, energy = outputs.novelty.astype(np.float64).T
    mode = np.log(factor.diagonal()).sum() - 0.5 * model.feature_size * np.log(2 * np.pi)
    assert np.allclose(-0.5 * distance, expected - mode, rtol=1e-4)
    assert np.allclose(energy, -logsumexp(outputs.logits.astype(np.float64)))


def stored_factor(model: AdoptedModel) -> Array:
    """What features are whitened by, as the model stores it."""
    factor: Array = model._factor(np.dtype(np.float64)) / model.scale.astype(np.float64)
    return factor


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_half_precision_holds_features_of_any_size(size: float) -> None:
    model = AdoptedModel.of(open_softmax(resnet()))
    f = model.feature_size
    whitening = np.tril(np.random.default_rng(0).normal(size=(f, f)) / f) + np.eye(f)
    model.set_density(np.zeros(f), whitening / size, model.priors)
    assert np.allclose(stored_factor(model) * size, whitening, rtol=1e-3, atol=1e-4)


def test_loaded_weights_count_after_a_pass_with_others() -> None:
    network, images = resnet(), some_images(2)
    used, other = AdoptedModel.of(open_softmax(network)), fitted(network)
    used.outputs(images)
    used.load_state(other.state())
    own, expected = used.outputs(images), other.outputs(images)
    assert own.log_density_terms is not None and expected.log_density_terms is not None
    assert np.array_equal(own.log_density_terms, expected.log_density_terms)


def test_gradients_reach_the_images() -> None:
    images = torch.rand(2, 3, 16, 16, requires_grad=True)
    outputs = photo_module(fitted(resnet())).tensor_outputs(images)
    assert outputs.novelty is not None
    outputs.novelty.sum().backward()
    assert images.grad is not None
    assert (images.grad.abs().amax((0, 1)) > 0).double().mean() > 0.9


def test_gradients_after_a_pass_without_them(tmp_path: Path) -> None:
    candid.save(resnet(), tmp_path / "resnet")
    model = candid.load(candid.save(fitted(str(tmp_path / "resnet")), tmp_path / "adopted"))
    model.outputs(some_images(1))
    images = torch.rand(1, 3, 16, 16, requires_grad=True)
    photo_module(model).tensor_outputs(images).logits.sum().backward()
    assert images.grad is not None


# the packaged classifiers


def test_lite0_has_its_published_classifier() -> None:
    info = EYES["lite0"]
    model, images = AdoptedModel.of(open_softmax("lite0")), torch.rand(1, 3, 224, 224)
    weights = read_weights(weights_file(info))
    weight, bias = torch.tensor(weights["_fc.weight"]), torch.tensor(weights["_fc.bias"])
    network = EfficientNetLite(Network.of(weights, info))
    expected = (network.pooled(network.maps(images)) @ weight.T + bias).softmax(1)
    fast, module = model.outputs(images.numpy()), photo_module(model)
    slow = module.tensor_outputs(images)
    assert (slow.logits.softmax(1) - expected).abs().max() <= 1e-6
    assert np.allclose(fast.features, slow.features, rtol=0, atol=1e-4)
    assert np.allclose(softmax(fast.logits), slow.logits.softmax(1), rtol=0, atol=1e-4)
    assert model.class_names[281:286] == ("tabby", "tiger cat", "Persian cat", "Siamese cat", "Egyptian cat")
    double = module.double().tensor_outputs(images.double())
    exact = network.double().pooled(network.maps(images.double()))
    exact = exact @ weight.double().T + bias.double()
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
    model, images = fitted(str(tmp_path / "resnet")), some_images(2)
    loaded = candid.load(candid.save(model, tmp_path / "adopted"))
    assert loaded.kind == "adopted"
    assert loaded.fingerprint() == model.fingerprint()
    for own, expected in zip(loaded.outputs(images), model.outputs(images), strict=True):
        assert expected is None or np.array_equal(own, expected)
    (weights,) = (tmp_path / "adopted").glob("weights*")
    assert weights.stat().st_size < 2 * model.feature_size**2 + 2000
    candid.save(randomise(resnet(), seed=5), tmp_path / "resnet")
    with pytest.raises(CandidError, match="other weights"):
        candid.load(tmp_path / "adopted").outputs(images)


def test_a_network_of_python_is_attached_after_loading(tmp_path: Path) -> None:
    network, images = resnet(), some_images(2)
    model = fitted(network)
    candid.save(model, tmp_path)
    loaded = candid.load(tmp_path)
    with pytest.raises(CandidError, match=r"model\.attach\(network\)"):
        loaded.outputs(images)
    with pytest.raises(CandidError, match="other weights"):
        loaded.attach(randomise(resnet(), seed=5))
    assert np.array_equal(loaded.attach(network).logits(images), model.logits(images))


# networks of the user's own


def test_features_of_a_module_are_the_input_of_its_last_layer() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 7), nn.ReLU(), nn.Linear(7, 3))
    images = torch.rand(2, 3, 4, 4)
    eye = ModuleSoftmax(network, 4, ("x", "y", "z"), mean=(0.1, 0.2, 0.3), std=(0.5,))
    inputs = (images - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / 0.5
    logits, features = eye.tensor_logits_and_features(images)
    assert torch.allclose(logits, network(inputs))
    assert torch.allclose(features, network[:3](inputs))
    for own, expected in zip(eye.logits_and_features(images.numpy()), (logits, features), strict=True):
        assert np.array_equal(own, expected)
    assert not any(module._forward_hooks for module in eye.module.modules())


def test_the_users_network_stays_as_it_is() -> None:
    module, images = nn.Sequential(nn.Flatten(), nn.Linear(48, 3)), some_images(2, 4).astype(np.float64)
    own, larger = resnet().train(), some_images(2).astype(np.float64)
    ModuleSoftmax(module, 4).logits_and_features(images)
    AdoptedModel.of(open_softmax(own)).outputs(larger)
    for network in (module, own):
        assert network.training
        assert all(each.requires_grad and each.dtype == torch.float32 for each in network.parameters())


def test_features_of_a_module_without_a_last_layer_are_its_logits() -> None:
    network = nn.Sequential(nn.Conv2d(3, 5, 4), nn.Flatten())
    logits, features = ModuleSoftmax(network, 4).tensor_logits_and_features(torch.rand(2, 3, 4, 4))
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
    found = model.outputs(images.numpy())
    assert np.allclose(found.logits, expected, atol=1e-5)
    assert not {"gradients", "class maps"} & model.can
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
    assert np.allclose(eye.logits_and_features(images.numpy())[0], network(images).detach(), atol=1e-5)
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
