from pathlib import Path

import pytest

from tests.training.runs import small_config, train


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generative model of digits with held-out scores, and a ResNet."""
    folder = tmp_path_factory.mktemp("runs")
    train(small_config(epochs=2, holdout=0.3), folder / "own")
    train(small_config(epochs=1, holdout=0.3, baseline=True), folder / "resnet")
    return folder
