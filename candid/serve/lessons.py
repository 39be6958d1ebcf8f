"""What people teach a model: corrections of stored images, groups of unknown ones, models made from both.

Every model is made from the one that the server was started with and from all corrections, in a process of
its own at low priority. So nothing adds up over many lessons, and each can be undone.
"""

import asyncio
import json
import logging
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from candid._support.errors import CandidError
from candid._support.files import write_text
from candid._support.progress import SILENT, Progress
from candid.judging.store import IMAGES, Correction, Storage
from candid.models.photo.taught import FEWEST

FOLDER, RECORD = "models", "lessons.json"
LEARNED = "corrections"
"""The entry of a model's metadata with the corrections that it has learned: names of classes by digest."""
KEPT = 10
"""Taught models that are kept on disk for going back; those that were never used go first."""
MOST_NOVEL = 500
"""Novel images that are grouped, the newest."""
Apart = Callable[..., Awaitable[Any]]
Job = Literal["teaching", "grouping", "loading"]
"""What a server does next to answering."""
log = logging.getLogger("candid.serve")


@dataclass(frozen=True)
class Lesson:
    """A model that was taught from corrections, and what that changed."""

    version: int
    """Its number in the store, from 1."""
    model: str
    """The name of the model."""
    start: str
    """The fingerprint of the model that it was made from."""
    made: str
    """When, as UTC."""
    photos: dict[str, int]
    """The photos that it was taught, by class."""
    classes: list[str]
    """Those that are new."""
    sentences: list[str]
    recalls: dict[str, tuple[float, float]]
    """Recall of each known class on held-out photos, before and after."""
    used: bool = False
    """Whether it has ever answered."""


def learned_by(model: Any) -> dict[str, str]:
    """Return the corrections that a model has learned: names of classes by digest of the photo."""
    return dict(model.metadata.get(LEARNED, {}))


def fresh(corrections: Sequence[Correction], learned: Mapping[str, str]) -> list[Correction]:
    """Return the corrections that a model has not learned yet."""
    return [each for each in corrections if learned.get(each.digest) != each.name]


def too_few(corrections: Sequence[Correction], known: Sequence[str]) -> dict[str, int]:
    """Return the new classes with too few photos, and how many more each needs."""
    counts = Counter(each.name for each in corrections if each.name not in known)
    return {name: FEWEST - count for name, count in counts.items() if count < FEWEST}


def learn(
    model: str,
    folder: Path,
    corrections: Sequence[Correction],
    out: str | Path,
    progress: Progress = SILENT,
) -> Lesson:
    """Teach a photo model what people said of stored images.

    Args:
        model: a photo model or its folder.
        folder: the store.
        corrections: those of photos that the model has learned already are left out.
        out: the folder for the new model; that of ``model`` replaces it.
        progress: where to show messages.

    Raises:
        CandidError: if there is nothing to teach, or the model can't be taught.
    """
    from candid.models import checkpoint
    from candid.models.protocol import require
    from candid.training.changes import save_change, target_of
    from candid.training.teach import NothingNewError, teach

    loaded: Any = require(checkpoint.resolve(model), "teach", "be taught from corrections")
    learned = learned_by(loaded)
    unlearned = fresh(corrections, learned)
    new = [each for each in unlearned if each.digest not in learned]  # a photo is never in two classes
    few = too_few(new, loaded.class_names)
    classes: dict[str, list[Path]] = {}
    for each in new:
        if each.name not in few:
            classes.setdefault(each.name, []).append(folder / IMAGES / each.file)
    if not classes:
        lacking = "".join(f"; '{name}' needs {count} more" for name, count in few.items())
        changed = len(unlearned) - len(new)
        if changed:
            lacking += (
                f"; {changed} of them {'was' if changed == 1 else 'were'} changed after it had been taught: "
                "teach the model from before ('candid undo') instead"
            )
        raise CandidError(f"No correction can be taught: a new class needs {FEWEST} photos{lacking}.")
    taught = {each.digest: each.name for each in new if each.name in classes}
    target, result = target_of(model, out), None
    while result is None:
        try:
            result = teach(loaded, classes, progress=progress)
        except NothingNewError as error:  # they are training photos, called what they were called then
            del classes[error.name]
            if not classes:
                raise
    result.model.metadata[LEARNED] = learned | taught
    save_change(result.model, target, loaded)
    return Lesson(
        version=0,
        model="",
        start="",
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        photos={name: len(paths) for name, paths in classes.items()},
        classes=[name for name in classes if name not in loaded.class_names],
        sentences=result.sentences(),
        recalls=result.recalls,
    )


