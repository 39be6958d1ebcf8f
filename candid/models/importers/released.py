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

from candid._support.errors import CheckpointError
from candid.models.checkpoint import load_weights
from candid.models.flow.classifier import GenerativeClassifier
from candid.models.flow.config import IMAGENET_MEAN, IMAGENET_STD, ClassifierConfig, FlowConfig
from candid.models.flow.network import array_of

Module = dict[str, Tensor]
SUBNETS = {"s": "subnet", "s_hi": "strided", "s_lo": "low_resolution"}
KIND = "a released ImageNet checkpoint"
CONSTANT = re.compile(r"w_inv|reshape_kernels\.[01]")


def import_released(
    path: str | os.PathLike[str], class_names: list[str] | None = None
) -> GenerativeClassifier:
    """Return the released checkpoint ``path`` as a model in evaluation mode that works like any other.

    The released cosine transform is stored as a diagonal after the orthonormal one, with its true
    log-determinant. The shuffle of the constant coefficients is undone in the means.

    Args:
        path: a checkpoint of the paper's authors, such as ``beta_1.avg.pt``.
        class_names: one name per class; the class numbers if None.

    Returns:
        The model.

    Raises:
        CheckpointError: if the file is cut or has another layout.

    Example:
        >>> import_released("beta_1.avg.pt")
        Traceback (most recent call last):
        ...
        candid._support.errors.CheckpointError: There is no file 'beta_1.avg.pt' to import.
    """
    source = Path(path)
    return build_released(read_dictionary(source, KIND), source, class_names)


def build_released(
    content: dict[Any, Any], source: Path, class_names: list[str] | None = None
) -> GenerativeClassifier:
    """Return the model of the opened checkpoint ``content``; ``source`` is its path, for messages."""
    _check_parts(content, source)
    modules = _modules(content["inn"], source)
    try:
        config = _infer_config(modules, content)
    except (KeyError, IndexError, ValueError, RuntimeError, StopIteration) as error:
        raise _foreign(source, f"its layout can't be told ({error})") from error
    model = GenerativeClassifier(config, class_names)
    kept = ("noise", "mixture.log_priors", "flow.dct")
    state = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(kept)}
    blocks = [module for module in modules if "act_norm" in module]
    names = [name for name, child in model.flow.named_children() if hasattr(child, "coupling")]
    for name, module in zip(names, blocks, strict=True):
        state |= dict(_translate_block(f"flow.{name}", module, hard=config.flow.mixing == "permutation"))
    shuffle = torch.from_numpy(np.random.RandomState(0).permutation(content["mu"].shape[2]))
    state["mixture.mean"] = content["mu"][0][:, shuffle.argsort()]
    state["mixture.alpha"], state["mixture.prototypes"] = content["mu_t"], content["mu_m"]
    load_weights(model, {name: array_of(tensor) for name, tensor in state.items()}, str(source))
    model.metadata = {"imported_from": source.name}
    if beta := re.search(r"beta_(inf|\d+(\.\d+)?)", source.name):
        model.metadata["beta"] = beta[1]
    return model


def read_dictionary(path: Path, kind: str) -> dict[Any, Any]:
    """Return the dictionary in a PyTorch file that should be ``kind``, read without running code from it."""
    if not path.is_file():
        raise CheckpointError(f"There is no file '{path}' to import.")
    try:
        with path.open("rb") as file:
            if file.read(2) == b"\x1f\x8b":
                raise CheckpointError(f"'{path}' is compressed: run gunzip on it first.")
        with warnings.catch_warnings(action="ignore"):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # whatever the unpickler trips over, the file is at fault
        raise foreign(path, kind, "it is cut, or no plain PyTorch file") from error
    if not isinstance(content, dict):
        raise foreign(path, kind, "it holds no dictionary")
    return content


def foreign(path: Path, kind: str, why: str) -> CheckpointError:
    """Return the error for a file that is not ``kind``."""
    return CheckpointError(f"'{path}' is not {kind}: {why}.")


def _check_parts(content: dict[Any, Any], path: Path) -> None:
    for key, shape in (("mu", "1 x classes x C"), ("mu_t", "classes x K"), ("mu_m", "K x rest")):
        tensor: Any = content.get(key)
        if (
            not _is_float(tensor)
            or tensor.dim() != shape.count("x") + 1
            or (key == "mu" and len(tensor) != 1)
        ):
            raise _foreign(path, f"it has no tensor '{key}' of {shape} numbers")
    if not isinstance(content.get("inn"), dict):
        raise _foreign(path, "it has no state dictionary 'inn'")


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _modules(state: dict[str, Tensor], path: Path) -> list[Module]:
    """Return the network's modules in order, each as its own tensors by name."""
    modules: dict[int, Module] = {}
    for key, tensor in state.items():
        if str(key).startswith("tmp_var_"):
            continue  # left-over activations
        match = re.fullmatch(r"module_list\.(\d{1,6})\.(.+)", str(key))
        if match is None or not isinstance(tensor, Tensor):
            raise _foreign(path, f"the entry '{key}' is unknown")
        modules.setdefault(int(match[1]), {})[match[2]] = tensor
    for module in modules.values():
        if "act_norm" not in module and not module.keys() <= {"haar_weights", "weight", "inv_weight"}:
            raise _foreign(path, f"a module has the unknown parts {', '.join(sorted(module))}")
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
    hard = all(_is_permutation(_mixing_matrix(m)) for m in modules if "act_norm" in m)
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


def _translate_block(prefix: str, module: Module, hard: bool) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in module.items():
        head, _, tail = name.partition(".")
        if head in SUBNETS:
            yield f"{prefix}.coupling.{SUBNETS[head]}.{tail}", tensor
        elif name in ("act_norm", "act_offset"):
            yield f"{prefix}.actnorm.{'gamma' if name == 'act_norm' else 'offset'}", tensor.flatten()
        elif name == "w" and hard:
            index = _mixing_matrix(module).argmax(1)
            yield f"{prefix}.mixing.index", index
            yield f"{prefix}.mixing.inverse_index", index.argsort()
        elif name == "w":
            yield f"{prefix}.mixing.matrix.weight", _mixing_matrix(module)
        elif not CONSTANT.fullmatch(name):
            yield f"{prefix}.{name}", tensor  # unknown: refused, by its name, when the weights are checked


def _mixing_matrix(module: Module) -> Tensor:
    """Return ``w`` as a matrix, checked to be orthogonal as the log-determinant assumes."""
    w = module["w"].flatten(1).float()
    if module["w"].shape[2:] != (1, 1) or not torch.allclose(w @ w.T, torch.eye(len(w)), atol=1e-4):
        raise ValueError("a mixing matrix 'w' is not orthogonal")
    return w


def _is_permutation(w: Tensor) -> bool:
    return bool(((w == 0) | (w == 1)).all())


def _foreign(path: Path, why: str) -> CheckpointError:
    return foreign(path, KIND, why)
