"""The network as an ONNX graph, written once and kept in a cache: on a CPU it runs three times as fast."""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from candid._support.errors import CandidError
from candid._support.files import replacing
from candid.models.eyes.efficientnet import SCALE, SHIFT, STD_EPSILON, Conv, EfficientNetLite, read_weights
from candid.models.eyes.registry import EyeInfo

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

VERSION = 1
"""Version of the graph: cached files of another one are not used."""
OPSET = 18
More = Literal["", "pooled", "maps"]
"""What a network puts out besides the statistics."""


def cache_folder() -> Path:
    """Return the folder for what can be computed again: ``CANDID_CACHE``, or candid in the user's cache."""
    given = os.environ.get("CANDID_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "candid"


def session(info: EyeInfo, more: More = "") -> "InferenceSession":
    """Return the network in onnxruntime: images in [0, 1] to statistics, and what else is asked for.

    ``more`` is "pooled" for the features that its own classifier reads, or "maps" for the maps of all stages.
    The graph comes from the cache; if it is not there or was changed, it is written first. If it can't be
    written, it is built in memory.
    """
    path = cache_folder() / f"{info.name}-{info.sha256[:16]}-{VERSION}{more and f'-{more}'}.onnx"
    content = _cached(path)
    if content is None:
        content = _graph(EfficientNetLite(read_weights(info.weights_file()), info), more)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_bytes(hashlib.sha256(content).digest() + content)
        except OSError:
            pass  # a full disk only means that it is built again the next time
    return session_of(content)


def session_of(content: bytes) -> "InferenceSession":
    """Return an ONNX model, ready to run on as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has many exceptions of its own
        raise CandidError(f"onnxruntime can't read the network: {error}") from error


def _cached(path: Path) -> bytes | None:
    """Return the graph in a file that begins with the SHA-256 of the rest; None if it is not whole."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    return stored[32:] if hashlib.sha256(stored[32:]).digest() == stored[:32] else None


class _Builder:
    """Nodes and weights of a graph."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

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


def _graph(network: EfficientNetLite, more: More) -> bytes:
    from onnx import TensorProto, helper

    build, layout, size = _Builder(), network.layout, network.info.size
    low, high, over = build.constant(0), build.constant(6), build.constant([2, 3], np.int64)

    def convolved(x: str, conv: Conv) -> str:
        weight, bias = (build.constant(each.numpy()) for each in network.parameters_of(conv))
        x = build.node(
            "Conv", x, weight, bias, strides=[conv.stride] * 2, group=conv.groups, auto_pad="SAME_UPPER"
        )
        return build.node("Clip", x, low, high) if conv.activation else x

    def mean(x: str, keepdims: int) -> str:
        return build.node("ReduceMean", x, over, keepdims=keepdims)

    x = build.node("Sub", build.node("Mul", "images", build.constant(255)), build.constant(SHIFT))
    x = convolved(build.node("Mul", x, build.constant(1 / SCALE)), layout.stem)
    parts, maps = [], []
    for number, block in enumerate(layout.blocks):
        start = x
        for conv in block.convs:
            x = convolved(x, conv)
        x = build.node("Add", x, start) if block.residual else x
        if number in network.info.stages:
            maps.append(x)
            middle = mean(x, keepdims=1)
            away = build.node("Sub", x, middle)
            variance = mean(build.node("Mul", away, away), keepdims=0)
            spread = build.node("Sqrt", build.node("Add", variance, build.constant(STD_EPSILON)))
            parts += [build.node("Squeeze", middle, over), spread]
    outputs = {"statistics": build.node("Concat", *parts, axis=1)}
    if more == "pooled":
        outputs["pooled"] = mean(convolved(x, layout.head), keepdims=0)
    if more == "maps":
        outputs |= {f"maps{stage}": each for stage, each in enumerate(maps)}
    for name, found in outputs.items():
        build.nodes.append(helper.make_node("Identity", [found], [name]))
    graph = helper.make_graph(
        build.nodes,
        network.info.name,
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["N", 3, size, size])],
        [
            helper.make_tensor_value_info(
                name, TensorProto.FLOAT, ["N", *[None] * (3 if "maps" in name else 1)]
            )
            for name in outputs
        ],
        build.weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = 10
    return model.SerializeToString()
