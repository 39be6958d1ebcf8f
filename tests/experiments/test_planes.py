"""Classes for a plane are picked by how well they are separated; the page has what was measured."""

import json

import numpy as np

from experiments.planes import FIGURES, IMAGES, PAGE, RECORD, picked, planes_table
from experiments.tables import filled


def test_the_page_has_the_recorded_planes_and_their_figures() -> None:
    planes = json.loads(RECORD.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, {"planes": planes_table(planes)}) == page
    assert planes
    for figure in (FIGURES[name] for name in planes):
        assert (IMAGES / figure).is_file() and f"(images/{figure})" in page


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
