"""The models that a server answers with: each can be replaced while requests are answered."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from candid._support.errors import CandidError
from candid.judging.watch_images import WatchState
from candid.serve import FILES, Limits, schemas
from candid.serve.queue import Queue
from candid.serve.schemas import DriftResponse, EncodedResponse, ImageRequest
from candid.serve.service import Service
from candid.serve.worker import Worker
from candid.trust.drift import UNPROVEN, Watch

log = logging.getLogger("candid.serve")
Networks = Sequence[Service | Worker]
Opener = Callable[[str, str], tuple[Networks, ExitStack]]
"""Loads a model folder under a name; the stack ends what it has started."""


def opened_here(model: str, name: str) -> tuple[Networks, ExitStack]:
    """Load a model into this process."""
    service = Service.load(model, name)
    service.warm_up()
    return [service], ExitStack()


class Drift:
    """The watch of a server. Only the thread that answers requests uses it.

    Args:
        start: a watch that has seen the held-out images, as text; None if the model has no held-out scores.
        model: the fingerprint of the model and its held-out scores.
        folder: where the state is read and written; None to keep it in memory.
    """

    def __init__(self, start: str | None, model: str, folder: Path | None) -> None:
        self.state, self._trouble = None, False
        if start is not None:
            file = None if folder is None else folder / f"drift-{model[:16]}.sqlite"
            earlier = None if file is None else file.with_suffix(".json")  # until 0.3
            self.state = WatchState(file, model, Watch.from_json(start), earlier)

    @property
    def watch(self) -> Watch | None:
        """The watch, with all images so far."""
        return None if self.state is None else self.state.watch

    def see(self, answers: Sequence[EncodedResponse], names: Sequence[str | None]) -> None:
        """Count judged images; a name is only for those that are stored."""
        if self.watch is None:
            return
        for answer, name in zip(answers, names, strict=True):
            if answer.sighting is not None:
                score, predicted, confidence = answer.sighting
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
        caveat = None if self.watch.proven else UNPROVEN
        report = self.watch.report()
        return DriftResponse(watching=True, sentence=self.watch.sentence(), caveat=caveat, **report)

    async def store(self) -> None:
        """Write the state if there are new images."""
        if self.state is None or self.state.is_written:
            return
        text, images = self.state.watch.to_json(), self.state.watch.images
        try:
            await asyncio.to_thread(self.state.store, text, images)
            self._trouble = False
        except CandidError as error:  # the answers go on
            if not self._trouble:
                log.error(str(error))
            self._trouble = True
        except sqlite3.ProgrammingError:  # closed in the meantime, with all images
            return

    def close(self) -> None:
        """Write the state for the last time, and let others use it."""
        if self.state is None:
            return
        try:
            self.state.count([])
        except CandidError as error:
            log.error(str(error))
        self.state.close()


class Served:
    """One model in memory, and what waits for it. All networks hold the same weights.

    Args:
        networks: what answers; each has its own thread.
        limits: the limits of the server.
        drift: the watch over its images.
        stack: ends the networks.
        source: the folder or the name that it was loaded from; None if there is none.
        version: 0 as it was when the server started, else the number of the model that was taught.
    """

    def __init__(
        self,
        networks: Networks,
        limits: Limits,
        drift: Drift,
        stack: ExitStack | None = None,
        source: str | None = None,
        version: int = 0,
    ) -> None:
        self.networks, self.drift, self.source, self.version = networks, drift, source, version
        self.model = networks[0].description
        self.name = self.model.info.name
        self._stack, self._users, self._batch = stack or ExitStack(), 0, limits.batch or self.model.batch
        self._state: Literal["new", "started", "closed"] = "new"

    def start(self) -> "Served":
        """Start the threads that ask the networks."""
        self._state = "started"
        self.queue: Queue[Service | Worker, Sequence[ImageRequest], Any] = Queue(
            self.networks,
            lambda network, requests: network.answer(requests),
            self._batch,
            lambda network: network.prepare() if isinstance(network, Worker) else None,
        )
        return self

    def info(self, limits: Limits, stores_images: bool) -> schemas.ModelResponse:
        """Return what clients are told about it."""
        more = {
            "limits": schemas.LimitsResponse(
                files=FILES, megabytes=limits.max_megabytes, pixels=limits.max_pixels
            ),
            "stores_images": stores_images,
            "examples": [photo.name for photo in self.model.examples],
            "version": self.version,
        }
        return self.model.info.model_copy(update=more)

    def seconds_lost(self) -> float:
        """Return for how long no network has been ready; 0 if one is."""
        if any(network.ready for network in self.networks):
            return 0.0
        return time.monotonic() - max(each.lost_since for each in self.networks if isinstance(each, Worker))

    @contextmanager
    def used(self) -> Iterator["Served"]:
        """Use it for one request: it is not closed before the request has its answer."""
        self._users += 1
        try:
            yield self
        finally:
            self._users -= 1

    async def retire(self) -> None:
        """Close it once the last request has its answer."""
        while self._users:
            await asyncio.sleep(0.02)
        await self.close()
        self.networks = ()  # what it was started with stays known, its weights don't stay in memory
        del self.queue

    async def close(self) -> None:
        """End its threads and processes, after what waits; only the first call does something."""
        if self._state != "started":
            return
        self._state = "closed"
        for network in self.networks:
            if isinstance(network, Worker):
                network.stop()
        await asyncio.to_thread(self.queue.close)
        self.drift.close()
        await asyncio.to_thread(self._stack.close)


class Models:
    """All models of a server by name; only the thread that answers requests uses it.

    A request takes its model once and keeps it: whatever is switched meanwhile, one model decodes and judges
    all of its images.
    """

    def __init__(self, served: Sequence[Served]) -> None:
        self._served = {each.name: each for each in served}
        self.starts = dict(self._served)
        """The models as the server was started with them; they may be closed."""
        self._leaving: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    @property
    def first(self) -> Served:
        """The model of requests that name none."""
        return next(iter(self._served.values()))

    def get(self, name: str | None) -> Served | None:
        """Return a model; without a name the first, and None if there is no such model."""
        return self.first if name is None else self._served.get(name)

    def switch(self, served: Served) -> None:
        """Answer further requests with another model of the same name; the old one finishes its own."""
        old, self._served[served.name] = self._served[served.name], served.start()
        task = asyncio.get_running_loop().create_task(old.retire())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def retired(self) -> None:
        """Wait until all that were replaced have answered, and are closed."""
        if self._leaving:
            await asyncio.wait(self._leaving)

    def start(self) -> None:
        """Start the threads of all models."""
        for each in self:
            each.start()

    def seconds_lost(self) -> float:
        """Return for how long some model has had no network; 0 if all have one."""
        return max(each.seconds_lost() for each in self)

    def abandon(self) -> None:
        """Let all requests fail that wait for a network."""
        for each in self:
            each.queue.abandon()

    async def close(self) -> None:
        """Close all, also those that were replaced."""
        await asyncio.gather(*(each.close() for each in self), self.retired())
