import copy
import io
import math
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from candid import PRESETS, CandidError, ClassifierConfig, FlowConfig, GenerativeClassifier, NonFiniteError
from candid.models.flow.coupling import AffineCoupling, DownsamplingCoupling
from candid.models.flow.mixture import log_standard_normal
from tests.helpers import randomise, small_classifier


def grid_images(count: int, *shape: int) -> Tensor:
    return torch.randint(0, 256, (count, *shape)) / 255


def test_one_pass_gives_consistent_answers() -> None:
    model = small_classifier()
    x = grid_images(4, 3, 16, 16)
    likelihoods, priors = model.log_likelihoods(x), model.mixture.log_priors
    torch.testing.assert_close(
        (likelihoods + priors).softmax(1).float(), model.posterior(x), atol=1e-6, rtol=0
    )
    torch.testing.assert_close((likelihoods + priors).logsumexp(1), model.log_density(x))
    torch.testing.assert_close(model.posterior(x).sum(1), torch.ones(4))
    assert torch.equal(model.predict(x), model.posterior(x).argmax(1))
    assert model.latent(x).shape == (4, model.dimensions)


def test_an_images_result_depends_on_the_image_alone() -> None:
    model = small_classifier().double()
    x = grid_images(4, 3, 16, 16)
    torch.testing.assert_close(model.log_density(x[2:3]), model.log_density(x)[2:3], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["digits", "cifar", "tiny"])
def test_latent_and_invert_are_inverse_to_each_other(name: str) -> None:
    model = randomise(GenerativeClassifier.from_preset(name), strength=0.1).eval()
    x = grid_images(2, *model.image_shape)
    with torch.inference_mode():
        assert (model.invert(model.latent(x)) - x).abs().max() < 1e-4


def photos(archive: Path) -> Iterator[Tensor]:
    """The centre 224 x 224 of each photo after its shorter side was resized to 256."""
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is None or not member.name.endswith(".JPEG"):
                continue
            photo = Image.open(io.BytesIO(file.read())).convert("RGB")
            scale = 256 / min(photo.size)
            photo = photo.resize((round(photo.width * scale), round(photo.height * scale)))
            left, top = (photo.width - 224) // 2, (photo.height - 224) // 2
            pixels = np.asarray(photo.crop((left, top, left + 224, top + 224)))
            yield torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255


@pytest.mark.slow
@pytest.mark.parametrize("mixing", ["orthogonal", "permutation"])
def test_imagenet_round_trip_on_photos(imagenet_photos: Path, mixing: str) -> None:
    model = GenerativeClassifier.from_preset("imagenet", mixing=mixing).eval()
    batches = torch.stack(list(photos(imagenet_photos))).split(10)
    assert sum(map(len, batches)) == 100
    batches = batches[: 10 if mixing == "permutation" else 2]
    with torch.inference_mode():
        at_start = model.latent(batches[0])
        randomise(model, strength=0.1)
        assert (model.latent(batches[0]) - at_start).abs().mean() > 0.1  # away from the identity
        error = max(float((model.invert(model.latent(x)) - x).abs().max()) for x in batches)
    assert error < 1e-5


def linear_classifier(classes: int = 1) -> GenerativeClassifier:
    """Couplings switched off: the flow is linear, the density a Gaussian (mixture) in closed form."""
    flow = FlowConfig(1, 4, 4, blocks=(1, 1), widths=(4, 4), entry="none", pointwise_width=4)
    model = GenerativeClassifier(ClassifierConfig(flow, classes, mean=(0.4,), std=(0.2,)))
    randomise(model.double(), strength=0.3).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, AffineCoupling | DownsamplingCoupling):
                for name, subnet in module.named_children():
                    assert isinstance(subnet, nn.Sequential), name
                    for p in subnet[-1].parameters():
                        p.zero_()
    return model


def test_log_density_is_the_closed_form_one() -> None:
    """For a linear flow z = A v + b, p(u) is normal; scipy's density of it is the truth."""
    from scipy.stats import multivariate_normal

    model = linear_classifier()
    with torch.no_grad():
        basis = torch.eye(16, dtype=torch.float64).view(16, 1, 4, 4)
        offset = model.flow(torch.zeros(1, 1, 4, 4).double())[0][0]
        matrix = (model.flow(basis)[0] - offset).T
        x = grid_images(50, 1, 4, 4)
        found = model.log_density(x)
        mean, std = model.image_mean.item(), model.image_std.item()
        inverse = torch.linalg.inv(matrix) * std * 255  # v = (u / 255 - mean) / std
        centre = inverse @ (model.mixture.means(torch.tensor([0]))[0] - offset) + mean * 255
        u = 255 * x.double() + model.noise
    truth = multivariate_normal(centre.numpy(), (inverse @ inverse.T).numpy()).logpdf(u.flatten(1).numpy())
    np.testing.assert_allclose(found.numpy(), truth, rtol=1e-10)


