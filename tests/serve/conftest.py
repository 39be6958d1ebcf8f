from collections.abc import Iterator

import pytest

import candid
from candid import GenerativeClassifier
from candid.serve.service import Service
from tests.photo_models import PhotoRun, train_photo_model
from tests.serve.helpers import Running, calibrated_model, running


@pytest.fixture(scope="package")
def model() -> GenerativeClassifier:
    return calibrated_model()


@pytest.fixture(scope="package")
def saved(model: GenerativeClassifier, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(candid.save(model, tmp_path_factory.mktemp("serve") / "runs" / "mine" / "model" / "best"))


@pytest.fixture(scope="package")
def service(model: GenerativeClassifier) -> Service:
    return Service(model, "small")


@pytest.fixture(scope="package")
def server(service: Service) -> Iterator[Running]:
    with running(service) as found:
        yield found


@pytest.fixture(scope="package")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> PhotoRun:
    """A photo model with enough held-out photos to call one novel."""
    return train_photo_model(tmp_path_factory.mktemp("shapes"), photos=24)


@pytest.fixture(scope="package")
def trained(shapes: PhotoRun) -> Service:
    return Service.load(shapes.model, "shapes")
