"""Classes for a plane are picked by how well they are separated."""

import numpy as np

from experiments.planes import picked


def test_of_classes_that_look_alike_one_is_picked() -> None:
    """Six classes in three pairs: images of a pair share their logits but for noise."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(6), 200)
    logits = random.standard_normal((1200, 6)) + 4.0 * (labels[:, None] // 2 == np.arange(6) // 2)
    chosen = picked(logits, labels, 3)
    assert [y // 2 for y in chosen] == [0, 1, 2]
    assert picked(logits, labels, 6) == list(range(6))
    among = logits[np.isin(labels, chosen)][:, chosen]
    assert (among.argmax(1) == np.repeat(np.arange(3), 200)).mean() > 0.98
