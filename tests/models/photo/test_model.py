import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import candid
from candid._support.errors import CandidError
from candid._support.numbers import Array, logsumexp, softmax
from candid.models.photo.eye import Eye
from candid.models.photo.head import fit_head
from candid.models.photo.model import PhotoModel
from candid.models.photo.torch_eyes import ModuleEye
from candid.models.photo.torch_models import tensor_outputs_of
from tests.models.photo.test_head import CLASSES, GROUPS, clouds
from tests.photo_models import PhotoRun


class NoEye(Eye):
    """An eye of twelve numbers, for heads on given features."""

    name, size, sha256, groups = "none", 8, "0", GROUPS

    def statistics(self, images: Array) -> Array:
        raise AssertionError


def model_of(posterior: str, seed: int = 0) -> tuple[PhotoModel, Array, Array]:
    """Return a model, and features in float64, which it computes in."""
    features, labels = clouds(40, spread=1.3, seed=seed)
    head = fit_head(features, labels, CLASSES, GROUPS)
    random = np.random.default_rng(0)
    weights = (random.normal(size=(CLASSES, sum(GROUPS))), random.normal(size=CLASSES))
    chosen = {"posterior": posterior, "logistic": weights if posterior == "logistic" else None}
    model = PhotoModel.of(type(head)(**{**vars(head), **chosen}), NoEye(), ("a", "b", "c"))
    features, labels = clouds(9, seed=4)
    return model, features.astype(np.float64), labels


