"""The machine's limit: the highest rate of multiply-accumulates that is found on it.

No library is the fastest everywhere: on some CPUs a product of matrices in MKL runs at little more than half
of the rate of a convolution in oneDNN. So several products and convolutions are tried in numpy, MKL, oneDNN
and onnxruntime, and every convolution of the networks that are measured, alone, with the shapes that it has
in them. The fastest few then take turns with the networks, and the fastest of each round is the limit. A
network is made of such convolutions and does more than them, so it can't be faster.

All of it is in float32, as the networks are. :func:`candidates` of bfloat16 are for networks that use it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from candid.models.flow.frozen import FrozenConvolution

SIZES = (1024, 2048, 3072)
"""Of square matrices."""
CHANNELS = ((64, 56), (128, 28), (256, 14), (512, 7))
"""Channels and pixels of the stages of ResNet-50."""
BATCH, KEPT, TRIES = 8, 4, 3


@dataclass(frozen=True)
class Work:
    """Something to compute."""

    name: str
    macs: float
    """Multiply-accumulates, as the formula has them: what Winograd's convolution saves counts as speed."""
    run: Callable[[], object]

    def rate(self) -> float:
        """Return multiply-accumulates per second, of one run."""
        start = time.perf_counter()
        self.run()
        return self.macs / (time.perf_counter() - start)


class Limit:
    """The fastest few of many computations.

    Args:
        works: what is tried; each runs once before it is timed.

    Attributes:
        rates: the highest rate of each in GMAC per second, when they were tried.
    """

    def __init__(self, works: Iterable[Work]) -> None:
        works = list(works)
        for work in works:
            work.run()
        tried = [(max(work.rate() for _ in range(TRIES)), work) for work in works]
        tried.sort(key=lambda pair: -pair[0])
        self.rates = {work.name: rate / 1e9 for rate, work in reversed(tried)}
        self._fastest = [work for _, work in tried[:KEPT]]

    @property
    def name(self) -> str:
        """What is the fastest."""
        return self._fastest[0].name

    def rate(self) -> float:
        """Return the highest rate now, in GMAC per second."""
        return max(work.rate() for work in self._fastest) / 1e9


def candidates(quick: bool, dtype: torch.dtype = torch.float32) -> Iterator[Work]:
    """Yield products and convolutions of every library; onnxruntime and numpy have them in float32."""
    kind = str(dtype).removeprefix("torch.")
    for n in SIZES[:1] if quick else SIZES:
        a, b = torch.rand(n, n).to(dtype), torch.rand(n, n).to(dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(b, n)
        in_onednn = partial(torch.ops.mkldnn._linear_pointwise, a, packed, None, "none", [], "")
        yield Work(f"torch.mm, {n}, {kind}", n**3, partial(torch.mm, a, b))
        yield Work(f"oneDNN product, {n}, {kind}", n**3, in_onednn)
        if dtype is torch.float32:
            left, right = a.numpy(), b.numpy()
            yield Work(f"numpy, {n}", n**3, partial(np.matmul, left, right))
            yield Work(f"onnxruntime product, {n}", n**3, _in_onnxruntime("MatMul", left, right))
    for channels, side in CHANNELS[:1] if quick else CHANNELS:
        for kernel in (1, 3):
            name = f"{kernel} x {kernel}, {channels} channels, {side} x {side}"
            conv = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False).to(dtype)
            x = torch.rand(BATCH, channels, side, side).to(dtype)
            yield _convolution(f"oneDNN {name}, {kind}", conv, x)
            if dtype is torch.float32:
                weight = conv.weight.detach().numpy()
                pads = {"pads": [kernel // 2] * 4}
                run = _in_onnxruntime("Conv", x.numpy(), weight, **pads)
                yield Work(f"onnxruntime {name}", x.numel() * weight[0].size, run)


@torch.inference_mode()
def of_networks(networks: Sequence[nn.Module], x: Tensor) -> list[Work]:
    """Return every convolution of these networks, with the shapes that it has for the images ``x``."""
    seen: dict[tuple[Any, ...], Work] = {}

    def look(module: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
        weight: Any = module.weight
        key = (*given[0].shape, *weight.shape, str(module.stride), type(module).__name__)
        if key not in seen:
            name = f"{type(module).__name__} {tuple(weight.shape)} of {tuple(given[0].shape)}"
            run = partial(_inference, module, torch.rand_like(given[0]))
            seen[key] = Work(name, result.numel() * weight[0].numel(), run)

    for network in networks:
        hooks = [
            module.register_forward_hook(look)
            for module in network.modules()
            if isinstance(module, FrozenConvolution | nn.Conv2d)
        ]
        network(x)
        for hook in hooks:
            hook.remove()
    return list(seen.values())


@torch.inference_mode()
def _inference(module: nn.Module, x: Tensor) -> object:
    return module(x)


def _convolution(name: str, conv: nn.Conv2d, x: Tensor) -> Work:
    """Return a convolution of oneDNN with packed weights."""
    plain = conv.weight.detach().contiguous(memory_format=torch.channels_last).to_mkldnn()
    weight = torch.ops.aten.mkldnn_reorder_conv2d_weight(
        plain, conv.padding, (1, 1), (1, 1), 1, list(x.shape)
    )
    x = x.contiguous(memory_format=torch.channels_last)
    rest: tuple[Any, ...] = (None, conv.padding, (1, 1), (1, 1), 1, "none", [], "")
    macs = x.numel() * conv.weight[0].numel()
    return Work(name, macs, partial(torch.ops.mkldnn._convolution_pointwise, x, weight, *rest))


def _in_onnxruntime(operator: str, x: Any, weight: Any, **attributes: Any) -> Callable[[], object]:
    """Return one operator as a graph of its own, on as many threads as torch has."""
    node = helper.make_node(operator, ["x", "weight"], ["y"], **attributes)
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.ascontiguousarray(weight), "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return partial(session.run, None, {"x": x})
