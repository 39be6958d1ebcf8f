"""Photo models and adopted models as modules of torch: gradients reach the images."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from candid._support.errors import CandidError
from candid.models.flow.network import TensorOutputs, check_batch
from candid.models.photo.adopted import AdoptedModel
from candid.models.photo.efficientnet import Network, PackagedEye
from candid.models.photo.eye import Eye, JoinedEyes, SoftmaxEye
from candid.models.photo.model import PhotoModel
from candid.models.photo.opening import FileSoftmax, PackagedSoftmax
from candid.models.photo.torch_eyes import EfficientNetLite, described, statistics
from candid.models.photo.traced import Traced


class TorchArray(Traced):
    """A tensor that functions of numpy take."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))

    def _tensor(self, value: Any) -> Tensor:
        if isinstance(value, TorchArray):
            return value.tensor
        return torch.as_tensor(np.asarray(value), device=self.tensor.device)  # of no dimensions: no type

    def apply(self, name: str, *inputs: Any, **options: Any) -> "TorchArray":
        """Return what the function of torch gives."""
        if name in ("concatenate", "stack"):
            parts, axis = inputs
            joined = torch.cat if name == "concatenate" else torch.stack
            return TorchArray(joined([self._tensor(part) for part in parts], axis))
        if name == "power":
            return TorchArray(self.tensor ** inputs[1])
        function = getattr(torch, {"max": "amax", "min": "amin"}.get(name, name))
        return TorchArray(function(*map(self._tensor, inputs), **options))

    def astype(self, dtype: Any, copy: bool = True) -> "TorchArray":
        """Return it in another type."""
        return TorchArray(self.tensor.to(getattr(torch, np.dtype(dtype).name)))

    def __getitem__(self, key: Any) -> "TorchArray":
        return TorchArray(self.tensor[key])


def tensor_outputs_of(model: PhotoModel | AdoptedModel, *inputs: Tensor) -> TensorOutputs:
    """Return ``model.outputs_of(*inputs)`` as tensors that gradients can follow."""
    outputs: Any = model.outputs_of(*map(TorchArray, inputs))  # type: ignore[arg-type]
    tensors: list[Any] = [None if part is None else part.tensor for part in outputs]
    return TensorOutputs(*tensors)


class PhotoModule(nn.Module):
    """A photo model or an adopted model in torch.

    It agrees with the model to 1e-4, and gradients reach the images.
    """

    def __init__(self, model: PhotoModel | AdoptedModel) -> None:
        super().__init__()
        self.model, self.network = model, network_of(model.eye)
        self.class_names, self.image_shape = model.class_names, model.image_shape
        self.kind, self.density_of, self.can = model.kind, model.density_of, model.can
        self.feature_size, self.dimensions = model.feature_size, model.dimensions
        self.eval().requires_grad_(False)

    def tensor_outputs(self, x: Tensor) -> TensorOutputs:
        """Make one forward pass that gradients can follow."""
        check_batch(x, self.image_shape)
        seen = self.network(x)
        return tensor_outputs_of(self.model, *((seen,) if isinstance(seen, Tensor) else seen))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        """Return the log posterior up to a constant of the image, (B, M)."""
        check_batch(x, self.image_shape)
        seen = self.network(x)
        if not isinstance(seen, Tensor):  # of an adopted model
            return seen[0]
        logits: Any = self.model.logits_of(TorchArray(seen))  # type: ignore[arg-type]
        return logits.tensor

    def posterior(self, x: Tensor) -> Tensor:
        """Return p(y | x), (B, M); rows sum to one."""
        return self.logits(x).softmax(1)


def photo_module(model: PhotoModel | AdoptedModel) -> PhotoModule:
    """Return a photo model or an adopted model as a module of torch.

    Raises:
        CandidError: if its eye runs in onnxruntime alone.
    """
    return PhotoModule(model)


def network_of(eye: Eye) -> nn.Module:
    """Return an eye as a module: images to statistics, or to logits and features of a classifier.

    Raises:
        CandidError: if it runs in onnxruntime alone.
    """
    if isinstance(eye, PackagedEye):
        return EfficientNetLite(Network.read(eye.info))
    if isinstance(eye, PackagedSoftmax):
        return _PackagedClassifier(eye)
    if isinstance(eye, JoinedEyes):
        return _Joined(eye)
    module = getattr(eye.eye if isinstance(eye, FileSoftmax) else eye, "module", None)
    if module is None:
        raise CandidError(
            f"The eye '{eye.name}' runs in onnxruntime, which gives no gradients: use an eye in torch, such "
            "as lite0 or a .pt2 file."
        )
    return _Called(eye, module)


class _PackagedClassifier(nn.Module):
    def __init__(self, eye: PackagedSoftmax) -> None:
        super().__init__()
        self.network, self.early = EfficientNetLite(Network.read(eye.eye.info)), eye.groups[1]
        for name, values in zip(("weight", "bias"), eye.last_layer(), strict=True):
            self.register_buffer(name, torch.tensor(values))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.network.maps(x)
        pooled, early = self.network.pooled(maps), statistics(maps)[:, : self.early]
        logits = F.linear(pooled, self.get_buffer("weight"), self.get_buffer("bias"))
        return logits, torch.cat((pooled, early), 1)


class _Joined(nn.Module):
    def __init__(self, eye: JoinedEyes) -> None:
        super().__init__()
        self.sizes = [each.size for each in eye.eyes]
        self.networks = nn.ModuleList(network_of(each) for each in eye.eyes)

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.networks, self.sizes, strict=True)
        return torch.cat([network(at_size(x, size)) for network, size in parts], 1)


class _Called(nn.Module):
    """An eye with a module of its own."""

    def __init__(self, eye: Any, module: nn.Module) -> None:
        super().__init__()
        self.eye, self.module = eye, module

    def forward(self, x: Tensor) -> Any:
        if not isinstance(self.eye, SoftmaxEye):
            return self.eye.tensor_statistics(x)
        if not isinstance(self.eye, FileSoftmax):
            return self.eye.tensor_logits_and_features(x)  # type: ignore[attr-defined]
        outputs = self.eye.eye.tensor_outputs(x)  # type: ignore[attr-defined]
        logits = outputs.pop(self.eye.logits_number)
        return logits, described(outputs) if outputs else logits


def at_size(x: Tensor, size: int) -> Tensor:
    """Return images at ``size`` x ``size`` pixels, as :func:`candid.models.photo.eye.at_size` does."""
    if x.shape[-1] == size:
        return x
    return F.interpolate(x, (size, size), mode="bicubic", antialias=True).clamp(0, 1)
