"""Two commands at the same time that write to one place: the second one says so, and no result is lost."""

import os
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import candid
from experiments.red.attack import attack, check, full, tried
from experiments.red.kills import SMALL, start, template, warm

ROUNDS = 12 if full() else 2


@dataclass(frozen=True)
class Pair:
    """Two commands, and the classes that the model has if each of them says that all went well.

    Without classes only one of the two may say so.
    """

    what: str
    first: str
    second: str
    model: str = ""
    classes: tuple[str, str] = ("", "")

    def holds(self, place: Path, codes: list[int]) -> bool:
        """Return whether nothing is lost of what the commands said is done."""
        if "watch" in self.first:
            with closing(sqlite3.connect(place / "watch.sqlite")) as database:
                return bool(database.execute("SELECT count(*) FROM counted").fetchone() == (8,))
        if not self.classes[0]:
            return codes.count(0) == 1
        names = candid.load(place / self.model).class_names
        return all(name in names for name, code in zip(self.classes, codes, strict=True) if code == 0)


WATCH = "watch mine strange --once --state watch.sqlite"
DIGITS = f"train digits --out run {SMALL}"
PHOTOS, NAMED = (f"train {folder} --out run --eye eye.onnx" for folder in ("photos", "named"))
ADOPT = "adopt classifier.onnx {} --out adopted"
PAIRS = (
    Pair("two trainings", PHOTOS, NAMED, "run", ("rings", "circles")),
    Pair("two trainings of pixels", DIGITS, f"{DIGITS} --seed 1"),
    Pair("two lessons", "teach mine dots=more", "teach mine spots=strange", "mine", ("dots", "spots")),
    Pair(
        "two lessons elsewhere",
        "teach mine dots=more --out taught",
        "teach mine spots=strange --out taught",
        "taught",
        ("dots", "spots"),
    ),
    Pair("two names", "rename mine rings=circles", "rename mine stripes=lines", "mine", ("circles", "lines")),
    Pair(
        "a lesson and a name",
        "teach mine dots=more",
        "rename mine rings=circles",
        "mine",
        ("dots", "circles"),
    ),
    Pair("two adoptions", ADOPT.format("photos"), ADOPT.format("named")),
    Pair("two watches", WATCH, WATCH),
)


@attack(
    "Two commands that write to one place: each that says it is done is done, the other says why not.", 600
)
def two_writers() -> str:
    warm()
    both = 0
    refused: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        before, work = Path(name, "before"), Path(name, "work")
        template(before)
        shutil.copytree(before / "photos", before / "named")
        (before / "named" / "rings").rename(before / "named" / "circles")
        for pair in PAIRS:
            for turn in range(ROUNDS):
                shutil.rmtree(work, ignore_errors=True)
                shutil.copytree(before, work)
                pids = [start(pair.first, work, "first")]
                time.sleep(0.02 * turn)
                pids.append(start(pair.second, work, "second"))
                codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
                said = [Path(name, each).read_text(errors="replace")[-400:] for each in ("first", "second")]
                where = f"{pair.what}: {codes}, {said}"
                check(set(codes) <= {0, 2} and 0 in codes and "Traceback" not in "".join(said), where)
                check(pair.holds(work, codes), f"a result is lost: {where}")
                both += codes == [0, 0]
                refused[pair.what] += codes.count(2)
    tried(inputs=len(PAIRS) * ROUNDS)
    said_so = f"{refused.total()} times one said why not, {both} times both results are there"
    return f"{len(PAIRS) * ROUNDS} pairs: {said_so}"
