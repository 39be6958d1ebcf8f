"""A few classes in a plane: it says what the model says, and a fitted one is a model like any other."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.contour import QuadContourSet
from matplotlib.figure import Figure
from scipy.stats import multivariate_normal

from candid import CandidError, ClassifierConfig, GenerativeClassifier, ResNet, ResNetConfig, load, save
from candid._support.numbers import softmax
from candid._support.options import to_dict
from candid.data.datasets import open_dataset
from candid.data.images import to_float
from candid.evaluation.evaluate import evaluate
from candid.explanations.overview import project
from candid.models.decision_plane import (
    DecisionPlane,
    check_fitted,
    decision_plane,
    fitted_plane,
    plane_through,
)
from candid.models.flow.config import preset
from candid.models.flow.means import RADIUS, planar_model, rescale
from candid.models.flow.network import array_of
from candid.reports.plots.latent import decision_plane as draw
from candid.training.options import PlaneOptions
from candid.training.train import fit_plane, plane_options
from tests.helpers import candid_command, randomise, small_classifier
from tests.training.runs import MODEL, small_config

PRIORS = (0.05, 0.1, 0.15, 0.2, 0.1, 0.05, 0.05, 0.1, 0.15, 0.05)
some_classes = st.lists(st.integers(0, 9), min_size=2, max_size=10, unique=True)


def digits_model(priors: tuple[float, ...] | None = None, **changes: Any) -> GenerativeClassifier:
    """Untrained, with means of about a trained one's size, in float64."""
    model = GenerativeClassifier(preset("digits", **(MODEL | {"priors": priors} | changes)))
    return randomise(model, strength=0.5).double().eval()


MODELS: dict[tuple[float, ...] | None, GenerativeClassifier] = {
    priors: digits_model(priors) for priors in (None, PRIORS)
}


def flat_plane(means: list[list[float]], priors: list[float] | None = None, **more: Any) -> DecisionPlane:
    """Of latents with two dimensions."""
    shares = priors or [1 / len(means)] * len(means)
    names = more.get("names") or tuple(f"class {i}" for i in range(len(means)))
    return DecisionPlane(
        names, np.zeros(2), np.eye(2), np.array(means, np.float64), np.log(np.array(shares, np.float64))
    )


def test_priors_that_are_rounded_can_be_drawn_from() -> None:
    plane = decision_plane(planar_model(digits_model(PRIORS).float(), [1, 7, 9]))
    assert math.isfinite(plane.threshold()) and np.exp(plane.log_priors).sum() == pytest.approx(1, abs=1e-12)


