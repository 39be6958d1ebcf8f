"""Attacks on models, runs, data and caches."""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import candid
from candid._support.numbers import Array
from candid._support.progress import SILENT
from candid.data.datasets import open_dataset
from candid.data.splits import ArraySplit
from candid.inference.predictions import Predictions
from candid.inference.runner import Runner
from candid.models.checkpoint import sealed
from candid.models.photo.efficientnet import _cached
from candid.models.photo.opening import open_eye
from candid.robustness.attacks.benchmark import _load
from candid.training.features import FeatureCache
from candid.training.run_folder import RunFolder, state_digest
from candid.trust.arrays import ArrayFile
from experiments.red.attack import attack, check, full, tried
from experiments.red.damage import Subject, edits, flips

MODEL = {"blocks": [1, 1], "widths": [4, 8], "pointwise_width": 4, "mixing": "orthogonal"}
EDITS, FORGED, FLIPS = (2000, 1000, 3000) if full() else (600, 300, 800)


def verdicts(model: Path, images: Any) -> list[dict[str, Any]]:
    """Return all that is said of images; a model without held-out scores has no verdict, which is plain."""
    found = [each.to_dict() for each in candid.examine(str(model), images)]
    if any(each["verdict"] is None for each in found):
        raise candid.CandidError("There are no verdicts: the model has no held-out scores.")
    return found


def pixel_run(folder: Path) -> Path:
    """Train a tiny network on digits, and return its run folder."""
    candid.train("digits", out=folder / "run", epochs=1, workers=0, model=MODEL)
    return folder / "run"


def digits(count: int = 4) -> Array:
    """Return a few test images, (B, H, W, C) uint8."""
    split = open_dataset("digits").test
    assert isinstance(split, ArraySplit)
    return split.images[:count].transpose(0, 2, 3, 1)


def model_subjects(folder: Path, observe: Callable[[], Any], name: str) -> list[Subject]:
    """Return the files of a model, each of which decides what is said of images."""
    return [Subject(file, observe, f"{name} {file.name.split('-')[0]}") for file in sorted(folder.iterdir())]


def run_subjects(run: Path) -> list[Subject]:
    """Return the files that a run is resumed from."""
    folder = RunFolder(run)

    def resumed() -> Any:
        options = folder.options()
        state = folder.load_state(options, SILENT)
        open_dataset(options.data, split=options.split)
        results = folder.results or {}
        position = None if state is None else state_digest(vars(state))
        return options.deciding(), position, results["val"], results["test"]

    return [Subject(run / name, resumed, name) for name in ("config.toml", "state.pt", "results.json")]


def pass_subject(model: Path, folder: Path) -> Subject:
    """Return a cached pass; None counts as the truth, since it is then computed again."""
    split = open_dataset("digits").test
    assert split is not None
    loaded = candid.load(model)
    Runner(loaded, folder=folder).predictions(split, loaded.preprocessing, "test")
    (file,) = folder.iterdir()
    truth = Predictions.load(file)
    assert truth is not None

    def cached() -> str:
        found = Predictions.load(file) or truth
        return state_digest({name: getattr(found, name) for name in vars(truth)})

    return Subject(file, cached, "cached pass")


def attack_subject(model: Path, folder: Path) -> Subject:
    """Return a cached attack."""
    candid.attack([str(model)], "digits", out=folder, images=2, kappa=(0.0,), d=(66.0,), workers=0)
    file = next((folder / "attacks").iterdir())
    truth = _load(file)
    assert truth is not None
    return Subject(file, lambda: state_digest((_load(file) or truth).columns()), "cached attack")


def monitor_subjects(folder: Path) -> list[Subject]:
    """Return the files of a monitor."""
    random = np.random.default_rng(0)
    labels = np.arange(90) % 3
    logits = random.normal(size=(90, 3)) + 3 * np.eye(3)[labels]
    features = random.normal(size=(90, 5)) + labels[:, None]
    candid.Monitor(novelty=0.1).fit(logits, labels, features).save(folder)

    def observe() -> Any:
        return [each.to_dict() for each in candid.Monitor.load(folder).examine(logits[:9], features[:9])]

    return [Subject(file, observe, file.name.split("-")[0]) for file in sorted(folder.iterdir())]


def watch_subject(folder: Path) -> Subject:
    """Return the state of a watch."""
    file = folder / "watch.json"
    candid.Watch().fit(np.random.default_rng(3).normal(size=60)).save(file)
    return Subject(file, lambda: candid.Watch.load(file).to_json(), "watch")


