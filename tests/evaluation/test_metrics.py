import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss

from candid.evaluation import accuracy, bits_per_dimension, cross_entropy, expected_calibration_error


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


def plain_calibration_error(confidences: list[float], right: list[bool], bins: int) -> float:
    """As Guo et al. (2017) define it."""
    error = 0.0
    for k in range(bins):
        members = [i for i, c in enumerate(confidences) if k / bins < c <= (k + 1) / bins]
        if members:
            confidence = sum(confidences[i] for i in members) / len(members)
            share_right = sum(right[i] for i in members) / len(members)
            error += len(members) / len(confidences) * abs(confidence - share_right)
    return error


@st.composite
def predictions(draw: st.DrawFn) -> tuple[int, int, list[float], list[bool]]:
    """Classes, bins, and for each sample the highest probability and whether it is the right class's."""
    classes, bins = draw(st.integers(2, 5)), draw(st.integers(1, 40))
    edges = [k / bins for k in range(1, bins + 1) if k / bins > 1 / classes]
    just_above = [math.nextafter(edge, 2) for edge in edges if edge < 1]
    usual = st.floats(1 / classes, 1, exclude_min=True)
    confidence = st.sampled_from([1.0, *edges, *just_above]) | usual
    confidences = draw(st.lists(confidence, min_size=1, max_size=12))
    right = draw(st.lists(st.booleans(), min_size=len(confidences), max_size=len(confidences)))
    return classes, bins, confidences, right


@given(predictions())
@example((2, 15, [1.0], [True]))
@example((2, 15, [1.0], [False]))
@example((2, 25, [14 / 25, 0.57], [True, False]))
@example((2, 15, [math.nextafter(11 / 15, 2), 0.75, 11 / 15], [True, True, False]))
def test_calibration_error_is_the_plain_loops(drawn: tuple[int, int, list[float], list[bool]]) -> None:
    classes, bins, confidences, right = drawn
    highest = torch.tensor(confidences, dtype=torch.float64)[:, None]
    rest = ((1 - highest) / (classes - 1)).expand(-1, classes - 1)
    labels = torch.tensor([0 if r else 1 for r in right])
    found = expected_calibration_error(torch.cat((highest, rest), 1), labels, bins)
    assert found == pytest.approx(plain_calibration_error(confidences, right, bins), abs=1e-12)


def test_no_confidence_falls_out_of_the_bins() -> None:
    above_one = torch.tensor([[1 + 1e-7, 0.0]])  # as rounding makes it
    assert expected_calibration_error(above_one, torch.tensor([1])) == pytest.approx(1)
