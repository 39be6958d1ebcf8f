import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import entr
from sklearn.metrics import accuracy_score, log_loss, top_k_accuracy_score

from candid._support.errors import CandidError
from candid._support.numbers import Array, softmax
from candid.inference import metrics
from candid.inference.metrics import (
    accuracy,
    bits_per_dimension,
    cross_entropy,
    fit_temperature,
    label_ranks,
    mean_entropy,
    measured_distances,
    measured_uncertainty,
)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("classes", [2, 7])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_accuracy_and_cross_entropy_are_sklearns(
    classes: int, spread: float, random: np.random.Generator
) -> None:
    logits = (spread * random.normal(size=(200, classes))).astype(np.float32)
    labels = random.integers(classes, size=200)
    assert accuracy(logits, labels) == pytest.approx(accuracy_score(labels, logits.argmax(1)), rel=1e-12)
    truth = log_loss(labels, softmax(logits.astype(np.float64)), labels=range(classes))
    assert cross_entropy(logits, labels) == pytest.approx(truth, rel=1e-9)


def test_cross_entropy_of_a_sure_mistake_is_finite() -> None:
    """Logits of a flow are large and negative: the probability is 0 in floats, its logarithm is not."""
    logits = np.array([[-90_000.0, -94_000.0]], np.float32)
    assert cross_entropy(logits, np.array([1])) == 4000


def test_bits_per_dimension_by_hand() -> None:
    log_density = math.log(2) * np.array([-12.0, -24.0])
    assert bits_per_dimension(log_density, dimensions=6) == pytest.approx(3, rel=1e-12)


@st.composite
def scores_and_labels(draw: st.DrawFn) -> tuple[Array, Array]:
    """Of 3 to 6 classes; small whole numbers make ties."""
    images, classes = draw(st.integers(1, 8)), draw(st.integers(3, 6))
    score = st.integers(-2, 2).map(float) | st.floats(-1e6, 1e6)
    rows = draw(
        st.lists(st.lists(score, min_size=classes, max_size=classes), min_size=images, max_size=images)
    )
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=images, max_size=images))
    return np.array(rows), np.array(labels)


@settings(deadline=None, max_examples=60)
@given(scores_and_labels())
def test_ranks_of_labels_give_sklearns_top_k_accuracy(drawn: tuple[Array, Array]) -> None:
    """Of equal scores scikit-learn takes the last class first, so it sees the classes in reverse."""
    scores, labels = drawn
    classes, ranks = scores.shape[1], label_ranks(scores, labels)
    for k in range(1, classes):
        truth = top_k_accuracy_score(classes - 1 - labels, scores[:, ::-1], k=k, labels=range(classes))
        assert (ranks < k).mean() == pytest.approx(truth, abs=1e-12)
    assert (ranks < 1).mean() == accuracy(scores, labels)
    assert (ranks < classes).all()


