"""What an evaluation costs beyond the network: the pass of ``candid evaluate`` against bare forward passes.

The pass takes 8-bit images from memory and gives logits, the terms of the density, the length of each
image in a lossless code and the scores of its features; it is written to disk, under a name made from the
images and the weights. The peer is the same frozen network on batches that are ready.
"""

import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.common import Figure, alternate, conclude, console, parser, set_threads, show_times
from candid import GenerativeClassifier
from candid._support.distributed import keep_freed_memory
from candid._support.randomness import generator
from candid.data.images import Preprocessing
from candid.data.splits import ArraySplit
from candid.inference.runner import Runner
from candid.trust.feature_scores import fit_scores
from candid.trust.scores import FITTED_SCORES, SCORES, measures_for

PASS, BARE = "evaluation", "bare forward passes"
LIMIT = 1.1


def main() -> int:
    options = parser("benchmarks.evaluation", __doc__).parse_args()
    set_threads(options.threads)
    keep_freed_memory()
    count, rounds = (100, 2) if options.quick else (10_000, 5)
    random = generator(0)
    pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=random, dtype=torch.uint8)
    split = ArraySplit(pixels, torch.randint(10, (count,), generator=random))
    model = GenerativeClassifier.from_preset("cifar").eval()
    fast = model.frozen()
    features = model.config.flow.constant_coefficients
    columns = {
        "features": torch.randn(1000, features, generator=random),
        "logits": torch.randn(1000, 10, generator=random),
    }
    measures = measures_for(SCORES.values(), fit_scores(FITTED_SCORES, columns, torch.arange(1000) % 10))
    with tempfile.TemporaryDirectory() as folder:
        passes = Runner(model, folder=Path(folder))
        ready = [part / 255 for part in pixels.split(passes.batch)]

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
