"""Eyes from files: ONNX models and programs that torch.export wrote."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.files import digest
from candid.models.eyes.efficientnet import statistics
from candid.models.eyes.eye import Eye
from candid.models.eyes.graph import session_of


def described(outputs: list[Tensor]) -> Tensor:
    """Return the statistics of outputs that are maps (B, C, h, w), and outputs that are features (B, C)."""
    return torch.cat([statistics([each]) if each.ndim == 4 else each for each in outputs], 1)


class FileEye(Eye):
    """A network in a file, which takes images in [0, 1].

    Each of its outputs that is maps (B, C, h, w) counts as a stage; each that is features (B, C) is taken as
    it is.
    """

    output_names: tuple[str, ...] = ()
    metadata: Mapping[str, str] = {}
    """What the file says about itself."""

    def __init__(self, path: Path) -> None:
        self.name, self.path = str(path.resolve()), path
        try:
            self.content = path.read_bytes()
        except OSError as error:
            raise CandidError(f"The eye '{path}' can't be read: {error}.") from error
        self.sha256 = digest(self.content).hexdigest()
        self._open()
        outputs = self._outputs(torch.zeros(1, 3, self.size, self.size))
        usable = [each for each in outputs if each.ndim in (2, 4)]
        if not usable or len(usable) < len(outputs):
            raise CandidError(
                f"'{path}' has no usable output: it needs maps (B, C, h, w) or features (B, C), and nothing "
                f"else, not {', '.join(str(tuple(each.shape)) for each in outputs)}."
            )
        self.has_maps = all(each.ndim == 4 for each in outputs)
        self.groups = tuple(each.shape[1] for each in outputs for _ in range(2 if each.ndim == 4 else 1))

    def _open(self) -> None:
        """Read the network and find the size of its images."""
        raise NotImplementedError

    def _outputs(self, images: Tensor) -> list[Tensor]:
        """Return all outputs of the network."""
        raise NotImplementedError

    def statistics(self, images: Tensor) -> Tensor:
        """Return what describes the images, (B, D)."""
        return described(self._outputs(images))

    def maps(self, images: Tensor) -> list[Tensor]:
        """Return the outputs of the network if all of them are maps."""
        return self._outputs(images) if self.has_maps else super().maps(images)


class OnnxEye(FileEye):
    """A network in an ONNX file, run by onnxruntime. Gradients don't reach the images."""

    differentiable: ClassVar[bool] = False

    def _open(self) -> None:
        try:
            self._threads, self._session = torch.get_num_threads(), session_of(self.content)
        except CandidError as error:
            raise CandidError(f"'{self.path}' can't be an eye: {error}") from error
        inputs = self._session.get_inputs()
        shape = inputs[0].shape if len(inputs) == 1 else []
        square = len(shape) == 4 and shape[1] == 3 and isinstance(shape[3], int) and shape[2] == shape[3]
        if not square or isinstance(shape[0], int):
            raise CandidError(
                f"'{self.path}' must take one batch of square images (B, 3, S, S) of any length B, with a "
                f"fixed size S, not {[each.shape for each in inputs]}."
            )
        self.size = shape[3]
        self.output_names = tuple(each.name for each in self._session.get_outputs())
        self.metadata = self._session.get_modelmeta().custom_metadata_map

    def _outputs(self, images: Tensor) -> list[Tensor]:
        if self._threads != torch.get_num_threads():
            self._open()
        inputs = {self._session.get_inputs()[0].name: images.detach().cpu().float().contiguous().numpy()}
        return [torch.from_numpy(each).to(images.device) for each in self._session.run(None, inputs)]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_session"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class ExportedEye(FileEye):
    """A program that ``torch.export.save`` wrote (``.pt2``)."""

    def _open(self) -> None:
        try:
            program = torch.export.load(self.path)
            (shape,) = [
                tuple(value.shape)
                for node in program.graph.nodes
                if node.name in program.graph_signature.user_inputs
                for value in [node.meta["val"]]
            ]
            if isinstance(shape[0], int):
                raise ValueError(f"its batch is fixed at {shape[0]}, export it with a dynamic one.")
            self.size = int(shape[3])
            self.module = program.module()
        except Exception as error:  # torch raises whatever it likes for a foreign file
            raise CandidError(
                f"'{self.path}' is not a program of torch.export that takes one batch of images: {error}"
            ) from error

    def _outputs(self, images: Tensor) -> list[Tensor]:
        found = self.module(images)
        return [found] if isinstance(found, Tensor) else list(found)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "module"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()