@settings(deadline=None, max_examples=10)
@given(classes=some_classes, priors=st.sampled_from([None, PRIORS]), seed=st.integers(0, 99))
def test_two_coordinates_decide_as_the_model_does(
    classes: list[int], priors: tuple[float, ...] | None, seed: int
) -> None:
    planar = planar_model(MODELS[priors], classes)
    model = randomise(planar.mixture, seed, strength=2)
    plane = decision_plane(planar)
    assert model.angles is not None and len(model.angles) == len(classes)
    z = 5 * torch.randn(20, 64, dtype=torch.float64)
    posterior = array_of(model.posterior(z))
    np.testing.assert_allclose(plane.posterior(plane.project(z.numpy())), posterior, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(plane.axes @ plane.axes.T, np.eye(2), rtol=0, atol=1e-7)
    distances = np.linalg.norm(plane.means[:, None] - plane.means, axis=2)
    np.testing.assert_allclose(distances, array_of(model.pairwise_distances()), atol=1e-6, rtol=0)
    means = array_of(model.means(torch.arange(len(classes))))
    np.testing.assert_allclose(plane.project(means), plane.means, rtol=1e-7, atol=1e-7)
    spread = np.square(plane.means).sum(0)
    assert spread[0] >= spread[1] - 1e-9
    assert abs((plane.means.T @ plane.means)[0, 1]) < 1e-9 * (1 + spread[0])


@settings(deadline=None, max_examples=10)
@given(
    classes=st.lists(st.integers(0, 9), min_size=2, max_size=3, unique=True),
    priors=st.sampled_from([None, PRIORS]),
)
def test_two_or_three_means_already_lie_in_a_plane(
    classes: list[int], priors: tuple[float, ...] | None
) -> None:
    """Nothing is lost: the posterior is that of the whole model, given that it is one of these classes."""
    model = MODELS[priors]
    x = torch.randint(0, 256, (6, 1, 8, 8)) / 255.0
    among = model.posterior(x)[:, classes]
    planar = planar_model(model, classes)
    torch.testing.assert_close(planar.posterior(x), among / among.sum(1, keepdim=True), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(planar.latent(x), model.latent(x), rtol=0, atol=0)
    radii = np.linalg.norm(array_of(planar.mixture.circle_places()), axis=1)
    np.testing.assert_allclose(radii, radii[0], rtol=1e-9)
    if priors is not None:
        assert math.fsum(planar.config.priors or ()) == pytest.approx(1)


@settings(deadline=None, max_examples=10)
@given(classes=st.lists(st.integers(0, 9), min_size=5, max_size=10, unique=True))
def test_means_start_on_a_circle_so_that_each_class_has_an_outer_cell(classes: list[int]) -> None:
    plane = decision_plane(planar_model(MODELS[None], classes))
    np.testing.assert_allclose(np.linalg.norm(plane.means, axis=1), RADIUS, rtol=1e-5)
    distances = np.linalg.norm(plane.means[:, None] - plane.means, axis=2)
    np.fill_diagonal(distances, np.inf)
    np.testing.assert_allclose(distances.min(1), 2 * RADIUS * math.sin(math.pi / len(classes)), rtol=1e-4)
    assert plane.posterior(100 * plane.means).argmax(1).tolist() == list(range(len(classes)))


def test_a_plane_starts_in_the_mean_pooled_coefficients() -> None:
    """Convolutions can write a class there; whatever the means have beyond them leaves the start as it is."""
    model = GenerativeClassifier(replace(small_classifier().config, classes=4))
    constant = model.mixture.constant
    assert constant >= 3
    planar = planar_model(model, range(4))
    axes = planar.mixture.prototypes[1:]
    assert axes[:, :constant].abs().max() > 0 and axes[:, constant:].abs().max() == 0
    with torch.no_grad():
        model.mixture.prototypes.mul_(7.0)
    torch.testing.assert_close(planar_model(model, range(4)).mixture.prototypes[1:], axes)


def test_no_other_order_keeps_the_means_further_apart() -> None:
    """Of directions to a circle of five classes, those of the chosen order are the shortest.

    Neighbours of the circle are those of the order, either way round.
    """
    model, classes = MODELS[None], [0, 3, 5, 8, 9]
    means = model.mixture.means(torch.tensor(classes)).detach().double()
    means = means - means.mean(0)
    angles = 2 * math.pi / 5 * torch.arange(5).double()
    lengths, turns = [], []
    for order in itertools.permutations(range(5)):
        circle = torch.stack((angles[list(order)].cos(), angles[list(order)].sin()), 1)
        directions = torch.linalg.pinv(means) @ circle
        lengths.append(float(directions.square().sum()))
        turns.append(circle)
    best = turns[int(np.argmin(lengths))] * RADIUS
    found = torch.from_numpy(decision_plane(planar_model(model, classes)).means)
    torch.testing.assert_close(torch.cdist(found, found), torch.cdist(best, best), atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def spread_out() -> GenerativeClassifier:
    """A model with class means so far apart that two coordinates can separate some."""
    model = digits_model(PRIORS)
    rescale(model, 6.0)
    return model


def draws_of(model: GenerativeClassifier, classes: list[int], seed: int) -> tuple[Any, Any]:
    """Return latents of the mixture of ``classes``, and their places in this list."""
    random, shares = np.random.default_rng(seed), np.exp(model.log_priors[classes])
    labels = random.choice(len(classes), 3000, p=shares / shares.sum())
    return model.geometry.means(np.array(classes))[labels] + random.standard_normal((3000, 64)), labels


@pytest.mark.parametrize("classes", [[3, 1, 8], [5, 0, 2, 9, 7, 3]])
def test_a_fitted_plane_says_more_than_the_principal_axes(
    classes: list[int], spread_out: GenerativeClassifier
) -> None:
    """Judged on draws from the mixture that it was not fitted to; of three classes little is lost."""
    fitted = fitted_plane(spread_out, classes, *draws_of(spread_out, classes, 0))
    principal = plane_through(spread_out, classes)
    z, labels = draws_of(spread_out, classes, 1)
    right, principal_right = (
        float((plane.logits(plane.project(z)).argmax(1) == labels).mean()) for plane in (fitted, principal)
    )
    points = fitted.project(z)
    if len(classes) == 3:
        means = spread_out.geometry.means(np.array(classes))
        logits = z @ means.T - 0.5 * np.square(means).sum(1) + fitted.log_priors
        assert right > float((logits.argmax(1) == labels).mean()) - 0.01
    else:
        assert right > principal_right + 0.05
    away = points - fitted.means[labels]
    np.testing.assert_allclose(away.std(), 1, atol=0.1)
    assert fitted.inside(points).mean() == pytest.approx(0.9, abs=0.04)
    np.testing.assert_allclose(fitted.means.mean(0), 0, atol=1e-9)
    assert abs((fitted.means.T @ fitted.means)[0, 1]) < 1e-6


def test_a_fitted_plane_needs_three_to_twelve_classes_with_images() -> None:
    for wrong in ([1, 2], list(range(13))):
        with pytest.raises(CandidError, match=f"3 to 12 classes, not {len(wrong)}: choose them"):
            check_fitted(wrong)
    with pytest.raises(CandidError, match="no images of '3' to fit the plane to"):
        fitted_plane(MODELS[None], [1, 2, 3], np.zeros((2, 64)), np.array([0, 1]))
    with pytest.raises(CandidError, match="can't come from an adopted model"):
        fitted_plane(load("everyday"), [1, 2, 3], np.zeros((3, 9)), np.arange(3))


def test_the_density_is_that_of_the_mixture_in_the_plane() -> None:
    plane = flat_plane([[0.0, 1.0], [2.0, -1.0], [-3.0, 0.0]], [0.5, 0.3, 0.2])
    points = 3 * np.random.default_rng(0).standard_normal((50, 2))
    truth = sum(
        share * multivariate_normal(mean).pdf(points)
        for share, mean in zip((0.5, 0.3, 0.2), plane.means, strict=True)
    )
    np.testing.assert_allclose(np.exp(plane.log_density(points)), truth)


@pytest.mark.parametrize("classes", range(2, 13))
def test_the_drawn_region_holds_90_percent_with_priors_in_single_precision(classes: int) -> None:
    """Priors of pixel models are float32: as float64, they sum to one but for 1e-8."""
    around = 2 * math.pi / classes * np.arange(classes)
    shares = np.exp(np.log(np.full(classes, 1 / classes, np.float32)).astype(np.float64))
    plane = flat_plane((3 * np.stack((np.cos(around), np.sin(around)), 1)).tolist(), shares.tolist())
    random = np.random.default_rng(classes)
    drawn = plane.means[random.integers(classes, size=5000)] + random.standard_normal((5000, 2))
    assert plane.inside(drawn).mean() == pytest.approx(0.9, abs=0.02)


def test_a_planar_model_is_saved_and_loaded_like_any_other(tmp_path: Path) -> None:
    model = digits_model().float()
    planar = planar_model(model, [3, 8, 0, 5])
    assert planar.class_names == ("3", "8", "0", "5")
    assert planar.record.config == {"only": ["3", "8", "0", "5"]} and model.metadata == {}
    loaded = load(save(planar, tmp_path))
    x = torch.rand(4, 1, 8, 8)
    assert loaded.config == planar.config and loaded.config.planar
    torch.testing.assert_close(loaded.logits(x), planar.logits(x))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), planar.parameters(), strict=True))
    torch.testing.assert_close(loaded.frozen().posterior(x), planar.posterior(x))
    assert loaded.sample([1], n=2).shape == (2, 1, 8, 8)
    record = json.loads((tmp_path / "model.json").read_text())
    del record["config"]["circle"]  # as models of earlier versions: their planar means are free
    assert ClassifierConfig(**{**record["config"], "flow": planar.config.flow}).circle is False
    del record["config"]["planar"]
    assert ClassifierConfig(**{**record["config"], "flow": planar.config.flow}).planar is False


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([1], "2 to 10 classes, not 1"),
        ([*range(10), 0], "2 to 10 classes, not 11"),
        ([1, 2, 1], "Class 1 is chosen twice"),
        ([1, 10], "from 0 to 9: there is no class 10"),
        ([-1, 1], "there is no class -1"),
    ],
)
def test_wrong_classes_are_refused(classes: list[int], message: str) -> None:
    with pytest.raises(CandidError, match=message):
        planar_model(MODELS[None], classes)