def test_bits_per_dimension_of_a_known_source() -> None:
    """Images whose pixels are normal with s grey levels have h = log2(s sqrt(2 pi e)) bits a dimension,
    and the model with exactly that density reaches it, on the 8-bit images.
    """
    spread = 20.0
    model = linear_classifier()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("gamma"):
                p.fill_(10.0)  # a scale of 1.0000045
            elif "offset" in name or name.startswith("mixture"):
                p.zero_()
    # Haar pooling halves: N(0, 1) in latent space is a spread of 2 x 0.2 x 255 grey levels.
    model.image_mean.fill_(0.5)
    model.image_std.fill_(spread / 2 / 255)
    u = 127.5 + spread * torch.randn(4000, 1, 4, 4, dtype=torch.float64)
    assert u.min() > 0 and u.max() < 256
    bits = -model.log_density(u.floor() / 255).mean() / (16 * math.log(2))
    assert bits.item() == pytest.approx(math.log2(spread * math.sqrt(2 * math.pi * math.e)), abs=0.01)


def test_density_integrates_to_one() -> None:
    """Over the whole space of grey images of 2 x 2 pixels, by the trapezoidal rule."""
    flow = FlowConfig(1, 2, 2, blocks=(2,), widths=(4,), entry="none", pointwise_width=4)
    model = GenerativeClassifier(ClassifierConfig(flow, classes=2, priors=(0.3, 0.7)))
    randomise(model.double(), strength=0.5).eval()
    with torch.inference_mode():
        z = model.mixture.sample(torch.tensor([0, 1]).repeat(5000))
        samples = 255 * model.invert(z).flatten(1)
        centre, spread = samples.mean(0), samples.std(0)
        steps = torch.linspace(-6.5, 6.5, 33, dtype=torch.float64)
        axes = [c + s * steps for c, s in zip(centre, spread, strict=True)]
        points = torch.cartesian_prod(*axes).view(-1, 1, 2, 2) / 255
        density = torch.cat([model.log_density(part).exp() for part in points.split(50_000)])
    volume = math.prod(float(axis[1] - axis[0]) for axis in axes)
    assert float(density.sum()) * volume == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("flow", [{}, {"entry": "7x7", "mixing": "permutation"}, {"dct": "released"}])
def test_the_terms_of_stages_add_up_to_the_density(flow: dict[str, Any]) -> None:
    model = small_classifier(blocks=(2, 1, 2), widths=(4, 4, 4), **flow)
    x = grid_images(5, 3, 16, 16)
    frozen, double = model.frozen(), copy.deepcopy(model).double()
    for each, precision in ((double, 1e-9), (model, 1e-6), (frozen, 1e-6)):
        outputs, terms = each.forward_by_stage(x)
        assert terms.shape == (5, 2 + 3) and terms.dtype == torch.float64
        torch.testing.assert_close(terms.sum(1), double.log_density(x), rtol=precision, atol=0)
        torch.testing.assert_close(each.log_density_of(outputs), each.log_density(x), rtol=precision, atol=0)
        torch.testing.assert_close(outputs.logits, each.logits(x))


def test_each_stage_has_the_log_determinants_of_its_layers() -> None:
    model = small_classifier(blocks=(2, 1), dct="released").double()
    x = grid_images(3, 3, 16, 16)
    _, terms = model.forward_by_stage(x)
    z, by_layer = model.normalise(x, None), {}
    for name, layer in model.flow.leaves():
        z, by_layer[name] = layer(z)
    expected = torch.zeros(3, 4, dtype=torch.float64)
    expected[:, 0] = model.mixture.logits(z).logsumexp(1) + log_standard_normal(z)
    expected[:, 1] = -model.dimensions * math.log(255 * model.image_std.item())
    columns = {"entry": 1, "haar": 1, "pointwise": 1, "stage1": 2, "stage2": 3, "dct": 3}
    for name, log_det in by_layer.items():
        expected[:, columns[re.split("[._]", name)[0]]] += log_det
    torch.testing.assert_close(terms, expected, rtol=1e-9, atol=0)


def test_samples_are_eight_bit_images(generator: torch.Generator) -> None:
    model = small_classifier()
    x = model.sample([0, 2], n=3, generator=generator)
    assert x.shape == (6, 3, 16, 16)
    assert x.min() >= 0 and x.max() <= 1
    torch.testing.assert_close((255 * x).round() / 255, x)
    assert model.sample(1).shape == (1, 3, 16, 16)
    with pytest.raises(CandidError, match="0 to 2"):
        model.sample(3)


