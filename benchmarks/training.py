"""What a training step costs: gradients to zero, loss, backward pass; imagenet preset.

Peers: the straightforward formulation (benchmarks/straightforward.py), FrEIA's AllInOneBlock
(benchmarks/freia.py), ResNet-50, and the limit: the multiply-accumulates of three forward passes at the
highest rate that is found on this machine (benchmarks/limit.py).

Candid trains with freed memory kept for the next step (candid._support.processes). A process that has kept
memory once goes on reusing it, so the contenders live in two processes, one of each kind, and take turns. The
straightforward formulation is in both. First the losses are compared: they must agree to 1e-4.
"""

import multiprocessing
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import freia
from benchmarks.common import (
    Figure,
    Timing,
    alternate_with_limit,
    conclude,
    console,
    parsed,
    parser,
    show,
    show_times,
)
from benchmarks.limit import Limit, candidates
from benchmarks.models import classifier, macs
from benchmarks.straightforward import Straightforward
from candid import GenerativeClassifier, ResNet, ResNetConfig, information_bottleneck_loss
from candid._support.processes import keep_freed_memory
from candid.models.flow.config import Memory

PLAIN, INVERSE, RESNET = "Candid", "Candid, memory='inverse'", "ResNet-50"
STRAIGHT, STRAIGHT_KEPT = "straightforward", "straightforward, freed memory kept"
TOLERANCE = 1e-4
Step = Callable[[int], None]
"""Of a batch size."""


def with_kept_memory(quick: bool) -> dict[str, Step]:
    """Contenders in a process that keeps freed memory."""
    keep_freed_memory()
    model, x, y = _start(quick)
    resnet = ResNet(ResNetConfig.matching(model.config))
    peer = Straightforward(model)

    def ours(memory: Memory, batch: int) -> None:
        model.memory = memory
        model.zero_grad()
        information_bottleneck_loss(model, x[:batch], y[:batch], 1.0).total.backward()

    def resnet_step(batch: int) -> None:
        resnet.zero_grad()
        F.cross_entropy(resnet(x[:batch]), y[:batch], label_smoothing=0.05).backward()

    return {
        PLAIN: partial(ours, "plain"),
        INVERSE: partial(ours, "inverse"),
        STRAIGHT_KEPT: partial(_peer_step, peer, x, y),
        RESNET: resnet_step,
    }


def without(quick: bool) -> dict[str, Step]:
    """Contenders in a process that gives freed memory back."""
    model, x, y = _start(quick)
    peer = freia.peers(model, x)[freia.ALL_IN_ONE]
    straight = Straightforward(model)
    del model
    return {STRAIGHT: partial(_peer_step, straight, x, y), freia.ALL_IN_ONE: partial(_peer_step, peer, x, y)}


def _start(quick: bool) -> tuple[GenerativeClassifier, Tensor, Tensor]:
    model = classifier(quick)
    random = torch.Generator().manual_seed(0)
    return model, torch.rand(16, *model.image_shape, generator=random), torch.arange(16)


def _peer_step(peer: Any, x: Tensor, y: Tensor, batch: int) -> None:
    peer.zero_grad()
    peer.loss(x[:batch], y[:batch]).backward()


@torch.no_grad()
def losses(quick: bool) -> dict[str, float]:
    """With batch statistics and the fixed noise of evaluation: in float64, noise would be another one.

    In float32 the straightforward one has few digits left: |z|^2 is in its logits.
    """
    model, x, y = _start(quick)
    x, y = x[:4], y[:4]
    peer = Straightforward(model).eval()
    model.eval().flow.train()
    peer.layers.train()
    return {
        PLAIN: float(information_bottleneck_loss(model, x, y, 1.0).total),
        STRAIGHT: float(peer.loss(x, y)),
        f"{STRAIGHT}, float64": float(peer.double().loss(x.double(), y)),
    }


class Elsewhere:
    """Contenders in a process of their own: called with a name and a batch size."""

    def __init__(self, build: Callable[[bool], dict[str, Step]], quick: bool, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, build, quick, threads), daemon=True).start()
        theirs.close()

    def __call__(self, name: str, batch: int) -> None:
        self.connection.send((name, batch))
        self.connection.recv()


def _serve(
    connection: Connection, build: Callable[[bool], dict[str, Step]], quick: bool, threads: int
) -> None:
    torch.set_num_threads(threads)
    steps = build(quick)
    while True:
        try:
            name, batch = connection.recv()
        except EOFError:
            return
        steps[name](batch)
        connection.send("done")


def main() -> int:
    options = parsed(parser("benchmarks.training", __doc__))
    quick: bool = options.quick
    rounds = {4: 1, 16: 1} if quick else {4: 3, 16: 2}
    cases: dict[str, dict[str, Timing]] = {}
    with console.status("measuring"):
        found = losses(quick)
        each, once = macs(classifier(quick))
        kept, given_back = (Elsewhere(build, quick, options.threads) for build in (with_kept_memory, without))
        limit = Limit(candidates(quick))
        for batch, repeats in rounds.items():
            places = {PLAIN: kept, INVERSE: kept, STRAIGHT: given_back, STRAIGHT_KEPT: kept}
            if batch == 4:
                places[freia.ALL_IN_ONE] = given_back
            places[RESNET] = kept
            cases[f"batch {batch}"] = alternate_with_limit(
                {name: partial(place, name, batch) for name, place in places.items()},
                repeats,
                3 * (each * batch + once),
                limit,
            )
    difference = abs(found[PLAIN] / found[f"{STRAIGHT}, float64"] - 1)
    show("Loss", ("", ""), [(name, f"{loss:.6f}") for name, loss in found.items()])
    figures: dict[str, Figure] = {}
    for (case, times), target in zip(cases.items(), (0.3, 0.45), strict=True):
        show_times(f"Training step, {case}", times)
        plain = times[PLAIN]
        figures |= {
            f"{case}, {PLAIN} / {STRAIGHT}": Figure(plain.ratios(times[STRAIGHT]), target),
            f"{case}, {PLAIN} / {STRAIGHT_KEPT}": Figure(plain.ratios(times[STRAIGHT_KEPT])),
            f"{case}, {INVERSE} / {PLAIN}": Figure(times[INVERSE].ratios(plain), 1.5),
        }
    missed = conclude("training", quick, cases, figures, {"losses": found, "difference": difference})
    if not difference <= TOLERANCE:
        console.print("[red]The losses don't agree: the times mean nothing.[/]")
        return 1
    return missed


if __name__ == "__main__":
    sys.exit(main())
