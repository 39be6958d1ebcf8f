"""Eyes from files: ONNX models, and what they share with programs that torch.export wrote."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array, digest, threads
from candid.data.images import Preprocessing
from candid.models.photo.efficientnet import session_of, statistics
from candid.models.photo.eye import PREPROCESSOR, Eye

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

    from candid.models.hub import HubInput

OUTPUTS = {"last_hidden_state", "pooler_output", "image_embeds"}
"""Outputs that are used, with logits, if a graph has any of them; attentions and hidden states are not."""
LEADING = 16
"""The most tokens that come before those of patches."""
OPSET = 13
LARGEST = 2**31 - 2**24
"""Bytes of a graph with its weights: the format can't hold more in one piece."""


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
    sees images; without one, it takes images in [0, 1] of a fixed size. See :mod:`candid.models.hub`.
    """

    input: "HubInput | None" = None
    """How it sees images, if a file says it."""

    def _prepare(self) -> None:
        from candid.models.hub import HubInput

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


def hub_eye(name: str, download: bool = True) -> OnnxEye:
    """Return a network of the Hugging Face Hub; see :func:`candid.models.hub.fetched`."""
    from candid.models.hub import fetched

    files = fetched(name, download)
    eye = OnnxEye(files.path)
    eye.name, eye.licence, eye.source = files.name, files.licence, files.name.partition("@")[0]
    return eye


# graphs


def with_weights(content: bytes, path: Path) -> tuple[bytes, list[bytes]]:
    """Return a graph with the weights that it keeps in other files, and the content of these files."""
    if b"location" not in content:
        return content, []
    import onnx

    try:
        model = onnx.load_from_string(content)
    except Exception:  # onnxruntime says what is wrong with it
        return content, []
    outside = [
        (tensor, {entry.key: entry.value for entry in tensor.external_data})
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    ]
    files: dict[str, bytes] = {}
    for tensor, where in outside:
        name = where["location"]
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CandidError(f"its weights are in '{name}', outside of its folder.")
        if name not in files:
            try:
                files[name] = (path.parent / name).read_bytes()
            except OSError as error:
                raise CandidError(f"its weights are in '{name}', which can't be read: {error}.") from error
        start = int(where.get("offset", 0))
        stop = start + int(where["length"]) if "length" in where else len(files[name])
        if stop > len(files[name]):
            raise CandidError(f"its weights are in '{name}', which is cut.")
        tensor.raw_data = files[name][start:stop]
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]
    if not outside:
        return content, []
    if model.ByteSize() > LARGEST:
        raise CandidError("its weights take more than 2 GB: use a smaller or a quantized network.")
    return model.SerializeToString(), [files[name] for name in sorted(files)]


def adapted(
    content: bytes, session: "InferenceSession", path: Path, given: "HubInput | None"
) -> bytes | None:
    """Return a graph that takes images in [0, 1], (B, 3, S, S), and returns maps and features.

    Pixel values are computed as ``given`` says. Tokens (B, T, C) become features, the first one if there are
    more than patches, and maps (B, C, S / patch, S / patch), the last ones. Inputs of type uint8 get pixels
    from 0 to 255, and inputs (B, S, S, 3) get channels last.

    Returns:
        the graph, or None if it is such a graph already, or can't become one.
    """
    inputs = session.get_inputs()
    shape = inputs[0].shape if len(inputs) == 1 else []
    if len(shape) != 4 or isinstance(shape[0], int):
        return None
    last = shape[3] == 3 and shape[1] != 3
    sides = shape[1:3] if last else shape[2:]
    fixed = {side for side in sides if isinstance(side, int)}
    size = given.size if given is not None else fixed.pop() if len(fixed) == 1 else None
    if size is None or any(isinstance(side, int) and side != size for side in sides):
        if given is not None:
            raise CandidError(f"it takes {sides[0]} x {sides[1]} pixels, but {PREPROCESSOR} says {size}.")
        return None
    if given is None and not all(isinstance(side, int) for side in sides):
        return None
    kind = inputs[0].type.removeprefix("tensor(").removesuffix(")")
    if kind not in ("float", "float16", "uint8"):
        raise CandidError(f"its input is of type {kind}, not float, float16 or uint8.")
    square = (2, size, size, 3) if last else (2, 3, size, size)
    images = np.zeros(square, np.float32 if kind == "float" else kind)
    kept = names = [each.name for each in session.get_outputs()]
    if OUTPUTS & set(names):
        kept = [name for name in names if name in OUTPUTS | {"logits"}]
    try:
        shapes = {
            name: output.shape
            for name, output in zip(kept, session.run(kept, {inputs[0].name: images}), strict=True)
        }
    except Exception as error:  # onnxruntime has many exceptions of its own
        raise CandidError(f"it does not run on images of {size} x {size} pixels: {error}") from error
    tokens = any(len(shape) == 3 for shape in shapes.values())
    if given is None and not tokens and not last and kind == "float" and kept == names:
        return None
    return _Adapter(content, size, given).graph(kind, last, shapes)


class _Adapter:
    """Adds nodes before and after a graph."""

    def __init__(self, content: bytes, size: int, given: "HubInput | None") -> None:
        import onnx
        from onnx import version_converter

        self.model = onnx.load_from_string(content)
        version = next(part.version for part in self.model.opset_import if not part.domain)
        if version < OPSET:
            self.model = version_converter.convert_version(self.model, OPSET)
        self.size, self.given = size, given
        self.before: list[Any] = []
        self.after: list[Any] = []

    def graph(self, kind: str, last: bool, shapes: dict[str, tuple[int, ...]]) -> bytes:
        """Return the graph with outputs of these shapes, whose input is of a type, and has channels last."""
        from onnx import TensorProto, helper

        graph = self.model.graph
        initial = {part.name for part in graph.initializer}
        (start,) = (part.name for part in graph.input if part.name not in initial)
        self._pixels(start, kind, last)
        outputs = [
            output
            for name, shape in shapes.items()
            for output in (self._tokens(name, shape, shapes) if len(shape) == 3 else [(name, shape)])
        ]
        nodes = [*self.before, *graph.node, *self.after]
        del graph.node[:], graph.input[:], graph.output[:]
        square: list[str | int | None] = ["N", 3, self.size, self.size]
        graph.input.append(helper.make_tensor_value_info("candid_images", TensorProto.FLOAT, square))
        for name, shape in outputs:
            as_float = f"candid_{name}"
            nodes.append(helper.make_node("Cast", [name], [as_float], to=TensorProto.FLOAT))
            dims: list[str | int | None] = ["N", *shape[1:]]
            graph.output.append(helper.make_tensor_value_info(as_float, TensorProto.FLOAT, dims))
        graph.node.extend(nodes)
        content: bytes = self.model.SerializeToString()
        return content

    def _pixels(self, start: str, kind: str, last: bool) -> None:
        """Add what makes ``start``, the input of the network, of images in [0, 1]."""
        from onnx import TensorProto

        if kind == "uint8":
            if self.given is not None and (len({*self.given.scale}) > 1 or any(self.given.shift)):
                raise CandidError(f"it takes pixels of type uint8, but {PREPROCESSOR} normalizes them.")
            x = self._node("Mul", "candid_images", self._constant(255, np.float32))
            x = self._node("Cast", self._node("Round", x), to=TensorProto.UINT8)
        else:
            scale, shift = ((1.0,), (0.0,)) if self.given is None else (self.given.scale, self.given.shift)
            by, plus = (
                self._constant(np.reshape(each, (1, -1, 1, 1)), np.float32) for each in (scale, shift)
            )
            x = self._node("Add", self._node("Mul", "candid_images", by), plus)
            if kind == "float16":
                x = self._node("Cast", x, to=TensorProto.FLOAT16)
        if last:
            x = self._node("Transpose", x, perm=[0, 2, 3, 1])
        self._node("Identity", x, output=start)

    def _tokens(
        self, name: str, shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]]
    ) -> list[tuple[str, tuple[int, ...]]]:
        """Add what divides tokens into the first one and maps of the last ones; return their names."""
        patch = None if self.given is None else self.given.patch
        if self.given is None or patch is None:
            raise CandidError(
                f"its output '{name}' is tokens {shape}: it needs a {PREPROCESSOR}, and a config.json with "
                "'patch_size', next to it."
            )
        side, registers = self.size // patch, self.given.registers
        leading = shape[1] - side**2
        right = 0 <= leading <= LEADING and (not registers or leading in (registers, registers + 1))
        if not right:
            raise CandidError(
                f"its output '{name}' has {shape[1]} tokens, but {self.size} pixels are {side} x {side} "
                f"patches of {patch} pixels, with at most {LEADING} tokens before them, or those that "
                "config.json says."
            )
        axis, end = self._constant([1]), self._constant([np.iinfo(np.int64).max])
        maps = self._node("Slice", name, self._constant([-(side**2)]), end, axis, later=True)
        maps = self._node("Transpose", maps, perm=[0, 2, 1], later=True)
        maps = self._node("Reshape", maps, self._constant([0, shape[2], side, side]), later=True)
        outputs: list[tuple[str, tuple[int, ...]]] = []
        if leading and not {"pooler_output", "image_embeds"} & set(shapes):  # these are made of the first one
            first = self._node("Slice", name, self._constant([0]), self._constant([1]), axis, later=True)
            first = self._node("Reshape", first, self._constant([0, shape[2]]), later=True)
            outputs.append((first, (shape[0], shape[2])))
        return [*outputs, (maps, (shape[0], shape[2], side, side))]

    def _node(self, kind: str, *inputs: str, output: str = "", later: bool = False, **attributes: Any) -> str:
        from onnx import helper

        output = output or f"candid_{len(self.before)}_{len(self.after)}"
        nodes = self.after if later else self.before
        nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def _constant(self, values: Any, dtype: Any = np.int64) -> str:
        from onnx import numpy_helper

        name = f"candid_constant_{len(self.model.graph.initializer)}"
        self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name
