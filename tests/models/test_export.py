"""Exported files compute what the model does, say what they are, and are whole or not there."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

import candid
from candid import ResNet, ResNetConfig
from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.models.export import METADATA, TOLERANCE, Exported, check_images, difference, export
from tests.helpers import candid_command, randomise, small_classifier


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generative model and a ResNet."""
    folder = tmp_path_factory.mktemp("models")
    model = small_classifier(blocks=(1,), widths=(4,))
    model.class_names = ("cat", "dog", "a fish, or a bird")
    model.metadata = {"beta": "inf"}
    candid.save(model, folder / "own")
    resnet = ResNet(ResNetConfig(height=16, width=16, classes=3, blocks=(1,), widths=(4,), stem="3x3"))
    candid.save(randomise(resnet), folder / "resnet")
    return folder


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    out = tmp_path_factory.mktemp("exported") / "files"
    return {each.format: each for each in export(folder / "own", out, ("onnx", "torch-export"))}


@pytest.fixture(scope="module")
def archive(made: dict[str, Exported]) -> tuple[Any, dict[str, str]]:
    """The program in the .pt2 file, and its metadata."""
    extra: dict[str, Any] = {METADATA: ""}
    program = torch.export.load(made["torch-export"].path, extra_files=extra).module()
    return program, json.loads(extra[METADATA])


def images(count: int) -> Array:
    return np.random.default_rng(0).integers(0, 256, (count, 3, 16, 16)).astype(np.float32) / 255


def expected(folder: Path, x: Array) -> list[Array]:
    model, images = candid.load(folder / "own"), torch.from_numpy(x)
    with torch.no_grad():
        found = [model.logits(images), model.log_density(images), model.latent(images)]
    return [each.numpy() for each in found]


def is_near(own: list[Array], theirs: list[Array]) -> bool:
    return all(
        one.shape == two.shape and difference(one, two) < TOLERANCE
        for one, two in zip(own, theirs, strict=True)
    )


@pytest.mark.parametrize("count", [1, 2, 7])
def test_any_number_of_images_gives_what_pytorch_does(
    folder: Path, made: dict[str, Exported], archive: tuple[Any, dict[str, str]], count: int
) -> None:
    x = images(count)
    own = expected(folder, x)
    session = onnxruntime.InferenceSession(made["onnx"].path)
    names = ["logits", "log_density", "latent"]
    assert [each.name for each in session.get_outputs()] == names
    assert session.get_inputs()[0].shape == ["batch", 3, 16, 16]
    found = list(session.run(names, {"images": x}))
    assert is_near(own, found) and all(each.dtype == np.float32 for each in found)
    with torch.no_grad():
        assert is_near(own, [each.numpy() for each in archive[0](torch.from_numpy(x))])


def test_files_say_what_they_are(made: dict[str, Exported], archive: tuple[Any, dict[str, str]]) -> None:
    onnx = onnxruntime.InferenceSession(made["onnx"].path).get_modelmeta().custom_metadata_map
    for found in (onnx, archive[1]):
        assert json.loads(found["class_names"]) == ["cat", "dog", "a fish, or a bird"]
        assert json.loads(found["image_shape"]) == [3, 16, 16] and "[0, 1]" in found["images"]
        assert found["candid_version"] == candid.__version__ and found["beta"] == "inf"
        assert list(json.loads(found["outputs"])) == ["logits", "log_density", "latent"]
    for each in made.values():
        assert each.path.stat().st_size == each.bytes and each.batch is None
        assert set(each.differences) == {"logits", "log_density", "latent"}
        assert all(0 <= value < TOLERANCE for value in each.differences.values())


def test_a_resnet_has_logits_only_and_a_batch_may_be_fixed(folder: Path, tmp_path: Path) -> None:
    options = ["--out", str(tmp_path / "net.pt2"), "--batch", "2", "--json"]
    done = candid_command("export", str(folder / "resnet"), *options)
    assert done.exit_code == 0, (done.output, done.exception)
    (found,) = json.loads(done.stdout)
    assert found["batch"] == 2 and list(found["differences"]) == ["logits"]
    program: Any = torch.export.load(tmp_path / "net.pt2").module()
    x = torch.from_numpy(images(2))
    (logits,) = program(x)
    assert torch.allclose(logits, candid.load(folder / "resnet").logits(x), atol=1e-4)
    with pytest.raises((AssertionError, RuntimeError)):
        program(torch.from_numpy(images(3)))


def test_a_wrong_file_is_not_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "candid.models.export.check_images", lambda *_: np.full((4, 3, 16, 16), np.nan, np.float32)
    )
    out = tmp_path / "new" / "net.pt2"
    with pytest.raises(CandidError, match=r"'logits' differs from PyTorch's by nan"):
        export(folder / "resnet", out)
    assert not out.parent.exists()


def test_differences_are_relative_to_the_largest_of_an_image() -> None:
    assert difference(np.array([-1e6]), np.array([-1e6 - 50])) == pytest.approx(5e-5)
    own = np.array([[100.0, 1.0], [0.1, 0.2]])
    assert difference(own, own + np.array([[0.0, 1.0], [0.0, 0.001]])) == pytest.approx(0.01)
    x = check_images((3, 16, 12), 5)
    assert x.shape == (5, 3, 16, 12) and x.dtype == np.float32 and 0 <= x.min() <= x.max() <= 1
    assert np.array_equal((255 * x).round() / np.float32(255), x)
    rough = np.abs(np.diff(x, axis=3)).mean((1, 2, 3))
    assert rough[0] > 3 * rough[1]


def test_mistakes_are_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for out, options, message in (
        (tmp_path / "a.onnx", {"formats": ("torch-export",)}, "would be of the format onnx"),
        (tmp_path / "a.pt2", {"formats": ("onnx", "torch-export")}, "name a folder"),
        (file, {}, "is a file"),
        (tmp_path / "a.pt2", {"batch": 0}, "from 1 on"),
    ):
        with pytest.raises(CandidError, match=message):
            export(folder / "own", out, **options)
    with pytest.raises(CandidError, match="There is no model"):
        export(tmp_path / "none", tmp_path / "a.pt2")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(CandidError, match=r"needs onnxscript: pip install 'candid-vision\[export\]'"):
        export(folder / "own", tmp_path / "a.onnx")
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]
    done = candid_command("export", str(folder / "own"), "--out", str(tmp_path), "--batch", "many")
    assert isinstance(done.exception, CandidError) and "'dynamic', not 'many'" in str(done.exception)
