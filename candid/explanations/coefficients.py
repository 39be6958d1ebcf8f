"""The cosine coefficients of the latent, and which of them separate the classes."""

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid.models.flow.pooling import dct_matrix
from candid.models.protocol import Model, require_latent

CHUNK = 4096
"""Columns of the prototypes that are computed at a time in float64."""


def dct_basis(height: int, width: int) -> Tensor:
    """Return the image that each coefficient is the product with, (height, width, height, width), float64.

    ``[i, j]`` is the image of frequency i along the height and j along the width: with feature map f the
    coefficient is ``(basis[i, j] * f).sum()``. The images are orthonormal.

    >>> dct_basis(1, 2)[0]
    tensor([[[ 0.7071,  0.7071]],
    <BLANKLINE>
            [[ 0.7071, -0.7071]]], dtype=torch.float64)
    """
    if min(height, width) < 1:
        raise CandidError(f"A feature map has at least 1 x 1 positions, not {height} x {width}.")
    return torch.einsum("ia,jb->ijab", dct_matrix(height), dct_matrix(width))


@torch.no_grad()
def mean_spread(model: Model) -> Tensor:
    """Return how much the class means differ in each cosine coefficient, (height, width), float64.

    ``[i, j]`` is the standard deviation over classes (divisor M) of the entries of mu_y at frequency i along
    the height and j along the width, averaged over channels, in standard deviations of a class. Where it is
    0 the coefficient doesn't affect the classification.

    >>> from candid import GenerativeClassifier
    >>> mean_spread(GenerativeClassifier.from_preset("cifar")).shape
    torch.Size([4, 4])
    """
    model = require_latent(model, "The spread of class means")
    mixture, (height, width) = model.mixture, model.grid
    spreads = [_spread(mixture.mean, None)]
    spreads += [_spread(chunk, mixture.weights) for chunk in mixture.prototypes.split(CHUNK, dim=1)]
    return torch.cat(spreads).view(width, height, -1).mean(2).T.cpu()  # z runs along the width slowest


def _spread(rows: Tensor, weights: Tensor | None) -> Tensor:
    """Return the standard deviations of the columns of ``weights @ rows``, or of ``rows``, (columns,)."""
    rows = rows.double()
    per_class = rows if weights is None else weights.double()
    centred = (per_class - per_class.mean(0)) / len(per_class) ** 0.5
    if weights is not None:
        # |R p|^2 is the variance of alpha_y . p over classes: what is formed has K rows, not M.
        centred = torch.linalg.qr(centred, mode="r").R @ rows
    return torch.linalg.vector_norm(centred, dim=0)
