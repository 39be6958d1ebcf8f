"""Real processes: training on photos, teaching and adopting load no torch."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from candid.models import checkpoint
from tests.photo_models import CLASSES, PhotoRun, write_photos

SCRIPT = """
import sys
from candid.cli.app import run

assert not run(sys.argv[1:])
loaded = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "lightning_fabric"})
assert not loaded, loaded
"""
MISSING = """
import sys
from candid.cli.app import main

sys.modules["torch"] = None  # as if it was not installed
sys.argv[0] = "candid"
main()
"""


def run(*arguments: object, script: str = SCRIPT) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", script, *map(str, arguments)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("LOCAL_")}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=variables)


def onnx_classifier(path: Path, classes: int) -> None:
    """Write a classifier of mean colours, with features and logits."""
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["features"], keepdims=0),
        helper.make_node("MatMul", ["features", "w"], ["logits"]),
    ]
    weights = {"w": random.normal(size=(3, classes)).astype(np.float32), "axes": np.array([2, 3])}
    graph = helper.make_graph(
        nodes,
        "colours",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 32, 32])],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None])
            for name in ("features", "logits")
        ],
        [numpy_helper.from_array(values, name) for name, values in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 10
    path.write_bytes(model.SerializeToString())


def test_photos_are_trained_and_taught_without_torch(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", CLASSES, 9)
    checks = write_photos(tmp_path / "new", ("checks",), 5, start=30) / "checks"
    for arguments in (
        ("train", photos, "--out", tmp_path / "run"),
        ("train", "--resume", "--out", tmp_path / "run"),
        ("teach", tmp_path / "run", f"checks={checks}", "--out", tmp_path / "taught"),
        ("forget", tmp_path / "taught", "checks", "--out", tmp_path / "forgotten"),
    ):
        done = run(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)
    assert checkpoint.load(tmp_path / "taught").class_names == (*CLASSES, "checks")
    assert checkpoint.load(tmp_path / "forgotten").class_names == CLASSES


def test_an_onnx_classifier_is_adopted_without_torch(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", CLASSES, 20)
    onnx_classifier(tmp_path / "colours.onnx", len(CLASSES))
    (tmp_path / "names.txt").write_text("\n".join(CLASSES))
    done = run(
        "adopt",
        tmp_path / "colours.onnx",
        photos,
        "--class-names",
        tmp_path / "names.txt",
        "--out",
        tmp_path / "model",
    )
    assert done.returncode == 0, done.stderr
    assert "30 held out" in done.stdout
    assert checkpoint.load(tmp_path / "model").metadata["adopted"]["labels"] is True


@pytest.mark.parametrize("arguments", [("train", "digits"), ("train", "PHOTOS", "--preset", "tiny")])
def test_a_network_needs_torch(arguments: tuple[str, ...], photo_run: PhotoRun, tmp_path: Path) -> None:
    words = [photo_run.data if word == "PHOTOS" else word for word in arguments]
    done = run(*words, "--out", tmp_path / "run", script=MISSING)
    assert done.returncode == 2
    message = "candid: Training a network needs torch: pip install 'candid-vision[paper]'."
    assert done.stderr.strip().splitlines()[-1] == message
    assert not (tmp_path / "run").exists()
