"""Attacks find the smallest perturbation where it is known, and say what they did to images."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import candid
from candid import GenerativeClassifier, ResNet, ResNetConfig
from candid._support.errors import CandidError, NonFiniteError
from candid.robustness.attacks import carlini_wagner as carlini_wagner_attack
from candid.robustness.attacks import search as projected_gradient_attack
from candid.robustness.attacks.metrics import AttackedImages, Trace
from tests.helpers import RecordedProgress, randomise, small_classifier


def carlini_wagner(*arguments: Any, **options: Any) -> Any:
    return as_tensors(carlini_wagner_attack.carlini_wagner(*arguments, **options))


def projected_gradient(*arguments: Any, **options: Any) -> Any:
    return as_tensors(projected_gradient_attack.projected_gradient(*arguments, **options))


def as_tensors(attacked: AttackedImages) -> AttackedImages:
    """The same with tensors, which are compared with those of models."""
    tensors: dict[str, Any] = {
        name: torch.from_numpy(column) for name, column in attacked.columns().items() if "." not in name
    }
    traces = attacked.traces and tuple(map(trace_of_tensors, attacked.traces))
    eight_bit = attacked.eight_bit and as_tensors(attacked.eight_bit)
    return replace(attacked, **tensors, traces=traces, eight_bit=eight_bit)


def trace_of_tensors(trace: Trace) -> Trace:
    assert isinstance(trace.margins, np.ndarray) and isinstance(trace.distances, np.ndarray)
    parts: list[Any] = [None if part is None else torch.from_numpy(part) for part in vars(trace).values()]
    return Trace(*parts)


class Linear:
    """Logits that are linear in the image; remembers how many images it was asked for."""

    def __init__(self, classes: int = 3, seed: int = 0, scale: float = 1.0, offset: float = 0.0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.image_shape = (2, 4, 5)
        self.weight = scale * torch.randn(classes, 40, generator=random, dtype=torch.float64)
        self.bias = torch.randn(classes, generator=random, dtype=torch.float64) + offset
        self.asked: list[int] = []

    def logits(self, x: Tensor) -> Tensor:
        self.asked.append(len(x))
        return x.flatten(1) @ self.weight.to(x).T + self.bias.to(x)

    def images(self, n: int, ends: float = 0.0, seed: int = 0) -> Tensor:
        """Away from black and white, but for a share ``ends`` of their pixels."""
        random = torch.Generator().manual_seed(seed)
        x = 0.2 + 0.6 * torch.rand(n, *self.image_shape, generator=random, dtype=torch.float64)
        at_end = torch.rand(x.shape, generator=random) < ends
        return torch.where(at_end, (torch.rand(x.shape, generator=random) < 0.5).double(), x)

    def smallest(self, x: Tensor, target: int, kappa: float) -> float:
        """L2 norm of the smallest change of one image in [0, 1] that gives one of two classes its margin."""
        a = self.weight[target] - self.weight[1 - target]
        b = self.bias[target] - self.bias[1 - target]
        flat, low, high = x.flatten(), 0.0, 1e9
        for _ in range(200):
            middle = (low + high) / 2
            reached = (flat + middle * a).clamp(0, 1) @ a + b >= kappa
            low, high = (low, middle) if reached else (middle, high)
        return float(((flat + high * a).clamp(0, 1) - flat).norm())

    def reachable(self, target: int, kappa: float) -> bool:
        a = self.weight[target] - self.weight[1 - target]
        return float(a.clamp(min=0).sum() + self.bias[target] - self.bias[1 - target]) > kappa


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 1000),
    scale=st.floats(0.5, 5),
    kappa=st.sampled_from([0.0, 0.01, 1.0]),
    ends=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_smallest_perturbation_of_linear_logits(
    seed: int, scale: float, kappa: float, ends: float
) -> None:
    model = Linear(2, seed, scale)
    x = model.images(2, ends, seed)
    targets = model.logits(x).argmin(1)
    found = carlini_wagner(model, x, targets, kappa=kappa)
    for i, target in enumerate(targets.tolist()):
        if not model.reachable(target, kappa + 0.5):
            continue
        expected = model.smallest(x[i], target, kappa)
        assert found.success[i] and found.margin[i] >= kappa
        assert expected * (1 - 1e-9) <= float(found.distance[i]) <= 1.05 * expected


def test_black_and_white_pixels_move_and_nothing_else_does_before_the_attack() -> None:
    model = Linear(2)
    x = model.images(3, ends=1.0)
    assert set(x.unique().tolist()) == {0, 1}
    for tighten in (True, False):
        found = carlini_wagner(model, x, model.logits(x).argmin(1), tighten=tighten, keep_path=True)
        assert found.success.all() and ((found.images - x).abs() > 1e-3).any()
        assert found.images.min() >= 0 and found.images.max() <= 1
        assert found.traces is not None
        assert [float(trace.distances[0]) for trace in found.traces] == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hugely_negative_logits(dtype: torch.dtype) -> None:
    """Float32 has steps of 1/16 there."""
    model = Linear(4, scale=0.5, offset=-1e6)
    x = model.images(5).to(dtype)
    targets = model.logits(x).argsort(1)[:, 1]
    found = carlini_wagner(model, x, targets)
    assert found.images.dtype == dtype and found.success.all()
    assert model.logits(found.images).argmax(1).equal(targets)
    expected = carlini_wagner(Linear(4, scale=0.5), x.double(), targets)
    near = 0.3 if dtype == torch.float32 else 0.01
    assert found.distance.allclose(expected.distance, rtol=near, atol=near / 10)


def test_finished_images_leave_the_batch() -> None:
    model = Linear(3, scale=0.3)
    x = model.images(6)
    model.asked.clear()
    found = carlini_wagner(model, x, (model.logits(x).argmax(1) + 1) % 3, tighten=False)
    attacked = model.asked[2:-2]  # before, the classes are counted; after, the results are looked at
    assert attacked == sorted(attacked, reverse=True) and attacked[0] == 6 > attacked[-1]
    assert sum(attacked) == int((found.steps + 1).sum())


@pytest.mark.parametrize("tighten", [True, False])
def test_the_best_is_kept_not_the_last(tighten: bool) -> None:
    model = Linear(3, scale=0.5, seed=4)
    x = model.images(4)
    found = carlini_wagner(
        model, x, (model.logits(x).argmax(1) + 1) % 3, kappa=1, tighten=tighten, keep_path=True
    )
    assert found.traces is not None
    for i, trace in enumerate(found.traces):
        best = float(trace.distances[trace.margins >= 1].min())
        assert float(found.distance[i]) == pytest.approx(best, rel=1e-9)
        assert len(trace.distances) == int(found.steps[i]) + 1 and trace.latents is None
    assert any(
        trace.margins[-1] < 1 or trace.distances[-1] > 1.001 * distance
        for trace, distance in zip(found.traces, found.distance, strict=True)
    )


def test_an_attack_without_end_keeps_the_smallest_loss() -> None:
    model = Linear(3)
    x = model.images(3)
    targets = (model.logits(x).argmax(1) + 1) % 3
    found = carlini_wagner(model, x, targets, kappa=math.inf, c=0.5, steps=150, keep_path=True)
    assert found.success.all() and found.traces is not None
    for i, trace in enumerate(found.traces):
        losses = trace.distances**2 - 0.5 * trace.margins
        assert float(found.distance[i] ** 2 - 0.5 * found.margin[i]) == pytest.approx(float(losses.min()))
    near = carlini_wagner(model, x, targets)
    assert (found.margin > near.margin + 1).all() and (found.distance > near.distance).all()


@pytest.fixture(scope="module")
def model() -> GenerativeClassifier:
    model = small_classifier().double()
    with torch.no_grad():
        model.mixture.mean.mul_(3)
    return model


def eight_bit_images(n: int, size: int = 16) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (n, 3, size, size), generator=random, dtype=torch.uint8)


def test_a_generative_classifier_is_fooled(model: GenerativeClassifier) -> None:
    images = eight_bit_images(4)
    x = images.double() / 255
    labels = model.predict(x)
    targets = (labels + 1) % 3
    found = carlini_wagner(model, images, targets, labels=labels, keep_latents=True)
    assert found.success.all() and not found.already_misclassified.any()
    assert found.posterior.allclose(model.posterior(found.images), atol=1e-9)
    assert found.posterior.argmax(1).equal(targets) and found.posterior.dtype == torch.float64
    assert found.distance.allclose((found.images - x).flatten(1).norm(dim=1))
    assert found.per_pixel.allclose((found.images - x).square().mean((1, 2, 3)).sqrt())
    assert found.log_density is not None and found.log_density.allclose(model.log_density(found.images))
    rounded = (255 * found.images).round() / 255
    assert found.rounded_success.equal(model.predict(rounded) == targets)
    assert found.traces is not None and found.traces[2].latents is not None
    assert found.traces[2].latents[0].allclose(model.latent(x[2:3])[0])
    reached = found.traces[2].distances.sub(found.distance[2]).abs().argmin()
    assert found.traces[2].latents[reached].allclose(model.latent(found.images[2:3])[0], atol=1e-6)
    again = carlini_wagner(model, images.numpy(), targets.numpy())
    assert again.images.equal(found.images) and again.traces is None
    as_in_the_paper = carlini_wagner(model, images, targets, tighten=False)
    assert as_in_the_paper.success.all() and (as_in_the_paper.distance >= found.distance).all()


@pytest.mark.parametrize("tighten", [True, False])
def test_an_image_alone_and_in_a_batch(model: GenerativeClassifier, tighten: bool) -> None:
    x = eight_bit_images(3).double() / 255
    targets = (model.predict(x) + 2) % 3
    options: dict[str, Any] = {"steps": 12, "tighten": tighten}
    together = carlini_wagner(model, x, targets, **options)
    apart = carlini_wagner(model, x, targets, batch=2, **options)
    assert apart.images.allclose(together.images, atol=1e-6) and apart.steps.equal(together.steps)
    with torch.no_grad():
        alone = carlini_wagner(model, x[1:2], targets[1:2], **options)
    assert alone.images[0].allclose(together.images[1], atol=1e-6)


@pytest.mark.parametrize("tighten", [True, False])
def test_the_detection_is_fooled_as_well(model: GenerativeClassifier, tighten: bool) -> None:
    images = eight_bit_images(3)
    x = images.double() / 255
    targets = (model.predict(x) + 1) % 3
    median = float(model.log_density(x).detach().max() / model.dimensions) + 0.3
    missing, squares = [], []
    for d in (0.0, 66.0, 1000.0):
        found = carlini_wagner(model, images, targets, d=d, median=median, steps=60, tighten=tighten)
        assert found.success.all() and found.log_density is not None
        missing.append((median - found.log_density / model.dimensions).abs())
        squares.append(found.distance.square())
    assert (missing[1] < missing[0]).all() and (missing[2] < missing[1]).all()
    if tighten:  # none is better for what another one minimises
        for i, d in enumerate((0.0, 66.0, 1000.0)):
            losses = torch.stack(
                [near + d * gap.square() for near, gap in zip(squares, missing, strict=True)]
            )
            assert (losses[i] <= 1.02 * losses.amin(0) + 1e-4).all()


def test_an_image_that_needs_no_attack_is_counted() -> None:
    model = Linear(3)
    x = model.images(3)
    predicted = model.logits(x).argmax(1)
    targets = predicted.clone()
    targets[1] = (targets[1] + 1) % 3
    for found in (carlini_wagner(model, x, targets), projected_gradient(model, x, targets, radius=0.01)):
        assert found.already_misclassified.tolist() == [True, False, True]
        assert found.success[[0, 2]].all()
    kept = carlini_wagner(model, x, targets)
    assert kept.distance[[0, 2]].tolist() == [0, 0] and kept.distance[1] > 0
    labels = predicted.clone()
    labels[2] = (labels[2] + 1) % 3
    away = carlini_wagner(model, x, labels=labels)
    assert away.already_misclassified.tolist() == [False, False, True] and away.distance[2] == 0
    assert away.success.all() and (model.logits(away.images).argmax(1) != labels).all()


def test_away_from_the_label_is_no_farther_than_to_any_target() -> None:
    model = Linear(3, seed=2, scale=0.5)
    x = model.images(4)
    labels = model.logits(x).argmax(1)
    away = carlini_wagner(model, x, labels=labels)
    to_any = torch.stack(
        [carlini_wagner(model, x, (labels + i) % 3, labels=labels).distance for i in (1, 2)]
    ).amin(0)
    assert away.success.all() and away.distance.allclose(to_any, rtol=0.01)


@settings(max_examples=8, deadline=None)
@given(radius=st.floats(0.01, 3), ends=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 100))
def test_projected_gradients_stay_within_the_radius(radius: float, ends: float, seed: int) -> None:
    model = Linear(2, seed)
    x = model.images(3, ends, seed)
    targets = model.logits(x).argmin(1)
    found = projected_gradient(model, x, targets, radius=radius)
    assert (found.distance <= radius * (1 + 1e-9)).all()
    assert found.images.min() >= 0 and found.images.max() <= 1
    assert found.success.equal(found.margin > 0) and found.steps.tolist() == [40] * 3
    for i, target in enumerate(targets.tolist()):
        if model.reachable(target, 0.5):
            needed = model.smallest(x[i], target, 0.0)
            assert found.success[i] or radius < 1.02 * needed
            assert not found.success[i] or radius >= needed * (1 - 1e-9)


def test_a_resnet_is_fooled_and_left_as_it_was() -> None:
    config = ResNetConfig(height=16, width=16, classes=3, blocks=(1, 1), widths=(4, 4), stem="3x3")
    net = randomise(ResNet(config, seed=0))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    images = eight_bit_images(3)
    targets = (net.eval().predict(images / 255) + 1) % 3
    net.train()
    for found in (
        carlini_wagner(net, images, targets),
        projected_gradient(net, images, targets, radius=8.0),
    ):
        assert found.success.all() and found.log_density is None and found.images.dtype == torch.float32
        assert net.training and all(p.grad is None and p.requires_grad for p in net.parameters())
        assert all(before[name].equal(value) for name, value in net.state_dict().items())
    assert net.eval().predict(found.images).equal(targets)


def test_an_eight_bit_attack_holds_under_noise_that_it_has_not_seen() -> None:
    """Of the smallest perturbations not one survives rounding: they are smaller than the model's noise."""
    model = candid.load("cifar10-beta1")
    images = (255 * model.sample([3, 8], generator=torch.Generator().manual_seed(0))).round().byte()
    targets = (model.predict(images / 255) + 1) % 10
    found = carlini_wagner(model, images, targets, steps=20, eight_bit=True)
    rounded = found.eight_bit
    assert found.success.all() and not found.rounded_success.any()
    assert rounded is not None and rounded.success.all() and rounded.rounded_success.all()
    assert (found.distance < rounded.distance).all() and (rounded.distance < 0.2).all()
    others = torch.Generator().manual_seed(1)
    for _ in range(10):
        assert model.predict(rounded.images).equal(targets)
        model.noise.copy_(torch.rand(model.noise.shape, generator=others))


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1000),
    kappa=st.sampled_from([0.0, 0.01, 1.0, math.inf]),
    ends=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_eight_bit_images_are_files(seed: int, kappa: float, ends: float) -> None:
    model = Linear(2, seed)
    x = (255 * model.images(3, ends, seed)).round() / 255
    targets = model.logits(x).argmin(1)
    found = carlini_wagner(model, x, targets, kappa=kappa, steps=40, eight_bit=True)
    rounded = found.eight_bit
    assert rounded is not None and rounded.eight_bit is None
    pixels = (255 * rounded.images).round()
    assert rounded.images.equal(pixels / 255) and pixels.min() >= 0 and pixels.max() <= 255
    assert rounded.distance.allclose((rounded.images - x).flatten(1).norm(dim=1))
    margins = rounded.margin
    assert rounded.success.equal(margins > 0 if math.isinf(kappa) else margins >= kappa)
    assert rounded.rounded_success.equal(margins > 0)
    for i, target in enumerate(targets.tolist()):
        if kappa < math.inf and model.reachable(target, kappa + 3):
            needed = model.smallest(x[i], target, kappa)
            rounding = math.sqrt(40) / 510  # as if all pixels had to be rounded up
            assert rounded.margin[i] > kappa - 0.02 and rounded.distance[i] < 1.5 * needed + rounding
            assert not rounded.success[i] or rounded.distance[i] >= needed * (1 - 1e-9)


