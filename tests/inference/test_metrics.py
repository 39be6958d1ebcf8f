import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, top_k_accuracy_score

from candid._support.errors import CandidError
from candid.inference.metrics import accuracy, bits_per_dimension, cross_entropy, top_k_accuracy


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
