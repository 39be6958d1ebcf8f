"""Rescaling the span of the class means changes distances and densities, never posteriors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import candid
from candid import CandidError, GenerativeClassifier
from candid.models.flow.means import planar_model, rescale, restore, span_of
from candid.models.flow.mixture import LatentMixture
from tests.helpers import randomise

RANKS = (None, 0, 3)


def small_model(rank: int | None = None, priors: tuple[float, ...] | None = None) -> GenerativeClassifier:
    model = GenerativeClassifier.from_preset(
        "digits", classes=4, rank=rank, priors=priors, blocks=(1, 1), widths=(4, 4)
    )
    return randomise(model.double()).eval()


def images(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (6, 1, 8, 8), generator=generator) / 255.0


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_posteriors_stay_and_distances_scale(
    rank: int | None, scale: float, generator: torch.Generator
) -> None:
    model = small_model(rank, (0.1, 0.2, 0.3, 0.4))
    x = images(generator)
    before, distances = model(x), model.mixture.pairwise_distances()
    density = model.log_density_of(before)
    span = span_of(model.mixture)
    rescale(model, scale)
    after = model(x)
    torch.testing.assert_close(after.logits.softmax(1), before.logits.softmax(1), rtol=0, atol=1e-12)
    torch.testing.assert_close(model.mixture.pairwise_distances(), scale * distances)
    torch.testing.assert_close(model.invert(after.z), x.double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(after.log_det, before.log_det - 3 * math.log(scale))
    torch.testing.assert_close(model.frozen()(x).z, after.z, rtol=1e-9, atol=1e-9)
    c, priors = span.layer.coordinates(before.z), model.mixture.log_priors
    expected = span.log_likelihood(c, priors, math.log(scale)) - span.log_likelihood(c, priors, 0)
    torch.testing.assert_close(model.log_density_of(after) - density, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("classes", [[0, 1], [3, 0, 2], [1, 2, 3, 0]])
@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_means_on_a_circle_are_refitted_exactly(
    classes: list[int], scale: float, generator: torch.Generator
) -> None:
    model = planar_model(small_model(priors=(0.1, 0.2, 0.3, 0.4)), classes).double()
    x = images(generator)
    before, distances = model(x), model.mixture.pairwise_distances()
    density = model.log_density_of(before)
    span = span_of(model.mixture)
    rescale(model, scale)
    after = model(x)
    torch.testing.assert_close(after.logits.softmax(1), before.logits.softmax(1), rtol=0, atol=1e-12)
    torch.testing.assert_close(model.mixture.pairwise_distances(), scale * distances, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(after.log_det, before.log_det - 2 * math.log(scale))
    c, priors = span.layer.coordinates(before.z), model.mixture.log_priors
    expected = span.log_likelihood(c, priors, math.log(scale)) - span.log_likelihood(c, priors, 0)
    torch.testing.assert_close(model.log_density_of(after) - density, expected, rtol=0, atol=1e-7)
    again = planar_model(model, [1, 0]).double()  # of a refitted model: its refit is undone first
    among = before.logits[:, [1, 0]].softmax(1)
    torch.testing.assert_close(again(x).logits.softmax(1), among, rtol=0, atol=1e-6)
    restore(model)
    torch.testing.assert_close(model(x).z, before.z)


@settings(max_examples=25, deadline=None)
@given(first=st.floats(0.1, 10), second=st.floats(0.1, 10), seed=st.integers(0, 100))
def test_rescaling_again_replaces_the_layer_and_restoring_undoes_it(
    first: float, second: float, seed: int
) -> None:
    model = small_model()
    x = images(torch.Generator().manual_seed(seed))
    before = model(x)
    rescale(model, first)
    rescale(model, second)
    assert [name for name, _ in model.flow.named_children()].count("span") == 1
    once = small_model()
    rescale(once, second)
    torch.testing.assert_close(model(x).z, once(x).z)
    restore(model)
    torch.testing.assert_close(model(x).z, before.z)
    torch.testing.assert_close(model(x).logits, before.logits)


def test_means_that_left_the_span_are_not_restored_silently() -> None:
    model = small_model()
    rescale(model, 2.0)
    with torch.no_grad():
        model.mixture.mean[0] += 1
    with pytest.raises(CandidError, match="changed after the mixture was refitted"):
        restore(model)


def test_dependent_means_are_refused() -> None:
    planar = LatentMixture(classes=4, constant=4, dimensions=8, planar=True)
    equal = LatentMixture(classes=3, constant=4, dimensions=8)
    with torch.no_grad():
        equal.mean[1], equal.prototypes[1] = equal.mean[0], equal.prototypes[0]
    for mixture in (planar, equal, LatentMixture(classes=1, constant=4, dimensions=8)):
        with pytest.raises(CandidError, match="affinely dependent"):
            span_of(mixture)


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(CandidError, match="frozen"):
        rescale(small_model().frozen(), 2.0)


def test_the_basis_is_orthonormal_and_factored(generator: torch.Generator) -> None:
    mixture = LatentMixture(classes=9, constant=12, dimensions=48, rank=2)
    layer = span_of(mixture).layer
    assert layer.prototypes.shape == (2, 36)
    basis = torch.cat((layer.constant, layer.weights @ layer.prototypes), 1)
    torch.testing.assert_close(basis @ basis.T, torch.eye(8).double(), rtol=0, atol=1e-10)


def test_a_widened_basis_is_orthonormal_again() -> None:
    layer = span_of(LatentMixture(classes=9, constant=12, dimensions=48, rank=2)).layer.float().double()
    basis = torch.cat((layer.constant, layer.weights @ layer.prototypes), 1)
    torch.testing.assert_close(basis @ basis.T, torch.eye(8).double(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("half", [False, True])
def test_a_rescaled_model_is_saved_and_loaded(half: bool, tmp_path: object) -> None:
    model = small_model(3).float()
    rescale(model, 2.5)
    loaded = candid.load(candid.save(model, str(tmp_path), half=half))
    assert loaded.config.flow.span == (3, 3)
    for name, tensor in model.state_dict().items():
        if name.startswith(("mixture.", "flow.span.")) or not half:
            assert loaded.state_dict()[name].equal(tensor), name
