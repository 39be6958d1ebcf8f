import hashlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as serialize

import candid
from candid import CheckpointError
from candid._support.numbers import Array
from candid.inference.predictions import predict
from candid.models import checkpoint, zoo
from candid.models.checkpoint import KINDS, Kind, load, resolve, sealed
from candid.models.flow.network import ImageClassifier, TensorOutputs
from candid.models.info import describe
from candid.models.protocol import require
from candid.models.saving import save, save_held_out
from tests.helpers import small_classifier


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = small_classifier()
    model.metadata = {"note": "for a test"}
    return candid.save(model, tmp_path / "model")


def weights_of(folder: Path) -> Path:
    (path,) = folder.glob("weights-*.safetensors")
    return path


def edit(folder: Path, **changes: object) -> None:
    path = folder / "model.json"
    record = json.loads(path.read_text()) | changes
    version = record["format_version"]
    path.write_text(json.dumps(sealed(record) if version == 2 else record))


def test_a_saved_model_comes_back_the_same(folder: Path) -> None:
    model, loaded = small_classifier(), candid.load(folder)
    x = torch.rand(3, 3, 16, 16)
    assert torch.equal(model.log_density(x), loaded.log_density(x))
    assert loaded.config == model.config
    assert loaded.class_names == model.class_names
    assert loaded.metadata == {"note": "for a test"}
    assert not loaded.training
    assert all(p.requires_grad for p in loaded.parameters())
    assert candid.load(folder / "model.json", memory="inverse").memory == "inverse"


def test_saving_again_replaces_the_model_and_leaves_one_set_of_weights(folder: Path) -> None:
    before = weights_of(folder)
    other = small_classifier(seed=1)
    candid.save(other, folder)
    assert weights_of(folder) != before
    assert torch.equal(candid.load(folder).mixture.mean, other.mixture.mean)
    assert sorted(p.name for p in folder.iterdir()) == ["model.json", weights_of(folder).name]
    assert weights_of(folder).stat().st_mode == (folder / "model.json").stat().st_mode


def test_saving_removes_no_file_of_anybody_else(folder: Path) -> None:
    others = ("weights-imagenet.pth", "calibration-notes.txt", "weights-of-mine.safetensors")
    for name in others:
        (folder / name).write_text("mine")
    (folder / "weights-old").mkdir()
    candid.save(small_classifier(seed=1), folder)
    assert all((folder / name).read_text() == "mine" for name in others)


def test_half_precision_weights_load_and_stay_invertible(tmp_path: Path) -> None:
    model = small_classifier()
    model.held_out = {"weights": np.zeros(3)}
    full, half = candid.save(model, tmp_path / "full"), candid.save(model, tmp_path / "half", half=True)
    assert weights_of(half).stat().st_size < 0.7 * weights_of(full).stat().st_size
    stored = load_file(weights_of(half))
    rounded = {name for name, tensor in stored.items() if tensor.dtype == torch.float16}
    matrices = {name for name, tensor in stored.items() if tensor.ndim > 1}
    assert rounded == {name for name in matrices if not name.startswith("mixture.")}
    loaded = candid.load(half)
    assert not loaded.held_out, "scores of other weights"
    x = torch.rand(3, 3, 16, 16)
    with torch.inference_mode():
        assert (loaded.invert(loaded.latent(x)) - x).abs().max() < 1e-5
        assert torch.allclose(loaded.log_density(x), model.log_density(x), rtol=1e-2)


def test_what_is_too_large_for_half_precision_stays_whole(tmp_path: Path) -> None:
    model = small_classifier()
    model.mixture.prototypes.data[0, 0] = 1e6
    loaded = candid.load(candid.save(model, tmp_path, half=True))
    assert torch.equal(loaded.mixture.prototypes, model.mixture.prototypes)


def test_class_priors_travel_with_the_model(tmp_path: Path) -> None:
    model = candid.GenerativeClassifier.from_preset("digits", classes=2, priors=(0.3, 0.7)).eval()
    loaded = candid.load(candid.save(model, tmp_path))
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(loaded.posterior(x), model.posterior(x))
    assert describe(loaded.config)["total_parameters"] > 0


@pytest.mark.parametrize("metadata", [{"loss": float("nan")}, {"scores": torch.zeros(3)}])
def test_metadata_that_is_no_json_is_refused_before_anything_is_written(
    folder: Path, metadata: object
) -> None:
    model = small_classifier(seed=1)
    model.metadata = metadata  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match="JSON"):
        candid.save(model, folder)
    assert torch.equal(candid.load(folder).mixture.mean, small_classifier().mixture.mean)


HELD_OUT = {"temperature": np.array(1.5), "statistic.predicted": np.arange(7)}