def test_progress_is_by_images() -> None:
    progress = RecordedProgress()
    model = Linear(3)
    x = model.images(5)
    labels = model.logits(x).argmax(1)
    found = carlini_wagner(model, x, labels=labels, eight_bit=True, batch=2, progress=progress)
    assert len(found) == 5
    assert [(name, total) for name, total, *_ in progress.loops] == [("attacking", 5), ("rounding", 5)]
    assert [sorted(numbers) for *_, numbers in progress.loops] == [[0, 1, 2, 3, 4]] * 2


def test_mistakes_are_said(model: GenerativeClassifier) -> None:
    images = eight_bit_images(2)

    def fails(match: str, targets: Any = (0, 1), given: Any = images, **options: Any) -> None:
        with pytest.raises(CandidError, match=match) as error:
            carlini_wagner(options.pop("victim", model), given, targets, **options)
        assert "\n" not in str(error.value)

    fails("target of image 1 is its label, 1", labels=[1, 1])
    fails("0 to 2: 3 in targets", (0, 3))
    fails("0 to 2: -1 in labels", None, labels=[-1, 0])
    fails("2 images need 2 class numbers as targets", (0,))
    fails("2 images need 2 class numbers as labels", labels=[0.5, 1.0])
    fails("or labels to lead away from", None)
    fails("needs the median", d=66.0)
    fails("needs the median", d=66.0, median=math.nan)
    fails("'d' of an attack", d=-1.0, median=0.0)
    fails("'kappa'", kappa=-1.0)
    fails("'kappa'", kappa=math.nan)
    fails("'steps'", steps=0)
    fails("'batch'", batch=0)
    fails("batch of 3 x 16 x 16", given=images[:, :, :8])
    fails("batch of 3 x 16 x 16", given=images[0])
    fails("batch of 3 x 16 x 16", given=images[:0])
    fails("8-bit or floats", given=images.long())
    fails("Image 1 has pixels outside", given=torch.stack((images[0] / 255, images[1] * 1.0)))
    fails("Image 0 has pixels outside", given=torch.full((2, 3, 16, 16), math.nan))
    config = ResNetConfig(height=16, width=16, classes=3, blocks=(1,), widths=(4,), stem="3x3")
    fails("likelihood to fool", victim=ResNet(config), d=66.0, median=0.0)
    fails("Latents", victim=ResNet(config), keep_latents=True)
    broken = ResNet(config)
    nn.init.constant_(broken.fc.bias, math.nan)
    with pytest.raises(NonFiniteError, match="logits are not finite"):
        carlini_wagner(broken, images, (0, 1))
    one = Linear(1)
    with pytest.raises(CandidError, match="one class"):
        carlini_wagner(one, one.images(1), [0])
    with pytest.raises(CandidError, match="'radius'"):
        projected_gradient(model, images, (0, 1), radius=0.0)