@dataclass(frozen=True)
class Grouped:
    """Stored images that a model does not know, by their numbers."""

    groups: list[tuple[str, list[int], str]]
    """Name, images with the most central one first, and the known class that is nearest."""
    singles: list[int]
    """Those that fit no group."""


def grouped(model: str, folder: Path, files: Sequence[str]) -> Grouped:
    """Group those stored images that are novel."""
    from candid.judging.group import group

    paths = [path for file in files if (path := folder / IMAGES / file).exists()]
    if not paths:
        return Grouped([], [])
    result = group(model, paths, skip_bad=True)
    groups = [
        (each.name, [int(Path(member.path).stem) for member in each.members], each.nearest)
        for each in result.groups
    ]
    return Grouped(groups, [int(Path(single.path).stem) for single in result.singles])


class BusyError(Exception):
    """The server teaches, groups or loads a model already."""


class Lessons:
    """The lessons of a server; only the thread that answers requests uses it.

    Args:
        storage: the stored images and their corrections.
        apart: runs a function in a process of its own and returns what it returns.
    """

    def __init__(self, storage: Storage, apart: Apart) -> None:
        self.storage, self._apart = storage, apart
        self.busy: Job | None = None
        """What the server does now."""
        self.problem: str | None = None
        """Why the last job failed."""
        self.groups: dict[str, Grouped] = {}
        """Groups of unknown images, by model; only after they were asked for."""
        self._task: asyncio.Task[None] | None = None
        record = _read(storage.folder / RECORD)
        self._lessons = [Lesson(**each) for each in record.get("lessons", ())]
        self._in_use: dict[str, int] = record.get("in_use", {})
        self._next: int = record.get("next", 1)

    def of(self, name: str, start: str) -> list[Lesson]:
        """Return the lessons of a model as it was started, oldest first."""
        return [each for each in self._lessons if (each.model, each.start) == (name, start)]

    def in_use(self, name: str, start: str) -> int:
        """Return the version that answered last, 0 if it was the model as it was started."""
        version = self._in_use.get(name, 0)
        return version if any(each.version == version for each in self.of(name, start)) else 0

    def folder(self, version: int) -> Path:
        """Return where a taught model is."""
        return self.storage.folder / FOLDER / f"{version:05d}"

    def begin(self, what: Job, job: Coroutine[Any, Any, None]) -> None:
        """Do a job in the background.

        Raises:
            BusyError: if there is one already.
        """
        if self.busy is not None:
            job.close()
            raise BusyError
        self.busy, self.problem = what, None
        self._task = asyncio.get_running_loop().create_task(self._done(job))

    async def _done(self, job: Coroutine[Any, Any, None]) -> None:
        try:
            await job
        except CandidError as error:
            self.problem = str(error)
        except Exception:
            log.exception("A lesson failed.")
            self.problem = "Something went wrong on the server: its log has the details."
        finally:
            self.busy = None

    async def teach(self, name: str, start: str, model: str) -> None:
        """Make a model from the one in the folder ``model``, whose fingerprint is ``start``."""
        version, folder = self._next, self.storage.folder
        out = self.folder(version)
        shutil.rmtree(out, ignore_errors=True)  # of a server that was killed
        lesson = await self._apart(learn, model, folder, self.storage.corrections(name), out)
        self._next = version + 1
        unused = [each for each in self.of(name, start) if not each.used]
        made = replace(lesson, version=version, model=name, start=start)
        self._lessons = [each for each in self._lessons if each not in unused] + [made]
        self._write(unused)

    async def group(self, name: str, model: str) -> None:
        """Group the stored images that ``model`` does not know."""
        files = self.storage.novel(name, MOST_NOVEL)
        self.groups[name] = await self._apart(grouped, model, self.storage.folder, files)

    def use(self, name: str, version: int) -> None:
        """Note that a version answers from now on."""
        self._in_use[name] = version
        self._lessons = [
            replace(each, used=each.used or (each.model, each.version) == (name, version))
            for each in self._lessons
        ]
        old = [each for each in self._lessons if each.version not in self._in_use.values()][:-KEPT]
        self._lessons = [each for each in self._lessons if each not in old]
        self._write(old)

    async def close(self) -> None:
        """End what runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _write(self, removed: Sequence[Lesson]) -> None:
        """Write the record, then remove models that it does not name."""
        record = {
            "lessons": [asdict(each) for each in self._lessons],
            "in_use": self._in_use,
            "next": self._next,
        }
        write_text(json.dumps(record, indent=1), self.storage.folder / RECORD)
        for each in removed:
            shutil.rmtree(self.folder(each.version), ignore_errors=True)


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CandidError(f"'{file}' can't be read ({error}): restore it or remove it.") from error
