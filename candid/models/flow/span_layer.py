"""The last layer of a refitted model: it rescales the span of the class means."""

from collections.abc import Callable

import torch
from torch import Tensor

from candid.models.flow.invertible import Invertible
from candid.models.flow.precision import full_precision


class SpanScaling(Invertible):
    """Scale flat latents about a centre within R directions, and shift them there: (B, D) -> (B, D).

    ``z' = z + U ((1 / s - 1) c + g)`` with the coordinates ``c = U^T z - c_0``; ``log |det| = -R log s``.
    The R orthonormal columns of U are factored like the class means: R x C numbers for the constant
    coefficients, and combinations of K prototypes for the D - C others. A new layer is the identity.

    Args:
        directions: R.
        constant: C, the number of constant coefficients.
        dimensions: D, the length of z.
        prototypes: K.

    >>> layer = SpanScaling(directions=2, constant=4, dimensions=16, prototypes=3)
    >>> z = torch.randn(5, 16)
    >>> layer(z)[0].equal(z)
    True
    """

    constant: Tensor
    weights: Tensor
    prototypes: Tensor
    centre: Tensor
    shift: Tensor
    log_scale: Tensor

    def __init__(self, directions: int, constant: int, dimensions: int, prototypes: int) -> None:
        super().__init__()
        self.register_buffer("constant", torch.zeros(directions, constant))
        self.register_buffer("weights", torch.zeros(directions, prototypes))
        self.register_buffer("prototypes", torch.zeros(prototypes, dimensions - constant))
        self.register_buffer("centre", torch.zeros(directions))
        self.register_buffer("shift", torch.zeros(directions))
        self.register_buffer("log_scale", torch.zeros(()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SpanScaling":
        """Make U orthonormal to the last digit again when it is widened, by Newton steps."""
        digits_before = torch.finfo(self.constant.dtype).bits
        super()._apply(fn, recurse)
        if torch.finfo(self.constant.dtype).bits > digits_before:
            gram = self.prototypes @ self.prototypes.T
            for _ in range(2):
                products = self.constant @ self.constant.T + self.weights @ gram @ self.weights.T
                step = 1.5 * torch.eye(len(products)).to(products) - 0.5 * products
                self.constant, self.weights = step @ self.constant, step @ self.weights
                self.centre = step @ self.centre
        return self

    def coordinates(self, z: Tensor) -> Tensor:
        """Return ``c = U^T z - c_0``, (B, R)."""
        constant = self.constant.shape[1]
        with full_precision(z):
            rest = (z[:, constant:] @ self.prototypes.T) @ self.weights.T
            return z[:, :constant] @ self.constant.T + rest - self.centre

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        step = self.coordinates(x) * torch.expm1(-self.log_scale) + self.shift
        return self._moved(x, step), self._log_det(x)

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        step = self.coordinates(z) * torch.expm1(self.log_scale) - self.log_scale.exp() * self.shift
        return self._moved(z, step), -self._log_det(z)

    def _moved(self, z: Tensor, step: Tensor) -> Tensor:
        """Return ``z + U step`` for steps (B, R)."""
        with full_precision(z):
            return z + torch.cat((step @ self.constant, (step @ self.weights) @ self.prototypes), 1)

    def _log_det(self, z: Tensor) -> Tensor:
        return (-len(self.shift) * self.log_scale).to(z.dtype).expand(z.shape[0])
