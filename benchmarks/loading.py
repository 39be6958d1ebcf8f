"""What loading costs: training steps on images that are read, decoded and augmented, against a fixed batch.

At 32 x 32 the images are PNG files that are decoded once and kept in memory, as every small set is; at
224 x 224 they are JPEG photos of 500 x 375, decoded and cropped by two worker processes for every step.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor

from benchmarks.common import Figure, Timing, conclude, parsed, parser, show_times
from candid._support.processes import keep_freed_memory
from candid._support.randomness import generator
from candid.data.datasets import open_dataset
from candid.data.images import Preprocessing
from candid.training.loader import Plan, training_batches
from candid.training.loop import losses_of
from candid.training.options import TrainOptions
from candid.training.recipes import load_options
from candid.training.setup import build_model, build_optimiser

LIMIT = 1.1
LOADED, FIXED = "images from files", "one batch"
Step = Callable[[Tensor, Tensor], None]


class Case(NamedTuple):
    """One model and the image files it is trained on."""

    preset: str
    images: int
    size: tuple[int, int]
    ending: str
    batch: int
    rounds: int
    steps: int


def make_photos(folder: Path, case: Case) -> None:
    """Crops of scikit-learn's two photos, in two class folders."""
    random, (width, height) = generator(0), case.size
    for name in ("china", "flower"):
        photo = Image.fromarray(load_sample_image(f"{name}.jpg")).resize((960, 640))
        (folder / name).mkdir()
        for i in range(case.images // 2):
            left, top = (
                int(torch.randint(room, (), generator=random)) for room in (960 - width, 640 - height)
            )
            crop = photo.crop((left, top, left + width, top + height))
            crop.save(folder / name / f"{i:05d}{case.ending}")


def training_step(config: TrainOptions) -> Step:
    """A whole step: forward, backward, clipping, optimiser."""
    model = build_model(config, ("a", "b")).train()
    optimiser = build_optimiser(model, config)

    def step(images: Tensor, labels: Tensor) -> None:
        losses_of(model, images / 255, labels, config, generator(0)).total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimiser.step()
        optimiser.zero_grad()

    return step


def measure(config: TrainOptions, case: Case) -> tuple[Timing, Timing]:
    """Seconds of a step, loaded and on a fixed batch; the rounds take turns."""
    flow = config.model_config(2).flow
    preprocessing = Preprocessing(flow.channels, flow.height, flow.width, config.crop, config.flip)
    data = open_dataset(config.data).preprocess(preprocessing)
    plan = Plan(len(data.train), config.batch, 1, seed=0)
    step = training_step(config)
    fixed_batch = next(training_batches(data.train, preprocessing, plan, 0, 1, range(1)))
    step(*fixed_batch)
    loaded, fixed = [], []
    for _ in range(case.rounds):
        batches = training_batches(
            data.train, preprocessing, plan, 0, case.steps + 1, range(1), config.workers
        )
        step(*next(batches))
        start = time.perf_counter()
        for batch in batches:
            step(*batch)
        loaded.append((time.perf_counter() - start) / case.steps)
        start = time.perf_counter()
        for _ in range(case.steps):
            step(*fixed_batch)
        fixed.append((time.perf_counter() - start) / case.steps)
    return Timing(tuple(loaded)), Timing(tuple(fixed))


def main() -> int:
    options = parsed(parser("benchmarks.loading", __doc__))
    keep_freed_memory()
    quick: bool = options.quick
    cases = {
        "32 x 32, cifar": Case("cifar", 1600, (32, 32), ".png", 128, *((2, 2) if quick else (5, 10))),
        "224 x 224, imagenet": Case("imagenet", 96, (500, 375), ".jpg", *((2, 1, 2) if quick else (8, 3, 3))),
    }
    times: dict[str, dict[str, Timing]] = {}
    figures = {}
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            make_photos(Path(folder), case)
            loaded, fixed = measure(
                load_options(data=folder, preset=case.preset, batch=case.batch, workers=2), case
            )
        times[name] = {LOADED: loaded, FIXED: fixed}
        show_times(f"A training step, {name}, batch {case.batch}", times[name])
        figures[f"{name}: {LOADED} / {FIXED}"] = Figure(loaded.ratios(fixed), LIMIT)
    return conclude("loading", quick, times, figures)


if __name__ == "__main__":
    sys.exit(main())
