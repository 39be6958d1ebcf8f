"""Heatmaps add up: to the log posterior of every class, for any means, priors and sizes."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.fft import idctn
from scipy.special import log_softmax, logsumexp, softmax
from torch import Tensor

from candid import ClassifierConfig, FlowConfig, GenerativeClassifier, ResNet, ResNetConfig
from candid._support.errors import CandidError
from candid.explanations.class_maps import ClassMaps
from candid.explanations.heatmaps import SpatialMixture, heatmaps
from candid.explanations.options import HeatmapRule
from candid.models.flow.backbone import SpanScaling
from candid.models.flow.means import rescale
from tests.explanations.mixtures import latents, mixture_model, outputs_for
from tests.helpers import LargestTensor, small_classifier


def all_maps(model: GenerativeClassifier, z: Tensor, **options: Any) -> list[ClassMaps]:
    return heatmaps(model, outputs_for(model, z), top=model.config.classes, **options)


def positions(model: GenerativeClassifier, z: Tensor) -> Tensor:
    """The inverse cosine transform by scipy, (B, h, w, C)."""
    flow = model.config.flow
    h, w = flow.height // flow.downsampling, flow.width // flow.downsampling
    by_frequency = z.detach().view(len(z), w, h, flow.constant_coefficients).transpose(1, 2)
    return torch.from_numpy(idctn(by_frequency.numpy(), axes=(1, 2), norm="ortho"))


priors_of = st.integers(2, 5).flatmap(
    lambda classes: st.lists(st.floats(0.01, 1), min_size=classes, max_size=classes)
)


@settings(max_examples=40, deadline=None)
@given(
    weights=priors_of,
    size=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    rank=st.one_of(st.none(), st.integers(1, 3)),
    planar=st.booleans(),
    scale=st.floats(0, 40),
    spread=st.floats(0, 20),
    contrast=st.one_of(st.just(0.03), st.just(0.0), st.just(math.inf), st.just(1e308), st.floats(0, 10)),
    rule=st.sampled_from(["candid", "paper"]),
    seed=st.integers(0, 1000),
)
def test_every_map_sums_to_its_log_posterior(
    weights: list[float],
    size: tuple[int, int],
    rank: int | None,
    planar: bool,
    scale: float,
    spread: float,
    contrast: float,
    rule: HeatmapRule,
    seed: int,
) -> None:
    total = math.fsum(weights)
    model = mixture_model(
        len(weights),
        (2 * size[0], 2 * size[1]),
        None if planar else rank,
        tuple(weight / total for weight in weights),
        planar,
        scale,
        seed,
    )
    z = latents(model, 2, spread, seed)
    expected = model.mixture.logits(z).detach().log_softmax(1).numpy()
    for maps, log_posterior in zip(all_maps(model, z, contrast=contrast, rule=rule), expected, strict=True):
        sums = maps.values.sum((1, 2))
        assert np.isfinite(maps.values).all() and maps.values.shape[1:] == size
        assert np.abs(sums - log_posterior[list(maps.classes)]).max() < 1e-9
        assert np.abs(maps.scores - sums).max() < 1e-9 and not maps.baselines.any()
        assert maps.largest_error < 1e-9
        assert np.exp(sums).sum() == pytest.approx(1)


@pytest.mark.parametrize(
    "options", [{"rank": 2}, {"rank": None}, {"planar": True}, {"dct": "released", "size": (6, 6)}]
)
@pytest.mark.parametrize("priors", [None, (0.1, 0.2, 0.3, 0.4)])
def test_maps_are_their_formulas(options: dict[str, Any], priors: tuple[float, ...] | None) -> None:
    model = mixture_model(priors=priors, **options)
    z, contrast = latents(model), 0.1
    maps = all_maps(model, z, contrast=contrast)
    log_priors = model.mixture.log_priors
    w, means = positions(model, z), positions(model, model.mixture.means(torch.arange(4)))
    log_q = -0.5 * (w[:, None] - means[None]).square().sum(4)  # (B, M, h, w)
    distance = (z[:, None] - model.mixture.means(torch.arange(4)).detach()).square().sum(2)
    assert log_q.sum((2, 3)).allclose(-0.5 * distance)  # what the saliency's terms sum to
    saliency = -(log_q + log_priors[:, None, None]).logsumexp(1)
    evidence = (log_q.sum((2, 3)) + log_priors).logsumexp(1)
    r = saliency / saliency.amax((1, 2), keepdim=True)
    shares = (r + contrast) / (r + contrast).sum((1, 2), keepdim=True)
    even = log_priors[:, None, None] / w[0, :, :, 0].numel()
    expected = log_q + even - (evidence[:, None, None] * shares)[:, None]
    for i, found in enumerate(maps):
        assert found.saliency is not None
        np.testing.assert_allclose(found.values, expected[i, list(found.classes)], rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(found.saliency, saliency[i], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("options", [{"rank": 2}, {"planar": True}, {"dct": "released", "size": (6, 6)}])
def test_the_papers_rule_is_what_its_text_says(options: dict[str, Any]) -> None:
    """With equal priors, S = log sum_y q(z | y), and r_kl is log p(w_kl) in the range [0, 1]."""
    model = mixture_model(**options)
    z, classes = latents(model), torch.arange(4)
    every = np.tile(np.arange(4), (len(z), 1))
    maps = heatmaps(model, outputs_for(model, z), every, rule="paper")
    w, means = (positions(model, each).numpy() for each in (z, model.mixture.means(classes)))
    for i in range(len(z)):
        log_q = -0.5 * ((w[i] - means) ** 2).sum(3)  # (M, h, w)
        log_p = logsumexp(log_q, axis=0) - np.log(4)
        r = (log_p - log_p.min()) / (log_p.max() - log_p.min())
        s = logsumexp(log_q.sum((1, 2))) * (r + 0.03) / (r + 0.03).sum()
        np.testing.assert_allclose(maps[i].values, log_q - s, rtol=0, atol=1e-9)
        posterior = softmax(log_q.sum((1, 2)))
        np.testing.assert_allclose(np.exp((log_q - s).sum((1, 2))), posterior, rtol=1e-9)
    for own, papers in zip(heatmaps(model, outputs_for(model, z), every), maps, strict=True):
        assert papers.rule == "paper"
        np.testing.assert_array_equal(own.saliency, papers.saliency)
        difference = own.values - papers.values  # the same for all classes
        np.testing.assert_allclose(difference, np.tile(difference[:1], (4, 1, 1)), rtol=0, atol=1e-9)


def test_an_image_that_is_equally_salient_everywhere_has_even_shares() -> None:
    model = mixture_model(classes=2, scale=0.0)
    for contrast in (0.0, 0.03):
        (maps,) = all_maps(model, torch.zeros(1, model.dimensions).double(), contrast=contrast, rule="paper")
        even = np.broadcast_to(maps.values.mean((1, 2), keepdims=True), maps.values.shape)
        np.testing.assert_allclose(maps.values, even, rtol=1e-5, atol=1e-8)


def test_saliency_of_one_class_sums_to_its_distance() -> None:
    model = mixture_model(classes=1)
    z = latents(model)
    sums = [maps.saliency.sum() for maps in all_maps(model, z) if maps.saliency is not None]
    mean = model.mixture.means(torch.arange(1)).detach()
    assert sums == pytest.approx((0.5 * (z - mean).square().sum(1)).tolist())


def test_a_contrast_of_zero_leaves_mostly_what_differs_between_classes() -> None:
    """Where two classes have the same mean everywhere but at one position, their maps differ only there."""
    model = mixture_model(classes=2, scale=0.0)
    spatial = SpatialMixture(model)
    bump = torch.zeros(1, spatial.positions, 4, dtype=torch.float64)
    bump[0, 4] = 1.0
    moved, _ = spatial.dct(bump.mT.unflatten(2, spatial.shape))
    with torch.no_grad():
        model.mixture.mean[1], model.mixture.prototypes[1] = moved[0, :4], moved[0, 4:]
    maps = all_maps(model, latents(model), contrast=0.0)
    difference = np.stack([np.abs(image.values[0] - image.values[1]).ravel() for image in maps])
    elsewhere = [i for i in range(spatial.positions) if i != 4]
    assert difference[:, 4].min() > 1e-3
    assert difference[:, elsewhere].max() < 1e-12
    shared = {
        contrast: max(
            np.abs(image.values.reshape(2, -1)[:, elsewhere]).max()
            for image in all_maps(model, latents(model), contrast=contrast)
        )
        for contrast in (0.0, 0.03, math.inf)
    }
    assert shared[0.0] < 0.6 * shared[0.03] and shared[0.03] < 0.3 * shared[math.inf]


def test_at_224_pixels_all_sums_are_right_and_the_means_stay_small() -> None:
    flow = FlowConfig(3, 224, 224, blocks=(1, 1, 1, 1), widths=(1, 1, 1, 1), entry_width=1, pointwise_width=1)
    priors = torch.rand(200).add(0.1)
    config = ClassifierConfig(
        flow, 200, rank=32, priors=tuple((priors.double() / priors.double().sum()).tolist())
    )
    model = GenerativeClassifier(config).eval()
    with torch.no_grad():
        model.mixture.mean.mul_(30)
        model.mixture.prototypes.mul_(30)
    assert model.mixture.pairwise_distances().max() > 20
    outputs = outputs_for(model, latents(model, 2))
    with LargestTensor() as largest:
        maps = heatmaps(model, outputs)
    assert len(maps) == 2
    for image in maps:
        assert image.values.shape == (3, 7, 7)
        assert image.largest_error < 1e-9
        assert np.abs(image.values.sum((1, 2)) - image.scores).max() < 1e-9
    assert largest.numel <= 33 * model.dimensions


@pytest.mark.parametrize("options", [{"rank": 3}, {"rank": None, "priors": (0.1, 0.2, 0.3, 0.4)}])
def test_maps_of_a_refitted_model_are_those_before_and_local(options: dict[str, Any]) -> None:
    """Refitting changes no map, and a change at one position changes what classes differ in only there."""
    model = mixture_model(**options)
    z = latents(model)
    spatial = SpatialMixture(model)
    bump = torch.zeros(1, spatial.positions, 4, dtype=torch.float64)
    bump[0, 0] = 1.0
    moved = z + spatial.dct(bump.mT.unflatten(2, spatial.shape))[0]
    every = np.tile(np.arange(4), (len(z), 1))
    before = heatmaps(model, outputs_for(model, z), every, contrast=0.5)
    rescale(model, 2.5)
    span = cast(SpanScaling, model.flow._modules["span"])
    after, changed = (span(each)[0] for each in (z, moved))
    maps = heatmaps(model, outputs_for(model, after), every, contrast=0.5)
    for own, trained in zip(maps, before, strict=True):
        np.testing.assert_allclose(own.values, trained.values, rtol=0, atol=1e-9)
        assert np.abs(own.values.sum((1, 2)) - own.scores).max() < 1e-9
    for i, other in enumerate(heatmaps(model, outputs_for(model, changed), every, contrast=0.5)):
        change = np.diff(other.values - maps[i].values, axis=0).reshape(3, -1)
        assert np.abs(change[:, 0]).max() > 1e-3
        assert np.abs(change[:, 1:]).max() < 1e-9
    means = positions(model, model.mixture.means(torch.arange(4)))
    spread = [positions(model, each)[:, None] - means for each in (after, changed)]
    naive = (spread[1].square() - spread[0].square()).sum(4).flatten(2)  # after the refit: not local
    assert (naive - naive[:, :1]).abs()[:, :, 1:].max() > 1e-2


def test_a_real_image_with_chosen_classes_and_the_frozen_network() -> None:
    model = small_classifier().double()
    outputs = model.outputs(np.random.default_rng(0).random((2, 3, 16, 16)))
    chosen = np.array([[2], [0]])
    maps = heatmaps(model, outputs, chosen)
    frozen = heatmaps(model.frozen(), outputs, chosen, spatial=SpatialMixture(model))
    log_posterior = log_softmax(outputs.logits, axis=1)
    for i, (own, folded) in enumerate(zip(maps, frozen, strict=True)):
        assert own.classes == (chosen[i, 0],) and own.values.shape == (1, 2, 2)
        np.testing.assert_allclose(folded.values, own.values, rtol=1e-5, atol=1e-8)
        assert own.values.sum() == pytest.approx(log_posterior[i, chosen[i, 0]])


def test_mistakes_are_said() -> None:
    model = mixture_model()
    outputs = outputs_for(model, latents(model))
    with pytest.raises(CandidError, match="has 4 classes"):
        heatmaps(model, outputs, top=5)
    for contrast in (-0.1, math.nan):
        with pytest.raises(CandidError, match="zero or positive"):
            heatmaps(model, outputs, contrast=contrast)
    with pytest.raises(CandidError, match="did you mean 'paper'"):
        heatmaps(model, outputs, rule="papers")  # type: ignore[arg-type]
    resnet = ResNet(ResNetConfig(height=32, width=32, classes=3, blocks=(1,), widths=(4,), stem="3x3"))
    with pytest.raises(CandidError, match="from a ResNet"):
        SpatialMixture(resnet)  # type: ignore[arg-type]
