"""A watch over the images that a server judges: it counts them, and its state survives a restart."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from candid._support.errors import CandidError
from candid._support.files import locked, write_text
from candid.serve.schemas import DriftResponse, EncodedResponse
from candid.trust.watch import Watch

SECONDS = 1.0
"""Between two looks at whether the state must be written."""
NOT_WRITTEN = "Can't write the state of the watch to '%s' (%s): free some space."
log = logging.getLogger("candid.serve")


class Drift:
    """The watch of a server. Only the thread that answers requests uses it.

    Args:
        start: a watch that has seen the held-out images, as text; None if the model has no held-out scores.
        model: the fingerprint of the model and its held-out scores.
        folder: where the state is read and written; None to keep it in memory.
    """

    def __init__(self, start: str | None, model: str, folder: Path | None) -> None:
        self.watch = None if start is None else Watch.from_json(start)
        self._file = None if folder is None else folder / f"drift-{model[:16]}.json"
        self._written, self._writing, self._held = 0, threading.Lock(), ExitStack()
        if self._file is not None and self.watch is not None:
            self.watch = self._opened(self._file, self.watch)

    def _opened(self, file: Path, start: Watch) -> Watch:
        """Lock the state for as long as the server runs, and return the watch that it holds."""
        lock = file.with_name(f".{file.stem}.lock")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock.touch()
        except OSError as error:
            raise CandidError(
                f"Can't use '{file.parent}' as --state ({error}): name another folder."
            ) from error
        self._held.enter_context(locked(lock, "keeps the state of its watch by", seconds=0))
        found = start
        if file.exists():
            found = Watch.load(file)
            found.proven = start.proven  # states of earlier versions don't say it
        self._written = found.images
        found.save(file)  # a folder that can't be written is named at the start
        return found

    def see(self, found: Sequence[EncodedResponse], names: Sequence[str | None]) -> None:
        """Count judged images; a name is only for those that are stored."""
        if self.watch is None:
            return
        for each, name in zip(found, names, strict=True):
            if each.sighting is not None:
                score, predicted, confidence = each.sighting
                rang = self.watch.alarm
                called = None if name is None else [name]
                self.watch.update(score, predicted, confidence, called)
                if self.watch.alarm and not rang:
                    log.warning(self.watch.sentence())

    @property
    def evidence(self) -> float:
        """The largest evidence so far."""
        return 0.0 if self.watch is None else self.watch.evidence

    @property
    def images(self) -> int:
        """The images so far."""
        return 0 if self.watch is None else self.watch.images

    @property
    def alarm(self) -> bool:
        """Whether the alarm has rung."""
        return self.watch is not None and self.watch.alarm

    def response(self) -> DriftResponse:
        """Return the answer of the API."""
        if self.watch is None:
            sentence = "This model has no held-out scores, so its images can't be watched."
            return DriftResponse(watching=False, sentence=sentence)
        return DriftResponse(watching=True, sentence=self.watch.sentence(), **self.watch.report())

    async def keep(self) -> None:
        """Write the state once a second while there are new images, until it is cancelled."""
        trouble = False
        while True:
            await asyncio.sleep(SECONDS)
            if self.watch is None or self._file is None or self.watch.images == self._written:
                continue
            text, images = self.watch.to_json(), self.watch.images
            try:
                await asyncio.to_thread(self._write, self._file, text, images)
                trouble = False
            except OSError as error:  # the answers go on
                if not trouble:
                    log.error(NOT_WRITTEN, self._file, error)
                trouble = True

    def close(self) -> None:
        """Write the state for the last time, and let others use it."""
        if self.watch is not None and self._file is not None:
            try:
                self._write(self._file, self.watch.to_json(), self.watch.images)
            except OSError as error:
                log.error(NOT_WRITTEN, self._file, error)
        self._held.close()

    def _write(self, file: Path, text: str, images: int) -> None:
        """Write a state unless a newer one is there: a thread may end after the task that waited for it."""
        with self._writing:
            if images > self._written:
                write_text(text, file)
                self._written = images
