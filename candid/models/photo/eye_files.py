"""Eyes from files: ONNX models, and what they share with programs that torch.export wrote."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array, digest, threads
from candid.data.images import Preprocessing
from candid.models.photo.efficientnet import session_of, statistics
from candid.models.photo.eye import Eye
from candid.models.photo.hub import PREPROCESSOR, HubInput, adapted, with_weights


def described(outputs: list[Array]) -> Array:
    """Return the statistics of outputs that are maps (B, C, h, w), and outputs that are features (B, C)."""
    return np.concatenate([statistics([each]) if each.ndim == 4 else each for each in outputs], 1)


class FileEye(Eye):
    """A network in a file, which takes images in [0, 1].

    Each of its outputs that is maps (B, C, h, w) counts as a stage; each that is features (B, C) is taken as
    it is.
    """

    output_names: tuple[str, ...] = ()
    metadata: Mapping[str, str] = {}
    """What the file says about itself."""

    def __init__(self, path: Path) -> None:
        self.name, self.path = str(path.parent.resolve() / path.name), path  # links may have other names
        try:
            self.content = path.read_bytes()
        except OSError as error:
            raise CandidError(f"The eye '{path}' can't be read: {error}.") from error
        self.sha256 = digest(self.content).hexdigest()
        self._prepare()
        self._open()
        outputs = self.outputs(np.zeros((1, 3, self.size, self.size), np.float32))
        usable = [each for each in outputs if each.ndim in (2, 4)]
        if not usable or len(usable) < len(outputs):
            raise CandidError(
                f"'{path}' has no usable output: it needs maps (B, C, h, w) or features (B, C), and nothing "
                f"else, not {', '.join(str(tuple(each.shape)) for each in outputs)}."
            )
        self.are_maps = tuple(each.ndim == 4 for each in outputs)
        self.groups = tuple(each.shape[1] for each in outputs for _ in range(2 if each.ndim == 4 else 1))

    @property
    def has_maps(self) -> bool:
        """Whether some of the outputs are maps."""
        return any(self.are_maps)

    def _prepare(self) -> None:
        """Change the network, so that it takes images in [0, 1]."""

    @abstractmethod
    def _open(self) -> None:
        """Read the network and find the size of its images."""

    @abstractmethod
    def outputs(self, images: Array) -> list[Array]:
        """Return all outputs of the network."""

    def statistics(self, images: Array) -> Array:
        """Return what describes the images, (B, D)."""
        return described(self.outputs(images))

    def maps(self, images: Array) -> list[Array]:
        """Return the outputs of the network if some of them are maps; features are (B, C)."""
        return self.outputs(images) if self.has_maps else super().maps(images)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class OnnxEye(FileEye):
    """A network in an ONNX file, run by onnxruntime. Gradients don't reach the images.

    A ``preprocessor_config.json`` next to it, as repositories of the Hugging Face Hub have it, says how it
    sees images; without one, it takes images in [0, 1] of a fixed size. See :mod:`candid.models.photo.hub`.
    """

    input: HubInput | None = None
    """How it sees images, if a file says it."""

    def _prepare(self) -> None:
        try:
            self.content, files = with_weights(self.content, self.path)
            self.input = HubInput.read(self.path)
            session = session_of(self.content)
            changed = adapted(self.content, session, self.path, self.input)
        except CandidError as error:
            raise CandidError(f"'{self.path}' can't be an eye: {error}") from error
        if files or self.input is not None:
            self.sha256 = digest(self.sha256, *files, repr(self.input)).hexdigest()
        self.content = changed or self.content

    def _open(self) -> None:
        try:
            self._threads, self._session = threads(), session_of(self.content)
        except CandidError as error:
            raise CandidError(f"'{self.path}' can't be an eye: {error}") from error
        inputs = self._session.get_inputs()
        shape = inputs[0].shape if len(inputs) == 1 else []
        square = len(shape) == 4 and shape[1] == 3 and isinstance(shape[3], int) and shape[2] == shape[3]
        if not square or isinstance(shape[0], int):
            raise CandidError(
                f"'{self.path}' must take one batch of square images (B, 3, S, S) of any length B, with a "
                f"fixed size S, or with a {PREPROCESSOR} next to it, not {[each.shape for each in inputs]}."
            )
        self.size = shape[3]
        self.output_names = tuple(each.name for each in self._session.get_outputs())
        self.metadata = self._session.get_modelmeta().custom_metadata_map

    @property
    def preprocessing(self) -> Preprocessing:
        """How a file becomes an image that it takes."""
        return super().preprocessing if self.input is None else self.input.preprocessing

    def outputs(self, images: Array) -> list[Array]:
        """Return all outputs of the network."""
        if self._threads != threads():
            self._open()
        inputs = {self._session.get_inputs()[0].name: np.ascontiguousarray(images, np.float32)}
        return list(self._session.run(None, inputs))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_session"}
