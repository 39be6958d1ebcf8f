"""Train the bundled models and put them into ``candid/models/zoo``.

``python -m experiments.models cifar-10-batches-bin --tiny tiny20``

Each run is a folder in ``runs/zoo``; what was stopped goes on where it was, what is finished is kept. Of Tiny
ImageNet's classes, ``val/`` holds the test photos where there is no ``test/``.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from candid._support.errors import CandidError
from candid.judging.calibrate import calibrate
from candid.models import checkpoint, saving, zoo
from experiments.cards import write_card

MODELS: dict[str, tuple[str, ...]] = {
    "cifar10-beta1": ("--beta", "1", "--precision", "32"),
    "cifar10-betainf": ("--beta", "inf"),
    "cifar10-resnet": ("--baseline", "--precision", "32"),
    "cifar10-beta2": ("--beta", "2"),
    "cifar10-beta4": ("--beta", "4"),
    "cifar10-beta8": ("--beta", "8"),
    "cifar10-beta16": ("--beta", "16"),
    "cifar10-beta32": ("--beta", "32"),
    "cifar10-beta0": ("--beta", "0"),
    "cifar10-resnet-unsmoothed": ("--baseline", "--label-smoothing", "0"),
    "tiny20": (),
}
"""The bundled models: what each has of its own, next to the recipe that its name begins with."""
NOT_BUNDLED: dict[str, tuple[str, ...]] = {
    "cifar10-beta1-seed1": ("--beta", "1", "--seed", "1"),
    "cifar10-resnet-seed1": ("--baseline", "--seed", "1"),
}
"""Models that show what chance (and bfloat16) does; their results stay on the page."""


def with_test(data: str | Path, work: Path) -> Path:
    """Return a folder with ``train`` and ``test``: ``data`` itself, or links to its ``train`` and ``val``.

    Tiny ImageNet has its labelled test photos in ``val``, but training uses a ``val`` folder to choose the
    best epoch and for p-values. The folder with links is in ``work`` and has the name of ``data``.
    """
    data = Path(data)
    if (data / "test").is_dir():
        return data
    if not (data / "train").is_dir() or not (data / "val").is_dir():
        raise CandidError(f"'{data}' needs the folders train/ and test/ (or val/): name the data set.")
    linked = work / "data" / data.resolve().name
    linked.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", "train"), ("test", "val")):
        if not (linked / name).exists():
            (linked / name).symlink_to((data / part).resolve(), target_is_directory=True)
    return linked


def recipe(name: str) -> str:
    """Return the recipe of the model ``name``."""
    return name.partition("-")[0]


def published(name: str) -> str:
    """Return what the data of the model ``name`` are called."""
    return {"cifar10": "cifar-10-batches-bin"}.get(recipe(name), recipe(name))


def command(name: str, data: str | None = None) -> list[str]:
    """Return the command that trains the model ``name``, without the folder of the run."""
    options = (MODELS | NOT_BUNDLED)[name]
    return ["candid", "train", data or published(name), "--recipe", recipe(name), *options]


def train(arguments: Sequence[str], run: Path, threads: int) -> None:
    """Run a training command until it is finished; a run that exists already goes on."""
    if (run / "config.toml").is_file():
        arguments = ["candid", "train", "--resume"]
    run.parent.mkdir(parents=True, exist_ok=True)
    with run.with_name(f"{run.name}.log").open("a", encoding="utf-8") as log:
        subprocess.run(
            [sys.executable, "-m", *arguments, "--out", str(run)],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdout=log,
            stderr=log,
            check=True,
        )


def pack(name: str, data: str, runs: Path) -> Path:
    """Put the best model of a run into the zoo, in half precision, calibrated after that, with its card."""
    packed, place = runs / name / "packed", zoo.FOLDER / name
    model = checkpoint.load(runs / name / "model" / "best")
    config = model.metadata["training"]["config"]
    config["data"] = published(name)
    saving.save(model, packed, half=True)
    if calibrate(packed, data, part="val") is None:
        raise CandidError("The bundled models are packed by one process.")
    if name in zoo.names() and _tensors(packed) == _tensors(place):
        return place  # with the figures on its card
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(packed, place)
    write_card(name, command(name), runs / name)
    return place


def _tensors(folder: Path) -> set[tuple[str, int]]:
    """Files by their names, which say what they hold, and sizes: a copy may have been cut."""
    return {(file.name, file.stat().st_size) for file in folder.glob("*.safetensors")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and pack all models, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m experiments.models", description=__doc__)
    parser.add_argument("data", metavar="DATA", help="CIFAR-10 as published: the folder cifar-10-batches-bin")
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these; all otherwise")
    parser.add_argument(
        "--tiny", metavar="FOLDER", help="20 classes of Tiny ImageNet: train/ and test/ (or val/)"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/zoo"), help="the folder for runs")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at once; cores are shared")
    asked = parser.parse_args(arguments)
    names = asked.names or [name for name in MODELS if asked.tiny or recipe(name) == "cifar10"]
    threads = max(1, (os.cpu_count() or 1) // asked.jobs)
    tiny: Any = None if asked.tiny is None else str(with_test(asked.tiny, asked.runs))
    sources: dict[str, str] = {name: asked.data if recipe(name) == "cifar10" else tiny for name in names}
    with ThreadPoolExecutor(asked.jobs) as pool:
        for _ in pool.map(
            lambda name: train(command(name, sources[name]), asked.runs / name, threads), names
        ):
            pass
    for name in names:
        if name in MODELS:
            print(pack(name, sources[name], asked.runs))


if __name__ == "__main__":
    main()
