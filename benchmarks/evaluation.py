"""What an evaluation costs beyond the network: the pass of ``candid evaluate`` against bare forward passes.

The pass takes 8-bit images from memory and gives logits, the terms of the density, the length of each
image in a lossless code and the scores of its features; it is written to disk, under a name made from the
images and the weights. The peer is the same frozen network on batches that are ready.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import Figure, alternate, conclude, console, parsed, parser, show_times
from candid import GenerativeClassifier
from candid._support.processes import keep_freed_memory
from candid._support.randomness import draws
from candid.data.images import Preprocessing
from candid.data.splits import ArraySplit
from candid.inference.runner import Runner
from candid.judging.held_out import measures_for
from candid.trust.ranking import fit_learners
from candid.trust.scores import SCORES, Columns, learning_scores

PASS, BARE = "evaluation", "bare forward passes"
LIMIT = 1.1


def main() -> int:
    options = parsed(parser("benchmarks.evaluation", __doc__))
    keep_freed_memory()
    count, rounds = (100, 1) if options.quick else (10_000, 3)
    random = draws(0).numpy
    pixels = random.integers(0, 256, (count, 3, 32, 32), np.uint8)
    split = ArraySplit(pixels, random.integers(10, size=count))
    model = GenerativeClassifier.from_preset("cifar").eval()
    fast = model.frozen()
    features = model.config.flow.constant_coefficients
    random_columns = {
        "features": random.normal(size=(1000, features)),
        "logits": random.normal(size=(1000, 10)),
    }
    columns = Columns(random_columns, np.arange(1000) % 10)
    measures = measures_for(SCORES.values(), fit_learners(learning_scores(columns), columns))
    with tempfile.TemporaryDirectory() as folder:
        passes = Runner(model, folder=Path(folder))
        ready = [part / 255 for part in torch.from_numpy(pixels).split(passes.batch)]

        def evaluate() -> None:
            for kept in Path(folder).iterdir():
                kept.unlink()
            passes.predictions(split, Preprocessing(3, 32, 32), "test", measures)

        @torch.inference_mode()
        def forward() -> None:
            for x in ready:
                fast(x)

        with console.status("measuring"):
            times = alternate({PASS: evaluate, BARE: forward}, rounds)
    title = f"{count} images, cifar preset"
    show_times(title, times)
    figures = {f"{PASS} / {BARE}": Figure(times[PASS].ratios(times[BARE]), LIMIT)}
    return conclude("evaluation", options.quick, {title: times}, figures)


if __name__ == "__main__":
    sys.exit(main())
