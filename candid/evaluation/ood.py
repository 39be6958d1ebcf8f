"""Is this image like anything the model was trained on?"""

import torch
from torch import Tensor


def p_values(scores: Tensor, calibration: Tensor) -> Tensor:
    """Conformal p-values of outlier scores: ``(1 + #{calibration >= score}) / (n + 1)``.

    ``calibration`` are the scores of n images that the model was not trained on. If an image comes
    from where they come from, its p-value is below any t with a probability of at most t.

    >>> p_values(torch.tensor([0.5, 9.0]), torch.tensor([0.1, 0.2, 0.9]))
    tensor([0.5000, 0.2500], dtype=torch.float64)
    """
    ordered = calibration.sort().values
    at_least = len(ordered) - torch.searchsorted(ordered, scores.contiguous())
    return (1 + at_least).double() / (len(ordered) + 1)


def typicality_p_values(log_density: Tensor, calibration: Tensor) -> Tensor:
    """Two-sided p-values of log densities: an image is an outlier if it is too improbable or too probable.

    Twice the smaller of the two one-sided conformal p-values, at most 1. Images that are simpler than the
    training images, such as blank ones, often have too high a density.

    >>> typicality_p_values(torch.tensor([-9.0, 0.4]), torch.linspace(0, 1, 99))
    tensor([0.0200, 0.8200], dtype=torch.float64)
    """
    too_low = p_values(-log_density, -calibration)
    too_high = p_values(log_density, calibration)
    return (2 * torch.minimum(too_low, too_high)).clamp(max=1)
