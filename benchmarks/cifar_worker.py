"""Training steps of the cifar preset on request: a process that benchmarks/cifar.py starts, once a checkout.

It uses what earlier versions of Candid have, too, and nothing else of the benchmarks. The first argument
is torch's number of threads, the second a batch size. For every line ``name steps`` on standard input it
takes as many steps of that model and writes their seconds.
"""

import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from candid._support.randomness import generator
from candid.training.recipes import load_options
from candid.training.setup import build_model


def either(name: str, module: str, earlier: str) -> Any:
    """Return what has this name in a module, or in the one where earlier versions have it."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return getattr(import_module(earlier), name)


losses_of = either("losses_of", "candid.training.loop", "candid.training.losses")
build_optimiser = either("build_optimiser", "candid.training.setup", "candid.training.optimiser")
keep_freed_memory = either("keep_freed_memory", "candid._support.processes", "candid._support.distributed")


def training_step(batch: int, baseline: bool) -> Callable[[], None]:
    """A whole step on a fixed batch: forward, backward, clipping, optimiser."""
    config = load_options("cifar10", data="none", baseline=baseline)
    model = build_model(config, tuple(map(str, range(10)))).train()
    optimiser = build_optimiser(model, config)
    images = torch.randint(0, 256, (batch, 3, 32, 32), generator=generator(0), dtype=torch.uint8)
    labels = torch.arange(batch) % 10

    def step() -> None:
        losses_of(model, images / 255, labels, config, generator(0)).total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimiser.step()
        optimiser.zero_grad()

    return step


def main() -> None:
    threads, batch = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    keep_freed_memory()
    steps = {"candid": training_step(batch, False), "resnet": training_step(batch, True)}
    for line in sys.stdin:
        name, count = line.split()
        start = time.perf_counter()
        for _ in range(int(count)):
            steps[name]()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
