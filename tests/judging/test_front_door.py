"""candid.examine: any kind of model, any kind of images."""

from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import candid
from candid import CandidError, Examination, GenerativeClassifier, UnusableImage

MODEL = "cifar10-beta1"


@pytest.fixture(scope="module")
def model() -> GenerativeClassifier:
    return candid.load(MODEL)


@pytest.fixture(scope="module")
def pixels() -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def test_every_kind_of_image_gives_the_same(
    model: GenerativeClassifier, pixels: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]", tmp_path: Path
) -> None:
    file = tmp_path / "noise.png"
    Image.fromarray(pixels).save(file)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    (expected,) = candid.examine(model, file)
    assert expected.path == str(file) and expected.label == next(iter(expected.posterior))
    assert len(expected.posterior) == 10 and expected.verdict == "novel" and expected.classes == ()
    kinds = [
        str(file),
        tmp_path,
        str(tmp_path / "*.png"),
        tensor,
        tensor / 255,
        tensor[None],
        pixels,
        pixels / 255,
        Image.fromarray(pixels),
    ]
    for images in (*kinds, kinds):
        for found in candid.examine(model, images, batch=1):
            assert found.to_dict() | {"path": ""} == expected.to_dict() | {"path": ""}
    assert len(candid.examine(model, kinds)) == len(kinds)
    assert [each.path for each in candid.examine(model, [tensor, file, pixels])] == ["0", str(file), "1"]


def test_arrays_are_preprocessed_as_files_are(model: GenerativeClassifier, tmp_path: Path) -> None:
    for shape in ((48, 40, 3), (50, 50), (40, 60, 4)):
        pixels = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "image.png")
        (one,), (other,) = (candid.examine(model, each) for each in (tmp_path / "image.png", pixels))
        assert one.posterior == other.posterior and one.p_value == other.p_value


def test_models_are_named_or_found_in_folders(model: GenerativeClassifier, tmp_path: Path) -> None:
    image = torch.zeros(3, 32, 32)
    (expected,) = candid.examine(model, image)
    assert candid.examine(MODEL, image) == [expected]
    candid.save(model, tmp_path / "run" / "model" / "best")
    assert candid.examine(tmp_path / "run" / "model" / "best", image) == [expected]
    assert candid.examine(tmp_path / "run", image) == [expected]


def test_a_record_has_five_classes_and_the_promises(model: GenerativeClassifier) -> None:
    (found,) = candid.examine(model, torch.zeros(3, 32, 32), novelty=0.05, error=0.1)
    record = found.to_dict()
    assert list(record) == [
        *("path", "label", "confidence", "posterior", "p_value", "class_p_value"),
        *("verdict", "plain", "classes", "class_count", "node", "node_leaves"),
        *("log_density_nats", "promises"),
    ]
    assert record["plain"] == found.plain
    assert len(record["posterior"]) == 5
    promises = record["promises"]
    assert promises["score"] == "joint" and promises["n_reference"] == 500
    assert promises["novelty"] == {
        **{"asked": 0.05, "in_force": 0.05, "smallest": 1 / 501, "promise": "average", "proven": 0.05},
        **{"cut": 0.05, "upper": pytest.approx(0.0668, abs=1e-4)},
    }
    assert promises["risk"] is None
    assert promises["error"]["in_force"] == 0.1 and record["verdict"] in found.line()


def test_images_that_cant_be_used_stop_the_list_unless_they_are_skipped(
    model: GenerativeClassifier, tmp_path: Path
) -> None:
    bad = tmp_path / "text.png"
    bad.write_text("no image")
    images = [torch.zeros(3, 32, 32), bad, torch.full((3, 32, 32), 7.0), torch.zeros(3, 32)]
    with pytest.raises(CandidError, match=r"text.png' can't be used: .*skip_bad=True"):
        candid.examine(model, images)
    assert len(candid.examine(model, images, skip_bad=True)) == 1
    found = list(candid.examine_stream(model, images))
    assert [type(each) for each in found] == [Examination, UnusableImage, UnusableImage, UnusableImage]
    assert isinstance(found[2], UnusableImage) and "between 0 and 1" in found[2].reason
    with pytest.raises(CandidError, match="An image is a tensor"):
        candid.examine(model, [3])


def test_streams_may_be_endless(model: GenerativeClassifier) -> None:
    endless = cycle([torch.zeros(3, 32, 32)])
    found = list(islice(candid.examine_stream(model, endless, batch=4), 9))
    assert [each.path for each in found] == [str(i) for i in range(9)]


def test_a_wrong_option_names_the_right_one(model: GenerativeClassifier) -> None:
    with pytest.raises(CandidError, match="did you mean 'novelty'"):
        candid.examine(model, torch.zeros(3, 32, 32), novelti=0.1)
    with pytest.raises(CandidError, match="below 1"):
        candid.examine(model, torch.zeros(3, 32, 32), novelty=1.5)
