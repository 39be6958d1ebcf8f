from pathlib import Path

import pytest

from candid.data.datasets import Dataset, open_dataset
from tests.data.shard_helpers import write_shards


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def data(folder: Path) -> Dataset:
    return open_dataset(str(folder))
