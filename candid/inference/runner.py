"""A model over whole data sets: shared by processes, and cached on disk under a hash of what went in."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from safetensors import SafetensorError

from candid._support.errors import CandidError, plainly
from candid._support.files import cache_file
from candid._support.numbers import Array, digest, log_softmax, logsumexp, use_threads
from candid._support.old_formats import described_pass
from candid._support.processes import OneProcess, Processes, first_error, gathered, launch
from candid._support.progress import SILENT, Progress
from candid.data.batches import NamedBatch, named_batches
from candid.data.crops import reflected_frame, ten_crops
from candid.data.images import Preprocessing, image_keys, to_float
from candid.data.splits import Split
from candid.inference.predictions import FEATURES, NO_MEASURES, Measure, Predictions, predict, without_noise
from candid.models.protocol import Model, Outputs, batch_size

T = TypeVar("T")
VERSION = 3
"""Version of what a pass computes: cached files of another one are not used."""
TEN_CROPS, NO_NOISE = "ten crops", "without noise"
MARGIN = 8 / 7
"""Ten crops are taken from an image that is larger by this factor: 256 pixels for 224."""


def launch_for(model: Model, devices: int | None = None) -> Processes:
    """Start the processes that share a pass of ``model``; one that is no network runs without torch."""
    return launch(devices, network="network" in model.can)


class Transform(NamedTuple):
    """Something that is done to 8-bit images (B, C, H, W) before the model sees them."""

    key: str
    """Distinguishes transforms in the cache."""
    apply: Callable[[Array], Array]


class Runner:
    """Runs a model over data sets: on which processes, with which cache, showing what.

    All processes must ask for the same passes; only the first gets the results.
    """

    def __init__(
        self,
        model: Model,
        processes: Processes | None = None,
        folder: Path | None = None,
        workers: int = 0,
        progress: Progress = SILENT,
    ) -> None:
        self.processes = processes or OneProcess()
        self.is_first = self.processes.is_global_zero
        self.model = model.ready()
        use_threads(self.model)
        self.frozen = self.model.frozen()
        self.batch = batch_size(model)
        self.folder, self.workers, self.progress = folder, workers, progress

    def predictions(
        self,
        split: Split,
        preprocessing: Preprocessing,
        name: str,
        measures: Mapping[str, Measure] = NO_MEASURES,
        transform: Transform | None = None,
    ) -> Predictions | None:
        """Return what the model says of ``split``, called ``name``; None in all processes but the first.

        Args:
            split: the images.
            preprocessing: how the model sees them.
            name: what people call them.
            measures: what else to measure of each image; keys of the images are added.
            transform: what to do to the images first.
        """
        learned = [array for measure in measures.values() for array in getattr(measure, "arrays", ())]
        key = digest(*learned).hexdigest() + ("" if transform is None else transform.key)
        measures = {**measures, "keys": _image_keys}

        def make(batch: NamedBatch) -> Predictions:
            images, labels, paths = batch
            images = images if transform is None else transform.apply(images)
            return predict(self.frozen, images, labels, paths, measures)

        return self._cached_or_made(make, split, preprocessing, name, self.batch, key, measures.keys())

    def published_predictions(
        self, split: Split, preprocessing: Preprocessing, name: str
    ) -> Predictions | None:
        """Return what the model says of ``split`` if it is shown as the paper's authors did.

        Logits are without dequantisation noise. Log densities keep it: without, they would not be those of
        8-bit images.
        """
        quiet = without_noise(self.frozen)

        def make(batch: NamedBatch) -> Predictions:
            predictions = predict(self.frozen, *batch)
            if quiet is self.frozen:
                return predictions
            return replace(predictions, logits=quiet.outputs(to_float(batch[0])).logits)

        view = replace(preprocessing, published="centre")
        return self._cached_or_made(make, split, view, f"{name}, as published", self.batch, NO_NOISE)

    def ten_crops(
        self, split: Split, preprocessing: Preprocessing, name: str, published: bool = False
    ) -> Array | None:
        """Return log posteriors averaged over ten crops, (N, M); None in all processes but the first.

        Photos are resized to 8/7 of the model's size, and the crops are those of the central square. Images
        that fill the model's size have no pixels beyond it: theirs are reflected, as in training.

        Args:
            split: the images.
            preprocessing: how the model sees them.
            name: what people call them.
            published: take the crops from the whole photo, as the paper's authors did, without
                dequantisation noise.
        """
        sides = round(MARGIN * preprocessing.height), round(MARGIN * preprocessing.width)
        reflected = split.in_memory or preprocessing.crop != "resized"
        view, key, model = preprocessing, TEN_CROPS, self.frozen
        if published:
            view, key = replace(preprocessing, published="ten crops"), f"{TEN_CROPS} {NO_NOISE}"
            model, name = without_noise(model), f"{name}, as published"
        elif not reflected:
            view = replace(preprocessing, height=sides[0], width=sides[1], crop="none")

        def averaged(batch: NamedBatch) -> Predictions:
            crops, labels, paths = batch
            if not published:
                larger = reflected_frame(crops, sides) if reflected else crops
                crops = ten_crops(larger, preprocessing.size)
            logits = model.outputs(to_float(crops.reshape(-1, *crops.shape[2:]))).logits
            of_crops = log_softmax(logits.astype(np.float64)).reshape(len(crops), 10, -1)
            mean = logsumexp(of_crops, axis=1) - math.log(10)
            return Predictions(paths, labels, mean, np.zeros(mean.shape[1], np.float32))

        name = f"{TEN_CROPS} of {name}"
        predictions = self._cached_or_made(averaged, split, view, name, max(1, self.batch // 10), key)
        return None if predictions is None else predictions.logits

    def each(
        self,
        work: Callable[[NamedBatch], T],
        split: Split,
        preprocessing: Preprocessing,
        name: str,
        batch: int | None = None,
        most: int | None = None,
    ) -> list[T]:
        """Return what ``work`` makes of each batch of this process, at most ``most``.

        All processes raise an error that one of them meets.
        """
        rank, processes = self.processes.global_rank, self.processes.world_size
        batch = batch or self.batch
        results, error = [], None
        try:
            batches = named_batches(split, preprocessing, batch, rank, processes, self.workers)
            total = math.ceil(len(split) / batch / processes)
            for item in islice(self.progress.track(batches, name, total, batch * processes), most):
                results.append(work(item))
        except CandidError as problem:
            error = problem
        error = first_error(self.processes, error)
        if error is not None:
            raise error
        return results

    def features(
        self, split: Split, preprocessing: Preprocessing, name: str, most: int
    ) -> Predictions | None:
        """Return what the model says of about ``most`` images, with columns of features and keys.

        It returns None in all processes but the first. Nothing is cached.
        """

        def make(batch: NamedBatch) -> Predictions:
            return predict(self.frozen, *batch, {**FEATURES, "keys": _image_keys})

        batches = math.ceil(most / self.batch / self.processes.world_size)
        return self._joined(self.each(make, split, preprocessing, name, most=batches))

    def _joined(self, own: list[Predictions]) -> Predictions | None:
        """Return the batches of all processes in order; None in all processes but the first."""
        by_process = gathered(self.processes, own)
        in_turn = [part for parts in zip_longest(*by_process) for part in parts if part is not None]
        return Predictions.joined(in_turn) if self.is_first else None

    def _cached_or_made(
        self,
        make: Callable[[NamedBatch], Predictions],
        split: Split,
        preprocessing: Preprocessing,
        name: str,
        batch: int,
        key: str,
        columns: Iterable[str] = (),
    ) -> Predictions | None:
        file = self._file(name, split, preprocessing, key) if self.is_first else None
        predictions = self._cached(file, split)
        if predictions is not None and not all(column in predictions.columns for column in columns):
            predictions = None  # it was made for scores that need less
        if self.processes.broadcast(predictions is not None):
            return predictions
        predictions = self._joined(self.each(make, split, preprocessing, name, batch))
        if predictions is None:
            return None
        if not split.can_index:  # in one order for any number of processes
            order = sorted(range(len(predictions)), key=predictions.paths.__getitem__)
            predictions = predictions[np.array(order, np.int64)]
        try:
            if file is not None:
                predictions.save(file, split.state())
        except (OSError, SafetensorError) as error:
            problem = plainly(str(error))
            self.progress.log(f"The results can't be cached in '{self.folder}' for later studies: {problem}")
        return predictions

    def _file(self, name: str, split: Split, preprocessing: Preprocessing, key: str) -> Path | None:
        """Return the file for a hash of everything that decides what is in it; ``name`` is for people."""
        if self.folder is None:
            return None
        described = described_pass(VERSION, self.model.config, preprocessing, key)
        if preprocessing.published is not None:
            described += f" published: {preprocessing.published}"
        hashed = self.model_hash.copy()
        hashed.update(described.encode())
        hashed.update(split.fingerprint())
        return cache_file(self.folder, name, hashed)

    @cached_property
    def model_hash(self) -> "hashlib._Hash":
        """The hash of all weights; copy it before adding to it."""
        return digest(*self.model.state().values())

    def _cached(self, file: Path | None, split: Split) -> Predictions | None:
        if file is None or not file.exists():
            return None
        predictions = Predictions.load(file, split.state())
        if predictions is None:
            self.progress.log(f"'{file}' is damaged or its images were replaced: it is computed again.")
        return predictions


def _image_keys(images: Array, outputs: Outputs) -> Array:
    return image_keys(images)
