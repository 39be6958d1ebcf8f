"""What classes cost: the mixture with low-rank means alone, and in a whole forward pass.

The peer forms the M x D matrix of means (MaterialisedMixture in benchmarks/freia.py). With 21 000 classes
that matrix alone would take 12.6 GB, so there is no peer.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import (
    Figure,
    Timing,
    alternate,
    conclude,
    console,
    parsed,
    parser,
    show_times,
)
from benchmarks.freia import MaterialisedMixture
from benchmarks.models import classifier
from candid.models.flow.mixture import LatentMixture

BATCH = 16
FROZEN, PLAIN, MATERIALISED = "Candid, frozen", "Candid", "materialised means"


def forward(logits: Callable[[Tensor], Tensor], z: Tensor) -> None:
    with torch.inference_mode():
        logits(z)


def step(module: nn.Module, logits: Callable[[Tensor], Tensor], z: Tensor) -> None:
    module.zero_grad()
    z = z.detach().requires_grad_()
    F.cross_entropy(logits(z), torch.arange(len(z))).backward()


def head(classes: int, quick: bool, repeats: int) -> dict[str, dict[str, Timing]]:
    """The mixture alone; with the peer where its means fit into memory."""
    constant, dimensions, rank = (192, 12288, 16) if quick else (3072, 150528, 128)
    mixture = LatentMixture(classes, constant, dimensions, rank)
    z = torch.randn(BATCH, dimensions)
    small = classes <= 1000
    modules: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {PLAIN: (mixture, mixture.logits)}
    if small:
        peer = MaterialisedMixture(mixture)
        modules[MATERIALISED] = peer, peer
    logits = {FROZEN: mixture.frozen().logits, **{name: run for name, (_, run) in modules.items()}}
    cases = {
        f"mixture, {classes} classes, forward": alternate(
            {name: partial(forward, run, z) for name, run in logits.items()}, repeats
        )
    }
    if small:
        cases[f"mixture, {classes} classes, forward and backward"] = alternate(
            {name: partial(step, module, run, z) for name, (module, run) in modules.items()}, repeats
        )
    return cases


def main() -> int:
    options = parsed(parser("benchmarks.mixture", __doc__))
    quick: bool = options.quick
    few, many, repeats = (100, 2100, 1) if quick else (1000, 21_000, 5)
    torch.manual_seed(0)
    cases: dict[str, dict[str, Timing]] = {}
    figures: dict[str, Figure] = {}
    with console.status("measuring"):
        for classes in (few, many):
            cases |= head(classes, quick, repeats)
        models = {
            f"{classes} classes": classifier(quick, classes=classes).frozen() for classes in (many, few)
        }
        x = torch.rand(8, *next(iter(models.values())).image_shape)
        for batch, target in ((1, None), (8, 1.3)):
            times = alternate(
                {name: partial(forward, model, x[:batch]) for name, model in models.items()}, repeats
            )
            larger, smaller = times.values()
            cases[f"whole forward pass, frozen, batch {batch}"] = times
            figures[f"whole forward pass, batch {batch}, {many} / {few} classes"] = Figure(
                larger.ratios(smaller), target
            )
    for case, times in cases.items():
        show_times(case, times)
        if MATERIALISED in times:
            figures |= {
                f"{case}, {name} / {MATERIALISED}": Figure(timing.ratios(times[MATERIALISED]))
                for name, timing in times.items()
                if name != MATERIALISED
            }
    return conclude("mixture", quick, cases, figures)


if __name__ == "__main__":
    sys.exit(main())
