"""Eyes of the user's own: modules of torch, ONNX files and exported programs."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import candid
from candid import CandidError, ResNet, ResNetConfig
from candid.models.photo.eye import JoinedEyes
from candid.models.photo.eye_files import OnnxEye
from candid.models.photo.opening import open_eye
from candid.models.photo.torch_eyes import ExportedEye, ModuleEye, statistics
from candid.models.photo.torch_models import network_of
from tests.helpers import randomise


def small_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(864, 2)
    )


def test_a_module_is_read_at_its_layers() -> None:
    network = small_network().eval()  # batch norms use their running statistics
    eye = ModuleEye(network, ["3", "0"], 16, mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.25))
    images = torch.rand(2, 3, 16, 16)
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.5, 0.25])
    first = network[0]((images - mean[:, None, None]) / std[:, None, None])
    second = network[3](network[2](network[1](first)))
    assert torch.allclose(eye.tensor_statistics(images), statistics([second, first]), atol=1e-6)
    assert np.allclose(eye.statistics(images.numpy()), statistics([second, first]).detach(), atol=1e-6)
    assert eye.groups == (6, 6, 4, 4)
    assert not any(module._forward_hooks for module in eye.module.modules())


def test_the_users_module_stays_as_it_is() -> None:
    network = small_network()
    eye = ModuleEye(network, ["0"], 16)
    eye.tensor_statistics(torch.rand(1, 3, 16, 16, dtype=torch.float64))
    assert network.training and not eye.module.training
    assert all(each.requires_grad and each.dtype == torch.float32 for each in network.parameters())


def test_hooks_are_removed_if_the_module_fails() -> None:
    eye = ModuleEye(small_network(), ["0"], 16)
    with pytest.raises(RuntimeError):
        eye.statistics(np.zeros((2, 3, 9, 9), np.float32))  # the linear layer does not fit
    assert not any(module._forward_hooks for module in eye.module.modules())


def test_gradients_reach_images_through_a_module() -> None:
    images = torch.rand(2, 3, 16, 16, requires_grad=True)
    network_of(ModuleEye(small_network(), ["3"], 16))(images).square().sum().backward()
    assert images.grad is not None
    assert (images.grad.abs().amax((0, 1)) > 0).all()


def test_the_digest_of_a_module_is_that_of_its_weights_and_layers() -> None:
    network = small_network()
    eye = ModuleEye(network, ["0"], 16)
    assert ModuleEye(network, ["0"], 16).sha256 == eye.sha256
    assert ModuleEye(network, ["3"], 16).sha256 != eye.sha256
    assert ModuleEye(network, ["0"], 16, mean=(0.5,)).sha256 != eye.sha256
    with torch.no_grad():
        network.get_parameter("0.weight")[0, 0, 0, 0] += 1
    assert ModuleEye(network, ["0"], 16).sha256 != eye.sha256


@pytest.mark.parametrize(
    ("layers", "message"),
    [(["7"], "no layer '7'"), ([], "at least one layer"), (["4"], "gives no maps"), (["5"], "gives no maps")],
)
def test_layers_that_cannot_be_used(layers: list[str], message: str) -> None:
    with pytest.raises(CandidError, match=message):
        ModuleEye(small_network(), layers, 16)


def test_a_resnet_of_candid_is_an_eye(tmp_path: Path) -> None:
    config = ResNetConfig(3, 16, 16, classes=3, blocks=(1, 1), widths=(4, 8), stem="3x3")
    candid.save(randomise(ResNet(config)).eval(), tmp_path / "resnet")
    eye = open_eye(str(tmp_path / "resnet"))
    assert (eye.size, eye.groups) == (16, (16, 16, 32, 32))
    assert eye.statistics(np.zeros((2, 3, 16, 16), np.float32)).shape == (2, 96)


# ONNX files


def onnx_file(path: Path, outputs: dict[str, int], inputs: list[int | str] | None = None) -> Tensor:
    """Write a 1 x 1 convolution with these outputs (name: dimensions); return its weight."""
    weight = torch.randn(4, 3, 1, 1)
    nodes = [helper.make_node("Conv", ["x", "w"], ["maps"])]
    nodes.append(helper.make_node("ReduceMean", ["maps", "axes"], ["features"], keepdims=0))
    nodes.append(helper.make_node("ReduceMean", ["maps"], ["number"], keepdims=0))
    weights = [
        numpy_helper.from_array(weight.numpy(), "w"),
        numpy_helper.from_array(np.array([2, 3], np.int64), "axes"),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, inputs or ["N", 3, 12, 12])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * d) for name, d in outputs.items()],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 10
    path.write_bytes(model.SerializeToString())
    return weight


def test_maps_and_features_of_an_onnx_file(tmp_path: Path) -> None:
    path, images = tmp_path / "eye.onnx", torch.rand(3, 3, 12, 12)
    weight = onnx_file(path, {"maps": 4, "features": 2})
    eye = open_eye(str(path))
    maps = nn.functional.conv2d(images, weight)
    expected = torch.cat((statistics([maps]), maps.mean((2, 3))), 1)
    assert (eye.size, eye.groups) == (12, (4, 4, 4))
    assert np.allclose(eye.statistics(images.numpy()), expected, atol=1e-5)
    assert [each.ndim for each in eye.maps(images.numpy())] == [4, 2]
    with pytest.raises(CandidError, match="which gives no gradients"):
        network_of(eye)


def test_an_onnx_file_follows_the_number_of_threads(tmp_path: Path) -> None:
    onnx_file(tmp_path / "net.onnx", {"maps": 4})
    eye, before = open_eye(str(tmp_path / "net.onnx")), torch.get_num_threads()
    assert isinstance(eye, OnnxEye)
    try:
        for threads in (before + 1, before):
            torch.set_num_threads(threads)
            eye.statistics(np.zeros((1, 3, eye.size, eye.size), np.float32))
            assert eye._session.get_session_options().intra_op_num_threads == threads
    finally:
        torch.set_num_threads(before)


def test_an_onnx_file_with_maps_only_has_heatmaps(tmp_path: Path) -> None:
    weight = onnx_file(tmp_path / "eye.onnx", {"maps": 4})
    images = torch.rand(1, 3, 12, 12)
    (maps,) = open_eye(str(tmp_path / "eye.onnx")).maps(images.numpy())
    assert np.allclose(maps, nn.functional.conv2d(images, weight), atol=1e-5)


def test_an_onnx_eye_can_be_sent_to_another_process(tmp_path: Path) -> None:
    onnx_file(tmp_path / "eye.onnx", {"features": 2})
    eye, images = open_eye(str(tmp_path / "eye.onnx")), torch.rand(2, 3, 12, 12).numpy()
    assert np.array_equal(pickle.loads(pickle.dumps(eye)).statistics(images), eye.statistics(images))
    with pytest.raises(CandidError, match="no maps, so there are no heatmaps"):
        eye.maps(images)


@pytest.mark.parametrize("outputs", [{"number": 0}, {"features": 2, "number": 0}])
def test_an_onnx_file_without_a_usable_output(tmp_path: Path, outputs: dict[str, int]) -> None:
    onnx_file(tmp_path / "eye.onnx", outputs)
    with pytest.raises(CandidError, match="no usable output"):
        open_eye(str(tmp_path / "eye.onnx"))


@pytest.mark.parametrize("inputs", [["N", 3, "S", "S"], ["N", 3, 12, 16], ["N", 3, 12, "W"]])
def test_an_onnx_file_of_no_fixed_square(tmp_path: Path, inputs: list[int | str]) -> None:
    onnx_file(tmp_path / "eye.onnx", {"maps": 4}, inputs)
    with pytest.raises(CandidError, match="square images"):
        open_eye(str(tmp_path / "eye.onnx"))


def test_an_onnx_file_with_a_fixed_batch(tmp_path: Path) -> None:
    """It is told to the user when the eye is opened, not in the middle of an extraction."""
    onnx_file(tmp_path / "eye.onnx", {"maps": 4}, [1, 3, 12, 12])
    with pytest.raises(CandidError, match="batch"):
        open_eye(str(tmp_path / "eye.onnx"))


@pytest.mark.parametrize("ending", [".onnx", ".pt2"])
@pytest.mark.parametrize("content", [b"", b"no network", None])
def test_files_that_are_no_network(tmp_path: Path, ending: str, content: bytes | None) -> None:
    path = tmp_path / f"eye{ending}"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CandidError) as caught:
        open_eye(str(path))
    assert str(path) in str(caught.value)


def test_an_exported_program_with_a_fixed_batch(tmp_path: Path) -> None:
    program = torch.export.export(nn.Conv2d(3, 4, 3).eval(), (torch.rand(2, 3, 12, 12),))
    torch.export.save(program, tmp_path / "eye.pt2")
    with pytest.raises(CandidError, match="dynamic"):
        open_eye(str(tmp_path / "eye.pt2"))


def test_an_exported_program(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            maps = self.conv(x)
            return maps, maps.mean((2, 3))

    network = Both().eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(network, (torch.rand(2, 3, 12, 12),), dynamic_shapes={"x": {0: batch}})
    torch.export.save(program, tmp_path / "eye.pt2")
    eye, images = open_eye(str(tmp_path / "eye.pt2")), torch.rand(3, 3, 12, 12, requires_grad=True)
    assert isinstance(eye, ExportedEye)
    maps, features = network(images)
    found = network_of(eye)(images)
    assert np.allclose(eye.statistics(images.detach().numpy()), found.detach(), atol=1e-6)
    assert (eye.size, eye.groups) == (12, (4, 4, 4))
    assert torch.allclose(found, torch.cat((statistics([maps]), features), 1), atol=1e-5)
    found.sum().backward()
    assert images.grad is not None
    assert images.grad.abs().max() > 0


def test_joined_eyes_are_only_differentiable_together(tmp_path: Path) -> None:
    onnx_file(tmp_path / "eye.onnx", {"features": 2})
    module = ModuleEye(small_network(), ["0"], 16)
    both = JoinedEyes([module, open_eye(str(tmp_path / "eye.onnx"))])
    assert both.statistics(np.zeros((2, 3, 16, 16), np.float32)).shape == (2, 12)
    with pytest.raises(CandidError, match="which gives no gradients"):
        network_of(both)
