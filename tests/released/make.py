"""Make small models, a monitor and a watch with one version, and write down what it says of images.

    git archive COMMIT --prefix=earlier/ | tar -x -C /tmp
    PYTHONPATH=/tmp/earlier python tests/released/make.py tests/released/COMMIT

It uses only what all versions have; what a version does not have is left out.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import candid

MODEL = {"blocks": [1], "widths": [4], "pointwise_width": 4, "mixing": "orthogonal"}
PHOTOS = 40
SAID = ("label", "posterior", "p_value", "class_p_value", "log_density")
"""What every version says of an image. Verdicts depend on levels, whose defaults have changed."""


def digits() -> list[Any]:
    """Return images of digits, (H, W, C) uint8."""
    return list((load_digits().images[:6, ..., None] * 255 / 16).round().astype(np.uint8))


def photo(kind: int, seed: int) -> Image.Image:
    """Return stripes (0) or rings (1) in noise."""
    random = np.random.default_rng([kind, seed])
    rows, columns = np.mgrid[:100, :112]
    distance = np.hypot(rows - 50, columns - 56) if kind else rows + columns
    waves = 90 * np.sin(distance * 6.28 / random.uniform(10, 26))
    pixels = random.uniform(60, 200, 3) + waves[..., None] + random.normal(0, 25, (100, 112, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def eye(path: Path) -> None:
    """Write a tiny network: 24 filters of 5 x 5 pixels on images of 64 pixels, and their means."""
    from onnx import TensorProto, helper, numpy_helper

    filters = np.random.default_rng(5).normal(size=(24, 3, 5, 5)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["filtered"]),
        helper.make_node("Relu", ["filtered"], ["maps"]),
        helper.make_node("ReduceMean", ["maps", "axes"], ["features"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 64, 64])],
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", 24])],
        [numpy_helper.from_array(filters, "w"), numpy_helper.from_array(np.array([2, 3], np.int64), "axes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 10
    path.write_bytes(model.SerializeToString())


def photos() -> list[Any]:
    """Return images that no model has seen, as arrays."""
    return [np.asarray(photo(seed % 2, 100 + seed)) for seed in range(4)]


def arrays(count: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Return logits, labels and features of a classifier of three classes."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    logits = random.normal(size=(count, 3)) + 2 * np.eye(3)[labels]
    return logits, labels, random.normal(size=(count, 16)) + labels[:, None]


def said(examinations: Any) -> list[dict[str, Any]]:
    """Return what is compared between versions."""
    records = [each.to_dict() for each in examinations]
    return [{key: record[key] for key in SAID if key in record} for record in records]


def _kept(run: Path, out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(run / "model" / "best", out)


def main(out: Path) -> None:
    """Make everything that this version has."""
    out.mkdir(parents=True, exist_ok=True)
    os.environ["CANDID_CACHE"] = str(Path(tempfile.gettempdir(), "released-cache"))
    found: dict[str, Any] = {}
    out, here = out.resolve(), Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)  # the models remember names of files
        place = Path()
        candid.train("digits", out=place / "pixel", epochs=1, workers=0, model=MODEL)
        _kept(place / "pixel", out / "pixel")
        found["pixel"] = said(candid.examine(str(out / "pixel"), digits()))
        if hasattr(candid, "teach"):  # the first version with photo models
            for kind, title in enumerate(("rings", "stripes")):
                (place / "photos" / title).mkdir(parents=True)
                for seed in range(PHOTOS):
                    photo(1 - kind, seed).save(place / "photos" / title / f"{seed}.png")
            eye(place / "eye.onnx")
            candid.train("photos", out=place / "photo", eye="eye.onnx", thumbnails=False)
            _kept(place / "photo", out / "photo")
            shutil.copy(place / "eye.onnx", out / "photo")  # a model also finds its eye next to itself
            found["photo"] = said(candid.examine(str(out / "photo"), photos()))
            shutil.rmtree(place / "photos" / "rings")
            state = str(out / "watch.sqlite")
            words = ["watch", str(out / "photo"), "photos/stripes", "--once", "--state", state]
            subprocess.run([sys.executable, "-m", "candid", *words], check=True, stdout=subprocess.DEVNULL)
        os.chdir(here)
    logits, labels, features = arrays(60)
    if hasattr(candid, "Monitor"):
        candid.Monitor(novelty=0.1).fit(logits, labels, features).save(out / "monitor")
        others, _, seen = arrays(9, seed=1)
        found["monitor"] = said(candid.Monitor.load(out / "monitor").examine(others, seen))
    if hasattr(candid, "Watch"):
        watch = candid.Watch().fit(logits[:, 0])
        watch.update(logits[:20, 1])
        watch.save(out / "watch.json")
        found["watch"] = {"images": watch.images, "evidence": watch.evidence, "alarm": watch.alarm}
    (out / "said.json").write_text(json.dumps(found, indent=1) + "\n")
    print(candid.__file__, {key: len(value) for key, value in found.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
