import numpy as np
import pytest

from candid._support.numbers import Array
from candid.inference.metrics import area_under_curve, paired_placements
from candid.robustness.corruptions.metrics import area_intervals, error_intervals

RATES = np.array([0.2, 0.5, 0.7])  # clean, two corruptions


def drawn(images: int) -> tuple[Array, Array]:
    """Errors of two models that find the same images hard, at two severities."""
    random = np.random.default_rng(0)
    hard = random.random((images, 1, 1))

    def errors(rates: Array) -> Array:
        luck = random.random((images, 3, 2))
        wrong = (0.7 * hard + 0.3 * luck < rates[:, None]).mean(2)
        wrong[:, 0] = wrong[:, 0].round()  # clean images have one severity
        return wrong

    return errors(RATES + 0.1), errors(RATES)


def plain_metrics(own: Array, reference: Array) -> tuple[float, float]:
    """Return mCE and relative mCE of mean errors, clean ones first."""
    ratios = [own[c] / reference[c] for c in (1, 2)]
    relative = [(own[c] - own[0]) / (reference[c] - reference[0]) for c in (1, 2)]
    return sum(ratios) / 2, sum(relative) / 2


@pytest.mark.parametrize("published", [False, True])
def test_error_intervals_are_those_of_a_plain_bootstrap(published: bool) -> None:
    own, reference = drawn(300)
    fixed = reference.mean(0)
    found = error_intervals(own, fixed if published else reference)
    random, resampled = np.random.default_rng(0), []
    for _ in range(4000):
        rows = random.integers(0, 300, 300)
        other = fixed if published else reference[rows].mean(0)
        resampled.append(plain_metrics(own[rows].mean(0), other))
    expected = np.quantile(resampled, (0.025, 0.975), axis=0).T
    for interval, ends in zip(found, expected, strict=True):
        assert interval == pytest.approx(tuple(ends), abs=0.12 * (ends[1] - ends[0]))


def test_pairs_leave_less_to_chance() -> None:
    own, reference = drawn(300)
    paired, _ = error_intervals(own, reference)
    shuffled, _ = error_intervals(own, reference[np.random.default_rng(1).permutation(300)])
    assert paired is not None and shuffled is not None
    assert paired[1] - paired[0] < 0.7 * (shuffled[1] - shuffled[0])


def test_a_reference_without_errors_has_no_interval() -> None:
    assert error_intervals(np.ones((5, 3)), np.zeros((5, 3))) == (None, None)
    assert error_intervals(np.ones((5, 3)), np.full(3, 0.5)) == ((2, 2), None)


def test_the_interval_of_a_mean_area_is_that_of_a_bootstrap_of_images() -> None:
    images = 200
    random = np.random.default_rng(0)
    clean = random.standard_normal(images)
    noise = random.standard_normal((2, 3, images))
    corrupted = {"weak": clean + 0.5 + 0.5 * noise[0], "strong": clean + 2 + 0.5 * noise[1]}
    rows = np.arange(images)
    placed = {name: paired_placements(clean, each, rows) for name, each in corrupted.items()}
    each, mean = area_intervals(placed)
    resampled = []
    for _ in range(400):
        drawn = random.integers(images, size=images)
        areas = [area_under_curve(clean[drawn], c[:, drawn].ravel()) for c in corrupted.values()]
        resampled.append((*areas, sum(areas) / 2))
    for (low, high), values in zip((*each.values(), mean), zip(*resampled, strict=True), strict=True):
        assert (high - low) / 3.92 == pytest.approx(np.std(values), rel=0.2)
