"""The contract of an invertible layer."""

from abc import ABC, abstractmethod

from torch import Tensor, nn


class Invertible(nn.Module, ABC):
    """A differentiable bijection with a known log-determinant.

    - Forward goes from the image to the latent, inverse goes back.
    - Both return ``(output, log_det)``. ``log_det`` is ``log |det d output / d input|`` of the direction
      travelled: in nats, of shape (B,), in the input's dtype and on its device. So the two
      log-determinants of a round trip add up to zero.
    - A layer stores nothing between calls and never writes to its input.
    - Fixed tensors are buffers; permutations are indices.
    - The arithmetic of the bijection is done in the input's precision, under autocast too;
      only the networks that predict coefficients may run in a lower one.
    """

    @abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]: ...