def array_subject(folder: Path, compressed: bool) -> Subject:
    """Return stored arrays of another classifier."""
    random, file = np.random.default_rng(1), folder / f"arrays-{compressed}.npz"
    columns: dict[str, Any] = {"logits": random.normal(size=(40, 3)), "labels": np.arange(40) % 3}
    (np.savez_compressed if compressed else np.savez)(file, **columns)

    def observe() -> str:
        found = ArrayFile.read(file)
        return state_digest([found.arrays.columns, found.labels, found.paths])

    return Subject(file, observe, "npz")


def photo_subjects(folder: Path) -> list[Subject]:
    """Return the files of a photo model, its run and its caches. CANDID_CACHE must name a folder."""
    random = np.random.default_rng(2)
    for label, kind in enumerate(("flat", "noise")):
        (folder / "photos" / kind).mkdir(parents=True)
        for i in range(20):
            pixels = random.normal(110 + 5 * i, 60 * label + 1, (100, 100, 3)).clip(0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "photos" / kind / f"{i}.png")
    data, run, shown = str(folder / "photos"), folder / "photo-run", folder / "photos" / "noise" / "0.png"
    candid.train(data, out=run)
    subjects = model_subjects(run / "model" / "best", lambda: verdicts(run, [shown]), "photo")

    def resumed() -> Any:
        results = candid.train(out=run, resume=True).results
        return results["val"], results["test"]

    subjects += [Subject(run / name, resumed, f"photo {name}") for name in ("config.toml", "results.json")]
    cache, eye = Path(os.environ["CANDID_CACHE"]), open_eye("lite0")
    known = sorted(FeatureCache(eye, SILENT)._places)
    truth = dict(zip(known, FeatureCache(eye, SILENT).rows(known), strict=True))

    def statistics() -> str:
        cache = FeatureCache(eye, SILENT)
        return state_digest([list(cache.rows([key])[0] if key in cache else truth[key]) for key in known])

    subjects += [Subject(file, statistics, "statistics") for file in cache.glob("features/*/*.safetensors")]
    for file in cache.glob("*.onnx"):
        graph = file.read_bytes()[32:]
        subjects.append(Subject(file, lambda file=file, graph=graph: _cached(file) or graph, "graph"))  # type: ignore[misc]
    return subjects


@contextmanager
def workplace() -> Iterator[Path]:
    """Yield a temporary folder that also has the cache."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["CANDID_CACHE"] = str(Path(place, "cache"))
        yield Path(place)


@attack(
    "A random edit of a model's record is refused or changes no result, also with its digest put right.", 600
)
def edited_records() -> str:
    with workplace() as place:
        run, images = pixel_run(place), digits()
        best = run / "model" / "best"
        subject = Subject(best / "model.json", lambda: verdicts(best, images), "model.json")
        plain = edits(subject, EDITS).report()
        forged = edits(subject, FORGED, sealed).report()
    tried(inputs=EDITS + FORGED)
    return f"edits {plain}; with the digest put right {forged}"


@attack("A flipped bit in any file of a model, a run or a cache is noticed or changes no result.", 900)
def flipped_bits() -> str:
    with workplace() as place:
        run, images = pixel_run(place), digits()
        best = run / "model" / "best"
        subjects = model_subjects(best, lambda: verdicts(best, images), "pixel")
        subjects += [
            *run_subjects(run),
            pass_subject(best, place / "passes"),
            attack_subject(best, place / "cw"),
        ]
        subjects += [*monitor_subjects(place / "monitor"), watch_subject(place)]
        subjects += [array_subject(place, compressed) for compressed in (False, True)]
        subjects += photo_subjects(place)
        found = flips(subjects, FLIPS)
        tried(inputs=FLIPS)
        return f"{len(subjects)} files, flips {found.report()}"


SAVES = """
import sys, candid
model = candid.load(sys.argv[1])
while True:
    candid.save(model, sys.argv[2])
    print("saved", flush=True)
"""


@attack("SIGTERM during a save leaves a whole model, and the next save removes what is half-written.", 300)
def terminated_saves() -> str:
    kills, chance = 60 if full() else 6, random.Random(0)
    tried(kills=kills)
    with workplace() as place:
        best, target = pixel_run(place) / "model" / "best", place / "saved"
        expected = candid.load(best).fingerprint()
        for _ in range(kills):
            command = [sys.executable, "-c", SAVES, str(best), str(target)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                process.stdout.readline()
                time.sleep(chance.uniform(0, 0.05))
                process.terminate()
            check(candid.load(target).fingerprint() == expected, "the model is another one")
        candid.save(candid.load(best), target)
        left = sorted(file.name.split("-")[0] for file in target.iterdir())
        check(left == ["held_out", "model.json", "weights"], f"there is more in the folder: {left}")
    return f"{kills} processes terminated, the model was whole each time"
