"""Networks as the Hugging Face Hub has them: graphs with these signatures, built here."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from onnx import TensorProto, external_data_helper, helper, numpy_helper, save_model
from PIL import Image

import candid
from candid import CandidError
from candid._support.numbers import Array
from candid.data.images import Preprocessing, preprocess_image, to_float
from candid.explanations.class_maps import class_maps
from candid.models.photo.eye_files import OnnxEye
from candid.models.photo.opening import open_eye, open_softmax
from tests.photo_models import CLASSES, photo, write_photos

SIZE, PATCH, WIDTH = 28, 7, 6
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
DINO = {
    "do_center_crop": True,
    "crop_size": {"height": SIZE, "width": SIZE},
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_processor_type": "BitImageProcessor",
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 32},
    **IMAGENET,
}
SIGLIP = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "resample": 2,
    "rescale_factor": 1 / 255,
    "size": {"height": SIZE, "width": SIZE},
}


class Kind(NamedTuple):
    """A graph: its outputs, how many tokens come before the patches, and the files next to it."""

    outputs: tuple[str, ...]
    leading: int = 0
    given: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    external: bool = False
    uint8: bool = False


PATCHES = {"patch_size": PATCH}
KINDS = {
    "dinov2": Kind(("last_hidden_state",), 1, DINO, PATCHES),
    "dinov3": Kind(("last_hidden_state", "pooler_output"), 5, DINO, {**PATCHES, "num_register_tokens": 4}),
    "siglip": Kind(("last_hidden_state", "pooler_output"), 0, SIGLIP, {"vision_config": PATCHES}),
    "clip": Kind(("image_embeds", "last_hidden_state"), 1, DINO | {"resample": 2}, PATCHES, external=True),
    "mobileclip": Kind(("image_embeds",), 1, {"size": SIZE, "do_center_crop": True, "do_normalize": False}),
    "sscd": Kind(("embedding", "maps"), 0, uint8=True),
}


def hub_folder(folder: Path, kind: Kind) -> Path:
    """Write a graph with random weights and the files next to it; return the graph."""
    (folder / "onnx").mkdir(parents=True)
    random = np.random.default_rng(7)
    weight = random.normal(size=(WIDTH, 3, PATCH, PATCH)).astype(np.float32) / 10
    before = random.normal(size=(1, kind.leading, WIDTH)).astype(np.float32)
    last = "pixels" if kind.uint8 else "pixel_values"
    nodes = [
        helper.make_node("Transpose", ["cast"], ["pixels"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", [last, "weight"], ["maps"], strides=[PATCH, PATCH]),
        helper.make_node("GlobalAveragePool", ["maps"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["embedding"]),
        helper.make_node("Tanh", ["embedding"], ["image_embeds"]),
        helper.make_node("Sin", ["embedding"], ["pooler_output"]),
        helper.make_node("Reshape", ["maps", "flat"], ["columns"]),
        helper.make_node("Transpose", ["columns"], ["patches"], perm=[0, 2, 1]),
        helper.make_node("Unsqueeze", ["image_embeds", "one"], ["class"]),
        helper.make_node("Mul", ["class", "before"], ["first"]),
        helper.make_node("Concat", ["first", "patches"], ["last_hidden_state"], axis=1),
        helper.make_node("Identity", ["image_embeds"], ["logits"]),
    ]
    if kind.uint8:
        nodes.insert(0, helper.make_node("Cast", ["pixel_values"], ["cast"], to=TensorProto.FLOAT))
    else:
        nodes = nodes[1:]
    constants: dict[str, Array] = {
        "weight": weight,
        "before": before,
        "one": np.array([1]),
        "flat": np.array([0, WIDTH, -1]),
    }
    dims: list[str | int | None] = ["batch_size", 3, "height", "width"]
    if kind.uint8:
        dims = ["batch_size", SIZE, SIZE, 3]
    input_type = TensorProto.UINT8 if kind.uint8 else TensorProto.FLOAT
    rank = {"last_hidden_state": 3, "maps": 4}
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("pixel_values", input_type, dims)],
        [helper.make_tensor_value_info(o, TensorProto.FLOAT, [None] * rank.get(o, 2)) for o in kind.outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    file = folder / "onnx" / "model.onnx"
    if kind.external:
        external_data_helper.convert_model_to_external_data(
            model, location="model.onnx_data", size_threshold=0
        )
    save_model(model, str(file))
    for name, content in {"preprocessor_config.json": kind.given, "config.json": kind.config}.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return file


def expected(kind: Kind, images: Array) -> dict[str, Array]:
    """What the network computes of images in [0, 1], in numpy."""
    random = np.random.default_rng(7)
    weight = random.normal(size=(WIDTH, 3, PATCH, PATCH)).astype(np.float32) / 10
    given = kind.given or {}
    if kind.uint8:
        images = np.rint(images * 255)
    elif "image_mean" in given:
        mean, std = (np.array(given[f"image_{each}"])[:, None, None] for each in ("mean", "std"))
        images = (images - mean) / std
    side = SIZE // PATCH
    blocks = images.reshape(-1, 3, side, PATCH, side, PATCH)
    maps = np.einsum("bchpwq,kcpq->bkhw", blocks, weight)
    return {"maps": maps, "embedding": maps.mean((2, 3))}


@pytest.mark.parametrize("name", KINDS)
def test_a_graph_of_the_hub_sees_what_its_files_say(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    eye, images = (
        open_eye(str(hub_folder(tmp_path, kind))),
        np.random.default_rng(1).random((3, 3, SIZE, SIZE)),
    )
    images = to_float(np.rint(images * 255).astype(np.uint8))
    assert isinstance(eye, OnnxEye) and eye.size == SIZE
    outputs, wanted = eye.outputs(images), expected(kind, images)
    embedding = wanted["embedding"]
    vector = np.sin(embedding) if "pooler_output" in kind.outputs else np.tanh(embedding)
    if name == "dinov2":  # its class token
        before = np.random.default_rng(7)
        before.normal(size=(WIDTH, 3, PATCH, PATCH))
        vector = vector * before.normal(size=(1, 1, WIDTH))[0]
    vector = embedding if name == "sscd" else vector
    for each in outputs:
        assert np.allclose(each, wanted["maps"] if each.ndim == 4 else vector, atol=2e-4, rtol=1e-4)
    assert sorted(each.ndim for each in outputs) == ([2] if name == "mobileclip" else [2, 4])


@pytest.mark.parametrize("name", KINDS)
def test_a_model_through_a_graph_of_the_hub(name: str, tmp_path: Path) -> None:
    """Trained, saved, opened from another place, asked; its heatmaps add up."""
    file = hub_folder(tmp_path / "hub", KINDS[name])
    data = write_photos(tmp_path / "photos", CLASSES, 8)
    candid.train(str(data), out=tmp_path / "run", eye=str(file))
    model = candid.load(tmp_path / "run")
    examinations = candid.examine(model, sorted(data.rglob("*.png")))
    right = sum(each.label == Path(str(each.path)).parent.name for each in examinations)
    assert right >= 12  # of 24: weights are random
    image = to_float(preprocess_image(photo("dots", 3), model.preprocessing))
    if name == "mobileclip":
        with pytest.raises(CandidError, match="no heatmaps"):
            class_maps(model, image)
        return
    maps = class_maps(model, image)
    assert maps.values.shape[1:] == (SIZE // PATCH, SIZE // PATCH)
    assert np.allclose(maps.values.sum((1, 2)), maps.scores - maps.baselines, atol=1e-6)
    assert maps.largest_error < 1e-6 and np.abs(maps.values).max() > 0


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({}, Preprocessing(3, SIZE, SIZE, border=4)),
        ({"resample": 2}, Preprocessing(3, SIZE, SIZE, border=4, resampling="bilinear")),
        ({"do_center_crop": False, "size": SIZE}, Preprocessing(3, SIZE, SIZE, squash=True)),
        (
            {"do_center_crop": False, "size": {"shortest_edge": SIZE}, "crop_pct": 0.875},
            Preprocessing(3, SIZE, SIZE, border=4),
        ),
    ],
)
def test_which_part_of_a_photo_is_seen(changes: dict[str, Any], seen: Preprocessing, tmp_path: Path) -> None:
    kind = KINDS["dinov2"]._replace(given=DINO | changes)
    assert open_eye(str(hub_folder(tmp_path, kind))).preprocessing == seen
    boxes = {0: (0, 0, 400, 100), 4: (156.25, 6.25, 243.75, 93.75)}
    assert np.allclose(seen.box(400, 100), boxes[seen.border])
    picture, size = photo("dots", 1, 100, 400), (SIZE, SIZE)
    by = Image.Resampling.BILINEAR if "resample" in changes else Image.Resampling.BICUBIC
    wanted = picture.resize(size, by, box=seen.box(400, 100), reducing_gap=3.0)
    assert np.array_equal(preprocess_image(picture, seen), np.asarray(wanted).transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_pad": True}, "'do_pad', which may change pixels"),
        ({"rescale_offset": 1}, "'rescale_offset', which may change pixels"),
        ({"resample": 0}, "resample 0"),
        ({"do_resize": False}, "photos have any size"),
        ({"image_std": None}, "does not say how"),
        ({"size": {"height": 32, "width": 30}}, "no square"),
        ({"crop_size": 40}, "does not fit"),
        ({"crop_size": 21}, "with at most 16 tokens before them|does not run on"),
    ],
)
def test_wrong_settings_are_one_sentence(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    kind = KINDS["dinov2"]._replace(given=DINO | changes, config={"patch_size": 4})
    with pytest.raises(CandidError, match=message) as caught:
        open_eye(str(hub_folder(tmp_path, kind)))
    assert str(caught.value).count(". ") == 0


@pytest.mark.parametrize("config", [{"patch_size": 0}, {"patch_size": [7, 8]}, {"num_register_tokens": "4"}])
def test_a_wrong_config_is_one_sentence(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CandidError, match="which is no number of that kind"):
        open_eye(str(hub_folder(tmp_path, KINDS["dinov2"]._replace(config=PATCHES | config))))


def test_settings_that_change_nothing_are_no_error(tmp_path: Path) -> None:
    kind = KINDS["dinov2"]._replace(given=DINO | {"do_pad": False, "pad_size": None})
    assert open_eye(str(hub_folder(tmp_path, kind))).size == SIZE


def test_tokens_need_the_patch_size(tmp_path: Path) -> None:
    with pytest.raises(CandidError, match=r"config.json with 'patch_size'"):
        open_eye(str(hub_folder(tmp_path, KINDS["dinov2"]._replace(config=None))))


def test_other_settings_or_weights_are_another_eye(tmp_path: Path) -> None:
    file = hub_folder(tmp_path, KINDS["clip"])
    first = open_eye(str(file)).sha256
    weights = file.with_name("model.onnx_data")
    weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    second = open_eye(str(file)).sha256
    settings = tmp_path / "preprocessor_config.json"
    settings.write_text(json.dumps(DINO))
    assert len({first, second, open_eye(str(file)).sha256}) == 3
    weights.unlink()
    with pytest.raises(CandidError, match="model.onnx_data', which can't be read"):
        open_eye(str(file))


def test_a_classifier_of_the_hub_is_adopted(tmp_path: Path) -> None:
    labels = {str(i): f"kind {i}" for i in range(WIDTH)}
    kind = Kind(("logits",), 1, DINO, {**PATCHES, "id2label": labels})
    classifier = open_softmax(str(hub_folder(tmp_path, kind)))
    assert classifier.class_names == tuple(labels.values())
    assert classifier.border == 4 and classifier.preprocessing.border == 4
    images = np.random.default_rng(1).random((2, 3, SIZE, SIZE), np.float32)
    wanted = np.tanh(expected(kind, images)["embedding"])
    assert np.allclose(classifier.logits_and_features(images)[0], wanted, atol=1e-4)
