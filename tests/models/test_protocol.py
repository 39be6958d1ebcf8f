"""What all models share: abilities, checks of images, and imports that load a network when it is needed."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from candid import CandidError, GenerativeClassifier, ResNet, ResNetConfig
from candid._support.numbers import Array
from candid.models.protocol import Outputs, can, check_batch, require
from tests.helpers import small_classifier

RESNET = ResNetConfig(3, 16, 16, classes=3, blocks=(1, 1), widths=(4, 4), stem="3x3")
HEAVY = ("torch", "onnxruntime", "sklearn", "scipy", "candid.models.resnet", "candid.models.flow.classifier")


def loaded_by(code: str) -> set[str]:
    """Return which of :data:`HEAVY` a new process has loaded after it ran ``code``."""
    script = (
        f"{code}\nimport json, sys\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("module", ["protocol", "checkpoint", "zoo", "info", "flow.config"])
def test_what_all_models_share_loads_no_network(module: str) -> None:
    assert not loaded_by(f"import candid.models.{module}")


@pytest.mark.parametrize("name", ["everyday", "waste"])
def test_a_model_of_photos_loads_no_network_in_torch(name: str) -> None:
    loading = f"import candid; model = candid.load({name!r}); model.fingerprint(); model.can"
    assert not loaded_by(loading) & {"torch", "candid.models.resnet", "candid.models.flow.classifier"}


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import numpy as np
import candid
model = candid.load("waste")
classes = len(model.class_names)
assert model.outputs(np.full((2, *model.image_shape), 0.5, np.float32)).logits.shape == (2, classes)
assert model.geometry.distances().shape == (classes, classes)
for name in ("cifar10-beta1", "cifar10-resnet"):
    try:
        candid.load(name)
    except candid.CandidError as error:
        print(error)
"""


def test_without_torch_models_of_photos_work_and_networks_say_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "A GenerativeClassifier needs torch: pip install 'candid-vision[paper]'.",
        "A ResNet needs torch: pip install 'candid-vision[paper]'.",
    ]


@pytest.mark.parametrize("name", ["cifar10-beta1", "cifar10-resnet"])
def test_a_network_loads_its_own_kind_alone(name: str) -> None:
    kinds = loaded_by(f"import candid; assert candid.load({name!r}).kind") - {"torch", "scipy"}
    assert kinds == {"candid.models.resnet" if "resnet" in name else "candid.models.flow.classifier"}


def test_an_eye_from_a_bundled_resnet_does_not_depend_on_earlier_imports() -> None:
    opened = "from candid.models.photo.opening import open_eye; assert open_eye('cifar10-resnet').name"
    assert "candid.models.resnet" in loaded_by(opened)


def test_the_outputs_of_one_image_are_a_part_of_those_of_the_batch() -> None:
    terms = np.arange(6.0).reshape(3, 2)
    outputs = Outputs(np.eye(3), np.ones((3, 4)), terms, None)
    alone = outputs.at(1)
    assert alone.logits.tolist() == [[0, 1, 0]] and alone.features.shape == (1, 4)
    assert alone.log_density_terms is not None and alone.log_density_terms.tolist() == [[2, 3]]
    assert alone.latent is None and alone.novelty is None


@pytest.mark.parametrize("make", [small_classifier, lambda: ResNet(RESNET).eval()])
def test_arrays_and_tensors_give_the_same(make: type[GenerativeClassifier]) -> None:
    model = make()  # type: ignore[call-arg]
    images = np.random.default_rng(0).random((4, 3, 16, 16), np.float32)
    outputs, tensors = model.outputs(images), model.tensor_outputs(torch.from_numpy(images))
    for part, tensor in zip(outputs, tensors, strict=True):
        assert (part is None) == (tensor is None)
        if part is not None and tensor is not None:
            assert isinstance(part, np.ndarray) and np.array_equal(part, tensor.detach().numpy())
    state = model.state()
    assert list(state) == list(model.state_dict()) == list(model.layout())
    for name, tensor in model.state_dict().items():
        assert np.array_equal(state[name], tensor.numpy()) and state[name].flags.c_contiguous, name
        assert model.layout()[name] == (state[name].shape, state[name].dtype.kind == "f")
    assert model.size == sum(p.numel() for p in model.parameters())
    assert model.ready() is model and model.log_priors.shape == (3,)


def test_the_geometry_of_a_pixel_model_is_that_of_its_mixture() -> None:
    model = small_classifier()
    geometry, mixture = model.geometry, model.mixture.double_copy()
    assert np.array_equal(geometry.means(), mixture.means(torch.arange(3)).numpy())
    assert np.array_equal(geometry.means(np.array([2])), mixture.means(torch.tensor([2])).numpy())
    assert np.array_equal(geometry.distances(), mixture.pairwise_distances().numpy())
    assert not geometry.planar and np.array_equal(geometry.log_priors, model.log_priors)


def test_an_ability_that_is_missing_gives_one_sentence() -> None:
    pixels, resnet = small_classifier(), ResNet(RESNET)
    assert can(pixels, "invert") and not can(resnet, "invert") and not can(torch.nn.Linear(1, 1), "invert")
    assert require(pixels, "geometry", "Heatmaps") is pixels
    for model, ability, purpose, sentence in (
        (
            resnet,
            "invert",
            "A counterfactual",
            "A counterfactual can't come from a ResNet, which has no class",
        ),
        (resnet, "geometry", "Heatmaps", "Heatmaps can't come from a ResNet.*use a generative classifier"),
        (pixels, "teach", "learn new classes", "Only a photo model can learn new classes.*'generative'"),
        (torch.nn.Linear(1, 1), "geometry", "Heatmaps", "Heatmaps can't come from a Linear"),
    ):
        with pytest.raises(CandidError, match=sentence):
            require(model, ability, purpose)  # type: ignore[arg-type]
    with pytest.raises(CandidError, match="Class means can't come from a ResNet"):
        resnet.geometry  # noqa: B018


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        (np.zeros((2, 3, 16, 16), np.uint8), "float arrays in .0, 1., not uint8: divide 8-bit ones by 255"),
        ([[0.5]], "float arrays in .0, 1., not list"),
        (np.zeros((3, 16, 16)), r"give a single 3 x 16 x 16 image as x\[None\]"),
        (np.zeros((1, 3, 9, 16)), "3 x 16 x 16 images .*, not an array of 1 x 3 x 9 x 16: resize"),
        (np.zeros((0, 3, 16, 16)), "not an array of 0 x 3 x 16 x 16"),
        (np.zeros(()), "not an array of no dimensions"),
        (np.full((1, 3, 16, 16), 255.0), "reach 255 where white is 1"),
    ],
)
def test_images_that_are_no_batch_of_floats_are_refused(images: Array, sentence: str) -> None:
    with pytest.raises(CandidError, match=sentence):
        check_batch(images, (3, 16, 16))
    check_batch(np.ones((1, 3, 16, 16), np.float32), (3, 16, 16))
