"""The study of networks on features: its page has the measured numbers, and its measures are right."""

import json
from pathlib import Path

import numpy as np
import pytest

from candid._support.progress import SILENT
from candid.robustness.corruptions import CORRUPTIONS
from candid.training.features import Features
from candid.training.options import VectorOptions
from candid.training.vectors import VectorData
from experiments.features import asked
from experiments.features_measures import Asked, Material, classification, measured
from experiments.features_tables import RESULTS, WORDS, filled_page


def drawn(rows: int, seed: int, shift: float = 0.0) -> Features:
    random = np.random.default_rng(seed)
    labels = np.arange(rows) % 3
    values = (3 * np.eye(3, 6)[labels] + random.normal(size=(rows, 6)) + shift).astype(np.float32)
    return Features(tuple(map(str, range(rows))), labels, values, np.arange(rows))


@pytest.fixture
def material(tmp_path: Path) -> Material:
    parts = {"train": drawn(150, 0), "val": drawn(150, 1), "test": drawn(90, 2)}
    clean = parts["test"].values[::3]
    corrupted = np.stack([clean, clean + 20] * (len(CORRUPTIONS) // 2) + [clean])
    options = VectorOptions(
        data="features.npz", couplings=2, width=8, epochs=20, batch=50, learning_rate=0.02
    )
    far = {"far": drawn(40, 3, shift=20).values}
    return Material(VectorData(parts, ("a", "b", "c"), (6,)), far, corrupted, tmp_path, options)


def test_the_page_has_the_measured_numbers() -> None:
    words = WORDS.read_text(encoding="utf-8")
    assert filled_page(words) == words and RESULTS.is_file()


@pytest.mark.parametrize("beta", [4.0, None])
def test_a_model_is_trained_once_and_measured(material: Material, beta: float | None) -> None:
    one = Asked("hard", beta, 0)
    record = measured(one, material, SILENT)
    json.dumps(record, allow_nan=False)
    assert measured(one, material, SILENT) == record
    assert record["accuracy"] > 0.8
    if beta is None:
        assert record["beta"] == "softmax" and "two-tailed" not in record["detection"]["far"]
        return
    assert record["detection"]["far"]["combined"]["auc"] > 0.99
    areas = record["corruptions"]["combined"]["by_corruption"].values()
    assert np.allclose(list(areas)[::2], 0.5) and min(list(areas)[1::2]) > 0.99
    assert record["corruptions"]["combined"]["auc"] == pytest.approx(np.mean(list(areas)))
    assert -1 <= record["rank_correlation"]["held_out"] <= 1
    assert record["plane"]["accuracy"] > 0.8


def test_errors_of_the_most_confident_half() -> None:
    logits = np.array([[9.0, 0], [8, 0], [1, 0], [0.5, 0]])
    found = classification(logits, np.array([0, 1, 0, 1]))
    assert found["error_of_half"] == 0.5 and found["accuracy"] == 0.5
    assert found["confident"] == 2 and found["wrong"] == 1
    assert classification(logits / 100, np.array([0, 1, 0, 1]))["error_of_half"] == 0.5


def test_the_most_wanted_models_come_first() -> None:
    models = list(asked(3))
    assert len(models) == len(set(models)) == 54
    assert {one.seed for one in models[:18]} == {0}
    assert {one.beta for one in models[18:30]} == {1.0, 16.0, float("inf")}
