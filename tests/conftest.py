import os
from pathlib import Path

import pytest
import torch

from tests.helpers import SHARED

torch.set_num_threads(1)


LONG = (
    "training/test_processes.py",
    "cli/test_demo.py",
    "flow/test_classifier.py",
    "test_benchmarks.py",
    "test_imagenet.py",
)
"""They come first: at the end of a run the other process would wait for them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def shared_file(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not in {os.fspath(SHARED)} (set CANDID_SHARED to the folder that has it)")
    return path


@pytest.fixture(scope="session")
def released_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import gzip
    import shutil

    target = tmp_path_factory.mktemp("released") / "released_tiny.pt"
    with gzip.open(shared_file("reference/released_tiny.pt.gz")) as packed, target.open("wb") as plain:
        shutil.copyfileobj(packed, plain)
    return target


@pytest.fixture(scope="session")
def released_expected() -> Path:
    return shared_file("reference/released_tiny_expected.npz")


@pytest.fixture(scope="session")
def imagenet_photos() -> Path:
    return shared_file("data/imagenet-sample-100.tar")