def test_what_has_no_plane_says_so() -> None:
    with pytest.raises(CandidError, match="lie in no plane"):
        decision_plane(MODELS[None])
    with pytest.raises(CandidError, match="from a ResNet"):
        planar_model(ResNet(ResNetConfig.matching(preset("digits"))), [0, 1])
    with pytest.raises(CandidError, match="frozen model"):
        planar_model(MODELS[None].frozen(), [0, 1])
    with pytest.raises(CandidError, match="'planar' means have no 'rank'"):
        preset("digits", rank=2, planar=True)


def test_a_model_is_tuned_as_it_was_trained() -> None:
    model = planar_model(digits_model(), [1, 2])
    recorded = small_config(holdout=0.11, split_seed=7, crop="jitter", beta=math.inf, schedule="plateau")
    record = to_dict(recorded) | {"beta": "inf", "model": MODEL | {"classes": 10, "rank": 3}}
    model.metadata["training"] = {"config": record}
    found = plane_options(model, "digits", {"only": ("1", "2"), "epochs": 4, "beta": None})
    assert (found.holdout, found.split_seed, found.crop, found.beta) == (0.11, 7, "jitter", math.inf)
    assert (found.schedule, found.epochs, found.only) == ("one-cycle", 4, ("1", "2"))
    assert found.model == MODEL
    with pytest.raises(CandidError, match="At beta 0 a model does not separate"):
        plane_options(model, "digits", {"beta": 0.0})


