"""How exact the gradients of memory="inverse" are: imagenet preset, a training step of eight images.

Relative distances between whole gradients, and for the parameter that differs most. The gradient of a
ReLU network jumps where a ReLU switches, so that float32 alone, without any inversion, already differs
from float64; that distance is in the table as the yardstick.
"""

import copy

import torch
from torch import Tensor

from benchmarks.common import console, parsed, parser, show, write
from candid import GenerativeClassifier, information_bottleneck_loss
from candid.models.flow.config import Memory

Gradients = dict[str, Tensor]


def gradients(model: GenerativeClassifier, x: Tensor, memory: Memory) -> Gradients:
    """In training mode but with the fixed noise of evaluation: float64 would draw another noise."""
    model = copy.deepcopy(model).eval()
    model.memory = memory
    model.flow.train()
    information_bottleneck_loss(model, x, torch.arange(len(x)), beta=1.0).total.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def distances(found: Gradients, truth: Gradients) -> tuple[float, float]:
    """Of the whole gradient, and of the parameter that differs most."""
    differences = {name: float((found[name] - truth[name]).square().sum()) for name in truth}
    norms = {name: float(truth[name].square().sum()) for name in truth}
    worst = max(differences[name] / norms[name] for name in truth)
    return (sum(differences.values()) / sum(norms.values())) ** 0.5, worst**0.5


def main() -> None:
    options = parsed(parser("benchmarks.gradients", __doc__))
    model = GenerativeClassifier.from_preset("tiny" if options.quick else "imagenet")
    x = torch.rand(8, *model.image_shape, generator=torch.Generator().manual_seed(0))
    with console.status("measuring"):
        plain, inverse = (gradients(model, x, memory) for memory in ("plain", "inverse"))
        model.double()
        plain64, inverse64 = (gradients(model, x, memory) for memory in ("plain", "inverse"))
    results = {
        "float32, inverse against plain": distances(inverse, plain),
        "float32, inverse against float64": distances(inverse, plain64),
        "float32, plain against float64": distances(plain, plain64),
        "float64, inverse against plain": distances(inverse64, plain64),
    }
    rows = [(name, f"{whole:.1e}", f"{worst:.1e}") for name, (whole, worst) in results.items()]
    show("Relative distance of gradients", ("", "whole gradient", "worst parameter"), rows)
    write("gradients", options.quick, {"distances": results})


if __name__ == "__main__":
    main()
