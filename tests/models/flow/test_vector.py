"""Classifiers of vectors: exact densities and inverses, models on disk, what they can't do."""

from pathlib import Path

import numpy as np
import pytest
import torch

import candid
from candid import CandidError, FlowConfig
from candid.inference.predictions import without_noise
from candid.models.flow.config import vector_flow
from candid.models.flow.vector import VectorClassifier, VectorConfig
from candid.models.protocol import require
from tests.helpers import autograd_log_det, randomise


@pytest.fixture
def model() -> VectorClassifier:
    """Three classes of seven features in two groups, in float64, away from the identity."""
    config = VectorConfig(vector_flow(7, couplings=2, width=5), 3, rank=0, groups=(4, 3), deviation=0.1)
    model = randomise(VectorClassifier(config, seed=3)).eval()
    random = np.random.default_rng(0)
    factor = np.tril(random.normal(size=(7, 7))) + 3 * np.eye(7)
    model.start(random.normal(size=7), np.repeat([2.0, 5.0], (4, 3)), factor)
    return model


def test_density_is_that_of_the_features_and_the_latent_goes_back(model: VectorClassifier) -> None:
    model = model.double()
    features = torch.randn(2, 7, dtype=torch.float64)
    outputs = model.tensor_outputs_of(features)
    assert outputs.latent is not None and outputs.log_density_terms is not None
    truth = autograd_log_det(lambda h: model(h).z, features)
    means = model.mixture.means(torch.arange(3))
    squares = (outputs.latent[:, None] - means).square().sum(2)
    log_normal = -0.5 * squares - 3.5 * np.log(2 * np.pi)
    expected = (log_normal + model.mixture.log_priors).logsumexp(1) + truth
    torch.testing.assert_close(outputs.log_density_terms.sum(1), expected, rtol=1e-9, atol=0)
    back = model.invert(outputs.latent.detach().numpy())
    np.testing.assert_allclose(back, features.numpy(), atol=1e-9)


def test_a_model_on_disk_is_the_same(model: VectorClassifier, tmp_path: Path) -> None:
    features = np.random.default_rng(1).normal(size=(4, 7)).astype(np.float32)
    loaded = candid.load(candid.save(model, tmp_path))
    for before, after in zip(model.outputs_of(features), loaded.outputs_of(features), strict=True):
        np.testing.assert_array_equal(before, after)
    assert loaded.fingerprint() == model.fingerprint() and loaded.config == model.config


def test_noise_is_drawn_in_training_and_fixed_afterwards(model: VectorClassifier) -> None:
    features = torch.randn(2, 7)
    first, again = (model.train()(features).z for _ in range(2))
    assert not first.equal(again)
    first, again = (model.eval()(features).z for _ in range(2))
    assert first.equal(again)
    quiet = without_noise(model).outputs_of(features.numpy()).latent  # type: ignore[attr-defined]
    assert not np.allclose(quiet, first.detach().numpy())


@pytest.mark.parametrize(
    ("ability", "purpose", "message"),
    [
        ("invert", "Samples", "whose eye has no inverse to pixels"),
        ("class maps", "Heatmaps", "not linear in the maps of its eye"),
        ("teach", "be taught a class", "Only a photo model"),
    ],
)
def test_what_it_can_not_do_is_said_in_a_sentence(
    model: VectorClassifier, ability: str, purpose: str, message: str
) -> None:
    with pytest.raises(CandidError, match=message):
        require(model, ability, purpose)  # type: ignore[arg-type]


def test_images_need_an_eye_and_features_a_length(model: VectorClassifier) -> None:
    assert model.can == {"geometry", "mixture", "density", "network"}
    with pytest.raises(CandidError, match="trained on stored features"):
        model.outputs(np.zeros((1, 3, 224, 224), np.float32))
    with pytest.raises(CandidError, match=r"\(batch, 7\), not \(2, 6\)"):
        model.outputs_of(np.zeros((2, 6), np.float32))
    with pytest.raises(CandidError, match="A vector model can't be exported"):
        candid.export(model)
    with pytest.raises(CandidError, match="trained on stored features"):
        candid.examine(model, np.zeros((1, 32, 32, 3)))


@pytest.mark.parametrize("change", [{"height": 2}, {"entry": "3x3"}, {"blocks": (1, 1), "widths": (4, 4)}])
def test_vectors_have_one_position_and_one_stage(change: dict[str, object]) -> None:
    layout = {"channels": 4, "height": 1, "width": 1, "blocks": (1,), "widths": (4,), "entry": "none"}
    with pytest.raises(CandidError, match="pooling = 'none' is for vectors"):
        FlowConfig(**(layout | {"pooling": "none"} | change))  # type: ignore[arg-type]


def test_groups_and_noise_are_checked() -> None:
    for change, message in (({"groups": (3,)}, "3 features"), ({"deviation": 0.0}, "no density")):
        with pytest.raises(CandidError, match=message):
            VectorConfig(vector_flow(4, width=2), 2, rank=0, **({"groups": (4,)} | change))