def test_labels_of_equal_scores_are_not_all_first() -> None:
    assert label_ranks(np.zeros((5, 5)), np.arange(5)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        (np.array([[0.0, math.nan]]), np.array([1]), "NaN"),
        (np.zeros((0, 3)), np.zeros(0, np.int64), "at least one image"),
        (np.zeros((2, 3)), np.array([0, 3]), "Label 3 is none of the 3 classes"),
        (np.zeros((2, 3)), np.array([0.0, 1.0]), "int64"),
        (np.zeros((2, 3)), np.array([0]), "(images, classes)"),
    ],
)
def test_ranks_of_labels_refuse(scores: Array, labels: Array, message: str) -> None:
    with pytest.raises(CandidError) as caught:
        label_ranks(scores, labels)
    assert message in str(caught.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_entropy_is_scipys(dtype: type, random: np.random.Generator) -> None:
    posterior: Array = softmax(9 * random.normal(size=(50, 6))).astype(dtype)
    posterior[::5] = np.eye(6, dtype=dtype)[2]
    assert mean_entropy(posterior) == pytest.approx(entr(posterior).sum(1).mean(), rel=1e-6)


def calibrated(images: int, classes: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Logits, and labels drawn from their softmax."""
    logits = 2 * random.normal(size=(images, classes))
    return logits, (softmax(logits).cumsum(1) < random.random((images, 1))).sum(1)


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("factor", [0.05, 1, 30])
def test_temperature_is_the_optimum(
    classes: int, factor: float, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, labels = calibrated(300, classes, random)
    logits = factor * logits - 90_000  # as a flow's
    monkeypatch.setattr(metrics, "_AT_ONCE", 1000)

    def loss(log_t: float) -> float:
        return cross_entropy(logits / math.exp(log_t), labels)

    best = minimize_scalar(
        loss, bounds=(math.log(factor) - 2, math.log(factor) + 2), options={"xatol": 1e-10}
    )
    assert fit_temperature(logits, labels) == pytest.approx(math.exp(best.x), rel=1e-6)


def test_temperature_undoes_a_scaling(random: np.random.Generator) -> None:
    logits, labels = calibrated(5000, 5, random)
    once = fit_temperature(logits, labels)
    assert once == pytest.approx(1, abs=0.05)
    assert fit_temperature(3 * logits, labels) == pytest.approx(3 * once, rel=1e-9)


@pytest.mark.parametrize(
    ("logits", "labels", "temperature"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], [0, 1], 1e-3),  # all right: the sharper, the better
        ([[1e6, 0.0], [0.0, 1e6]], [0, 1], 1e-3),
        ([[1.0, 0.0], [0.0, 1.0]], [1, 0], 1e3),  # all wrong: the flatter, the better
        ([[1.0, 0.0], [1.0, 0.0]], [0, 1], 1e3),
        ([[2.0, 2.0], [-7.0, -7.0]], [0, 1], 1),  # makes no difference
        ([[5.0]], [0], 1),
    ],
)
def test_temperature_has_bounds(logits: list[list[float]], labels: list[int], temperature: float) -> None:
    assert fit_temperature(np.array(logits), np.array(labels)) == temperature


@pytest.mark.parametrize("factor", [0.05, 1, 30])
def test_temperature_is_the_one_of_a_bisection(factor: float, random: np.random.Generator) -> None:
    logits, labels = calibrated(300, 5, random)
    d = factor * (logits - np.take_along_axis(logits, labels[:, None], 1))
    low, high = 1e-3, 1e3  # of 1 / T
    while high / low > 1 + 1e-12:
        middle = (low * high) ** 0.5
        falls = (softmax(middle * d) * d).sum() < 0
        low, high = (middle, high) if falls else (low, middle)
    assert fit_temperature(factor * logits, labels) == pytest.approx((low * high) ** -0.5, rel=1e-11)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        ([[0.0, math.nan]], [0], "NaN or infinite"),
        ([[0.0, -math.inf]], [0], "NaN or infinite"),
        ([[1.0, 0.0], [0.0, 1.0]], [1, 2], "Label 2"),
    ],
)
def test_temperature_refuses_bad_logits(logits: list[list[float]], labels: list[int], message: str) -> None:
    with pytest.raises(CandidError, match=message):
        fit_temperature(np.array(logits), np.array(labels))


@settings(deadline=None, max_examples=40)
@given(scores_and_labels())
def test_measured_uncertainty_is_the_mean_over_images_of_the_two_classes(
    drawn: tuple[Array, Array],
) -> None:
    scores, labels = drawn
    posterior = softmax(scores)
    found = measured_uncertainty(posterior, labels)
    assert np.array_equal(np.isnan(found), np.isnan(found.T))
    for i in range(scores.shape[1]):
        for j in range(scores.shape[1]):
            both = posterior[(labels == i) | (labels == j)][:, [i, j]]
            parts = [float(row.min() / row.sum()) if row.sum() else 0.0 for row in both]
            if not parts:
                assert np.isnan(found[i, j])
            elif i != j:
                assert float(found[i, j]) == pytest.approx(sum(parts) / len(parts), abs=1e-12)
    unlabelled = np.append(labels, -1)
    again = measured_uncertainty(np.concatenate((posterior, posterior[:1])), unlabelled)
    assert np.array_equal(again, found, equal_nan=True)


@pytest.mark.parametrize("priors", [None, (0.2, 0.3, 0.5)])
def test_measured_distances_are_those_of_class_averages_along_the_line_of_the_means(
    priors: tuple[float, ...] | None,
) -> None:
    rng = np.random.default_rng(3)
    means = rng.normal(size=(3, 6))
    averages = means + rng.normal(size=(3, 6))
    labels = rng.integers(0, 3, 500)
    z = averages[labels] + rng.normal(size=(500, 6))
    logits = z @ means.T - 0.5 * np.square(means).sum(1) + np.log(priors or [1 / 3] * 3)
    distances = np.linalg.norm(means[:, None] - means, axis=2)
    found = measured_distances(logits, labels, distances)
    for i in range(3):
        for j in range(3):
            if i != j:
                axis = (means[i] - means[j]) / distances[i, j]
                truth = (z[labels == i].mean(0) - z[labels == j].mean(0)) @ axis
                assert found[i, j] == pytest.approx(max(truth, 0))
    assert not found.diagonal().any()
    # where latents follow the mixture, it is the distance of the means
    own = means[labels] + rng.normal(size=(500, 6)) / 100
    logits = own @ means.T - 0.5 * np.square(means).sum(1)
    np.testing.assert_allclose(measured_distances(logits, labels, distances), distances, atol=0.01)
    few = measured_distances(logits[labels < 2], labels[labels < 2], distances)
    assert np.isnan(few[2, :2]).all() and few[0, 1] == pytest.approx(distances[0, 1], abs=0.01)
    assert not measured_distances(np.zeros((3, 3)), np.arange(3), np.zeros((3, 3))).any()
