"""Every kind of pass, for test_runner: ``python -m`` it with data, a folder and a number of processes."""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from candid._support.errors import CandidError
from candid._support.processes import Processes, launch
from candid._support.randomness import draws
from candid.data.datasets import open_images, open_part
from candid.data.images import Preprocessing
from candid.data.splits import ArraySplit, Split
from candid.inference.predictions import Measure
from candid.inference.runner import Runner
from candid.judging.held_out import MEASURES as CODE_LENGTHS
from candid.judging.held_out import LearnedMeasure
from candid.trust.learned import Mahalanobis
from tests.helpers import small_classifier

PREPROCESSING = Preprocessing(3, 16, 16, "resized")


def distance_to(mean: float) -> Measure:
    """The Mahalanobis distance of features to ``mean`` in each of them."""
    state = {"whitening": np.eye(192, dtype=np.float32), "means": np.full((1, 192), mean, np.float32)}
    return LearnedMeasure(Mahalanobis.from_state(state))


MEASURES: dict[str, Measure] = {**CODE_LENGTHS, "mahalanobis": distance_to(0)}


def array(images: int = 23) -> ArraySplit:
    pixels = draws(0).integers(256, images * 3 * 16 * 16).astype(np.uint8)
    return ArraySplit(pixels.reshape(images, 3, 16, 16), np.arange(images) % 3)


def counted(passes: Runner) -> list[nn.Module]:
    """Grows by the network's first layer whenever the network is used."""
    calls: list[nn.Module] = []
    network = passes.frozen
    assert isinstance(network, nn.Module)
    first = next(layer for layer in network.modules() if not list(layer.children()))
    first.register_forward_hook(lambda layer, *_: calls.append(layer))
    return calls


def every_pass(data: Path, out: Path, processes: Processes | None = None) -> None:
    """Results of the first process in ``out``, and what each process knows in ``out / <rank>.pt``."""
    passes = Runner(small_classifier(), processes, out)
    passes.batch = 5
    calls = counted(passes)
    files = open_part(str(data / "files"), "abc").split
    splits: dict[str, Split] = {"array": array(), "files": files, "one": array(1)}
    for name, split in splits.items():
        passes.predictions(split, PREPROCESSING, name, MEASURES)
    crops = passes.ten_crops(array(), PREPROCESSING, "array")
    passes.predictions(
        open_images(str(data / "shards"), PREPROCESSING), PREPROCESSING, "shards", CODE_LENGTHS
    )
    before = len(calls)
    kept = passes.predictions(files, PREPROCESSING, "files", MEASURES)
    calls_for_kept = len(calls) - before
    features = passes.features(array(), PREPROCESSING, "array", 100)
    broken = str(data / "broken")
    try:
        passes.predictions(open_part(broken, "abc").split, PREPROCESSING, "broken")
        message = "no error"
    except CandidError as error:
        message = str(error)
    known = {
        "first": passes.is_first,
        "has results": [kept is not None, crops is not None],
        "calls for what was kept": calls_for_kept,
        "features": None
        if features is None
        else (torch.from_numpy(features.columns["features"]), torch.from_numpy(features.labels)),
        "message": message,
    }
    torch.save(known, out / f"{passes.processes.global_rank}.pt")


if __name__ == "__main__":
    every_pass(Path(sys.argv[1]), Path(sys.argv[2]), launch(int(sys.argv[3])))
