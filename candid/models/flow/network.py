"""Networks in torch as models: what pixel models, and the ResNets that they are compared with, share."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from candid._support.numbers import Array
from candid.models.protocol import ModelBase, Outputs, check_batch_shape, check_white, wrong_type


class TensorOutputs(NamedTuple):
    """:class:`~candid.models.protocol.Outputs` as tensors, which gradients reach."""

    logits: Tensor
    features: Tensor
    log_density_terms: Tensor | None
    latent: Tensor | None
    novelty: Tensor | None = None

    def arrays(self) -> Outputs:
        """Return the same numbers as arrays."""
        return Outputs(*(None if part is None else array_of(part) for part in self))  # type: ignore[arg-type]


class ImageClassifier(ModelBase, nn.Module):
    """What pixel models and ResNets share of :class:`~candid.models.protocol.Model`.

    Methods that take tensors take float images in [0, 1], (B, C, H, W); gradients reach them.
    """

    image_mean: Tensor

    def __init__(self, class_names: tuple[str, ...]) -> None:
        nn.Module.__init__(self)
        ModelBase.__init__(self, class_names)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.image_mean.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers that it computes with."""
        return self.image_mean.dtype

    @property
    def size(self) -> int:
        """Number of weights."""
        return sum(weights.numel() for weights in self.parameters())

    def state(self) -> dict[str, Array]:
        """Return the weights by name, on the CPU."""
        return {name: array_of(weights.contiguous()) for name, weights in self.state_dict().items()}

    def layout(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Return the shape of each weight, and whether it has floating-point numbers."""
        weights = self.state_dict().items()
        return {name: (tuple(tensor.shape), tensor.is_floating_point()) for name, tensor in weights}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take weights by name, for evaluation in float32: those in half precision are widened."""
        self.load_state_dict({name: torch.tensor(weights) for name, weights in state.items()}, assign=True)
        self.float().eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def ready(self) -> Self:
        """Return the model itself in evaluation mode, on the GPU if there is one."""
        return self.eval().to(best_device())

    @torch.inference_mode()
    def outputs(self, images: Array) -> Outputs:
        """Make one forward pass over float images in [0, 1], (B, C, H, W)."""
        x = torch.from_numpy(np.ascontiguousarray(images))
        return self.tensor_outputs(x.to(self.device)).arrays()

    def tensor_outputs(self, x: Tensor) -> TensorOutputs:
        """Make one forward pass that gradients can follow."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """Return the log posterior up to a constant of the image, (B, M): for decisions and attacks."""
        raise NotImplementedError

    def feature_maps(self, x: Tensor) -> Tensor:
        """Return the last maps of the network, (B, C, h, w)."""
        raise NotImplementedError

    def posterior(self, x: Tensor) -> Tensor:
        """Return p(y | x), (B, M); rows sum to one."""
        return self.logits(x).softmax(dim=1)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return the most probable class, (B,)."""
        return self.logits(x).argmax(dim=1)


def array_of(values: Tensor) -> Array:
    """Return a tensor as an array on the CPU; bfloat16, which arrays don't have, as float32."""
    values = values.detach().cpu()
    array: Array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return array


def check_batch(x: Any, shape: tuple[int, int, int]) -> None:
    """Raise an error unless ``x`` is a batch of float images of this ``shape`` (C, H, W) in [0, 1]."""
    if torch.compiler.is_compiling():
        return
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise wrong_type(x, "tensors")
    check_batch_shape(tuple(x.shape), shape, "a tensor")
    if not x.is_meta:
        check_white(x.max())


def is_autocast(x: Tensor) -> bool:
    """Return whether autocast is on for the device of ``x``."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Switch autocast off for the bijection's own arithmetic on ``x``."""
    return torch.autocast(x.device.type, enabled=False) if is_autocast(x) else nullcontext()


def best_device() -> torch.device:
    """Return a GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
