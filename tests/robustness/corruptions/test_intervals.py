import numpy as np
import pytest
import torch
from torch import Tensor

from candid.inference.roc import area_under_curve, paired_placements
from candid.robustness.corruptions.intervals import area_intervals, error_intervals

RATES = torch.tensor([0.2, 0.5, 0.7])  # clean, two corruptions


def drawn(images: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Errors of two models that find the same images hard, at two severities."""
    hard = torch.rand(images, 1, 1, generator=generator)

    def errors(rates: Tensor) -> Tensor:
        luck = torch.rand(images, 3, 2, generator=generator)
        wrong = (0.7 * hard + 0.3 * luck < rates[:, None]).double().mean(2)
        wrong[:, 0] = wrong[:, 0].round()  # clean images have one severity
        return wrong

    return errors(RATES + 0.1), errors(RATES)


def plain_metrics(own: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """Return mCE and relative mCE of mean errors, clean ones first."""
    ratios = [own[c] / reference[c] for c in (1, 2)]
    relative = [(own[c] - own[0]) / (reference[c] - reference[0]) for c in (1, 2)]
    return sum(ratios) / 2, sum(relative) / 2


@pytest.mark.parametrize("published", [False, True])
def test_error_intervals_are_those_of_a_plain_bootstrap(published: bool, generator: torch.Generator) -> None:
    own, reference = drawn(300, generator)
    fixed = reference.mean(0)
    found = error_intervals(own, fixed if published else reference)
    random, resampled = np.random.default_rng(0), []
    for _ in range(4000):
        rows = random.integers(0, 300, 300)
        other = fixed.numpy() if published else reference.numpy()[rows].mean(0)
        resampled.append(plain_metrics(own.numpy()[rows].mean(0), other))
    expected = np.quantile(resampled, (0.025, 0.975), axis=0).T
    for interval, ends in zip(found, expected, strict=True):
        assert interval == pytest.approx(tuple(ends), abs=0.12 * (ends[1] - ends[0]))


def test_pairs_leave_less_to_chance(generator: torch.Generator) -> None:
    own, reference = drawn(300, generator)
    paired, _ = error_intervals(own, reference)
    shuffled, _ = error_intervals(own, reference[torch.randperm(300, generator=generator)])
    assert paired is not None and shuffled is not None
    assert paired[1] - paired[0] < 0.7 * (shuffled[1] - shuffled[0])


def test_a_reference_without_errors_has_no_interval() -> None:
    assert error_intervals(torch.ones(5, 3), torch.zeros(5, 3)) == (None, None)
    assert error_intervals(torch.ones(5, 3), torch.full((3,), 0.5)) == ((2, 2), None)


def test_the_interval_of_a_mean_area_is_that_of_a_bootstrap_of_images(generator: torch.Generator) -> None:
    images = 200
    clean = torch.randn(images, generator=generator)
    noise = torch.randn(2, 3, images, generator=generator)
    corrupted = {"weak": clean + 0.5 + 0.5 * noise[0], "strong": clean + 2 + 0.5 * noise[1]}
    rows = torch.arange(images)
    placed = {name: paired_placements(clean, each, rows) for name, each in corrupted.items()}
    each, mean = area_intervals(placed)
    resampled = []
    for _ in range(400):
        drawn = torch.randint(images, (images,), generator=generator)
        areas = [area_under_curve(clean[drawn], c[:, drawn].flatten()) for c in corrupted.values()]
        resampled.append((*areas, sum(areas) / 2))
    for (low, high), values in zip((*each.values(), mean), zip(*resampled, strict=True), strict=True):
        assert (high - low) / 3.92 == pytest.approx(np.std(values), rel=0.2)