def test_a_model_without_a_record_is_tuned_on_photos() -> None:
    model = planar_model(small_classifier(), [0, 2])
    found = plane_options(model, "photos", {})
    assert (found.data, found.crop, found.schedule) == ("photos", "resized", "one-cycle")
    assert found.model_config(2).flow == model.config.flow
    assert found.model_config(2).mean == model.config.mean


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four digits in a plane, tuned for an epoch with the network as it was."""
    model = GenerativeClassifier(preset("digits", **MODEL), seed=1)
    model.metadata["training"] = {"config": to_dict(small_config(split_seed=5)) | {"beta": "1.0"}}
    out = tmp_path_factory.mktemp("planes") / "run"
    options = PlaneOptions(means_only=True, epochs=2, learning_rate=0.05)
    outcome = fit_plane(model, "digits", [7, 1, 0, 4], out, options)
    assert outcome.finished
    return out


def test_a_fitted_plane_classifies_with_an_unchanged_network(fitted: Path) -> None:
    start, best = load(fitted / "start"), load(fitted / "model" / "best")
    weights = best.flow.state_dict()
    for name, old in start.flow.state_dict().items():
        assert torch.equal(old, weights[name]), name
    assert best.config.planar and best.config.flow.span == (2, 3) and best.metadata["refit"]["images"] > 20
    assert best.class_names == ("7", "1", "0", "4")
    data = open_dataset("digits", split_seed=5, only=best.class_names)
    test: Any = data.test
    x = to_float(test.images)
    right, before = (
        float((model.outputs(x).logits.argmax(1) == test.labels).mean()) for model in (best, start)
    )
    assert right > max(0.6, before)
    results = json.loads((fitted / "results.json").read_text())
    assert results["test"]["accuracy"] == pytest.approx(right)
    plane = decision_plane(best)
    points, labels, predicted = project(best, test, plane)
    np.testing.assert_array_equal(predicted, best.outputs(x).logits.argmax(1))
    np.testing.assert_allclose(plane.posterior(points), softmax(best.outputs(x).logits), atol=1e-4, rtol=0)
    np.testing.assert_array_equal(labels, test.labels)


def test_a_fitted_plane_is_evaluated_on_its_classes(fitted: Path) -> None:
    found = evaluate(fitted, "digits", workers=0)
    assert found is not None
    results = json.loads((fitted / "results.json").read_text())
    assert found.metrics["accuracy"] == pytest.approx(results["test"]["accuracy"])
    assert found.metrics["images"] == len(open_dataset("digits", split_seed=5, only=tuple("7104")).test or ())
    assert found.metrics["held_out_images"] > 0 and "verdicts" in found.metrics


def test_a_run_is_not_overwritten(fitted: Path) -> None:
    before = (fitted / "start" / "model.json").read_bytes()
    with pytest.raises(CandidError, match="already has a run"):
        fit_plane(load(fitted / "start"), "digits", [0, 1], fitted)
    assert (fitted / "start" / "model.json").read_bytes() == before


def run(*arguments: str | Path) -> Any:
    return candid_command("plane", *arguments)


def test_the_command_draws_a_plane(fitted: Path, tmp_path: Path) -> None:
    done = run(fitted / "model" / "best", "digits", "--out", tmp_path, "--json", "--workers", 0)  # type: ignore[arg-type]
    assert done.exit_code == 0, done.exception
    found = json.loads(done.stdout)
    results = json.loads((fitted / "results.json").read_text())
    assert found["accuracy"] == pytest.approx(results["test"]["accuracy"])
    assert found["classes"] == ["7", "1", "0", "4"]
    assert (tmp_path / "decision_plane.png").stat().st_size > 10_000
    assert (tmp_path / "decision_plane.svg").is_file()
    flat = save(digits_model(), tmp_path / "flat")
    refused = run(flat, "digits")
    assert isinstance(refused.exception, CandidError) and "--classes" in str(refused.exception)


def drawn(axes: Axes) -> list[tuple[list[Any], tuple[float, ...]]]:
    """Places of images, and the colour of their rims."""
    return [
        (np.asarray(each.get_offsets()).tolist(), tuple(np.asarray(each.get_edgecolor())[0]))
        for each in axes.collections
        if not isinstance(each, QuadContourSet)
    ]


def texts(figure: Figure) -> set[str]:
    return {text.get_text().replace("\n", " ") for text in figure.axes[0].texts}


def test_boundaries_lie_where_two_classes_are_equally_probable() -> None:
    plane = flat_plane([[-2.0, 0.0], [2.0, 0.0]], [0.9, 0.1])
    (lines, *_) = (c for c in draw(plane).axes[0].get_children() if isinstance(c, QuadContourSet))
    boundary = np.concatenate([path.vertices for path in lines.get_paths()])
    np.testing.assert_allclose(boundary[:, 0], math.log(9) / 4, atol=1e-6)


def test_too_many_classes_are_refused() -> None:
    with pytest.raises(CandidError, match="31 classes in one plane can't be read: draw at most 30"):
        draw(flat_plane([[float(i), 0.0] for i in range(31)]))


def test_images_in_the_cell_of_another_class_have_a_black_rim() -> None:
    plane = flat_plane([[-2.0, 0.0], [2.0, 0.0]])
    points = np.array([[-30.0, 1.0], [3.0, 0.0], [4.0, 9.0], [-1.0, 0.0]])
    axes = draw(plane, points, np.array([0, 0, 1, -1])).axes[0]
    rims: dict[bool, list[Any]] = {False: [], True: []}
    for offsets, edge in drawn(axes):
        rims[edge == (0, 0, 0, 1)] += offsets
    assert rims[True] == [[3.0, 0.0]]
    assert sorted(rims[False]) == [[-30.0, 1.0], [-1.0, 0.0], [4.0, 9.0]]
    assert axes.get_xlim()[0] < -29  # it reaches as far as the images


@pytest.mark.parametrize("classes", [2, 10, 16])
def test_every_class_with_room_has_its_name_in_its_cell(classes: int) -> None:
    angles = 2 * math.pi * np.arange(classes) / classes
    means = (8 * np.stack((np.cos(angles), np.sin(angles)), 1)).tolist()
    names = tuple(f"n{i:02} of a long name, or several" if i % 2 else f"n{i:02}" for i in range(classes))
    plane = flat_plane(means, names=names)
    random = np.random.default_rng(0)
    labels = random.integers(classes, size=1500)
    points = plane.means[labels] + 2 * random.standard_normal((1500, 2))
    figure = draw(plane, points, labels, "accuracy 12.3 % on 1,500 images")
    assert classes > 10 or texts(figure) == set(names)
    for text in figure.axes[0].texts:
        x, y = text.get_position()
        cell = int(plane.logits(np.array([[x, y]])).argmax())
        assert text.get_text().startswith(names[cell][:3])
    assert sum(len(places) for places, _ in drawn(figure.axes[0])) == 1000