def test_samples_come_from_their_class_in_order_and_from_the_generator() -> None:
    model = small_classifier()
    mean = model.invert(model.mixture.means(torch.tensor([0, 2])).detach())
    cold = model.sample([0, 2], n=2, temperature=0.0)
    assert (cold - mean[[0, 0, 1, 1]].clamp(0, 1)).abs().max() <= 1 / 255 + 1e-5
    first, second, other = (model.sample(1, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    u = 255 * model._denormalise(model.mixture.means(torch.tensor([1])))
    assert torch.equal((255 * model.sample(1, temperature=0.0)).round(), u.floor().clamp(0, 255))


def test_predictions_and_samples_can_be_used_in_a_loss() -> None:
    model = small_classifier()
    x = model.sample(1, n=2).requires_grad_()
    torch.nn.functional.cross_entropy(model.logits(x), model.predict(x)).backward()
    assert x.grad is not None


def test_an_empty_batch_is_refused() -> None:
    model = small_classifier()
    for call in (
        lambda: model.predict(torch.rand(0, 3, 16, 16)),
        lambda: model.invert(torch.zeros(0, 768)),
        lambda: model.sample(1, n=0),
        lambda: model.sample([]),
    ):
        with pytest.raises(CandidError, match="0 x 3 x 16 x 16|batch, 768|Samples need"):
            call()


def test_going_back_leaves_running_statistics_alone() -> None:
    model = small_classifier().train()
    before = {name: b.clone() for name, b in model.named_buffers()}
    model.sample(1, n=2)
    model.invert(torch.randn(2, model.dimensions))
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_function_transforms_and_hooks_work() -> None:
    model = small_classifier().double()
    z = torch.randn(model.dimensions, dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda v: model.mixture.logits(v[None])[0])(z)
    torch.testing.assert_close(jacobian, model.mixture.means(torch.arange(3)))
    called = []
    handle = model.flow.get_submodule("stage1_block1").register_forward_hook(lambda *_: called.append(1))
    model.predict(torch.rand(1, 3, 16, 16))
    handle.remove()
    assert called


def test_an_exported_model_agrees() -> None:
    model = GenerativeClassifier.from_preset("digits").eval()
    x = torch.rand(2, 1, 8, 8)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x)[2], model.logits(x), atol=1e-5, rtol=1e-5)


def test_training_noise_is_fresh_and_evaluation_noise_fixed() -> None:
    model = small_classifier()
    x = grid_images(2, 3, 16, 16)
    assert torch.equal(model.latent(x), model.latent(x))
    model.train()
    assert not torch.equal(model.latent(x), model.latent(x))


def test_building_leaves_the_global_generator_alone_and_is_reproducible() -> None:
    state = torch.get_rng_state()
    first, second = (GenerativeClassifier.from_preset("digits", seed=3) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    other = GenerativeClassifier.from_preset("digits", seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.mixture.mean, other.mixture.mean)


def test_wrong_images_are_refused() -> None:
    model = small_classifier()
    with pytest.raises(CandidError, match="3 x 16 x 16 images.*not a tensor of 1 x 3 x 9 x 16"):
        model.predict(torch.rand(1, 3, 9, 16))
    with pytest.raises(CandidError, match=r"x\[None\]"):
        model.predict(torch.rand(3, 16, 16))
    with pytest.raises(CandidError, match="reach 255 where white is 1"):
        model.predict(torch.full((1, 3, 16, 16), 255.0))
    with pytest.raises(CandidError, match="float tensors"):
        model.predict(np.zeros((1, 3, 16, 16)))  # type: ignore[arg-type]
    with pytest.raises(CandidError, match="divide 8-bit ones by 255"):
        model.predict(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
    with pytest.raises(CandidError, match="batch, 768"):
        model.invert(torch.zeros(1, 767))
    x = torch.rand(3, 3, 16, 16)
    x[1, 0, 0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="Image 1 of the batch has NaN"):
        model.posterior(x)


def test_nonfinite_results_name_the_culprit() -> None:
    model = small_classifier()
    x = torch.rand(2, 3, 16, 16)
    z = model.latent(x).detach()
    broken = small_classifier()
    with torch.no_grad():
        broken.mixture.mean[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="mixture"):
        broken.predict(x)
    with torch.no_grad():
        model.flow.get_submodule("stage1_block1.coupling.subnet.2").weight.fill_(math.inf)  # type: ignore[operator]
    with pytest.raises(NonFiniteError, match="'stage1_block1.coupling'.*forward"):
        model.log_density(x)
    with pytest.raises(NonFiniteError, match="'stage1_block1.coupling'.*inverse"):
        model.invert(z)


def test_unknown_names_are_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(CandidError, match="did you mean 'imagenet'"):
        GenerativeClassifier.from_preset("imagnet")
    with pytest.raises(CandidError, match="did you mean 'mixing'"):
        GenerativeClassifier.from_preset("digits", mixin="permutation")
    with pytest.raises(CandidError, match="'mixing' can't be 'soft'"):
        GenerativeClassifier.from_preset("digits", mixing="soft")
    with pytest.raises(CandidError, match="10 classes but 1 class names"):
        GenerativeClassifier(PRESETS["digits"], class_names=["zero"])
    assert GenerativeClassifier.from_preset("digits", class_names=["a", "b"]).config.classes == 2
    with pytest.raises(CandidError, match="memory must be"):
        GenerativeClassifier.from_preset("digits", memory="none")  # type: ignore[arg-type]
