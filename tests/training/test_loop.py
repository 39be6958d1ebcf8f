"""Real training runs in this process: what they compute, write and refuse."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import candid
from candid import CandidError, NonFiniteError, ResNet
from candid._support.progress import SILENT, TrainingDisplay
from candid.data.splits import ArraySplit
from candid.training.loader import Plan, training_batches
from candid.training.recipes import load_options
from candid.training.run_folder import RunFolder, data_digest
from candid.training.setup import build_model, in_unit_range, open_data
from candid.training.train import train_network
from tests.training.runs import MODEL, curve, small_config, train


class RecordedDisplay(TrainingDisplay):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert train(small_config(epochs=8, tensorboard=True), folder).finished
    return folder


def test_a_run_learns(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    assert results["test"]["accuracy"] > 0.85
    losses = curve(finished, "train_loss")
    assert losses[-1] < 0.6 * losses[0]
    assert curve(finished, "train_bits_per_dim")[-1] < curve(finished, "train_bits_per_dim")[0]


def test_the_run_folder_is_complete_and_agrees_with_itself(finished: Path) -> None:
    expected = {"config.toml", "metrics.csv", "model", "results.json", "state.pt", "tensorboard"}
    assert {path.name for path in finished.iterdir()} == expected
    assert RunFolder(finished).options() == small_config(epochs=8, tensorboard=True)
    assert curve(finished, "epoch") == list(range(1, 9))
    model = candid.load(finished / "model" / "last")
    assert model.class_names == tuple("0123456789")
    assert model.metadata["training"]["config"]["epochs"] == 8
    data, _ = open_data(small_config(epochs=8), SILENT)
    assert isinstance(data.test, ArraySplit)
    x = in_unit_range(torch.from_numpy(data.test.images), "cpu")
    results = json.loads((finished / "results.json").read_text())["test"]
    best = candid.load(finished / "model" / "best")
    right = best.predict(x).numpy() == data.test.labels
    assert right.mean() == pytest.approx(results["accuracy"])
    bits = -best.log_density(x).mean().item() / (64 * math.log(2))
    assert bits == pytest.approx(results["bits_per_dim"], rel=1e-5)


def test_tensorboard_gets_every_epoch(finished: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("val_accuracy")] == pytest.approx(
        curve(finished, "val_accuracy"), rel=1e-5
    )


def test_batch_norm_statistics_are_averages_with_the_final_weights(finished: Path) -> None:
    config = small_config(epochs=8)
    data, preprocessing = open_data(config, SILENT)
    model = candid.load(finished / "model" / "last").train()
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    averaged = norm.running_mean.clone()  # type: ignore[union-attr]
    plan = Plan(len(data.train), config.batch, 1, config.seed)
    inputs: list[torch.Tensor] = []
    norm.register_forward_hook(lambda _, given, __: inputs.append(given[0].mean((0, 2, 3))))
    with torch.no_grad():
        for images, _ in training_batches(data.train, preprocessing, plan, 0, plan.steps_per_epoch, range(1)):
            model(in_unit_range(images, "cpu"))
    torch.testing.assert_close(averaged, torch.stack(inputs).mean(0), atol=2e-2, rtol=0)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(small_config(epochs=1, seed=seed), tmp_path / name)
    a, b, c = (torch.load(tmp_path / name / "state.pt", weights_only=True)["model"] for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["mixture.mean"], c["mixture.mean"])


@pytest.mark.parametrize("beta", [0.0, 1.0, math.inf])
def test_beta_weighs_the_losses(tmp_path: Path, beta: float) -> None:
    train(small_config(epochs=1, beta=beta), tmp_path / "run")
    (loss,), (bits,), (entropy,) = (
        curve(tmp_path / "run", f"train_{name}") for name in ("loss", "bits_per_dim", "cross_entropy")
    )
    offset = candid.load(tmp_path / "run" / "model" / "last").bits_offset
    l_x = (bits - offset) * math.log(2)
    expected = entropy if math.isinf(beta) else (l_x + beta * entropy) / (1 + beta)
    assert loss == pytest.approx(expected, rel=1e-4)


def test_memory_by_inversion_and_accumulation_change_the_losses_little(tmp_path: Path) -> None:
    runs: dict[str, dict[str, Any]] = {
        "plain": {},
        "inverse": {"memory": "inverse"},
        "parts": {"grad_accumulation": 2},
    }
    for name, changes in runs.items():
        train(small_config(epochs=1, **changes), tmp_path / name)
    (plain,), (inverse,), (parts,) = (curve(tmp_path / name, "train_loss") for name in runs)
    assert inverse == pytest.approx(plain, rel=1e-3)
    assert parts == pytest.approx(plain, rel=0.1)  # batch norm sees half of the batch


def test_mixed_precision_is_close_to_full_precision(tmp_path: Path) -> None:
    for precision in ("32", "bf16"):
        train(small_config(epochs=1, batch=256, precision=precision), tmp_path / precision)
    (full,), (mixed,) = (curve(tmp_path / name, "train_loss") for name in ("32", "bf16"))
    assert mixed == pytest.approx(full, rel=0.05)
    assert mixed != full


def test_sgd_with_plateaus_runs(tmp_path: Path) -> None:
    config = small_config(
        epochs=30,
        optimiser="sgd",
        schedule="plateau",
        learning_rate=1e-9,
        warmup=1.0,
        patience=1,
        lr_decays=1,
    )
    assert train(config, tmp_path / "run").finished
    rates = curve(tmp_path / "run", "learning_rate")
    assert len(rates) < 30  # two plateaus ended it
    assert rates[-1] == pytest.approx(1e-10)


def test_the_baseline_trains_in_the_same_loop(tmp_path: Path) -> None:
    outcome = train(small_config(epochs=6, baseline=True, label_smoothing=0.0), tmp_path / "run")
    assert outcome.results["test"]["accuracy"] > 0.7
    assert "bits_per_dim" not in outcome.results["test"]
    model = candid.load(tmp_path / "run" / "model" / "best")
    assert isinstance(model, ResNet)
    assert model.class_names == tuple("0123456789")


def test_means_only_changes_the_means_alone(finished: Path, tmp_path: Path) -> None:
    start = str(finished / "model" / "last")
    train(small_config(epochs=1, start=start, means_only=True), tmp_path / "run")
    before, after = candid.load(start).state_dict(), candid.load(tmp_path / "run/model/last").state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"mixture.mean", "mixture.prototypes"}


def test_a_run_can_start_from_a_model(finished: Path, tmp_path: Path) -> None:
    train(small_config(epochs=1, start=str(finished / "model" / "last")), tmp_path / "run")
    assert curve(tmp_path / "run", "train_loss")[0] < curve(finished, "train_loss")[1]
    with pytest.raises(CandidError, match="not the kind of model"):
        train(small_config(start=str(finished / "model/last"), baseline=True), tmp_path / "other")


def test_a_model_to_start_from_must_fit_the_data(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(CandidError, match="3 x 32 x 32, not of 1 x 8 x 8: choose its --preset"):
        train(small_config(start="cifar10-resnet", baseline=True), tmp_path / "run")
    config = load_options("cifar10-quick", data="x", start="cifar10-beta1")
    with pytest.raises(CandidError, match=r"\(apple, bear\) are not those of 'cifar10-beta1' \(airp"):
        build_model(config, ("apple", "bear"))
    names = candid.load("cifar10-beta1").class_names
    assert build_model(config, names).class_names == names
    digits = load_options("digits", data="x", start=str(finished / "model/last"))
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    assert build_model(digits, words).class_names == words  # it had only numbers


def test_a_run_that_goes_on_for_longer_is_measured_anew(tmp_path: Path) -> None:
    short = small_config(epochs=1, schedule="plateau", warmup=0.0)
    first = train(short, tmp_path)
    longer = train(replace(short, epochs=2), tmp_path, resume=True)
    assert longer.results["step"] == 2 * first.results["step"]
    assert RunFolder(tmp_path).options().epochs == 2


def test_a_run_is_not_resumed_with_other_data(tmp_path: Path) -> None:
    images = [Image.fromarray(np.full((8, 8), 9 * i, dtype=np.uint8)) for i in range(24)]
    for i, image in enumerate(images):
        place = tmp_path / "data" / "train" / ("cat", "dog")[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{i}.png")
    config = small_config(data=str(tmp_path / "data"), epochs=1, batch=8, holdout=0.2)
    train(config, tmp_path / "run")
    (tmp_path / "data/train/dog").rename(tmp_path / "data/train/fox")
    with pytest.raises(CandidError, match="the data now has .*: restore it"):
        train(config, tmp_path / "run", resume=True)


def test_a_finished_run_stays_as_it_is(finished: Path) -> None:
    before = (finished / "state.pt").read_bytes()
    outcome = train(RunFolder(finished).options(), finished, resume=True)
    stored = json.loads((finished / "results.json").read_text())
    assert outcome.finished and stored.keys() - outcome.results.keys() == {"sha256"}
    assert outcome.results.items() < stored.items()
    assert (finished / "state.pt").read_bytes() == before


def test_divergence_names_step_and_layer_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"schedule": "plateau", "warmup": 0.0, "clip": 1e30}
    train(small_config(epochs=1, **settings), tmp_path / "run")
    before = (tmp_path / "run" / "state.pt").read_bytes()
    monkeypatch.setattr("candid.training.loop.learning_rate", lambda *_: 1e30)
    with pytest.raises(
        NonFiniteError, match=r"Step \d+ \(epoch 2\): .*(layer|gradient of) '.*--learning-rate"
    ):
        train(small_config(epochs=2, **settings), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "state.pt").read_bytes() == before
    candid.load(tmp_path / "run" / "model" / "last")


def test_what_can_be_known_before_computing_is_refused_before(finished: Path, tmp_path: Path) -> None:
    refused = {
        "A batch of 5000 is larger than the 12": small_config(batch=5000),
        "can't be shared equally by 7": small_config(grad_accumulation=7),
        "10 classes, more than the model's 4": small_config(model={"classes": 4}),
        "There is no data set or folder": small_config(data=str(tmp_path / "nowhere")),
        "There is no model at": small_config(start=str(tmp_path / "nowhere")),
    }
    for message, config in refused.items():
        with pytest.raises(CandidError, match=message):
            train(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()
    with pytest.raises(CandidError, match=r"already has a run: add 'resume' \(--resume\)"):
        train(small_config(), finished)
    (tmp_path / "file").write_text("")
    with pytest.raises(CandidError, match="is not a folder"):
        train(small_config(), tmp_path / "file")
    with pytest.raises(CandidError, match="There is no run to resume"):
        RunFolder(tmp_path / "empty").options()


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    assert train(small_config(epochs=1), folder).finished
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def flip_a_bit(path: Path) -> None:
    values = torch.load(path, weights_only=True)
    values["model"]["mixture.mean"].view(torch.int32).flatten()[3] ^= 1
    torch.save(values, path)


def empty_the_rows(path: Path) -> None:
    torch.save(torch.load(path, weights_only=True) | {"rows": []}, path)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("state.pt", cut, r"state.pt' can't be read"),
        ("state.pt", flip_a_bit, r"state.pt' is damaged, its digest does not fit: restore it"),
        ("state.pt", empty_the_rows, r"state.pt' is damaged"),
        ("state.pt", Path.unlink, r"state.pt' is missing, so that the run can't be resumed"),
        ("results.json", lambda path: path.write_text('{"val": {'), r"results.json' is damaged"),
        ("results.json", lambda path: path.write_text("[1]"), r"results.json' is damaged"),
        ("model/best", shutil.rmtree, r"best model '.*' is missing: restore it"),
    ],
)
def test_a_damaged_run_is_not_resumed(
    one_epoch: Path, tmp_path: Path, file: str, damage: Callable[[Path], object], message: str
) -> None:
    shutil.copytree(one_epoch, tmp_path / "run")
    damage(tmp_path / "run" / file)
    with pytest.raises(CandidError, match=message):
        train(small_config(epochs=1), tmp_path / "run", resume=True)


def test_a_run_that_was_killed_in_its_first_save_is_resumed(one_epoch: Path, tmp_path: Path) -> None:
    """The model of the first epoch was saved, and the state was not yet."""
    shutil.copytree(one_epoch, tmp_path / "run")
    for file in ("state.pt", "results.json"):
        (tmp_path / "run" / file).unlink()
    resumed = train(small_config(epochs=1), tmp_path / "run", resume=True)
    whole = json.loads((one_epoch / "results.json").read_text())
    assert resumed.finished and resumed.results["test"] == whole["test"]


def test_an_edited_configuration_is_not_resumed(one_epoch: Path, tmp_path: Path) -> None:
    shutil.copytree(one_epoch, tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("learning_rate = 0.008", "learning_rate = 0.024"))
    with pytest.raises(CandidError, match=r"config.toml' was changed after the run had started"):
        candid.train(out=tmp_path / "run", resume=True)


def test_swapped_labels_are_noticed(one_epoch: Path, tmp_path: Path) -> None:
    data, _ = open_data(small_config(), SILENT)
    assert isinstance(data.train, ArraySplit)
    found = data_digest(data)
    data.train.labels[:2] = data.train.labels[:2][::-1].copy()
    assert data_digest(data) != found
    state = RunFolder(one_epoch).load_state(small_config(epochs=1), SILENT)
    assert state is not None
    with pytest.raises(CandidError, match="images or labels are not those"):
        state.check_data(data, data_digest(data))


def test_a_state_of_the_older_version_is_resumed(one_epoch: Path, tmp_path: Path) -> None:
    shutil.copytree(one_epoch, tmp_path / "run")
    path = tmp_path / "run" / "state.pt"
    values = torch.load(path, weights_only=True)
    del values["digests"]
    torch.save(values, path)
    progress = RecordedDisplay()
    result = train_network(small_config(epochs=1), RunFolder(tmp_path / "run"), True, display=progress)
    assert result.finished
    assert any("without a digest" in line for line in progress.lines)


def test_training_is_one_python_call(tmp_path: Path) -> None:
    result = candid.train("digits", out=tmp_path / "run", epochs=1, model=MODEL, workers=0)
    assert result.finished and result.folder == tmp_path / "run"
    assert [row["epoch"] for row in result.metrics] == [1]
    assert result.model().class_names == tuple("0123456789")
    assert result.results["test"]["accuracy"] > 0.2
    with pytest.raises(CandidError, match="did you mean 'epochs'"):
        candid.train("digits", epoch=3)
    with pytest.raises(CandidError, match="Name the data to train on"):
        candid.train()
