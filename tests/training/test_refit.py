"""The mixture of a trained model describes held-out latents."""

from pathlib import Path

import pytest
import torch

import candid
from candid import CandidError, CheckpointError
from candid.models.flow.means import restore
from tests.training.runs import small_config, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("refit") / "run"
    assert train(small_config(), out).finished
    return out


def test_training_refits_and_measures_after_it(run: Path) -> None:
    model = candid.load(run)
    record = model.metadata["refit"]
    assert model.config.flow.span == (9, 10)
    assert record["gain"] > 0
    assert record["distance"] == pytest.approx(record["scale"] * record["distance_before"])
    assert model.held_out  # bound to the refitted weights: loading checks that
    assert candid.load(run / "model" / "last").config.flow.span is None


def test_the_scale_is_the_most_likely_one(run: Path) -> None:
    from candid.data.datasets import open_dataset
    from candid.models.flow.means import rescale

    model = candid.load(run)
    record = model.metadata["refit"]
    options = model.record.config
    data = open_dataset("digits", holdout=options["holdout"], split_seed=options["split_seed"], split="hash")
    from candid.data.batches import named_batches

    batches = named_batches(data.val, model.preprocessing, 250, 0, 1, 0)
    x = torch.cat([torch.from_numpy(images) for images, _, _ in batches]).float() / 255

    def density(scale: float) -> float:
        rescale(model, scale)
        with torch.no_grad():
            return float(model.log_density(x).mean())

    found = [density(record["scale"] * factor) for factor in (0.97, 1, 1.03)]
    assert found[1] == max(found)
    restore(model)
    with torch.no_grad():
        assert found[1] - float(model.log_density(x).mean()) == pytest.approx(record["gain"], abs=0.02)


def test_refit_by_call_keeps_posteriors_and_writes_to_out(run: Path, tmp_path: Path) -> None:
    before = candid.load(run)
    x = torch.randint(0, 256, (8, 1, 8, 8)) / 255
    found = candid.refit(str(run / "model" / "last"), "digits", out=tmp_path / "new", workers=0)
    after = candid.load(tmp_path / "new")
    assert after.metadata["refit"]["scale"] == found.scale
    assert after.held_out
    last = candid.load(run / "model" / "last")
    torch.testing.assert_close(after.posterior(x), last.posterior(x), rtol=0, atol=1e-5)
    assert before.config.flow.span is not None
    with pytest.raises(CheckpointError, match="comes with candid"):
        candid.refit("cifar10-beta1", "digits")
    with pytest.raises(CandidError, match="ResNet"):
        candid.refit("cifar10-resnet", "digits", out=tmp_path / "no")


def test_training_goes_on_from_a_refitted_model(run: Path, tmp_path: Path) -> None:
    options = small_config(start=str(run), epochs=1)
    assert train(options, tmp_path / "more").finished
    assert candid.load(tmp_path / "more").config.flow.span == (9, 10)
