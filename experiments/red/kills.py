"""Commands that write, killed at a random moment: children of a process that has imported everything."""

import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import candid
from experiments.red.attack import attack, check, full, tried

KILLS = 500 if full() else 38
"""Over all commands."""
MOMENTS = (0.1, 1.0)
"""When a command is killed, as shares of the time that a whole run takes."""
TEMPORARY, CACHE, LOGS = ".writing-", "cache", ("-wal", "-shm", "-journal")
PASSING, DIGESTS = ("when", "seconds", "extracted"), ("digest", "sha256")
"""Keys of JSON files that differ between two runs, and those of digests of a whole file."""
PHOTOS = 30
MODEL = '{"blocks": [1], "widths": [4], "pointwise_width": 4, "mixing": "orthogonal"}'


@dataclass(frozen=True)
class Killed:
    """A command that writes, and what is run after it was killed; in a folder of its own."""

    name: str
    words: str
    again: str | None = None
    """The same command, if nothing else is given."""
    grows: tuple[str, ...] = ()
    """Names of files that are written as the work goes on, so that they may be shorter than at the end."""


SMALL = (
    "--epochs 1 --workers 0 --set blocks=[1] --set widths=[4] --set pointwise_width=4 --set mixing=orthogonal"
)
COMMANDS = (
    Killed("train photos", "train photos --out run --eye eye.onnx", "train --out run --resume"),
    Killed(
        "train digits",
        f"train digits --out run {SMALL}",
        f"train digits --out run {SMALL} --resume",
        ("metrics.csv", "state.pt", "curves.png", "best", "last"),
    ),
    Killed("teach", "teach mine dots=more"),
    Killed("teach --out", "teach mine dots=more --out taught"),
    Killed("rename", "rename mine rings=circles"),
    Killed("merge", "merge mine both=rings,stripes"),
    Killed("forget", "forget three stripes"),
    Killed("undo", "undo changed"),
    Killed("calibrate", "calibrate mine others"),
    Killed("adopt", "adopt classifier.onnx photos --out adopted"),
    Killed("refit", "refit pixel digits --out refitted"),
    Killed("export", "export mine --out model.onnx"),
    Killed("evaluate", "evaluate mine photos --ood strange=strange --out evaluation"),
    Killed("audit", "audit mine --data photos --out audit --quick"),
    Killed("group", "group mine strange --out groups --sort-into sorted"),
    Killed("examine --out", "examine mine photos strange --out verdicts.csv"),
    Killed("examine into a folder", "examine mine photos strange --out verdicts"),
    Killed("watch", "watch mine strange --once --state watch.sqlite", grows=("watch.sqlite",)),
    Killed("corrupt", "corrupt mine photos --corruptions pixelate --images 8 --out corrupted"),
)


def picture(kind: str, seed: int) -> Image.Image:
    """Return rings, stripes or dots in noise."""
    draws = np.random.default_rng([("rings", "stripes", "dots").index(kind), seed])
    rows, columns = np.mgrid[:100, :112]
    shapes = {
        "rings": np.sin(np.hypot(rows - 50, columns - 56) * 6.28 / draws.uniform(10, 26)),
        "stripes": np.sin((rows + columns) * 6.28 / draws.uniform(10, 26)),
        "dots": np.sin(rows / 3) * np.sin(columns / 3),
    }
    levels = draws.uniform(60, 200, 3) + 90 * shapes[kind][..., None] + draws.normal(0, 25, (100, 112, 3))
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))


