"""Attacks on what is written to disks: full ones, and ones whose power was cut."""

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from candid.judging.store import IMAGES, NAME, RECORDS, Storage
from candid.models.checkpoint import read_json
from experiments.red.attack import attack, check, full, tried
from experiments.red.kills import SMALL, TEMPORARY, content, run, template, warm

CUTS = 100 if full() else 25
MEGABYTES = 200
"""Of stored images: none is removed for lack of room."""
DISK = 3
"""MB of the small file system."""


def picture(number: int) -> bytes:
    """Return bytes that begin as a PNG file and are different for each number."""
    return b"\x89PNG" + random.Random(number).randbytes(2000)


def _store(folder: Path, first: int) -> None:
    """Store images until the process is killed."""
    store = Storage(folder, MEGABYTES * 10**6)
    for number in range(first, first + 10**6):
        store.add(picture(number), "accept", "{}")


def _killed_store(folder: Path, first: int, seconds: float) -> None:
    child = os.fork()
    if not child:
        try:
            _store(folder, first)
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def cut_log(folder: Path, draw: random.Random) -> str:
    """Cut the write-ahead log, as a power cut can leave it; return what was done."""
    log = folder / f"{RECORDS}-wal"
    how = draw.choice(("whole", "cut", "cut", "gone", "garbage"))
    if not log.exists():
        return "no log"
    size = log.stat().st_size
    if how == "gone":
        log.unlink()
        (folder / f"{RECORDS}-shm").unlink(missing_ok=True)
    elif how == "cut":
        os.truncate(log, draw.randrange(size + 1))
    elif how == "garbage" and size:
        with log.open("r+b") as file:
            file.seek(draw.randrange(size))
            file.write(draw.randbytes(300))
    return how


@attack("A server's store after a power cut: no image is lost or overwritten, no number is used again.", 300)
def power_cuts() -> str:
    draw, images, orphans = random.Random(0), 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "store")
        for cut in range(CUTS):
            _killed_store(folder, cut * 10**6, draw.uniform(0.03, 0.2))
            before = _images(folder)
            how = cut_log(folder, draw) if (folder / RECORDS).exists() else "no record"
            store = Storage(folder, MEGABYTES * 10**6)
            after = _images(folder)
            check(after == before, f"cut {cut} ({how}): {len(before)} images became {len(after)}")
            rows = store.last(10**6)
            for row in rows:
                content, _ = store.content(row.id) or (b"", "")
                check(content == before[row.file], f"cut {cut} ({how}): another {row.file}")
            file = store.add(picture(-cut), "novel", "{}")
            check(file is not None and file not in before, f"cut {cut} ({how}): {file} is used again")
            orphans = max(orphans, len(before) - len(rows))
            store.close()
            images = len(_images(folder))
        # orphans are counted, and the oldest are removed first
        most = sum(len(each) for each in _images(folder).values()) // 2
        store = Storage(folder, most)
        left = _images(folder)
        store.close()
        check(sum(len(each) for each in left.values()) <= most, "orphans are not counted")
        newest = sorted(_images(folder))[-1]
        check(newest in left and len(left) > images // 3, "the newest were removed")
    tried(inputs=CUTS, kills=CUTS)
    return f"{CUTS} kills and cut logs; {images} images, up to {orphans} without a record: all kept"


def _images(folder: Path) -> dict[str, bytes]:
    place = folder / IMAGES
    found = sorted(place.iterdir()) if place.exists() else []
    return {path.name: path.read_bytes() for path in found if NAME.fullmatch(path.name)}


@contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[Path | None]:
    """Mount a file system of a few MB; None where this is not allowed."""
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(words, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path, left: int) -> None:
    """Fill a disk but for some bytes."""
    free = shutil.disk_usage(disk).free - left
    if free > 0:
        (disk / "filler").write_bytes(bytes(free))


WRITERS = (
    ("train photos --out {disk}/run --eye eye.onnx", ("run",)),
    (f"train digits --out {{disk}}/run {SMALL}", ("run",)),
    ("teach {disk}/mine dots=more", ()),
    ("rename {disk}/mine rings=circles", ()),
    ("calibrate {disk}/mine others", ()),
    ("adopt classifier.onnx photos --out {disk}/adopted", ("adopted",)),
    ("export mine --out {disk}/model.onnx", ("model.onnx",)),
    ("evaluate mine photos --out {disk}/evaluation", ()),
    ("group mine strange --out {disk}/groups --sort-into {disk}/sorted", ()),
    ("examine mine photos strange --out {disk}/verdicts.csv", ("verdicts.csv",)),
    ("examine mine photos strange --out {disk}/verdicts", ()),
    ("watch mine strange --once --state {disk}/watch.sqlite", ()),
    ("audit mine --data photos --out {disk}/audit --quick", ()),
)
"""Commands that write to the disk, and what must be whole there if it is there at all."""
ROOM = (0, 4096, 12_000, 40_000) if not full() else (0, 4096, 8192, 12_000, 20_000, 40_000, 80_000, 160_000)


@attack("On a full disk every command ends in one sentence, and the model that was there stays whole.", 900)
def full_disks() -> str:
    warm()
    refused = wrote = 0
    with tempfile.TemporaryDirectory() as name:
        before, work = Path(name, "before"), Path(name, "work")
        template(before)
        with small_disk(Path(name, "disk"), DISK) as disk:
            if disk is None:
                return "skipped: mounting a small file system is not allowed here"
            for words, _ in WRITERS:
                for room in ROOM:
                    _empty(disk)
                    shutil.rmtree(work, ignore_errors=True)
                    shutil.copytree(before, work)
                    shutil.copytree(before / "mine", disk / "mine")
                    was = content(disk / "mine")
                    fill(disk, room)
                    command = words.format(disk=disk)
                    code, said = run(command, work)
                    where = f"{command}, {room} bytes left: {code}, {said[-400:]}"
                    check(code in (0, 2) and "Traceback" not in said, where)
                    if code == 2:
                        refused += 1
                        last = said.strip().splitlines()[-1]
                        check("space" in said or "full" in said, where)
                        check(bool(last), where)
                        check(content(disk / "mine") == was, f"{where}: the model there has changed")
                    wrote += code == 0
                    _whole(disk, where)
    tried(inputs=refused + wrote)
    said = f"{refused} ended in one sentence, {wrote} had enough room"
    return f"{len(WRITERS)} commands with 0 to {max(ROOM):,} bytes left: {said}"


def _empty(disk: Path) -> None:
    for entry in disk.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _whole(disk: Path, where: str) -> None:
    """Raise if a model there is half-written."""
    for file in disk.rglob("model.json"):
        if TEMPORARY in str(file) or '"candid-model"' not in file.read_text(encoding="utf-8"):
            continue
        parts = [part for part in read_json(file.parent).values() if isinstance(part, dict)]
        for part in parts:
            if "sha256" in part:
                size = (file.parent / part["file"]).stat().st_size
                check(size == part["bytes"], f"{where}: {file} is not whole")
