"""Passes of a model over images: shared by processes, and kept on disk under what went into them."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from candid._support.distributed import first_error, gathered, summed
from candid._support.errors import CandidError
from candid._support.files import cache_file, digest
from candid._support.progress import SILENT, Progress
from candid._support.threads import use_threads
from candid.data.augment import reflected_frame, ten_crops
from candid.data.images import Preprocessing, image_keys
from candid.data.loader import NamedBatch, named_batches
from candid.data.splits import Split
from candid.inference.features import FeatureGaussian, Moments
from candid.inference.predictions import Predictions, predict, to_float
from candid.models.protocol import Model

if TYPE_CHECKING:
    from lightning_fabric import Fabric

T = TypeVar("T")
VERSION = 3
"""Of what a pass computes: files of another one are not used."""
NUMBERS_A_BATCH = 250 * 3 * 32 * 32
TEN_CROPS = "ten crops"
MARGIN = 8 / 7
"""Ten crops are taken from an image that is so much larger: of 256 pixels for 224."""


class Change(NamedTuple):
    """Something that is done to 8-bit images (B, C, H, W) before the model sees them."""

    key: str
    """Tells changes apart."""
    apply: Callable[[Tensor], Tensor]


class Passes:
    """A model and how it goes over images: by which processes, where results are kept, what is shown.

    All processes must ask for the same passes; only the first gets the results.
    """

    def __init__(
        self,
        model: Model,
        fabric: "Fabric | None" = None,
        folder: Path | None = None,
        workers: int = 0,
        progress: Progress = SILENT,
    ) -> None:
        self.fabric = fabric or _one_process()
        self.is_first = self.fabric.is_global_zero
        self.model = model.eval().to(self.fabric.device)
        use_threads(self.model)
        self.fast = self.model.frozen()
        self.batch = batch_size(model)
        self.folder, self.workers, self.progress = folder, workers, progress

    def predictions(
        self,
        split: Split,
        preprocessing: Preprocessing,
        name: str,
        gaussian: FeatureGaussian | None = None,
        change: Change | None = None,
    ) -> Predictions | None:
        """What the model says of ``split``, called ``name``; None in all processes but the first.

        With a ``change``, of its images after that.
        """
        tensors = [] if gaussian is None else [gaussian.whitening, gaussian.means]
        key = digest(*tensors).hexdigest() + ("" if change is None else change.key)

        def make(batch: NamedBatch) -> Predictions:
            images, labels, paths = batch
            images = images if change is None else change.apply(images)
            return predict(self.fast, images, labels, paths, gaussian)

        return self._kept_or_made(make, split, preprocessing, name, self.batch, key)

    def ten_crops(self, split: Split, preprocessing: Preprocessing, name: str) -> Tensor | None:
        """Log posteriors averaged over ten crops of an image, (N, M); None in all processes but the first.

        Images in memory have no pixels beyond the model's size: theirs are reflected, as in training.
        """
        sides = round(MARGIN * preprocessing.height), round(MARGIN * preprocessing.width)
        in_memory = split.in_memory
        larger = (
            preprocessing
            if in_memory
            else replace(preprocessing, height=sides[0], width=sides[1], crop="none")
        )

        @torch.inference_mode()
        def averaged(batch: NamedBatch) -> Predictions:
            images, labels, paths = batch
            crops = ten_crops(reflected_frame(images, sides) if in_memory else images, preprocessing.size)
            logits = self.fast.outputs(to_float(crops.flatten(0, 1), self.fabric.device)).logits
            of_crops = logits.double().log_softmax(1).unflatten(0, (-1, 10)).cpu()
            mean = of_crops.logsumexp(1) - math.log(10)
            none = torch.zeros(len(labels))
            return Predictions(
                paths, labels, image_keys(images), mean, torch.zeros(mean.shape[1]), none, None, None
            )

        name = f"{TEN_CROPS} of {name}"
        found = self._kept_or_made(averaged, split, larger, name, max(1, self.batch // 10), TEN_CROPS)
        return None if found is None else found.logits

    def feature_gaussian(
        self, split: Split, preprocessing: Preprocessing, name: str, images: int = 20_000
    ) -> FeatureGaussian:
        """Where the features of each class lie, from about ``images`` labelled ones; the same everywhere."""
        sums = Moments(len(self.model.class_names), self.model.feature_size)

        @torch.inference_mode()
        def add(batch: NamedBatch) -> None:
            images, labels, _ = batch
            sums.add(self.fast.outputs(to_float(images, self.fabric.device)).features.cpu(), labels)

        self._each(
            add,
            split,
            preprocessing,
            name,
            self.batch,
            math.ceil(images / self.batch / self.fabric.world_size),
        )
        for part in ("count", "first", "second"):
            setattr(sums, part, summed(self.fabric, getattr(sums, part)))
        return sums.gaussian()

    def _kept_or_made(
        self,
        make: Callable[[NamedBatch], Predictions],
        split: Split,
        preprocessing: Preprocessing,
        name: str,
        batch: int,
        key: str,
    ) -> Predictions | None:
        file = self._file(name, split, preprocessing, key) if self.is_first else None
        found = self._kept(file)
        if self.fabric.broadcast(found is not None):
            return found
        by_process = gathered(self.fabric, self._each(make, split, preprocessing, name, batch))
        in_turn = [part for parts in zip_longest(*by_process) for part in parts if part is not None]
        if not self.is_first:
            return None
        found = Predictions.joined(in_turn)
        if not split.can_index:  # in one order for any number of processes
            found = found[torch.tensor(sorted(range(len(found)), key=found.paths.__getitem__))]
        self._keep(found, file)
        return found

    def _each(
        self,
        work: Callable[[NamedBatch], T],
        split: Split,
        preprocessing: Preprocessing,
        name: str,
        batch: int,
        most: int | None = None,
    ) -> list[T]:
        """What ``work`` makes of each batch of this process, at most ``most``; all raise an error in one."""
        rank, processes = self.fabric.global_rank, self.fabric.world_size
        results, error = [], None
        try:
            batches = named_batches(split, preprocessing, batch, rank, processes, self.workers)
            total = math.ceil(len(split) / batch / processes)
            for item in islice(self.progress.track(batches, name, total, batch * processes), most):
                results.append(work(item))
        except CandidError as problem:
            error = problem
        error = first_error(self.fabric, error)
        if error is not None:
            raise error
        return results

    def _file(self, name: str, split: Split, preprocessing: Preprocessing, key: str) -> Path | None:
        """Named by a hash of all that decides what is in it; ``name`` is for people."""
        if self.folder is None:
            return None
        digest = self.model_hash.copy()
        written = repr((VERSION, self.model.config, preprocessing, key))
        # passes cached when the class was called View are still found
        digest.update(written.replace("Preprocessing(", "View(").replace("'jitter'", "'wobble'").encode())
        digest.update(split.fingerprint())
        return cache_file(self.folder, name, digest)

    @cached_property
    def model_hash(self) -> "hashlib._Hash":
        """Of all weights; copy it before adding to it."""
        return digest(*self.model.state_dict().values())

    def _keep(self, found: Predictions, file: Path | None) -> None:
        try:
            if file is not None:
                found.save(file)
        except (OSError, SafetensorError) as error:
            self.progress.log(f"the pass can't be kept in '{self.folder}' for later studies: {error}")

    def _kept(self, file: Path | None) -> Predictions | None:
        if file is None or not file.exists():
            return None
        found = Predictions.load(file)
        if found is None:
            self.progress.log(f"'{file}' is cut or damaged: it is made anew.")
        return found


def _one_process() -> "Fabric":
    from lightning_fabric import Fabric

    return Fabric(accelerator="cpu", devices=1)


def batch_size(model: Model) -> int:
    """Images that pass a network at a time."""
    return min(250, max(1, NUMBERS_A_BATCH // math.prod(model.image_shape)))