def network(path: Path, features: int, classes: int = 0) -> None:
    """Write a tiny network as an ONNX file: means of filters, and logits if there are classes."""
    from onnx import TensorProto, helper, numpy_helper

    draws = np.random.default_rng(features)
    filters = draws.normal(size=(features, 3, 5, 5)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["filtered"]),
        helper.make_node("Relu", ["filtered"], ["maps"]),
        helper.make_node("ReduceMean", ["maps", "axes"], ["features"], keepdims=0),
    ]
    weights = [
        numpy_helper.from_array(filters, "w"),
        numpy_helper.from_array(np.array([2, 3], np.int64), "axes"),
    ]
    outputs = [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", features])]
    if classes:
        nodes.append(helper.make_node("MatMul", ["features", "last"], ["logits"]))
        weights.append(
            numpy_helper.from_array(draws.normal(size=(features, classes)).astype(np.float32), "last")
        )
        outputs.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", classes]))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 64, 64])]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 10
    path.write_bytes(model.SerializeToString())


def photos(folder: Path, kind: str, count: int, start: int = 0) -> None:
    """Write photos of one kind."""
    folder.mkdir(parents=True)
    for seed in range(start, start + count):
        picture(kind, seed).save(folder / f"{seed}.png")


def template(place: Path) -> None:
    """Make the folder that each command begins with: photos and models."""
    place.mkdir()
    for kind in ("rings", "stripes"):
        photos(place / "photos" / kind, kind, PHOTOS)
    for kind in ("rings", "stripes"):
        photos(place / "others" / kind, kind, 40, 200)
    photos(place / "more", "dots", 8)
    photos(place / "strange", "dots", 8, 50)
    network(place / "eye.onnx", 24)
    network(place / "classifier.onnx", 16, 2)
    for words in (
        "train photos --out mine --eye eye.onnx",
        "teach mine dots=more --out three",
        "teach mine dots=more --out changed",
        "rename changed rings=circles",
        f"train digits --out pixel {SMALL}",
    ):
        code, said = run(words, place)
        check(code == 0, f"{words}: {said}")


def start(
    words: str | list[str], place: Path, said: str = "said", prepare: Callable[[], object] | None = None
) -> int:
    """Fork a child that runs ``candid WORDS`` in a folder, and return its id.

    Args:
        words: the command.
        place: the folder.
        said: the name of its log, next to the folder.
        prepare: what the child does first.
    """
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.setsid()
        log = os.open(place.parent / said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.chdir(place)
        os.environ["CANDID_CACHE"] = str(place / CACHE)
        sys.argv = ["candid", *(words.split() if isinstance(words, str) else words)]
        if prepare is not None:
            prepare()
        from candid.cli.app import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


def run(
    words: str | list[str], place: Path, prepare: Callable[[], object] | None = None, most: int = 600
) -> tuple[int, str]:
    """Run a command to its end; return its exit code and the last characters of what it said."""
    _, status = os.waitpid(start(words, place, prepare=prepare), 0)
    said = (place.parent / "said").read_bytes().decode(errors="replace")
    return os.waitstatus_to_exitcode(status), said[-most:]


def killed(words: str, place: Path, seconds: float) -> bool:
    """Run a command and kill it after some seconds; return whether it was still running."""
    child = start(words, place)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, _ = os.waitpid(child, os.WNOHANG)
        if ended:
            return False
        time.sleep(min(0.005, max(0.0, until - time.monotonic())))
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def content(place: Path) -> dict[str, str]:
    """Return digests of all files in a folder but of the cache and of what is being written."""
    files = {str(path.relative_to(place)): path for path in place.rglob("*") if path.is_file()}
    return {
        name: hashlib.sha256(meaning(path)).hexdigest()
        for name, path in files.items()
        if TEMPORARY not in name and not name.startswith(CACHE) and not name.endswith(LOGS)
    }


def meaning(file: Path) -> bytes:
    """Return what a file says, without when and how fast it was written."""
    data = file.read_bytes()
    if file.suffix == ".json":
        with suppress(ValueError):
            return json.dumps(_lasting(json.loads(data), top=True)).encode()
    if file.suffix == ".sqlite":
        with tempfile.TemporaryDirectory() as place:
            for part in file.parent.glob(f"{file.name}*"):
                shutil.copy(part, place)
            with closing(sqlite3.connect(Path(place, file.name))) as database:
                return "\n".join(database.iterdump()).encode()
    return data


def _lasting(value: Any, top: bool = False) -> Any:
    if isinstance(value, dict):
        left_out = (*PASSING, *(DIGESTS if top else ()))
        return {key: _lasting(entry) for key, entry in value.items() if key not in left_out}
    return [_lasting(entry) for entry in value] if isinstance(value, list) else value


class Trial:
    """One command: what it starts from, what it makes, and what is left when it is killed."""

    def __init__(self, command: Killed, before: Path, work: Path) -> None:
        self.command, self.template, self.work = command, before, work
        self.before = content(before)
        results, self.seconds = [], 0.0
        for _ in range(2):
            self.fresh()
            began = time.monotonic()
            code, said = run(command.words, work)
            self.seconds = time.monotonic() - began
            check(code in (0, 2) and "Traceback" not in said, f"{command.words} ended with {code}: {said}")
            results.append(content(work))
        self.after, second = results
        self.same = {name for name, digest in self.after.items() if second.get(name) == digest}
        """Files that have the same bytes after each run; others hold times or seconds."""
        check(self.after.keys() == second.keys(), f"{command.name}: {self.after.keys() ^ second.keys()}")

    def fresh(self) -> None:
        """Begin with the template."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.template, self.work)

    def kill(self, share: float) -> bool:
        """Kill the command after this share of its time, look, and run it again; return whether it ran."""
        self.fresh()
        was_killed = killed(self.command.words, self.work, share * self.seconds)
        where = f"{self.command.name}, killed at {share:.0%}"
        left = content(self.work)
        self.look(left, where)
        words = self.command.again or self.command.words
        if "--resume" in words and not any(name.startswith("run/") for name in left):
            words = self.command.words  # there is nothing to go on with
        code, said = run(words, self.work)
        found = content(self.work)
        wrong = [name for name in self.same if found.get(name) != self.after[name]]
        if code not in (0, 2) or "Traceback" in said or wrong:
            done = all(left.get(name) == self.after[name] for name in self.same)
            check(
                done and not wrong,
                f"{where}, then {words} ended with {code}: {said}; other files: {wrong[:5]}",
            )
        return was_killed

    def look(self, left: dict[str, str], where: str) -> None:
        """Raise if a file is half-written, lost or another one than before and after the command."""
        for name, digest in left.items():
            if digest in (self.before.get(name), self.after.get(name)):
                continue
            if name not in self.same or self._may_grow(name):
                self._check_whole(self.work / name, where)
                continue
            check(name not in self.after, f"{where}: {name} is neither as before nor as after")
            self._check_whole(self.work / name, where)
        lost = [name for name in self.before if name not in left and name in self.after]
        check(not lost, f"{where}: {lost[:5]} are gone")
        for record in self.work.rglob("model.json"):
            if TEMPORARY not in str(record):
                candid.models.checkpoint.read_json(record.parent)  # its digest is right

    def _may_grow(self, name: str) -> bool:
        return any(part in self.command.grows for part in Path(name).parts)

    def _check_whole(self, file: Path, where: str) -> None:
        """Raise if a file is cut, as far as its kind shows it."""
        name = file.relative_to(self.work)
        data = file.read_bytes()
        if file.suffix == ".json":
            with suppress(ValueError):
                json.loads(data)
                return
        elif file.suffix in (".html", ".svg"):
            if data.rstrip().endswith((b"</html>", b"</svg>")):
                return
        elif file.suffix in (".csv", ".md", ".toml", ".txt"):
            if data.endswith(b"\n") or not data:
                return
        elif file.suffix == ".png":
            if b"IEND" in data[-12:]:
                return
        elif data:
            return  # models carry digests, databases a log, and an ONNX file is opened by the next command
        check(False, f"{where}: {name} is cut ({len(data)} bytes)")


def warm() -> None:
    """Import what commands import, so that forked children start at once; nothing is computed here."""
    import importlib

    from candid.cli import app

    for entry in app.COMMANDS.values():
        importlib.import_module(entry.split(":")[0])
    for module in (
        *("training.train", "training.teach", "training.changes", "training.adopt", "training.refit"),
        *("judging.examine", "judging.bulk", "judging.calibrate", "judging.group", "judging.watch_images"),
        *("evaluation.evaluate", "models.export", "reports.audit", "models.flow.classifier"),
        *("models.photo.model", "models.photo.adopted", "robustness.corruptions.benchmark"),
    ):
        with suppress(ModuleNotFoundError):
            importlib.import_module(f"candid.{module}")
    for module in (
        "onnxruntime",
        "matplotlib.pyplot",
        "sklearn.cluster",
        "sklearn.linear_model",
        "torch._dynamo",
    ):
        importlib.import_module(module)


@attack(
    "A command that is killed with SIGKILL leaves nothing half-written; run again, it has the same result.",
    900,
)
def killed_commands() -> str:
    warm()
    draw, counts = random.Random(0), Counter[str]()
    each = -(-KILLS // len(COMMANDS))
    with tempfile.TemporaryDirectory() as name:
        before, work = Path(name, "before"), Path(name, "work")
        template(before)
        for command in COMMANDS:
            trial = Trial(command, before, work)
            counts["runs"] += each
            for _ in range(each):
                counts[command.name] += trial.kill(draw.uniform(*MOMENTS))
    runs = counts.pop("runs")
    tried(inputs=runs, kills=counts.total())
    said = ", ".join(f"{name} {number}" for name, number in counts.items())
    return f"{counts.total()} kills in {runs} runs, nothing half-written, lost or different: {said}"
