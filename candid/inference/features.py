"""How far are an image's features from those of the classes? Mahalanobis distances (Lee et al., 2018)."""

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1e-3
"""Added to the covariance, as a share of its mean variance: features that never vary have a distance, too."""
SMALLEST = 1e-8
"""A mean variance below this share of the mean square is no more than rounding."""


@dataclass(frozen=True)
class FeatureGaussian:
    """One Gaussian a class, with a common covariance, on whitened features."""

    whitening: Tensor
    """W with W^T W the inverse covariance, (F, F) in float32."""
    means: Tensor
    """Whitened means of the classes that were seen, (classes, F)."""

    def distance(self, features: Tensor) -> Tensor:
        """To the mean of the nearest class, in standard deviations, (B,)."""
        white = features.float() @ self.whitening.to(features.device).T
        means = self.means.to(features.device)
        centre = means.mean(0)  # cdist cancels squares: features far from 0 would lose their distances
        return torch.cdist(white - centre, means - centre).amin(1).double()


class Moments:
    """Sums over images from which a :class:`FeatureGaussian` is made."""

    def __init__(self, classes: int, features: int) -> None:
        self.count = torch.zeros(classes, dtype=torch.float64)
        """Images a class."""
        self.first = torch.zeros(classes, features, dtype=torch.float64)
        """Sums of their features."""
        self.second = torch.zeros(features, features, dtype=torch.float64)
        """Sums of products of features."""

    def add(self, features: Tensor, labels: Tensor) -> None:
        """More images: (B, F) and (B,)."""
        features = features.double()
        self.count += labels.bincount(minlength=len(self.count))
        self.first.index_add_(0, labels, features)
        self.second += features.T @ features

    def gaussian(self) -> FeatureGaussian:
        """With the classes' means and the covariance around them."""
        seen = self.count > 0
        means = self.first[seen] / self.count[seen, None]
        covariance = (self.second - means.T @ self.first[seen]) / self.count.sum()
        mean_square = self.second.diagonal().mean() / self.count.sum()
        variance = covariance.diagonal().mean().clamp(min=float(SMALLEST * mean_square) or 1.0)
        covariance += RIDGE * variance * torch.eye(len(covariance), dtype=torch.float64)
        inverse_root = torch.linalg.inv(torch.linalg.cholesky(covariance))
        return FeatureGaussian(inverse_root.float(), (means @ inverse_root.T).float())
