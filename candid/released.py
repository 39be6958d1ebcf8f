"""Importer of the eight ImageNet checkpoints that the paper's authors released.

The file is a pickled dictionary, read without running code from it: ``inn`` (the network's state),
``mu`` (means of the constant coefficients, shuffled), ``mu_t`` and ``mu_m`` (coefficients and
prototypes of the other means). The layout is inferred from names and shapes; every one is checked.
"""

import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from candid.checkpoint import load_weights
from candid.classifier import GenerativeClassifier
from candid.errors import CheckpointError
from candid.flow.backbone import FlowConfig
from candid.presets import IMAGENET_MEAN, IMAGENET_STD, ClassifierConfig

Module = dict[str, Tensor]
SUBNETS = {"s": "subnet", "s_hi": "strided", "s_lo": "low_resolution"}
CONSTANT = re.compile(r"w_inv|reshape_kernels\.[01]|haar_weights")


def import_released(
    path: str | os.PathLike[str], class_names: list[str] | None = None
) -> GenerativeClassifier:
    """The released checkpoint ``path`` as a model in evaluation mode that works like any other.

    The released cosine transform is kept as a diagonal beside the orthonormal one, with its true
    log-determinant. The shuffle of the constant coefficients is undone in the means.
    """
    source = Path(path)
    content = _read(source)
    modules = _modules(content["inn"], source)
    try:
        config = _infer_config(modules, content)
    except (KeyError, IndexError, ValueError, StopIteration) as error:
        raise _foreign(source, f"its layout can't be told ({error})") from error
    model = GenerativeClassifier(config, class_names)
    own = model.state_dict()
    state = {name: own[name] for name in ("noise", "image_mean", "image_std", "mixture.log_priors")}
    state |= {name: own[name] for name in own if name.startswith("flow.dct")}
    blocks = [module for module in modules if "act_norm" in module]
    names = [name for name, child in model.flow.named_children() if hasattr(child, "coupling")]
    for name, module in zip(names, blocks, strict=True):
        state |= dict(_translate_block(f"flow.{name}", module))
    shuffle = torch.from_numpy(np.random.RandomState(0).permutation(content["mu"].shape[2]))
    state["mixture.mean"] = content["mu"][0][:, shuffle.argsort()]
    state["mixture.alpha"], state["mixture.prototypes"] = content["mu_t"], content["mu_m"]
    load_weights(model, {name: tensor.detach().clone() for name, tensor in state.items()}, str(source))
    model.metadata = {"imported_from": source.name}
    return model.eval()


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"There is no file '{path}' to import.")
    with path.open("rb") as file:
        if file.read(2) == b"\x1f\x8b":
            raise CheckpointError(f"'{path}' is compressed: run gunzip on it first.")
    try:
        with warnings.catch_warnings(action="ignore"):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the unpickler trips over, the file is at fault
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _foreign(path, f"it is cut or no plain PyTorch file ({reason})") from error
    if not isinstance(content, dict):
        raise _foreign(path, "it holds no dictionary")
    for key, dims in (("mu", 3), ("mu_t", 2), ("mu_m", 2)):
        if not isinstance(content.get(key), Tensor) or content[key].dim() != dims:
            raise _foreign(path, f"it has no tensor '{key}' with {dims} dimensions")
    if not isinstance(content.get("inn"), dict):
        raise _foreign(path, "it has no state dictionary 'inn'")
    return content


def _modules(state: dict[str, Tensor], path: Path) -> list[Module]:
    """The network's modules in order, each as its own tensors by name."""
    modules: dict[int, Module] = {}
    for key, tensor in state.items():
        if key.startswith("tmp_var_"):
            continue  # left-over activations
        match = re.fullmatch(r"module_list\.(\d+)\.(.+)", key)
        if match is None:
            raise _foreign(path, f"the name '{key}' is unknown")
        modules.setdefault(int(match[1]), {})[match[2]] = tensor
    return [modules[i] for i in sorted(modules)]


def _infer_config(modules: list[Module], content: dict[str, Any]) -> ClassifierConfig:
    entry, pointwise, *rest = [module for module in modules if "act_norm" in module]
    blocks: list[int] = []
    widths: list[int] = []
    for module in rest:
        downsampling = "s_hi.2.weight" in module
        if downsampling or not blocks:
            blocks.append(0)
            widths.append(module["s_hi.2.weight" if downsampling else "s.2.weight"].shape[0])
        blocks[-1] += 1
    final_size = next(m["inv_weight"].shape[0] for m in modules if "inv_weight" in m)
    size = final_size * 2 ** (len(blocks) + 1)
    hard = all(_is_permutation(m["w"]) for m in modules if "w" in m)
    flow = FlowConfig(
        channels=entry["act_norm"].shape[1] // 4,
        height=size,
        width=size,
        blocks=tuple(blocks),
        widths=tuple(widths),
        entry_width=entry["s_hi.0.weight"].shape[0],
        pointwise_width=pointwise["s.0.weight"].shape[0],
        mixing="permutation" if hard else "orthogonal",
        actnorm="released",
        dct="released",
    )
    classes, rank = content["mu_t"].shape
    return ClassifierConfig(flow, classes, rank, IMAGENET_MEAN, IMAGENET_STD)


def _translate_block(prefix: str, module: Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in module.items():
        head, _, tail = name.partition(".")
        if head in SUBNETS:
            yield f"{prefix}.coupling.{SUBNETS[head]}.{tail}", tensor
        elif name in ("act_norm", "act_offset"):
            yield f"{prefix}.actnorm.{'gamma' if name == 'act_norm' else 'offset'}", tensor.flatten()
        elif name == "w" and _is_permutation(tensor):
            index = tensor[:, :, 0, 0].argmax(1)
            yield f"{prefix}.mixing.index", index
            yield f"{prefix}.mixing.inverse_index", index.argsort()
        elif name == "w":
            yield f"{prefix}.mixing.matrix.weight", tensor[:, :, 0, 0]
        elif not CONSTANT.fullmatch(name):
            yield f"{prefix}.{name}", tensor  # unknown: refused, by its name, when the weights are checked


def _is_permutation(w: Tensor) -> bool:
    return bool(((w == 0) | (w == 1)).all()) and bool((w.sum(0) == 1).all()) and bool((w.sum(1) == 1).all())


def _foreign(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"'{path}' is not a released ImageNet checkpoint: {why}.")
