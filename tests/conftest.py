import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.helpers import SHARED
from tests.photo_models import PhotoRun, train_photo_model

torch.set_num_threads(1)

settings.register_profile(
    "candid", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("candid")  # nothing depends on chance or on the speed of the machine

LONG = (
    "training/test_processes.py",
    "cli/test_demo.py",
    "flow/test_classifier.py",
    "test_benchmarks.py",
    "test_imagenet.py",
)
"""They come first: at the end of a run the other process would wait for them."""


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests and the processes that they start a cache of their own instead of the user's."""
    folder = tempfile.TemporaryDirectory(prefix="candid-cache-")
    config.add_cleanup(folder.cleanup)
    os.environ["CANDID_CACHE"] = folder.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def photo_run(tmp_path_factory: pytest.TempPathFactory) -> PhotoRun:
    """A tiny photo model, trained once; tests leave it as it is."""
    return train_photo_model(tmp_path_factory.mktemp("photo-run"))


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
