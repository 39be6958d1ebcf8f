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
