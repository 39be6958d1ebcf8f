"""The same photos judged in eight ways: p-values and verdicts must not depend on how they were computed."""

import csv
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from PIL import Image

import candid
from experiments.red.attack import attack, check, full, tried
from experiments.red.server import examine, served

SCRIPT = Path(__file__).parents[2] / "examples" / "deploy" / "verdict.py"
PHOTOS = 200 if full() else 48


class Answer(NamedTuple):
    """What must be equal."""

    label: str
    verdict: str
    p_value: float


def answers(records: Sequence[Any]) -> list[Answer]:
    """Return what must be equal of examinations or their records."""
    rows = [record if isinstance(record, dict) else record.to_dict() for record in records]
    return [Answer(row["label"], row["verdict"], float(row["p_value"])) for row in rows]


def in_python(model: str, paths: list[Path], batch: int) -> list[Answer]:
    """Judge with parts of this size."""
    examiner = candid.Examiner(model)
    parts = [paths[at : at + batch] for at in range(0, len(paths), batch)]
    return answers([each for part in parts for each in examiner.examine(part)])


def as_arrays(model: str, paths: list[Path]) -> list[Answer]:
    """Judge pixels instead of files."""
    return answers(candid.examine(model, [np.asarray(Image.open(path).convert("RGB")) for path in paths]))


def by_command(model: str, paths: list[Path], threads: int) -> list[Answer]:
    """Judge on the command line with this number of threads."""
    command = [sys.executable, "-m", "candid", "examine", model, *map(str, paths), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    check(done.returncode == 0, done.stderr[-500:])
    return answers([json.loads(line) for line in done.stdout.splitlines()])


def in_bulk(model: str, paths: list[Path], place: Path) -> list[Answer]:
    """Judge a folder with two processes, into tables."""
    folder, out = place / "links", place / "tables"
    folder.mkdir()
    for number, path in enumerate(paths):
        (folder / f"{number:05}{path.suffix}").symlink_to(path.resolve())
    command = [sys.executable, "-m", "candid", "examine", model, str(folder), "--out", str(out)]
    done = subprocess.run([*command, "--processes", "2"], capture_output=True, text=True)
    check(done.returncode == 0, done.stderr[-500:])
    rows = [row for table in sorted(out.glob("*.csv")) for row in csv.DictReader(table.open())]
    return answers(sorted(rows, key=lambda row: Path(row["path"]).name))


def by_server(model: str, paths: list[Path]) -> list[Answer]:
    """Ask a server, three photos at a time."""
    rows: list[Any] = []
    with served(model=model) as server:
        for at in range(0, len(paths), 3):
            contents = [path.read_bytes() for path in paths[at : at + 3]]
            status, answer = examine(server.port, *contents, timeout=120)
            check(status == 200, f"{status}: {answer}")
            rows += answer["results"]
    return answers(rows)


def exported(model: str, paths: list[Path], place: Path) -> list[Answer]:
    """Judge with the exported file and 120 lines of numpy, without Candid."""
    network = place / "model.onnx"
    command = [sys.executable, "-m", "candid", "export", model, "--out", str(network)]
    done = subprocess.run(command, capture_output=True, text=True)
    check(done.returncode == 0, done.stderr[-500:])
    script = runpy.run_path(str(SCRIPT))
    session = onnxruntime.InferenceSession(str(network))
    verdicts = script["Verdicts"](network.with_suffix(".json"))
    size, names = session.get_inputs()[0].shape[-1], candid.load(model).class_names
    found = []
    for path in paths:
        image = script["seen"](path, size, verdicts.known["margin"])
        logits, novelty = session.run(["logits", "novelty"], {"images": image[None]})
        verdict, _, _, _, p = verdicts.verdict(logits[0], novelty[0])
        found.append(Answer(names[int(np.argmax(logits[0]))], verdict, float(p)))
    return found


def different(expected: list[Answer], found: list[Answer]) -> list[str]:
    """Return what differs; p-values are ranks, so they are equal but for the last digit of a float."""
    check(len(expected) == len(found), f"{len(found)} answers of {len(expected)}")
    pairs = enumerate(zip(expected, found, strict=True))
    return [
        f"photo {number}: {one} is {other}"
        for number, (one, other) in pairs
        if one[:2] != other[:2] or abs(one.p_value - other.p_value) > 1e-9
    ]


@attack("200 photos judged in eight ways have equal p-values and verdicts, also held-out ones.", 600)
def ways_to_judge() -> str:
    from tests.photo_models import CLASSES, photo, train_photo_model

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        run = train_photo_model(place / "trained", photos=PHOTOS // 6)
        held_out = sorted(Path(run.data, "train").rglob("*.png"))
        (place / "new").mkdir()
        for number in range(PHOTOS - len(held_out)):
            kind = (*CLASSES, "checks", "noise")[number % 5]
            photo(kind, 5000 + number).save(place / "new" / f"{number:03}.png")
        paths = [*held_out, *sorted((place / "new").iterdir())]
        expected = in_python(run.model, paths, len(paths))
        found = {
            "reversed": in_python(run.model, paths[::-1], len(paths))[::-1],
            "one by one": in_python(run.model, paths, 1),
            "parts of seven": in_python(run.model, paths, 7),
            "as arrays": as_arrays(run.model, paths),
            "command with one thread": by_command(run.model, paths, 1),
            "command with two threads": by_command(run.model, paths, 2),
            "tables of two processes": in_bulk(run.model, paths, place),
            "server": by_server(run.model, paths),
            "exported": exported(run.model, paths, place),
        }
    tried(inputs=len(paths) * (1 + len(found)))
    wrong = {way: different(expected, each) for way, each in found.items()}
    broken = {way: (len(each), each[:2]) for way, each in wrong.items() if each}
    check(not broken, f"of {len(paths)} photos: {broken}")
    return f"{len(paths)} photos, {len(held_out)} of them held out, in {1 + len(found)} ways: no difference"