@pytest.mark.parametrize("posterior", ["mixture", "second-stage", "logistic"])
def test_logits_are_linear_in_the_statistics(posterior: str) -> None:
    model, features, _ = model_of(posterior)
    weight, bias = model.linear_logits()
    expected = features @ weight.T + bias
    np.testing.assert_allclose(model.outputs_of(features).logits, expected, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(model.logits_of(features), expected, rtol=1e-7, atol=1e-7)
    single = model.outputs_of(features.astype(np.float32))
    assert single.logits.dtype == single.novelty.dtype == np.float32  # type: ignore[union-attr]
    np.testing.assert_allclose(single.logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("posterior", ["mixture", "second-stage", "logistic"])
def test_it_says_the_same_in_torch(posterior: str) -> None:
    model, features, _ = model_of(posterior)
    tensors = tensor_outputs_of(model, torch.from_numpy(features))
    for tensor, expected in zip(tensors, model.outputs_of(features), strict=True):
        assert tensor is not None and expected is not None
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-9, atol=1e-9)


def test_photos_that_hardly_differ_are_refused() -> None:
    """Their whitening is beyond the range of half precision."""
    features, labels = clouds(12)
    means = np.stack([features[labels == y].mean(0) for y in range(CLASSES)]).astype(np.float64)

    def model(spread: float) -> PhotoModel:
        head = fit_head(means[labels] + spread * features, labels, CLASSES, GROUPS, logistic=False)
        return PhotoModel.of(head, NoEye(), ("a", "b", "c"))

    assert np.isfinite(model(1e-4).logits_of(features)).all()
    with pytest.raises(CandidError, match="look almost the same to the eye"):
        model(1e-6)


@pytest.mark.parametrize("posterior", ["mixture", "second-stage", "logistic"])
def test_the_latent_is_invertible(posterior: str) -> None:
    model, features, _ = model_of(posterior)
    latent = model.latent_of(features)
    np.testing.assert_allclose(model.invert(latent), features, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("posterior", ["mixture", "second-stage"])
def test_the_mixture_explains_posteriors_and_density(posterior: str) -> None:
    """Unit Gaussians around the means in latent space, and the Jacobian of the map by autograd."""
    model, x, _ = model_of(posterior)
    outputs = model.outputs_of(x)
    assert outputs.latent is not None and outputs.log_density_terms is not None
    means, log_priors = model.geometry.means(), model.geometry.log_priors
    squares = ((outputs.latent[:, None] - means) ** 2).sum(2)
    joint = -0.5 * squares - 0.5 * x.shape[1] * math.log(2 * math.pi) + log_priors
    np.testing.assert_allclose(softmax(joint), softmax(outputs.logits), rtol=1e-7, atol=1e-7)

    def latent(row: torch.Tensor) -> torch.Tensor:
        found = tensor_outputs_of(model, row[None]).latent
        assert found is not None
        return found[0]

    jacobian = torch.autograd.functional.jacobian(latent, torch.from_numpy(x[0]))
    log_det = float(torch.linalg.slogdet(jacobian)[1])
    found = outputs.log_density_terms.sum(1)
    np.testing.assert_allclose(found, logsumexp(joint) + log_det, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("classes", [None, np.array([2, 0])])
def test_the_geometry_is_that_of_the_means(classes: Array | None) -> None:
    geometry = model_of("mixture")[0].geometry
    means = geometry.means(classes)
    assert means.dtype == np.float64 and not geometry.planar
    order = np.arange(CLASSES) if classes is None else classes
    expected = np.linalg.norm(means[:, None] - means, axis=2)
    np.testing.assert_allclose(geometry.distances()[np.ix_(order, order)], expected, rtol=1e-7, atol=1e-7)
    assert np.exp(geometry.log_priors).sum() == pytest.approx(1)


def test_loaded_weights_count_after_a_pass_with_others() -> None:
    (used, features, _), (other, _, _) = model_of("mixture"), model_of("mixture", seed=3)
    used.outputs_of(features)
    used.load_state(other.state())
    for own, expected in zip(used.outputs_of(features), other.outputs_of(features), strict=True):
        assert own is not None and expected is not None and np.array_equal(own, expected)


def test_gradients_after_a_pass_without_them() -> None:
    model, features, _ = model_of("mixture")
    x = torch.from_numpy(features)
    with torch.inference_mode():
        tensor_outputs_of(model, x)
    x.requires_grad_()
    tensor_outputs_of(model, x).logits[:, 0].sum().backward()
    assert x.grad is not None
    np.testing.assert_allclose(x.grad, np.tile(model.linear_logits()[0][:1], (len(x), 1)), rtol=1e-7)


@pytest.mark.parametrize("posterior", ["mixture", "second-stage", "logistic"])
def test_statistics_may_be_on_another_device(posterior: str) -> None:
    model, features, _ = model_of(posterior)
    model.outputs_of(features)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, sum(GROUPS), dtype=torch.float64, device="cuda")
        found = tensor_outputs_of(model, x)
    assert {each.device.type for each in found if each is not None} == {"cuda"}


def test_new_photos_have_unit_variance_where_classes_do_not_differ() -> None:
    model, _, _ = model_of("mixture")
    new, _ = clouds(400, spread=1.3, seed=7)
    latent, means = model.latent_of(new.astype(np.float64)), model.geometry.means()
    basis = np.linalg.qr((means[1:] - means[0]).T)[0]
    rest = latent - latent @ basis @ basis.T
    assert (rest**2).sum(1).mean() / (sum(GROUPS) - CLASSES + 1) == pytest.approx(1, abs=0.15)


def test_saved_and_loaded_it_says_the_same(photo_run: PhotoRun, tmp_path: Path) -> None:
    model = candid.load(photo_run.model)
    assert isinstance(model, PhotoModel)
    candid.save(model, tmp_path / "copy")
    copy = candid.load(tmp_path / "copy")
    features = np.random.default_rng(0).random((4, model.config.dimensions), np.float32)
    for one, other in zip(model.outputs_of(features), copy.outputs_of(features), strict=True):
        assert one is not None and other is not None and np.array_equal(one, other)
    assert copy.fingerprint() == model.fingerprint()
    assert sum(file.stat().st_size for file in (tmp_path / "copy").iterdir()) < 6e6


def test_gradients_work_after_inference_mode() -> None:
    model, features, _ = model_of("second-stage")
    with torch.inference_mode():
        tensor_outputs_of(model, torch.from_numpy(features))
    x = torch.from_numpy(features).requires_grad_()
    tensor_outputs_of(model, x).logits[:, 0].sum().backward()
    weight, _ = model.linear_logits()
    assert x.grad is not None
    np.testing.assert_allclose(x.grad, np.tile(weight[0], (len(x), 1)), rtol=1e-7)


def test_a_model_with_too_few_held_out_photos_is_saved_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, _, _ = model_of("mixture")
    model.held_out = {"training_keys": np.arange(6)}
    candid.save(model, tmp_path / "model")
    assert not caplog.records
    stored = candid.load(tmp_path / "model").held_out
    assert np.array_equal(stored["training_keys"], np.arange(6))


def test_an_eye_with_other_weights_is_refused(photo_run: PhotoRun) -> None:
    model = candid.load(photo_run.model)
    other = PhotoModel(type(model.config)(**{**vars(model.config), "eye_sha256": "0" * 64}))
    with pytest.raises(CandidError, match="has other weights than the one that this model was trained with"):
        other.eye  # noqa: B018


def test_any_module_is_an_eye() -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 6, 3))
    eye = ModuleEye(network, ["0", "2"], size=16)
    images = np.random.default_rng(0).random((30, 3, 16, 16), np.float32)
    images[::2] *= 0.5
    labels = np.arange(30) % 2
    model = PhotoModel.of(fit_head(eye.statistics(images), labels, 2, eye.groups), eye, ("dark", "light"))
    assert (model.logits(images).argmax(1) == labels).mean() > 0.9
