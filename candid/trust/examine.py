"""What a model says of image files, one after the other, however many there are."""

import glob
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path

import torch
from torch import Tensor

from candid._support.distributed import best_device
from candid._support.errors import CandidError, NonFiniteError
from candid._support.threads import use_threads
from candid.data.formats import is_image
from candid.data.images import BadImageError, Preprocessing, decode_as, path_of
from candid.data.splits import unknown
from candid.inference.predictions import predictions_of, to_float
from candid.inference.runner import batch_size
from candid.models.protocol import Model, Outputs
from candid.trust.held_out import HeldOut, needed
from candid.trust.judge import Judge
from candid.trust.scores import statistics_of
from candid.trust.verdict import Verdict

TOP = 5
AHEAD = 2
"""Batches that are decoded while one passes the network."""


@dataclass(frozen=True)
class Examination:
    """What the model says of one image."""

    path: Path
    image: Tensor
    """As the model saw it, (C, H, W) uint8."""
    classes: tuple[int, ...]
    """The most probable ones, falling."""
    posterior: tuple[float, ...]
    """Theirs."""
    p_value: float | None
    """Among all held-out images; None, like the verdict, of a model that was not calibrated."""
    class_p_value: float | None
    """Among those of the same predicted class."""
    verdict: Verdict | None
    log_density: float | None
    """Of the 8-bit image, in nats; None of a ResNet."""
    outputs: Outputs
    """Of the forward pass, of this image alone."""


@dataclass(frozen=True)
class Unusable:
    """An image that can't be judged."""

    path: Path
    reason: str


def image_paths(sources: Sequence[str]) -> list[Path]:
    """The files that ``sources`` name: files, folders with all their images, and patterns such as 'a/*.png'.

    Each file once, in the order of the sources, those of a folder or pattern sorted.
    """
    paths: dict[Path, None] = {}
    for source in sources:
        path = path_of(source)
        if path.exists():
            found = [path]
        else:
            found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
        files = [file for each in found for file in (_images_in(each) if each.is_dir() else [each])]
        if not found:
            raise CandidError(f"There is no image, folder or match for '{source}': check the name.")
        if not files:
            raise CandidError(f"'{source}' has no images: name a folder with some.")
        paths |= dict.fromkeys(files)
    return list(paths)


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if is_image(path, folder))


class Examiner:
    """A model that is ready to judge images; see :func:`candid.evaluation.verdicts` for the levels."""

    def __init__(
        self,
        model: Model,
        name: object = "this model",
        test: str | None = None,
        novelty: float | None = None,
        error: float | None = None,
    ) -> None:
        asked = not (test is None and novelty is None and error is None)
        held_out = needed(model, name) if asked else HeldOut.of(model)
        self.judge = None if held_out is None else Judge.of(held_out, test, novelty, error)
        self.gaussian = None if held_out is None else held_out.gaussian
        self.preprocessing = model.preprocessing
        self.model = model.eval().to(best_device())
        use_threads(self.model)
        self.fast = self.model.frozen()

    def examine(self, paths: Iterable[Path]) -> Iterator[Examination | Unusable]:
        """One judgement for each of ``paths``, in their order; only a few batches are in memory at a time."""
        for files, images in _decoded(paths, self.preprocessing, batch_size(self.model)):
            good = [
                (file, image) for file, image in zip(files, images, strict=True) if isinstance(image, Tensor)
            ]
            judged = iter(self.judged(good) if good else ())
            for file, image in zip(files, images, strict=True):
                yield next(judged) if isinstance(image, Tensor) else Unusable(file, str(image))

    @torch.inference_mode()
    def judged(self, batch: Sequence[tuple[Path, Tensor]]) -> list[Examination | Unusable]:
        """Of images as the model sees them, with names, from one pass of the network."""
        images = torch.stack([image for _, image in batch])
        try:
            passed = self.fast.outputs(to_float(images, self.model.device))
        except NonFiniteError as error:
            if len(batch) == 1:
                return [
                    Unusable(batch[0][0], f"the network overflows on it, so it is like no image: {error}")
                ]
            return [judged for each in batch for judged in self.judged([each])]
        finite = passed.logits.isfinite().all(1).tolist()  # a ResNet does not look for itself
        if all(finite):
            return list(self._examinations(passed, batch, images))
        judged = iter(self.judged(kept) if (kept := list(compress(batch, finite))) else ())
        return [
            next(judged) if good else Unusable(path, "the network overflows on it, so it is like no image")
            for (path, _), good in zip(batch, finite, strict=True)
        ]

    def _examinations(
        self, passed: Outputs, batch: Sequence[tuple[Path, Tensor]], images: Tensor
    ) -> Iterator[Examination]:
        names = tuple(str(file) for file, _ in batch)
        found = predictions_of(passed, self.model, images, unknown(len(images)), names, self.gaussian)
        if self.judge is not None:
            p_value, class_p_value = self.judge.p_values(statistics_of(found))
            verdicts = self.judge.verdicts(found, p_value)
        best = found.posterior.topk(min(TOP, found.posterior.shape[1]))
        nothing = [None] * len(batch)
        columns = zip(
            best.indices.tolist(),
            best.values.tolist(),
            nothing if self.judge is None else p_value.tolist(),
            nothing if self.judge is None else class_p_value.tolist(),
            nothing if self.judge is None else verdicts,
            nothing if found.log_density is None else found.log_density.tolist(),
            [passed.at(i) for i in range(len(batch))],
            strict=True,
        )
        for (file, image), (classes, posterior, *others) in zip(batch, columns, strict=True):
            yield Examination(file, image, tuple(classes), tuple(posterior), *others)


def _decoded(
    paths: Iterable[Path], preprocessing: Preprocessing, batch: int
) -> Iterator[tuple[list[Path], list[Tensor | BadImageError]]]:
    """Batches of images as the model sees them; an error in place of one that can't be used."""
    remaining = iter(paths)
    waiting: deque[tuple[list[Path], list[Future[Tensor | BadImageError]]]] = deque()
    with ThreadPoolExecutor() as pool:
        while True:
            files = list(islice(remaining, batch))
            if files:
                waiting.append((files, [pool.submit(_decode, file, preprocessing) for file in files]))
            if len(waiting) > (AHEAD if files else 0):
                ready, futures = waiting.popleft()
                yield ready, [future.result() for future in futures]
            elif not files:
                return


def _decode(path: Path, preprocessing: Preprocessing) -> Tensor | BadImageError:
    try:
        return decode_as(path, preprocessing, None)
    except BadImageError as error:
        return error
