"""Eyes from files: a model finds its eye from any working directory, and next to itself."""

from pathlib import Path

import numpy as np
import pytest

import candid
from candid import CandidError, ResNet, ResNetConfig
from candid.models.photo.adopted import AdoptedModel
from candid.models.photo.head import fit_head
from candid.models.photo.model import PhotoModel
from candid.models.photo.opening import open_eye, open_softmax
from tests.models.photo.test_eyes import onnx_file


def test_a_model_finds_its_eye_from_anywhere_and_next_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, images = tmp_path / "eye.onnx", np.random.default_rng(0).random((20, 3, 12, 12), np.float32)
    onnx_file(file, {"features": 2})
    monkeypatch.chdir(tmp_path)
    eye = open_eye("eye.onnx")
    head = fit_head(eye.statistics(images), np.arange(20) % 2, 2, eye.groups)
    saved = candid.save(PhotoModel.of(head, eye, ("a", "b")), tmp_path / "model")
    expected = candid.load(saved).outputs(images).logits
    assert "gradients" not in candid.load(saved).can
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert np.array_equal(candid.load(saved).outputs(images).logits, expected)
    file.rename(saved / "eye.onnx")
    away = saved.rename(tmp_path / "moved")
    assert np.array_equal(candid.load(away).outputs(images).logits, expected)
    onnx_file(away / "eye.onnx", {"features": 2})
    with pytest.raises(CandidError, match="other weights"):
        candid.load(away).outputs(images)


def test_a_folder_of_a_resnet_is_stored_with_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ResNetConfig(3, 16, 16, classes=3, blocks=(1, 1), widths=(4, 8), stem="3x3")
    candid.save(ResNet(config).eval(), tmp_path / "resnet")
    monkeypatch.chdir(tmp_path)
    assert open_eye("resnet").name == str(tmp_path / "resnet")
    assert AdoptedModel.of(open_softmax("resnet")).config.eye == str(tmp_path / "resnet")
    assert open_softmax("cifar10-resnet").name == "cifar10-resnet"