def fingerprint(model: candid.GenerativeClassifier) -> Array:
    return np.frombuffer(bytes.fromhex(model.fingerprint()), np.uint8)


def calibrated(folder: Path, **changes: Array) -> Path:
    """The file in which the calibration of the model in ``folder`` now is."""
    model = candid.load(folder)
    model.held_out = {**HELD_OUT, **changes, "fingerprint": fingerprint(model)}
    save_held_out(model, folder)
    (path,) = folder.glob("held_out-*")
    return path


def test_a_calibration_travels_with_the_model(folder: Path, tmp_path: Path) -> None:
    assert candid.load(folder).held_out == {}
    calibrated(folder)
    copied = candid.load(candid.save(candid.load(folder), tmp_path / "copy"))
    for model in (candid.load(folder), copied):
        assert model.held_out.keys() == {*HELD_OUT, "fingerprint"}
        for name, values in HELD_OUT.items():
            assert np.array_equal(model.held_out[name], values)
            assert model.held_out[name].dtype == values.dtype
    copied.held_out = {}
    candid.save(copied, tmp_path / "copy")
    assert len(list((tmp_path / "copy").iterdir())) == 2


def test_calibrating_leaves_the_weights_alone(folder: Path) -> None:
    weights = weights_of(folder)
    before = weights.stat(), weights.read_bytes(), json.loads((folder / "model.json").read_text())
    first = calibrated(folder)
    second = calibrated(folder, temperature=np.array(2.5))
    assert first.name != second.name and not first.exists()
    record = json.loads((folder / "model.json").read_text())
    assert record.pop("held_out")["file"] == second.name
    assert record.pop("digest") != before[2].pop("digest")
    assert (weights.stat(), weights.read_bytes(), record) == before
    assert sorted(folder.iterdir()) == sorted([second, folder / "model.json", weights])
    assert candid.load(folder).held_out["temperature"] == 2.5


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_damaged_calibration_gives_one_clear_sentence(folder: Path, damage: str) -> None:
    path = calibrated(folder)
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:50])
    elif damage == "changed":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    expected = {
        "missing": f"The file '{path.name}' with the held-out scores is missing from '{folder}': copy",
        "cut": f"'{path}' has 50 bytes instead of {len(content)}: copy it again.",
        "changed": f"The content of '{path}' was changed since it was saved: copy it again.",
    }
    with pytest.raises(CheckpointError) as caught:
        candid.load(folder)
    assert str(caught.value).startswith(expected[damage])


def cut_record(folder: Path) -> None:
    path = folder / "model.json"
    path.write_bytes(path.read_bytes()[:200])


def cut_weights(folder: Path) -> None:
    os.truncate(weights_of(folder), 1000)


def scramble_weights(folder: Path) -> None:
    path = weights_of(folder)
    path.write_bytes(b"\xff" * path.stat().st_size)


def rename_weights(folder: Path) -> None:
    weights_of(folder).rename(folder / "other.safetensors")


def exchange_weights(folder: Path, content: bytes) -> None:
    """As a careful forger would: with the right name and size."""
    weights_of(folder).unlink()
    path = folder / f"weights-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    path.write_bytes(content)
    edit(folder, weights={"file": path.name, "bytes": len(content)})


def pickle_weights(folder: Path) -> None:
    exchange_weights(folder, pickle.dumps(load_file(weights_of(folder))))


def foreign_weights(folder: Path) -> None:
    exchange_weights(folder, serialize({"a.weight": torch.zeros(3)}))


def other_means(folder: Path, means: torch.Tensor) -> None:
    exchange_weights(folder, serialize(load_file(weights_of(folder)) | {"mixture.mean": means}))


def flip_a_bit(folder: Path) -> None:
    path = weights_of(folder)
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


def escape(folder: Path) -> None:
    edit(folder, weights={"file": "../" + weights_of(folder).name, "bytes": 1})


def unknown_key(folder: Path) -> None:
    config = json.loads((folder / "model.json").read_text())["config"]
    config["flow"]["bloks"] = config["flow"].pop("blocks")
    edit(folder, config=config)


def edit_by_hand(folder: Path, **changes: object) -> None:
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def repeat_a_key(folder: Path) -> None:
    path = folder / "model.json"
    path.write_text(path.read_text().replace("{", '{"class_names": ["x", "y", "z"],', 1))


def trained(**config: object) -> dict[str, object]:
    return {"training": {"config": config}}


def move_scores(folder: Path) -> None:
    """From a model with the same weights and other class names."""
    calibrated(folder)
    edit(folder, class_names=["x", "y", "z"])


