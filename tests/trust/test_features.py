import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from sklearn.covariance import EmpiricalCovariance
from torch import Tensor

from candid.trust.calibrate import RIDGE, Moments
from candid.trust.scores import FeatureGaussian


def fitted(features: Tensor, labels: Tensor, classes: int, part: int = 10**6) -> FeatureGaussian:
    moments = Moments(classes, features.shape[1])
    for x, y in zip(features.split(part), labels.split(part), strict=True):
        moments.add(x, y)
    return moments.gaussian()


def plain_distances(features: Tensor, labels: Tensor, queries: Tensor) -> NDArray[np.float64]:
    """With the inverse of scikit-learn's covariance, in float64."""
    x, y = features.double().numpy(), labels.numpy()
    means = np.stack([x[y == label].mean(0) for label in np.unique(y)])
    residuals = x - means[np.searchsorted(np.unique(y), y)]
    covariance = EmpiricalCovariance(assume_centered=True).fit(residuals).covariance_
    covariance += RIDGE * covariance.diagonal().mean() * np.eye(len(covariance))
    inverse = np.linalg.inv(covariance)
    nearest: NDArray[np.float64] = cdist(queries.double().numpy(), means, "mahalanobis", VI=inverse).min(1)
    return nearest


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    classes=st.integers(1, 30),
    features=st.integers(1, 12),
    offset=st.sampled_from([0.0, 1.0, -30.0]),
    constant=st.booleans(),
)
def test_distances_are_the_plain_ones(
    seed: int, classes: int, features: int, offset: float, constant: bool
) -> None:
    g = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(features, features, generator=g)).Q
    x = (0.1 + torch.rand(features, generator=g)) * torch.randn(90, features, generator=g) @ turn + offset
    if constant and features > 1:
        x[:, 0] = offset
    labels = 2 * torch.randint(0, classes, (90,), generator=g)  # odd classes are never seen
    queries = torch.cat((x[:40], x[:5] + 3, torch.zeros(1, features)))
    found = fitted(x, labels, 2 * classes).distance(queries)
    assert found.dtype == torch.float64
    truth = plain_distances(x, labels, queries) ** 2
    np.testing.assert_allclose(found**2, truth, rtol=1e-4, atol=1e-6 * truth.max())  # the mean of one: 0


def test_far_features_keep_their_distances(generator: torch.Generator) -> None:
    """The squares of 100 standard deviations would drown those of one."""
    x = torch.randn(400, 64, generator=generator) + 100
    x[:, 3] = 100
    labels = torch.arange(400) % 40
    found = fitted(x, labels, 40).distance(x)
    np.testing.assert_allclose(found, plain_distances(x, labels, x), rtol=1e-4)


@pytest.mark.parametrize("offset", [0.0, 1.0, 100.0])
def test_one_image_a_class_gives_plain_distances_in_some_unit(
    offset: float, generator: torch.Generator
) -> None:
    x = torch.randn(30, 8, generator=generator) + offset
    found = fitted(x, torch.arange(30), 30).distance(x + 1)
    euclidean = torch.cdist(x.double() + 1, x.double()).amin(1)
    torch.testing.assert_close(found / found.mean(), euclidean / euclidean.mean(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("value", [0.0, 0.3, 1e3])
def test_features_that_never_vary_have_distances(value: float) -> None:
    x = torch.full((50, 4), value)
    gaussian = fitted(x, torch.arange(50) % 3, 3)
    near, far = gaussian.distance(x).max(), gaussian.distance(x + 1).min()
    assert near < 0.01 * far
    assert torch.isfinite(far)


@pytest.mark.parametrize("part", [1, 7])
def test_moments_add_up(part: int, generator: torch.Generator) -> None:
    x, labels = torch.randn(25, 6, generator=generator), torch.arange(25) % 4
    whole, parts = fitted(x, labels, 5), fitted(x, labels, 5, part)
    torch.testing.assert_close(parts.whitening, whole.whitening)
    torch.testing.assert_close(parts.means, whole.means)
    assert len(whole.means) == 4
