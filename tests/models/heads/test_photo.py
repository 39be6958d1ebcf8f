import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import candid
from candid._support.errors import CandidError
from candid.models.eyes.eye import Eye, ModuleEye
from candid.models.heads.closed_form import fit_head
from candid.models.heads.photo import PhotoModel
from tests.models.heads.test_closed_form import CLASSES, GROUPS, clouds
from tests.photo_models import PhotoRun


class NoEye(Eye):
    """An eye of twelve numbers, for heads on given features."""

    name, size, sha256, groups = "none", 8, "0", GROUPS

    def statistics(self, images: Tensor) -> Tensor:
        raise AssertionError


def model_of(posterior: str, seed: int = 0) -> tuple[PhotoModel, Tensor, Tensor]:
    features, labels = clouds(40, spread=1.3, seed=seed)
    head = fit_head(features, labels, CLASSES, GROUPS)
    weights = (torch.randn(CLASSES, sum(GROUPS)).double(), torch.randn(CLASSES).double())
    chosen = {"posterior": posterior, "logistic": weights if posterior == "logistic" else None}
    return PhotoModel.of(type(head)(**{**vars(head), **chosen}), NoEye(), ("a", "b", "c")).double(), *clouds(
        9, seed=4
    )


@pytest.mark.parametrize("posterior", ["mixture", "second-stage", "logistic"])
def test_logits_are_linear_in_the_statistics(posterior: str) -> None:
    model, features, _ = model_of(posterior)
    weight, bias = model.linear_logits()
    expected = features.double() @ weight.T + bias
    torch.testing.assert_close(model.outputs_of(features.double()).logits, expected)
    torch.testing.assert_close(model.logits_of(features.double()), expected)


def test_photos_that_hardly_differ_are_refused() -> None:
    """Their whitening is beyond the range of half precision."""
    features, labels = clouds(12)
    means = torch.stack([features[labels == y].mean(0) for y in range(CLASSES)]).double()

    def model(spread: float) -> PhotoModel:
        head = fit_head(means[labels] + spread * features, labels, CLASSES, GROUPS, logistic=False)
        return PhotoModel.of(head, NoEye(), ("a", "b", "c"))

    assert model(1e-4).logits_of(features).isfinite().all()
    with pytest.raises(CandidError, match="look almost the same to the eye"):
        model(1e-6)


@pytest.mark.parametrize("posterior", ["mixture", "second-stage", "logistic"])
def test_the_latent_is_invertible(posterior: str) -> None:
    model, features, _ = model_of(posterior)
    latent = model.latent_of(features.double())
    torch.testing.assert_close(model.invert(latent), features.double())


@pytest.mark.parametrize("posterior", ["mixture", "second-stage"])
def test_the_mixture_explains_posteriors_and_density(posterior: str) -> None:
    """Unit Gaussians around the means in latent space, and the Jacobian of the map by autograd."""
    model, features, _ = model_of(posterior)
    x = features.double()
    outputs = model.outputs_of(x)
    assert outputs.latent is not None and outputs.log_density_terms is not None
    means, log_priors = model.mixture.prototypes.double(), model.mixture.log_priors.double()
    squares = torch.cdist(outputs.latent, means).square()
    joint = -0.5 * squares - 0.5 * x.shape[1] * math.log(2 * math.pi) + log_priors
    torch.testing.assert_close(joint.softmax(1), outputs.logits.softmax(1))
    jacobian = torch.autograd.functional.jacobian(lambda row: model.latent_of(row[None])[0], x[0])
    log_det = torch.linalg.slogdet(jacobian)[1]
    torch.testing.assert_close(outputs.log_density_terms.sum(1), joint.logsumexp(1) + log_det)


def test_loaded_weights_count_after_a_pass_with_others() -> None:
    (used, features, _), (other, _, _) = model_of("mixture"), model_of("mixture", seed=3)
    used.outputs_of(features.double())
    used.load_state_dict(other.state_dict())
    for own, expected in zip(
        used.outputs_of(features.double()), other.outputs_of(features.double()), strict=True
    ):
        assert own is not None and expected is not None and torch.equal(own, expected)


def test_gradients_after_a_pass_without_them() -> None:
    model, features, _ = model_of("mixture")
    with torch.inference_mode():
        model.outputs_of(features.double())
    x = features.double().requires_grad_()
    model.logits_of(x)[:, 0].sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, model.linear_logits()[0][:1].expand_as(x))


@pytest.mark.parametrize("posterior", ["mixture", "second-stage", "logistic"])
def test_statistics_may_be_on_another_device(posterior: str) -> None:
    model, features, _ = model_of(posterior)
    model.outputs_of(features.double())
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = model.outputs_of(torch.empty(2, sum(GROUPS), dtype=torch.float64, device="cuda"))
    assert {each.device.type for each in found if each is not None} == {"cuda"}


def test_new_photos_have_unit_variance_where_classes_do_not_differ() -> None:
    model, _, _ = model_of("mixture")
    new, _ = clouds(400, spread=1.3, seed=7)
    latent, means = model.latent_of(new.double()), model.mixture.prototypes.double()
    basis = torch.linalg.qr((means[1:] - means[0]).T)[0]
    rest = latent - latent @ basis @ basis.T
    assert rest.square().sum(1).mean() / (sum(GROUPS) - CLASSES + 1) == pytest.approx(1, abs=0.15)


def test_saved_and_loaded_it_says_the_same(photo_run: PhotoRun, tmp_path: Path) -> None:
    model = candid.load(photo_run.model)
    assert isinstance(model, PhotoModel)
    candid.save(model, tmp_path / "copy")
    copy = candid.load(tmp_path / "copy")
    features = torch.rand(4, model.config.dimensions)
    for one, other in zip(model.outputs_of(features), copy.outputs_of(features), strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
    assert copy.fingerprint() == model.fingerprint()
    assert sum(file.stat().st_size for file in (tmp_path / "copy").iterdir()) < 6e6


def test_gradients_work_after_inference_mode() -> None:
    model, features, _ = model_of("second-stage")
    with torch.inference_mode():
        model.outputs_of(features.double())
    x = features.double().requires_grad_()
    model.outputs_of(x).logits[:, 0].sum().backward()
    weight, _ = model.linear_logits()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight[0].expand_as(x.grad))


def test_a_model_with_too_few_held_out_photos_is_saved_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, _, _ = model_of("mixture")
    model.held_out = {"training_keys": torch.arange(6)}
    candid.save(model, tmp_path / "model")
    assert not caplog.records
    stored = candid.load(tmp_path / "model").held_out
    assert torch.equal(stored["training_keys"], torch.arange(6))


def test_an_eye_with_other_weights_is_refused(photo_run: PhotoRun) -> None:
    model = candid.load(photo_run.model)
    other = PhotoModel(type(model.config)(**{**vars(model.config), "eye_sha256": "0" * 64}))
    with pytest.raises(CandidError, match="has other weights than the one that this model was trained with"):
        other.eye  # noqa: B018


def test_any_module_is_an_eye() -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 6, 3))
    eye = ModuleEye(network, ["0", "2"], size=16)
    images = torch.rand(30, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images[::2] *= 0.5
    labels = torch.arange(30) % 2
    with torch.no_grad():
        statistics = eye.statistics(images)
    model = PhotoModel.of(fit_head(statistics, labels, 2, eye.groups), eye, ("dark", "light"))
    assert (model.logits(images).argmax(1) == labels).double().mean() > 0.9
