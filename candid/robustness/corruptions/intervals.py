"""95 % intervals of the corruption benchmark: what other images of the same kind could give.

All corruptions and severities change the same images, so what varies by chance is an image with all its
versions.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from candid.inference.intervals import bootstrap_intervals
from candid.inference.roc import placement_interval

Ends = tuple[float, float]
"""The lower and the upper end of an interval."""
RESAMPLES = 1000


def area_intervals(placed: Mapping[str, Tensor]) -> tuple[dict[str, Ends], Ends]:
    """Return the intervals of the areas under the ROC curve by corruption, and of their mean.

    Args:
        placed: the paired placements of the images by corruption, (N,); see
            :func:`candid.inference.roc.paired_placements`.
    """
    mean = torch.stack(list(placed.values())).mean(0)
    return {name: placement_interval([each]) for name, each in placed.items()}, placement_interval([mean])


def error_intervals(errors: Tensor, reference: Tensor) -> tuple[Ends | None, Ends | None]:
    """Return the intervals of mCE and of relative mCE, by a bootstrap of images.

    Args:
        errors: the errors of a model on each image, (N, 1 + corruptions): on the clean image, then the share
            of severities at which it is wrong.
        reference: the same of the reference model on the same images, or its published errors,
            (1 + corruptions,), which do not vary.

    Returns:
        The two intervals; None where a metric is not defined.
    """
    images, columns = errors.shape
    paired = reference.ndim == 2

    def figures(sums: Tensor) -> Tensor:
        means = sums / images
        own, other = means.split(columns, -1) if paired else (means, reference)
        ratios = []
        for relative in (0, 1):
            above = own[..., 1:] - relative * own[..., :1]
            below = other[..., 1:] - relative * other[..., :1]
            ratios.append(torch.where(below > 0, above / below, torch.nan).mean(-1))
        return torch.stack(ratios, -1)

    per_image = torch.cat((errors, reference), 1) if paired else errors
    mce, relative_mce = (
        None if each is None else (each.low, each.high)
        for each in bootstrap_intervals(per_image, figures, RESAMPLES, 0, 0.95)
    )
    return mce, relative_mce
