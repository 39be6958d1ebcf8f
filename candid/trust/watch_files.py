"""Watch image files for drift: those in a folder as they arrive, or a list of them once."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from candid._support.errors import CandidError
from candid._support.files import ANY_NAME, digest
from candid.data.formats import images_in
from candid.data.images import EXTENSIONS
from candid.models.protocol import Model
from candid.trust.examine import Examiner, Unusable
from candid.trust.options import WatchOptions
from candid.trust.watch import Watch
from candid.trust.watch_state import WatchState
from candid.trust.watched import WatchedScore

STATE = ".candid-watch.sqlite"
SECONDS = 1.0
"""Between two looks at a folder."""


class Counted(NamedTuple):
    """What happened to the watch with some more images."""

    watch: Watch
    images: int
    """Images that were counted."""
    rang: bool
    """Whether the alarm rang among them."""
    unusable: list[Unusable]
    """Images that can't be used; they are not counted, and looked at again if they change."""


class FileWatch:
    """A watch over image files.

    Args:
        model: the model that judges them.
        name: what users call it.
        source: a folder, or a text file that names one image a line.
        options: the level of the alarm, and where the state is.
    """

    def __init__(self, model: Model, name: str, source: str, options: WatchOptions) -> None:
        self.source, self.folder = source, Path(source) if Path(source).is_dir() else None
        self.once = options.once or self.folder is None
        if not Path(source).exists():
            raise CandidError(f"There is no folder or list '{source}': check the name.")
        first = [] if not self.once else self._files()
        if self.once and not first:
            raise CandidError(f"'{source}' names no images: there is nothing to watch.")
        score = WatchedScore.of(model, name)
        self.examiner = Examiner(model, name, watched=score)
        path = options.state
        if path is None and not self.once:
            assert self.folder is not None
            path = self.folder / STATE
        watch = score.watch(model.class_names, options.alarm, options.among)
        self.state = WatchState(path, score.identity(model), watch)

    @property
    def watch(self) -> Watch:
        """The watch, with all images so far."""
        return self.state.watch

    def run(self) -> Iterator[Counted]:
        """Yield what happened after each batch of new images; without end unless it watches once."""
        sizes: dict[Path, tuple[int, int]] = {}
        broken: dict[str, tuple[int, int] | None] = {}
        while True:
            found = [path for path in self._files() if not self.state.is_counted(self._name(path))]
            if not self.once:  # a file that is still being written changes between two looks
                now = {path: size for path in found if (size := _size(path)) is not None}
                found = [
                    path
                    for path, size in now.items()
                    if sizes.get(path) == size and broken.get(str(path)) != size
                ]
                sizes = now
            batch = self.examiner.batch
            for start in range(0, len(found), batch):
                counted = self._count(found[start : start + batch])
                broken |= {each.path: sizes.get(Path(each.path)) for each in counted.unusable}
                yield counted
            if self.once:
                return
            time.sleep(SECONDS)

    def _count(self, paths: list[Path]) -> Counted:
        watch, before, rang = self.watch, self.watch.images, self.watch.alarm
        unusable: dict[str, Unusable] = {}
        for each in self.examiner.examine(paths):
            if isinstance(each, Unusable):
                unusable[each.path] = each
                continue
            assert each.sighting is not None
            score, predicted, confidence = each.sighting
            watch.update(score, predicted, confidence, [each.path])
        self.state.count([self._name(path) for path in paths if str(path) not in unusable])
        return Counted(watch, watch.images - before, watch.alarm and not rang, [*unusable.values()])

    def _name(self, path: Path) -> str:
        """Return the name under which a file is counted: within the folder, wherever that is moved."""
        return str(path.resolve() if self.folder is None else path.relative_to(self.folder))

    def _files(self) -> list[Path]:
        """Return all image files, in the order in which they are watched."""
        if self.folder is not None:
            try:
                return in_order(images_in(self.folder), self.folder)
            except FileNotFoundError:  # a folder went away while we looked: look again later
                return []
        if Path(self.source).suffix.lower() in EXTENSIONS:
            return [Path(self.source)]
        lines = Path(self.source).read_text(encoding="utf-8", errors=ANY_NAME).splitlines()
        return list(dict.fromkeys(Path(line.strip()) for line in lines if line.strip()))


def in_order(files: list[Path], folder: Path) -> list[Path]:
    """Return files of one folder by name, as cameras number them; those of sub-folders in a random order.

    Names of sub-folders such as classes say nothing of time, and all images of a class after each other would
    look like a change. The order is a function of the names.
    """
    if len({path.parent for path in files}) <= 1:
        return sorted(files)
    return sorted(files, key=lambda path: digest(os.fsencode(path.relative_to(folder))).digest())


def _size(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
