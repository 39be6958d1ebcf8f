import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from sklearn.metrics import accuracy_score, log_loss, top_k_accuracy_score
from torch import Tensor

from candid._support.errors import CandidError
from candid.inference import metrics
from candid.inference.metrics import (
    accuracy,
    bits_per_dimension,
    cross_entropy,
    fit_temperature,
    measured_uncertainty,
    top_k_accuracy,
)


@pytest.mark.parametrize("classes", [2, 7])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_accuracy_and_cross_entropy_are_sklearns(
    classes: int, spread: float, generator: torch.Generator
) -> None:
    logits = spread * torch.randn(200, classes, generator=generator)
    labels = torch.randint(classes, (200,), generator=generator)
    assert accuracy(logits, labels) == pytest.approx(accuracy_score(labels, logits.argmax(1)), rel=1e-12)
    truth = log_loss(labels, logits.double().softmax(1), labels=range(classes))
    assert cross_entropy(logits, labels) == pytest.approx(truth, rel=1e-9)


def test_cross_entropy_of_a_sure_mistake_is_finite() -> None:
    """Logits of a flow are large and negative: the probability is 0 in floats, its logarithm is not."""
    logits = torch.tensor([[-90_000.0, -94_000.0]])
    assert cross_entropy(logits, torch.tensor([1])) == 4000


def test_bits_per_dimension_by_hand() -> None:
    log_density = math.log(2) * torch.tensor([-12.0, -24.0], dtype=torch.float64)
    assert bits_per_dimension(log_density, dimensions=6) == pytest.approx(3, rel=1e-12)


@st.composite
def scores_and_labels(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Of 3 to 6 classes; small whole numbers make ties."""
    images, classes = draw(st.integers(1, 8)), draw(st.integers(3, 6))
    score = st.integers(-2, 2).map(float) | st.floats(-1e6, 1e6)
    rows = draw(
        st.lists(st.lists(score, min_size=classes, max_size=classes), min_size=images, max_size=images)
    )
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=images, max_size=images))
    return torch.tensor(rows, dtype=torch.float64), torch.tensor(labels)


@settings(deadline=None, max_examples=60)
@given(scores_and_labels())
def test_top_k_accuracy_is_sklearns(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Of equal scores scikit-learn takes the last class first, so it sees the classes in reverse."""
    scores, labels = drawn
    classes = scores.shape[1]
    for k in range(1, classes):
        truth = top_k_accuracy_score(
            (classes - 1 - labels).numpy(), scores.flip(1).numpy(), k=k, labels=range(classes)
        )
        assert top_k_accuracy(scores, labels, k) == pytest.approx(truth, abs=1e-12)
    assert top_k_accuracy(scores, labels, 1) == accuracy(scores, labels)
    assert top_k_accuracy(scores, labels, classes) == 1


def test_top_k_accuracy_of_equal_scores_is_not_all_right() -> None:
    assert top_k_accuracy(torch.zeros(5, 5), torch.arange(5), k=2) == 0.4


@pytest.mark.parametrize(
    ("scores", "labels", "k", "message"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 1]), 0, "choose k from 1 to 3"),
        (torch.zeros(2, 3), torch.tensor([0, 1]), 4, "choose k from 1 to 3"),
        (torch.tensor([[0.0, math.nan]]), torch.tensor([1]), 1, "NaN"),
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), 1, "at least one image"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), 1, "Label 3 is none of the 3 classes"),
        (torch.zeros(2, 3), torch.tensor([0.0, 1.0]), 1, "int64"),
        (torch.zeros(2, 3), torch.tensor([0]), 1, "(images, classes)"),
    ],
)
def test_top_k_accuracy_refuses(scores: torch.Tensor, labels: torch.Tensor, k: int, message: str) -> None:
    with pytest.raises(CandidError) as caught:
        top_k_accuracy(scores, labels, k)
    assert message in str(caught.value)


def calibrated(images: int, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits, and labels drawn from their softmax."""
    logits = 2 * torch.randn(images, classes, generator=generator, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("factor", [0.05, 1, 30])
def test_temperature_is_the_optimum(
    classes: int, factor: float, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, labels = calibrated(300, classes, generator)
    logits = factor * logits - 90_000  # as a flow's
    monkeypatch.setattr(metrics, "_AT_ONCE", 1000)

    def loss(log_t: float) -> float:
        return cross_entropy(logits / math.exp(log_t), labels)

    best = minimize_scalar(
        loss, bounds=(math.log(factor) - 2, math.log(factor) + 2), options={"xatol": 1e-10}
    )
    assert fit_temperature(logits, labels) == pytest.approx(math.exp(best.x), rel=1e-6)


def test_temperature_undoes_a_scaling(generator: torch.Generator) -> None:
    logits, labels = calibrated(5000, 5, generator)
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
    assert fit_temperature(torch.tensor(logits), torch.tensor(labels)) == temperature


@pytest.mark.parametrize("factor", [0.05, 1, 30])
def test_temperature_is_the_one_of_a_bisection(factor: float, generator: torch.Generator) -> None:
    logits, labels = calibrated(300, 5, generator)
    d = factor * (logits - logits.gather(1, labels[:, None]))
    low, high = 1e-3, 1e3  # of 1 / T
    while high / low > 1 + 1e-12:
        middle = (low * high) ** 0.5
        falls = ((middle * d).softmax(1) * d).sum() < 0
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
        fit_temperature(torch.tensor(logits), torch.tensor(labels))


@settings(deadline=None, max_examples=40)
@given(scores_and_labels())
def test_measured_uncertainty_is_the_mean_over_images_of_the_two_classes(
    drawn: tuple[torch.Tensor, torch.Tensor],
) -> None:
    scores, labels = drawn
    posterior = scores.softmax(1)
    found = measured_uncertainty(posterior, labels)
    assert torch.equal(found.isnan(), found.T.isnan())
    for i in range(scores.shape[1]):
        for j in range(scores.shape[1]):
            both = posterior[(labels == i) | (labels == j)][:, [i, j]]
            parts = [float(row.min() / row.sum()) if row.sum() else 0.0 for row in both]
            if not parts:
                assert found[i, j].isnan()
            elif i != j:
                assert float(found[i, j]) == pytest.approx(sum(parts) / len(parts), abs=1e-12)
    unlabelled = torch.cat((labels, torch.tensor([-1])))
    more = measured_uncertainty(torch.cat((posterior, posterior[:1])), unlabelled)
    assert torch.equal(more.nan_to_num(9), found.nan_to_num(9))
