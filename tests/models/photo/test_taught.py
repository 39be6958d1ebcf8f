"""Classes that are taught to a head: the formula, the exact ratios, the density and the novelty scores."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from candid import CandidError
from candid._support.numbers import Array, log_softmax, logsumexp
from candid.models.photo.eye import Eye
from candid.models.photo.head import Posterior, fit_head
from candid.models.photo.model import PhotoModel
from candid.models.photo.taught import TaughtClasses
from candid.models.photo.torch_models import tensor_outputs_of
from candid.training.pieces import assembled

GROUPS, CLASSES, NEW = (12, 8), 3, 4


class NoEye(Eye):
    """Statistics are given, so nothing has to be seen."""

    name, size, sha256, groups = "none", 96, "0" * 64, GROUPS

    def statistics(self, images: Array) -> Array:
        raise AssertionError


def points(seed: int, each: int, classes: int = CLASSES + 1) -> tuple[Array, Array]:
    """Return statistics of classes with correlated features; the last class is new."""
    random = np.random.default_rng(7)
    d = sum(GROUPS)
    means = 1.6 * random.normal(size=(classes, d))
    mixing = np.eye(d) + 0.3 * random.normal(size=(d, d))
    labels = np.repeat(np.arange(classes), each)
    noise = np.random.default_rng([seed, each]).normal(size=(len(labels), d))
    return (means[labels] + noise @ mixing).astype(np.float32), labels


def fitted(posterior: Posterior = "mixture") -> PhotoModel:
    x, y = points(0, 60)
    x, y = x[y < CLASSES], y[y < CLASSES]
    head = fit_head(x, y, CLASSES, GROUPS, logistic=False)
    if posterior == "logistic":
        weight = np.random.default_rng(0).normal(size=(CLASSES, x.shape[1]))
        head = replace(head, logistic=(weight, np.zeros(CLASSES)))
    return PhotoModel.of(replace(head, posterior=posterior), NoEye(), ["a", "b", "c"])


def taught(model: PhotoModel, n: int = NEW, names: tuple[str, ...] = ("new",)) -> PhotoModel:
    x, y = points(1, n * len(names))
    own = np.split(x[y == CLASSES], len(names))
    keys = [np.arange(n)] * len(names)
    return assembled(model, [{"name": name} for name in names], own, keys)[0]


POSTERIORS: list[Posterior] = ["mixture", "second-stage", "logistic"]


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_logits_of_the_known_classes_stay_as_they_are(posterior: Posterior) -> None:
    model, x = fitted(posterior), points(2, 25)[0]
    more = taught(model, names=("new", "newer"))
    assert more.class_names == ("a", "b", "c", "new", "newer")
    before, after = model.outputs_of(x), more.outputs_of(x)
    assert np.array_equal(after.logits[:, :CLASSES], before.logits)
    assert np.array_equal(after.latent, before.latent)  # type: ignore[arg-type]
    assert np.array_equal(more.logits_of(x), after.logits)
    ratio = log_softmax(log_softmax(after.logits.astype(np.float64))[:, :CLASSES])
    assert np.allclose(ratio, log_softmax(before.logits.astype(np.float64)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_taught_classes_are_the_same_in_torch(posterior: Posterior) -> None:
    more, x = taught(fitted(posterior), names=("new", "newer")), points(2, 5)[0].astype(np.float64)
    tensors = tensor_outputs_of(more, torch.from_numpy(x))
    for tensor, expected in zip(tensors, more.outputs_of(x), strict=True):
        assert tensor is not None and expected is not None
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_the_new_class_is_found(posterior: Posterior) -> None:
    x, y = points(3, 50)
    found = taught(fitted(posterior), 8).logits_of(x).argmax(1)
    recalls = [float((found[y == c] == c).mean()) for c in range(CLASSES + 1)]
    assert recalls[CLASSES] > 0.8
    if posterior != "logistic":  # that one has random weights here
        assert min(recalls) > 0.7


def test_a_second_stage_that_is_more_confident_leaves_room_for_the_new_class() -> None:
    """Its logits may lie several times as far apart as those of the first stage."""
    model, (x, y) = fitted("second-stage"), points(3, 50)

    def sharpen(factor: float) -> None:
        model.load_state({"temperatures": model.temperatures * np.array([1, factor])})

    sharpen(6)
    spread = model.known.spread()
    assert spread > 3
    found = taught(model, 8).logits_of(x).argmax(1)
    recalls = [float((found[y == c] == c).mean()) for c in range(CLASSES + 1)]
    assert min(recalls) > 0.7
    sharpen(0.01)
    assert model.known.spread() == 1


def test_the_logit_is_the_documented_formula() -> None:
    model = fitted()
    x, y = points(1, NEW)
    factor = model._weights(np.dtype(np.float64)).factor

    def whitened(features: Array) -> Array:
        return ((features.astype(np.float64) - model.centre) / model.scale) @ factor.T

    z = whitened(x[y == CLASSES])
    m = z.mean(0)
    spread = ((z - m) ** 2).sum() / (NEW - 1)
    rho = math.sqrt(1 - spread / (NEW * m @ m))
    test = whitened(points(2, 5)[0])
    plain = rho * (test @ m - m @ m / 2 + spread / (2 * NEW)) + math.log(1 / CLASSES)
    expected = float(model.temperatures[0]) * plain
    assert 0.1 < rho < 1
    logits = taught(model).logits_of(points(2, 5)[0].astype(np.float64))[:, CLASSES]
    assert np.allclose(logits, expected, rtol=0, atol=1e-4)


def test_the_correction_removes_the_bias() -> None:
    """With n photos the mean of z . m - |m|^2 / 2 + D_e / 2n over draws is that of the true mean."""
    model = fitted()
    x, y = points(4, 4000)
    new = x[y == CLASSES]
    z = model.fitted_part(new.astype(np.float64)).z
    true = z.mean(0)
    wanted = (true @ true) / 2
    found, plugged = [], []
    for draw in np.split(z[:3990], 798):
        m = draw.mean(0)
        spread = ((draw - m) ** 2).sum() / 4
        plugged.append(true @ m - m @ m / 2)
        found.append(plugged[-1] + spread / 10)
    bias = np.mean(plugged) - wanted
    corrected = np.stack(found)
    error = corrected.std(ddof=1) / len(corrected) ** 0.5
    assert bias < -1.5
    assert abs(corrected.mean() - wanted) < 4 * error


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_the_density_is_that_of_the_mixture(posterior: Posterior) -> None:
    more = taught(fitted(posterior), 8)
    x = points(5, 6)[0].astype(np.float64)
    found = more.outputs_of(x)
    assert found.log_density_terms is not None and found.latent is not None
    means, log_priors = more.geometry.means(), more.geometry.log_priors
    logits = found.latent @ means.T - 0.5 * (means**2).sum(1) + log_priors
    gauss = -0.5 * (found.latent**2).sum(1) - 0.5 * x.shape[1] * math.log(2 * math.pi)
    expected = logsumexp(logits) + gauss + found.log_density_terms[:, 2]
    assert np.allclose(found.log_density_terms.sum(1), expected, rtol=0, atol=1e-6)
    assert abs(float(np.exp(more.log_priors).sum()) - 1) < 1e-6


def test_photos_of_the_new_class_are_no_longer_novel() -> None:
    model = fitted()
    more = taught(model, 8)
    x, y = points(6, 60)
    before, after = model.outputs_of(x).novelty, more.outputs_of(x).novelty
    assert before is not None and after is not None
    new = y == CLASSES
    assert (after <= before + 1e-4).all()  # more classes: nothing is farther away
    assert (after[new] < before[new] - 1).mean() > 0.9
    far = x[new] + 30 * np.sign(x[new])  # beyond the new class is not the new class
    assert (more.outputs_of(far).novelty[:, 2] > after[:, 2].max()).all()  # type: ignore[index]


@pytest.mark.parametrize("posterior", ["mixture", "second-stage"])
def test_logits_stay_linear(posterior: Posterior) -> None:
    more = taught(fitted(posterior))
    weights, bias = more.linear_logits()
    x = points(7, 4)[0].astype(np.float64)
    assert np.allclose(x @ weights.T + bias, more.logits_of(x), rtol=0, atol=1e-9)


def test_logits_of_a_logistic_posterior_are_not_linear() -> None:
    with pytest.raises(CandidError, match="logistic posterior are not linear"):
        taught(fitted("logistic")).linear_logits()


def test_photos_that_point_nowhere_say_nothing() -> None:
    model = fitted()
    z = np.random.default_rng(0).normal(size=(5, sum(GROUPS)))
    z = np.concatenate((z, -z))  # the mean is zero
    found = TaughtClasses.of([z], model.known.span)
    assert np.array_equal(found.weights, np.zeros_like(found.weights))
    assert np.allclose(found.constants, -math.log(CLASSES))
