"""The ResNet and the importer of torchvision's weights, against the published layout written plainly."""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import candid
from candid import CandidError, CheckpointError, ResNet, ResNetConfig
from candid.models.importers import import_any
from tests.helpers import randomise, small_classifier

State = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
SMALL = ResNetConfig(3, 16, 16, classes=3, blocks=(1, 2), widths=(4, 8), stem="3x3")


def published_shapes(
    blocks: tuple[int, ...] = (3, 4, 6, 3),
    planes: int = 64,
    classes: int = 1000,
    groups: int = 1,
    base_width: int = 64,
    basic: bool = False,
) -> Shapes:
    """Names and shapes of torchvision's ResNets: ResNeXt has groups, a wide one a base width of 128."""

    def norm(name: str, c: int) -> Shapes:
        vectors = ("weight", "bias", "running_mean", "running_var")
        return {f"{name}.{v}": (c,) for v in vectors} | {f"{name}.num_batches_tracked": ()}

    def conv(name: str, norm_name: str, c_in: int, c_out: int, kernel: int) -> Shapes:
        return {f"{name}.weight": (c_out, c_in, kernel, kernel)} | norm(norm_name, c_out)

    shapes = conv("conv1", "bn1", 3, planes, 7)
    expansion = 1 if basic else 4
    channels = planes
    for stage, count in enumerate(blocks):
        out = planes * 2**stage
        width = out * base_width // 64 * groups
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            if basic:
                shapes |= conv(f"{name}.conv1", f"{name}.bn1", channels, out, 3)
                shapes |= conv(f"{name}.conv2", f"{name}.bn2", out, out, 3)
            else:
                shapes |= conv(f"{name}.conv1", f"{name}.bn1", channels, width, 1)
                shapes |= conv(f"{name}.conv2", f"{name}.bn2", width // groups, width, 3)
                shapes |= conv(f"{name}.conv3", f"{name}.bn3", width, expansion * out, 1)
            if block == 0 and (stage > 0 or not basic):
                shortcut = f"{name}.downsample"
                shapes |= conv(f"{shortcut}.0", f"{shortcut}.1", channels, expansion * out, 1)
            channels = expansion * out
    return shapes | {"fc.weight": (classes, channels), "fc.bias": (classes,)}


def drawn(shapes: Shapes, generator: torch.Generator) -> State:
    """Weights that keep activations near unit size, and running statistics away from their start."""

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("num_batches_tracked"):
            return torch.tensor(7)
        noise = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            return noise * (2 / (shape[1] * shape[-1] ** 2 if len(shape) == 4 else shape[1])) ** 0.5
        if name.endswith("running_var"):
            return 0.5 + noise.abs()
        return (0.3 if name.endswith(".weight") else 0) + 0.2 * noise

    return {name: draw(name, shape) for name, shape in shapes.items()}


def small_state(**changes: object) -> State:
    settings: dict[str, object] = {"blocks": (1, 2, 1, 1), "planes": 4, "classes": 5}
    shapes = published_shapes(**(settings | changes))  # type: ignore[arg-type]
    return drawn(shapes, torch.Generator().manual_seed(0))


def plain_forward(state: State, x: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """ResNet v1.5, whose stride is in the 3 x 3 convolution; nothing shared with candid."""

    def conv(name: str, norm: str, y: Tensor, stride: int = 1) -> Tensor:
        weight = state[f"{name}.weight"]
        y = F.conv2d(y, weight, stride=stride, padding=weight.shape[-1] // 2)
        mean, variance, gain, shift = (
            state[f"{norm}.{part}"][:, None, None]
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (y - mean) / (variance + 1e-5).sqrt() * gain + shift

    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = (x - mean[:, None, None]) / std[:, None, None]
    x = F.max_pool2d(conv("conv1", "bn1", x, stride=2).relu(), kernel_size=3, stride=2, padding=1)
    for stage, count in enumerate(blocks, start=1):
        for block in range(count):
            name, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = conv(f"{name}.conv1", f"{name}.bn1", x).relu()
            y = conv(f"{name}.conv2", f"{name}.bn2", y, stride).relu()
            y = conv(f"{name}.conv3", f"{name}.bn3", y)
            if block == 0:
                x = conv(f"{name}.downsample.0", f"{name}.downsample.1", x, stride)
            x = (x + y).relu()
    return F.adaptive_avg_pool2d(x, 1).flatten(1) @ state["fc.weight"].T + state["fc.bias"]


def test_a_resnet_50_file_loads_and_computes_what_resnet_50_does(
    tmp_path: Path, generator: torch.Generator
) -> None:
    shapes = published_shapes()
    buffers = [n for n in shapes if n.endswith(("running_mean", "running_var", "num_batches_tracked"))]
    assert (len(shapes), len(buffers)) == (320, 159)
    state = drawn(shapes, generator)
    path = tmp_path / "resnet50.pth"
    torch.save(state, path)
    model = candid.import_torchvision(path)
    path.unlink()  # it is large
    assert model.config == ResNetConfig() and model.image_shape == (3, 224, 224)
    assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == shapes
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    assert len(list(model.parameters())) == 161 and all(p.requires_grad for p in model.parameters())
    x = torch.rand(2, 3, 224, 224, generator=generator)
    with torch.inference_mode():
        found, truth = model.logits(x), plain_forward(state, x, (3, 4, 6, 3))
        assert truth.std() > 0.1
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocks", [(3, 4, 23, 3), (3, 8, 36, 3)])
def test_deeper_bottleneck_resnets_load(tmp_path: Path, blocks: tuple[int, ...]) -> None:
    state = small_state(blocks=blocks)
    torch.save(state, tmp_path / "deep.pth")
    model = candid.import_torchvision(tmp_path / "deep.pth", list("abcde"))
    assert model.config.blocks == blocks and model.class_names == tuple("abcde")
    assert model.metadata == {"imported_from": "deep.pth"}
    x = torch.rand(2, 3, 224, 224)
    truth = plain_forward(state, x, blocks)
    torch.testing.assert_close(model.logits(x), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_older_torch_load(tmp_path: Path, zipped: bool) -> None:
    """They have no counters of batches, are no zip archives, and hold parameters instead of tensors."""
    state = {
        name: torch.nn.Parameter(tensor) if tensor.dim() != 1 else tensor
        for name, tensor in small_state().items()
        if not name.endswith("num_batches_tracked")
    }
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=zipped)
    model = candid.import_torchvision(tmp_path / "old.pth")
    assert torch.equal(model.fc.weight, state["fc.weight"])
    assert model.state_dict()["layer2.1.bn2.num_batches_tracked"] == 0


def test_half_precision_files_become_float32(tmp_path: Path) -> None:
    state = {k: t.half() if t.is_floating_point() else t for k, t in small_state().items()}
    torch.save(state, tmp_path / "half.pth")
    model = candid.import_torchvision(tmp_path / "half.pth")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def without(state: State, *names: str) -> State:
    return {name: tensor for name, tensor in state.items() if name not in names}


def test_other_networks_are_refused_in_one_sentence(tmp_path: Path) -> None:
    good = small_state()
    cases: dict[str, tuple[object, str]] = {
        "ResNet-18": (small_state(basic=True), "two convolutions, like those of ResNet-18 and 34"),
        "ResNeXt-50": (small_state(planes=64, groups=32, base_width=4), "in groups, like those of ResNeXt"),
        "wide ResNet-50": (small_state(base_width=128), "widens 8 channels to 16, like a wide ResNet's"),
        "small stem": (good | {"conv1.weight": torch.zeros(4, 3, 3, 3)}, "not of 7 x 7 pixels"),
        "grey": (good | {"conv1.weight": torch.zeros(4, 1, 7, 7)}, "not of 7 x 7 pixels with 3 colours"),
        "no dictionary": ([1], "holds no dictionary"),
        "empty": ({}, "no tensor 'conv1.weight'"),
        "wrapped": ({"state_dict": good}, "'state_dict' is no named tensor"),
        "number for a name": (good | {3: torch.zeros(1)}, "'3' is no named tensor"),
        "sparse": (good | {"fc.bias": torch.eye(5).to_sparse()}, "'fc.bias' is no named tensor"),
        "no numbers": (good | {"fc.bias": torch.zeros(5, device="meta")}, "'fc.bias' is no named tensor"),
        "released": ({"inn": {}, "mu": torch.zeros(1)}, "'inn' is no named tensor"),
        "no stages": ({"conv1.weight": good["conv1.weight"]}, "no tensor 'layer1.0.conv1.weight'"),
        "no classes": (without(good, "fc.weight"), "no tensor 'fc.weight'"),
        "none at all": (good | {"fc.weight": torch.zeros(0, 128)}, "'classes' must be at least 1"),
        "flat": (good | {"layer1.0.conv2.weight": torch.zeros(4)}, "with 4 dimensions"),
        "lacks one": (without(good, "layer2.1.bn2.bias"), "lacks tensor 'layer2.1.bn2.bias'"),
        "lacks a counter": (without(good, "bn1.num_batches_tracked"), "lacks tensor 'bn1.num_batches"),
        "one more": (good | {"layer1.0.gate.weight": torch.zeros(1)}, "unknown tensor 'layer1.0.gate"),
        "a gap": (without(good, "layer2.0.conv1.weight"), "unknown tensor 'layer2.0.bn1.bias'"),
        "other shape": (good | {"fc.bias": torch.zeros(4)}, r"'fc.bias'.*\(4,\)"),
        "whole numbers": (good | {"fc.bias": torch.zeros(5, dtype=torch.int64)}, "wrong type"),
        "huge": (good | {"fc.weight": torch.zeros(1, 1).expand(2**40, 128)}, "more numbers than the file"),
    }
    path = tmp_path / "file.pth"
    for name, (content, message) in cases.items():
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=message) as caught:
            candid.import_torchvision(path)
        assert "\n" not in str(caught.value), name
    torch.save(good, path)
    with pytest.raises(CandidError, match="5 classes but 2 class names"):
        candid.import_torchvision(path, ["a", "b"])


def test_broken_files_are_refused_and_no_code_in_them_is_run(tmp_path: Path) -> None:
    marker, path = tmp_path / "executed", tmp_path / "file.pth"

    class Malice:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (marker,)  # type: ignore[return-value]

    torch.save(small_state() | {"fc.bias": Malice()}, path)
    with pytest.raises(CheckpointError, match="not a torchvision ResNet.*no plain PyTorch file"):
        candid.import_torchvision(path)
    assert not marker.exists()
    torch.save(small_state(), path)
    whole = path.read_bytes()
    for content, message in (
        (whole[: len(whole) // 2], "cut, or no plain"),
        (b"", "cut, or no plain"),
        (b"\x1f\x8b compressed", "gunzip"),
        (bytes(range(256)) * 100, "cut, or no plain"),
        (b"an error page", "cut, or no plain"),
        (pickle.dumps({"a": 1}), "no named tensor|cut, or no plain"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message) as caught:
            candid.import_torchvision(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="There is no file"):
        candid.import_torchvision(tmp_path)


@settings(max_examples=40, deadline=None)
@given(cut=st.none() | st.floats(0, 1), place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_damage_anywhere_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, cut: float | None, place: float, flip: int
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "file.pth"
    torch.save(small_state(blocks=(1, 1), planes=2), path)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= flip
    path.write_bytes(content if cut is None else content[: int(cut * len(content))])
    try:
        import_any(path)
    except CheckpointError as error:
        assert "\n" not in str(error)


def test_the_command_line_takes_torchvision_files(tmp_path: Path) -> None:
    torch.save(small_state(), tmp_path / "resnet.pth")
    command = Path(sys.executable).with_name("candid")
    arguments = [str(command), "import", str(tmp_path / "resnet.pth"), "--out", str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}: 5 classes, 3 x 224 x 224 images\n"
    model = candid.load(tmp_path)
    assert isinstance(model, ResNet) and model.metadata == {"imported_from": "resnet.pth"}
    torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.pth")
    with pytest.raises(CheckpointError, match="neither 'inn' nor 'conv1.weight'"):
        import_any(tmp_path / "foreign.pth")


def test_a_saved_resnet_comes_back_the_same(tmp_path: Path) -> None:
    model = randomise(ResNet(SMALL, ["cat", "dog", "owl"])).eval()
    model.metadata = {"note": "for a test", "scores": [1.5, 2]}
    loaded = candid.load(candid.save(model, tmp_path))
    assert isinstance(loaded, ResNet) and not loaded.training
    assert loaded.config == SMALL
    assert loaded.class_names == ("cat", "dog", "owl")
    assert loaded.metadata == model.metadata
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype, name
    x = torch.rand(2, 3, 16, 16)
    assert torch.equal(loaded.logits(x), model.logits(x))


def test_load_takes_every_kind_and_load_any_is_its_old_name(tmp_path: Path) -> None:
    candid.save(ResNet(SMALL), tmp_path / "resnet")
    assert isinstance(candid.load(tmp_path / "resnet"), ResNet)
    candid.save(small_classifier(), tmp_path / "generative")
    with pytest.warns(DeprecationWarning, match="candid.load"):
        assert getattr(candid, "load_any") is candid.load  # noqa: B009
    assert isinstance(candid.load(tmp_path / "generative"), candid.GenerativeClassifier)


def test_other_images_are_refused_as_by_a_generative_classifier() -> None:
    model = ResNet(SMALL).eval()
    for images, message in (
        (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), "divide 8-bit ones by 255"),
        (torch.full((2, 3, 16, 16), 255.0), "where white is 1"),
        (torch.zeros(2, 1, 8, 8), "batch of 3 x 16 x 16 images"),
    ):
        with pytest.raises(CandidError, match=message):
            model.posterior(images)
    assert model.posterior(torch.rand(2, 3, 16, 16, dtype=torch.float64)).dtype == torch.float32


def test_posteriors_sum_to_one() -> None:
    model = randomise(ResNet(SMALL)).eval()
    posterior = model.posterior(torch.rand(4, 3, 16, 16))
    assert (posterior >= 0).all()
    torch.testing.assert_close(posterior.sum(1), torch.ones(4))


def test_the_seed_decides_the_weights_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, other = ResNet(SMALL, seed=1), ResNet(SMALL, seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    again = ResNet(SMALL, seed=1)
    for name, tensor in first.named_parameters():
        assert torch.equal(again.get_parameter(name), tensor), name
        if tensor.dim() > 1:
            assert not torch.equal(other.get_parameter(name), tensor), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": (1,)}, "one entry for each"),
        ({"blocks": (1, 10**9)}, "'blocks' must be at least 1 and at most 1000"),
        ({"widths": (0, 8)}, "'widths' must be at least 1"),
        ({"classes": 0}, "'classes' must be at least 1"),
        ({"height": 2**40}, "at most 65536"),
        ({"stem": "5x5"}, "'stem' can't be '5x5'"),
        ({"channels": 2}, r"one number or one a channel \(2\)"),
        ({"std": (0.0,)}, "'std' must be positive"),
    ],
)
def test_mistakes_in_a_configuration_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CandidError, match=message):
        replace(SMALL, **changes)  # type: ignore[arg-type]
