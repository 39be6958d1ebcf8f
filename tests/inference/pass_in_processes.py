"""Every kind of pass, for test_passes: ``python -m`` it with data, a folder and a number of processes."""

import sys
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch import nn

from candid._support.distributed import launch
from candid._support.errors import CandidError
from candid._support.randomness import generator
from candid.data.datasets import open_images, open_part
from candid.data.images import Preprocessing
from candid.data.splits import ArraySplit, Split
from candid.inference.predictions import Measure
from candid.inference.runner import Runner
from candid.trust.feature_scores import Mahalanobis
from candid.trust.scores import CODE_LENGTHS
from tests.helpers import small_classifier

PREPROCESSING = Preprocessing(3, 16, 16, "resized")
NORM = Mahalanobis.from_state({"whitening": torch.eye(192), "means": torch.zeros(1, 192)})
MEASURES: dict[str, Measure] = {**CODE_LENGTHS, "mahalanobis": NORM}


def array(images: int = 23) -> ArraySplit:
    pixels = torch.randint(0, 256, (images, 3, 16, 16), generator=generator(0), dtype=torch.uint8)
    return ArraySplit(pixels, torch.arange(images) % 3)


def counted(passes: Runner) -> list[nn.Module]:
    """Grows by the network's first layer whenever the network is used."""
    calls: list[nn.Module] = []
    first = next(layer for layer in passes.frozen.modules() if not list(layer.children()))
    first.register_forward_hook(lambda layer, *_: calls.append(layer))
    return calls


def every_pass(data: Path, out: Path, fabric: Fabric | None = None) -> None:
    """Results of the first process in ``out``, and what each process knows in ``out / <rank>.pt``."""
    passes = Runner(small_classifier(), fabric, out)
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
        "features": None if features is None else (features.columns["features"], features.labels),
        "message": message,
    }
    torch.save(known, out / f"{passes.fabric.global_rank}.pt")


if __name__ == "__main__":
    every_pass(Path(sys.argv[1]), Path(sys.argv[2]), launch(int(sys.argv[3])))
