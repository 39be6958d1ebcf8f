"""Invertible pooling: Haar wavelets in place of max pooling, the cosine transform in place of the mean."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from candid.models.flow.coupling import OrthogonalMatrix
from candid.models.flow.invertible import Invertible
from candid.models.flow.network import full_precision


class HaarPooling(Invertible):
    """2 x 2 Haar wavelets: (B, C, H, W) -> (B, 4C, H/2, W/2), grouped by wavelet.

    All averages come first, then the horizontal, the vertical and the diagonal differences.
    The orthonormal transform is multiplied by ``scale``; at 0.5 the first C channels are plain means.
    ``log |det| = D log scale``. H and W must be even.

    >>> z, _ = HaarPooling()(torch.ones(1, 3, 2, 2))
    >>> z.flatten().tolist()
    [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = F.pixel_unshuffle(x, 2).unflatten(1, (x.shape[1], 4)).transpose(1, 2)  # (B, 4, C, H/2, W/2)
        return self.scale * _butterfly(p).flatten(1, 2), self._log_det(x)

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        p = _butterfly(z.unflatten(1, (4, z.shape[1] // 4)) / self.scale)
        return F.pixel_shuffle(p.transpose(1, 2).flatten(1, 2), 2), -self._log_det(z)

    def _log_det(self, x: Tensor) -> Tensor:
        return x.new_full((x.shape[0],), x.shape[1:].numel() * math.log(self.scale))


def _butterfly(p: Tensor) -> Tensor:
    """Return the orthonormal 4-point Haar transform along dimension 1; it is its own inverse."""
    top_left, top_right, bottom_left, bottom_right = p.unbind(1)
    left, right = top_left + bottom_left, top_right + bottom_right
    left_step, right_step = top_left - bottom_left, top_right - bottom_right
    return 0.5 * torch.stack(
        (left + right, left - right, left_step + right_step, left_step - right_step), dim=1
    )


class DCTPooling(Invertible):
    """Orthonormal two-dimensional DCT-II of every channel, flattened: (B, C, H, W) -> (B, D).

    ``log |det| = 0``. The order is coefficient-major: the frequency along the width is slowest,
    then the one along the height, then the channel, so that the first C numbers are the constant
    coefficients, the mean-pooled features times sqrt(H W).

    >>> z, _ = DCTPooling(5, 4, 4)(torch.ones(1, 5, 4, 4))
    >>> z.shape, torch.allclose(z[0, :5], torch.tensor(4.0)), bool((z[0, 5:].abs() < 1e-6).all())
    (torch.Size([1, 80]), True, True)
    """

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.shape = channels, height, width
        self.over_height = OrthogonalMatrix(dct_matrix(height))
        self.over_width = OrthogonalMatrix(dct_matrix(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with full_precision(x):
            z = self._matrix() @ x.permute(0, 2, 3, 1).flatten(1, 2)
        return z.flatten(1), x.new_zeros(x.shape[0])

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        channels, height, width = self.shape
        with full_precision(z):
            x = self._matrix().T @ z.unflatten(1, (height * width, channels))
        return x.unflatten(1, (height, width)).permute(0, 3, 1, 2), z.new_zeros(z.shape[0])

    def _matrix(self) -> Tensor:
        """Return both transforms in one: from pixels, row by row, to coefficients, (HW, HW)."""
        _, height, width = self.shape
        both = torch.kron(
            self.over_width.weight, self.over_height.weight
        )  # columns: pixels, column by column
        return both.unflatten(1, (width, height)).mT.flatten(1)


def dct_matrix(n: int) -> Tensor:
    """Return the orthonormal DCT-II basis vectors as rows, lowest frequency first, (n, n) in float64."""
    if torch.get_default_device().type == "meta":  # as in random_orthogonal
        return torch.empty(n, n, dtype=torch.float64)
    position = torch.arange(n, dtype=torch.float64) + 0.5
    frequency = torch.arange(n, dtype=torch.float64)[:, None]
    basis = math.sqrt(2 / n) * torch.cos(math.pi / n * frequency * position)
    basis[0] /= math.sqrt(2)
    return basis
