"""Heads in other engines: the functions of numpy that a head calls, handed on to torch or to an ONNX graph.

A head is written once, for arrays. Given a :class:`Traced` instead, numpy calls back what stands for it in
the other engine.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from candid.models.photo.adopted import AdoptedModel
from candid.models.photo.efficientnet import OPSET, Builder, Network, PackagedEye, add_network, add_statistics
from candid.models.photo.eye import Eye, JoinedEyes, SoftmaxEye
from candid.models.photo.eye_files import OnnxEye
from candid.models.photo.model import PhotoModel
from candid.models.photo.opening import FileSoftmax, PackagedSoftmax


class Traced(NDArrayOperatorsMixin):
    """Stands for an array that another engine computes."""

    dtype: np.dtype[Any]

    @abstractmethod
    def apply(self, name: str, *inputs: Any, **options: Any) -> Self:
        """Return what numpy's function of this name gives."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Self:
        return self.apply(ufunc.__name__, *inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Self:
        return self.apply(func.__name__, *args, **kwargs)

    def sum(self, axis: int, keepdims: bool = False) -> Self:
        """Return sums along an axis."""
        return self.apply("sum", self, axis=axis, keepdims=keepdims)

    def mean(self, axis: int, keepdims: bool = False) -> Self:
        """Return means along an axis."""
        return self.apply("mean", self, axis=axis, keepdims=keepdims)

    def max(self, axis: int, keepdims: bool = False) -> Self:
        """Return the largest values along an axis."""
        return self.apply("max", self, axis=axis, keepdims=keepdims)

    def min(self, axis: int, keepdims: bool = False) -> Self:
        """Return the smallest values along an axis."""
        return self.apply("min", self, axis=axis, keepdims=keepdims)

    def squeeze(self, axis: int) -> Self:
        """Return it without an axis of length one."""
        return self.apply("squeeze", self, axis=axis)

    @abstractmethod
    def astype(self, dtype: Any, copy: bool = True) -> Self:
        """Return it in another type."""

    @abstractmethod
    def __getitem__(self, key: Any) -> Self:
        """Return some columns: ``[:, i]``, ``[:, a:b]`` or ``[:, None]``."""


ELEMENTWISE = {
    "add": "Add",
    "subtract": "Sub",
    "multiply": "Mul",
    "divide": "Div",
    "true_divide": "Div",
    "power": "Pow",
    "matmul": "MatMul",
    "negative": "Neg",
    "exp": "Exp",
    "log": "Log",
    "maximum": "Max",
    "minimum": "Min",
    "where": "Where",
}
REDUCING = {"sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax", "min": "ReduceMin"}


class Symbol(Traced):
    """An output of a node of an ONNX graph, (B, ...)."""

    def __init__(self, build: Builder, name: str, dtype: Any = np.float32) -> None:
        self.build, self.name, self.dtype = build, name, np.dtype(dtype)

    def _node(self, kind: str, *inputs: Any, dtype: Any = None, **attributes: Any) -> "Symbol":
        dtype = self.dtype if dtype is None else dtype
        names = [
            each.name if isinstance(each, Symbol) else self.build.constant(each, dtype) for each in inputs
        ]
        return Symbol(self.build, self.build.node(kind, *names, **attributes), dtype)

    def _numbers(self, *numbers: int) -> "Symbol":
        return Symbol(self.build, self.build.constant(numbers, np.int64))

    def apply(self, name: str, *inputs: Any, **options: Any) -> "Symbol":
        """Add the nodes of a function and return its result."""
        if name in REDUCING:
            keep = int(options["keepdims"])
            return self._node(REDUCING[name], self, self._numbers(options["axis"]), keepdims=keep)
        if name == "squeeze":
            return self._node("Squeeze", self, self._numbers(options["axis"]))
        if name == "isfinite":
            infinite = self._node("IsInf", self, dtype=bool)
            return self._node(
                "Not", self._node("Or", infinite, self._node("IsNaN", self, dtype=bool)), dtype=bool
            )
        if name in ("concatenate", "stack"):
            parts, axis = inputs
            parts = [part[:, None] for part in parts] if name == "stack" else parts
            return self._node("Concat", *parts, axis=axis, dtype=parts[0].dtype)
        dtype = next(each.dtype for each in inputs if isinstance(each, Symbol) and each.dtype != bool)
        return self._node(ELEMENTWISE[name], *inputs, dtype=dtype)

    def astype(self, dtype: Any, copy: bool = True) -> "Symbol":
        """Return it in another type."""
        from onnx import helper

        if np.dtype(dtype) == self.dtype:
            return self
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return self._node("Cast", self, dtype=np.dtype(dtype), to=kind)

    def __getitem__(self, key: Any) -> "Symbol":
        columns = key[1]
        if columns is None:
            return self._node("Unsqueeze", self, self._numbers(1))
        if isinstance(columns, int):
            return self._node(
                "Gather", self, Symbol(self.build, self.build.constant(columns, np.int64)), axis=1
            )
        start, stop, _ = columns.indices(2**31 - 1)
        return self._node("Slice", self, *(self._numbers(each) for each in (start, stop, 1)))


def needed_only(build: Builder, outputs: Sequence[str]) -> None:
    """Remove the nodes and weights that no output needs."""
    needed, kept = set(outputs), []
    for node in reversed(build.nodes):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    build.nodes[:] = reversed(kept)
    build.weights[:] = [weights for weights in build.weights if weights.name in needed]


# whole models as graphs


def graph_of(model: PhotoModel | AdoptedModel, batch: int | str) -> Any:
    """Return eye and head as one ONNX model: images to ``logits`` and ``novelty``.

    Args:
        model: a photo model or an adopted model.
        batch: the number of images, or what any number of them is called.

    Returns:
        None if torch runs the eye.
    """
    build = Builder()
    seen = (
        _classifier(build, model.eye)
        if isinstance(model.eye, SoftmaxEye)
        else [_eye(build, model.eye, "images")]
    )
    if None in seen:
        return None
    traced: Any = model.outputs_of(*(Symbol(build, name) for name in seen))  # type: ignore[arg-type]
    outputs = {"logits": traced.logits.name, "novelty": traced.novelty.name}
    needed_only(build, [*outputs.values()])
    sizes = {"logits": len(model.class_names), "novelty": model.novelty_size}
    return build.model("candid", model.image_shape[1], outputs, batch, **sizes)


def _eye(build: Builder, eye: Eye, images: str) -> str | None:
    """Add an eye and return what gives its statistics; None if torch runs it."""
    if isinstance(eye, PackagedEye):
        return add_network(build, Network.read(eye.info), images)["statistics"]
    if isinstance(eye, OnnxEye):
        return _described(build, _file(build, eye, images))
    if not isinstance(eye, JoinedEyes):
        return None
    parts = [_eye(build, each, _at_size(build, images, eye.size, each.size)) for each in eye.eyes]
    return None if None in parts else build.node("Concat", *parts, axis=1)  # type: ignore[arg-type]


def _classifier(build: Builder, eye: SoftmaxEye) -> list[str | None]:
    """Add a classifier and return what gives its logits and its features; None if torch runs it."""
    if isinstance(eye, PackagedSoftmax):
        names = add_network(build, Network.read(eye.eye.info), more="pooled")
        weight, bias = eye.last_layer()
        pooled, early = Symbol(build, names["pooled"]), Symbol(build, names["statistics"])[:, : eye.groups[1]]
        features: Any = np.concatenate((pooled, early), 1)  # type: ignore[arg-type]
        return [(pooled @ weight.T + bias).name, features.name]
    if not isinstance(eye, FileSoftmax) or not isinstance(eye.eye, OnnxEye):
        return [None, None]
    outputs = _file(build, eye.eye, "images")
    logits, _ = outputs.pop(eye.logits_number)
    return [logits, _described(build, outputs) if outputs else logits]


def _described(build: Builder, outputs: list[tuple[str, bool]]) -> str:
    """Add the statistics of the outputs of a file that are maps."""
    over, parts = build.constant([2, 3], np.int64), []
    for name, is_maps in outputs:
        parts += add_statistics(build, name, over) if is_maps else [name]
    return build.node("Concat", *parts, axis=1)


def _file(build: Builder, eye: OnnxEye, images: str) -> list[tuple[str, bool]]:
    """Add the nodes of an ONNX file and return its outputs, and which of them are maps."""
    import onnx
    from onnx import compose, helper, version_converter

    model = onnx.load_from_string(eye.content)
    version = next(part.version for part in model.opset_import if not part.domain)
    if version < OPSET:
        model = version_converter.convert_version(model, OPSET)
    model = compose.add_prefix(model, f"eye{len(build.nodes)}_")
    initial = {part.name for part in model.graph.initializer}
    (start,) = (part.name for part in model.graph.input if part.name not in initial)
    build.nodes += [helper.make_node("Identity", [images], [start]), *model.graph.node]
    build.weights += model.graph.initializer
    build.functions += model.functions
    build.ir_version = max(build.ir_version, model.ir_version)
    for opset in model.opset_import:
        build.opsets[opset.domain] = max(opset.version, build.opsets.get(opset.domain, 0))
    return list(zip((output.name for output in model.graph.output), eye.are_maps, strict=True))


def _at_size(build: Builder, images: str, given: int, size: int) -> str:
    """Add what :func:`candid.models.photo.eye.at_size` does."""
    if given == size:
        return images
    resized = build.node(
        "Resize",
        images,
        "",
        "",
        build.constant([size, size], np.int64),
        axes=[2, 3],
        mode="cubic",
        cubic_coeff_a=-0.5,
        antialias=1,
        exclude_outside=1,
    )
    return build.node("Clip", resized, build.constant(0), build.constant(1))