DAMAGE = {
    "cut record": (cut_record, "cut or overwritten"),
    "cut weights": (cut_weights, "1000 bytes instead of"),
    "scrambled weights": (scramble_weights, "was changed"),
    "a flipped bit": (flip_a_bit, "was changed"),
    "renamed weights": (rename_weights, "The file 'weights-.*' with the weights is missing from"),
    "pickled weights": (pickle_weights, "not a whole safetensors file"),
    "foreign weights": (foreign_weights, "unknown tensor 'a.weight'"),
    "other shapes": (lambda f: other_means(f, torch.zeros(3, 7)), r"'mixture.mean'.*\(3, 7\)"),
    "other types": (lambda f: other_means(f, torch.zeros(3, 192, dtype=torch.int32)), "wrong type"),
    "weights elsewhere": (escape, "missing"),
    "newer version": (lambda f: edit(f, format_version=99), "format version 99"),
    "foreign record": (lambda f: edit(f, format="onnx"), "not written by candid"),
    "record without config": (lambda f: edit(f, config=None), "'config'"),
    "endless number": (lambda f: (f / "model.json").write_text("9" * 5000), "can't be read as JSON"),
    "endless nesting": (lambda f: (f / "model.json").write_text("[" * 100_000), "can't be read as JSON"),
    "unknown key": (unknown_key, "'flow.bloks'.*did you mean 'blocks'"),
    "wrong names": (lambda f: edit(f, class_names=["a"]), "1 class names"),
    "no record": (lambda f: (f / "model.json").unlink(), "has no model.json"),
    "an edit": (lambda f: edit_by_hand(f, class_names=["b", "a", "c"]), "was edited since.*restore it"),
    "a key twice": (repeat_a_key, "'class_names' stands twice"),
    "kind as list": (lambda f: edit(f, kind=["resnet"]), "unknown kind"),
    "a long file name": (lambda f: edit(f, weights={"file": "w" * 5000, "bytes": 1}), "is missing"),
    "sizes as text": (
        lambda f: edit(f, weights={"file": weights_of(f).name, "bytes": "x" * 99}),
        "bytes instead",
    ),
    "null names": (lambda f: edit(f, class_names=[None] * 3), "must be text"),
    "nested names": (lambda f: edit(f, class_names=[["a"]] * 3), "must be text"),
    "empty names": (lambda f: edit(f, class_names=["a", "", "c"]), "must be text"),
    "equal names": (lambda f: edit(f, class_names=["a"] * 3), "Two classes have the name 'a'"),
    "holdout as text": (lambda f: edit(f, metadata=trained(holdout="x")), "wrong 'holdout'"),
    "only as number": (lambda f: edit(f, metadata=trained(only=3)), "wrong 'only'"),
    "beta as list": (lambda f: edit(f, metadata=trained(beta=[1])), "wrong 'beta'"),
    "an unknown crop": (lambda f: edit(f, metadata=trained(crop="x")), "wrong 'crop'"),
    "scores of an earlier version": (
        lambda f: [step(f) for step in (move_scores, lambda g: edit(g, library_version="0.0.9"))],
        "made by version 0.0.9.*candid calibrate",
    ),
    "scores of another model": (move_scores, "measured with a different model.*calibrate it again"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_gives_one_clear_sentence(folder: Path, damage: str) -> None:
    spoil, message = DAMAGE[damage]
    spoil(folder)
    with pytest.raises(candid.CandidError, match=message) as caught:
        candid.load(folder)
    assert "\n" not in str(caught.value)


def test_other_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no model at"):
        candid.load(tmp_path / "nowhere")
    torch.save({}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="candid import"):
        candid.load(tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="is a file"):
        candid.save(small_classifier(), tmp_path / "model.pt")


@pytest.mark.parametrize("change", ["class names", "weights", "crop", "std"])
def test_the_fingerprint_changes_with_everything_that_can_change_a_result(change: str) -> None:
    model = small_classifier()
    before = model.fingerprint()
    assert small_classifier().fingerprint() == before and len(before) == 64
    if change == "class names":
        model.class_names = model.class_names[::-1]
    elif change == "weights":
        model.mixture.mean.data[0, 0] += 1e-6
    elif change == "crop":
        model.metadata = trained(crop="none")
    else:
        model.config = replace(model.config, std=tuple(1.1 * std for std in model.config.std))
    assert model.fingerprint() != before


def test_scores_of_a_model_that_changed_are_left_out(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calibrated(folder)
    model = candid.load(folder)
    model.mixture.mean.data[0, 0] += 1
    assert not candid.load(candid.save(model, tmp_path / "changed")).held_out
    assert "Calibrate it again" in caplog.text
    assert candid.load(folder, held_out=False).held_out == {}


def test_a_folder_of_version_1_loads_and_says_that_it_has_no_digest(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = candid.load(folder)
    record = json.loads((folder / "model.json").read_text())
    del record["digest"], record["weights"]["sha256"]
    edit_by_hand(folder)
    (folder / "model.json").write_text(json.dumps(record | {"format_version": 1}))
    for _ in range(2):
        assert candid.load(folder).fingerprint() == model.fingerprint()
    assert caplog.text.count("older format without digests") == 1
    save_held_out(candid.load(folder), folder)
    assert json.loads((folder / "model.json").read_text())["format_version"] == 2


def test_any_model_is_found_by_folder_run_or_name(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    candid.save(candid.load(folder), run / "model" / "best")
    model = resolve(folder)
    assert resolve(model) is model and resolve(run).fingerprint() == model.fingerprint()
    assert resolve("cifar10-resnet").kind == "resnet"
    with pytest.raises(candid.CandidError, match="A Linear is not a model"):
        resolve(torch.nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="A Linear is not a model.*torch.save"):
        candid.save(torch.nn.Linear(1, 1), tmp_path / "linear")  # type: ignore[arg-type]


@dataclass(frozen=True)
class BrightnessConfig:
    classes: int = 2


class Brightness(ImageClassifier):
    """A further kind of model: two classes, by the mean of the pixels."""

    kind = "brightness"
    can = frozenset[str]()
    density_of = None
    feature_size = 1
    log_priors = np.log(np.full(2, 0.5))

    def __init__(self, config: BrightnessConfig, class_names: list[str]) -> None:
        super().__init__(tuple(class_names))
        self.config, self.image_shape = config, (1, 8, 8)
        self.register_buffer("image_mean", torch.full((1,), 0.5))

    def tensor_outputs(self, x: torch.Tensor) -> TensorOutputs:
        mean = x.mean((1, 2, 3))[:, None] - self.image_mean
        return TensorOutputs(torch.cat((-mean, mean), 1), mean, None, None)

    def frozen(self) -> "Brightness":
        return self


def test_a_new_kind_of_model_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "brightness", Kind(__name__, "BrightnessConfig", "Brightness", network=True))
    model = resolve(candid.save(Brightness(BrightnessConfig(), ["dark", "light"]), tmp_path))  # type: ignore[arg-type]
    assert model.kind == "brightness" and model.class_names == ("dark", "light")
    white = np.full((1, 1, 8, 8), 255, np.uint8)
    predictions = predict(model, white, np.zeros(1, np.int64), ("a",))
    assert predictions.logits.argmax() == 1 and predictions.log_density is None
    with pytest.raises(candid.CandidError, match="Heatmaps can't come from a brightness"):
        require(model, "invert", "Heatmaps")


SAVE_FOREVER = """
import sys, torch, candid
from tests.helpers import small_classifier
torch.set_num_threads(1)
models = [small_classifier(seed) for seed in (1, 2)]
print("ready", flush=True)
while True:
    for model in models:
        candid.save(model, sys.argv[1])
"""


def test_a_save_killed_at_any_moment_loses_nothing(folder: Path) -> None:
    truths = [small_classifier(seed).mixture.mean for seed in (0, 1, 2)]
    for attempt in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, folder], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            time.sleep(0.05 + 0.013 * attempt)
            process.send_signal(signal.SIGKILL)
        loaded = candid.load(folder)
        assert any(torch.equal(loaded.mixture.mean, truth) for truth in truths)
    candid.save(small_classifier(), folder)
    assert len(list(folder.iterdir())) == 2  # what the killed ones left is gone


def test_a_full_disk_leaves_the_earlier_model_alone(folder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="unharmed"):
            candid.save(small_classifier(seed=1), folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert torch.equal(candid.load(folder).mixture.mean, small_classifier().mixture.mean)
    assert len(list(folder.iterdir())) == 2


def test_a_folder_without_a_model_does_not_hide_a_bundled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """People keep photos in folders called 'waste' and 'tiny20'; './waste' is always the folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "_HIDDEN", set())
    (tmp_path / "waste" / "glass").mkdir(parents=True)
    assert load("waste", held_out=False).folder == zoo.MODELS["waste"] == checkpoint.model_folder("waste")
    assert caplog.messages == ["The folder 'waste' has no model: the bundled model of this name is used."]
    with pytest.raises(CheckpointError, match="The folder 'waste' has no model.json"):
        load("./waste")
    with pytest.raises(CheckpointError, match="comes with candid and stays as it is"):
        checkpoint.own_folder("waste")
    save(small_classifier(), tmp_path / "waste" / "model" / "best")
    assert not checkpoint.is_bundled("waste")
    assert load("waste").class_names == small_classifier().class_names
    (tmp_path / "tiny20").write_text("not a folder")
    with pytest.raises(CheckpointError, match="is a file, but a model is a folder"):
        load("tiny20")
