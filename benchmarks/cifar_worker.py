"""Training steps of the cifar preset on request: a process that benchmarks/cifar.py starts, once a checkout.

It uses what earlier versions of Candid have, too, and nothing else of the benchmarks. The first argument
is torch's number of threads, the second a batch size. For every line ``name steps`` on standard input it
takes as many steps of that model and writes their seconds.
"""

import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch

from candid._support.randomness import generator
from candid.inference.predictions import to_float
from candid.training.losses import losses_of
from candid.training.optimiser import build_optimiser
from candid.training.recipes import load_options
from candid.training.setup import build_model


def training_step(batch: int, baseline: bool) -> Callable[[], None]:
    """A whole step on a fixed batch: forward, backward, clipping, optimiser."""
    config = load_options("cifar10", data="none", baseline=baseline)
    model = build_model(config, tuple(map(str, range(10)))).train()
    optimiser = build_optimiser(model, config)
    images = torch.randint(0, 256, (batch, 3, 32, 32), generator=generator(0), dtype=torch.uint8)
    labels = torch.arange(batch) % 10

    def step() -> None:
        losses_of(model, to_float(images, "cpu"), labels, config, generator(0)).total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimiser.step()
        optimiser.zero_grad()

    return step


def main() -> None:
    threads, batch = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    if find_spec("candid._support.machine") is not None:
        import_module("candid._support.machine").keep_freed_memory()
    steps = {"candid": training_step(batch, False), "resnet": training_step(batch, True)}
    for line in sys.stdin:
        name, count = line.split()
        start = time.perf_counter()
        for _ in range(int(count)):
            steps[name]()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
