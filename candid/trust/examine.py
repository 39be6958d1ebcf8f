"""Examine images: what a model says about each, one after the other, for any number of images."""

import glob
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import compress, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from candid._support.config import build
from candid._support.errors import CandidError, NonFiniteError
from candid._support.threads import use_threads
from candid.data.formats import images_in
from candid.data.images import BadImageError, Preprocessing, decode_as, path_of, preprocess_image
from candid.inference.predictions import NO_MEASURES, Predictions, batch_size, to_float
from candid.models import checkpoint
from candid.models.protocol import Model, Outputs
from candid.trust.judge import HeldOut, Judge, examinations, needed
from candid.trust.options import ExamineOptions
from candid.trust.scores import statistics_of
from candid.trust.verdict import Evidence, Examination
from candid.trust.watched import WatchedScore

AHEAD = 2
"""Batches that are decoded while one passes the network."""
OVERFLOW = "the network's numbers overflow on this image; it can't be judged"
Source = Path | Tensor | np.ndarray[Any, Any] | Image.Image
"""One image: a file, or pixels."""


@dataclass(frozen=True)
class Unusable:
    """An image that can't be judged: what :func:`candid.examine_stream` yields for it."""

    path: str
    reason: str


def examine(model: Any, images: Any, **options: Any) -> list[Examination]:
    """Return what a model says of images: classes, p-values and a verdict for each.

    Args:
        model: a model, the name of a bundled one, a model folder or a run folder.
        images: one image or a list of them: tensors (C, H, W) or (B, C, H, W), 8-bit or floats in [0, 1];
            arrays (H, W, C) or (H, W); PIL images; names of files, folders and patterns such as
            ``"photos/*.jpg"``.
        **options: ``score``, ``novelty``, ``error``, ``risk``, ``delta``, ``novelty_promise``, ``skip_bad``
            and ``batch``; see :class:`~candid.trust.options.ExamineOptions`.

    Returns:
        One :class:`~candid.trust.verdict.Examination` for each image, in their order.

    Raises:
        CandidError: if an image can't be used, unless ``skip_bad`` is set.

    Example:
        >>> import candid, torch
        >>> grey = torch.full((3, 32, 32), 0.5)
        >>> [examined.verdict for examined in candid.examine("cifar10-beta1", grey)]
        ['novel']
    """
    skip_bad = build(ExamineOptions, options).skip_bad
    found = []
    for each in examine_stream(model, images, **options):
        if isinstance(each, Examination):
            found.append(each)
        elif not skip_bad:
            raise CandidError(
                f"'{each.path}' can't be used: {each.reason}. Leave it out, or set skip_bad=True."
            )
    return found


def examine_stream(model: Any, images: Any, **options: Any) -> Iterator[Examination | Unusable]:
    """Yield what a model says of each image, in bounded memory for any number of images.

    Args:
        model: see :func:`examine`.
        images: see :func:`examine`; also an endless iterator of such images.
        **options: see :func:`examine`.

    Returns:
        An iterator of an :class:`~candid.trust.verdict.Examination` or an :class:`Unusable` for each image.

    Example:
        >>> import candid, torch
        >>> stream = candid.examine_stream("cifar10-beta1", torch.rand(2, 3, 32, 32))
        >>> len(list(stream))
        2
    """
    chosen = build(ExamineOptions, options)
    name = model if isinstance(model, str | os.PathLike) else "this model"
    examiner = Examiner(checkpoint.resolve(model), name, chosen)
    return examiner.examine(images)


def sources(images: Any) -> Iterator[tuple[str, Source]]:
    """Yield the name and the file or pixels of each image in what :func:`examine` takes."""
    numbers = count()
    for each in [images] if isinstance(images, str | os.PathLike) or not _is_several(images) else images:
        if isinstance(each, Path) and not each.is_dir():  # patterns are text
            yield str(each), each
        elif isinstance(each, str | os.PathLike):
            yield from ((str(path), path) for path in image_paths([os.fspath(each)]))
        elif isinstance(each, Tensor) and each.ndim == 4:
            yield from ((str(next(numbers)), image) for image in each)
        elif isinstance(each, Tensor | np.ndarray | Image.Image):
            yield str(next(numbers)), each
        else:
            raise CandidError(f"An image is a tensor, an array, a PIL image or a file, not {each!r}.")


def _is_several(images: Any) -> bool:
    return not isinstance(images, Tensor | np.ndarray | Image.Image)


def image_paths(sources: Sequence[str]) -> list[Path]:
    """Return the files that ``sources`` name: files, folders with their images, patterns such as 'a/*.png'.

    Each file comes once, in the order of the sources; those of a folder or pattern are sorted.
    """
    paths: dict[Path, None] = {}
    for source in sources:
        path = path_of(source)
        if path.exists():
            found = [path]
        else:
            found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
        files = [file for each in found for file in (images_in(each) if each.is_dir() else [each])]
        if not found:
            raise CandidError(f"There is no image, folder or match for '{source}': check the name.")
        if not files:
            raise CandidError(f"'{source}' has no images: name a folder with some.")
        paths |= dict.fromkeys(files)
    return list(paths)


class Examiner:
    """A model that is ready to judge images.

    Args:
        model: the model; it is moved to a GPU if there is one.
        name: what users call it.
        options: score and levels.
        evidence: whether examinations carry what explanations start from.
        watched: the score that a watch for drift needs: examinations then carry it.
        held_out: the held-out scores of the model, if they were read already.
    """

    def __init__(
        self,
        model: Model,
        name: object = "this model",
        options: ExamineOptions | None = None,
        evidence: bool = False,
        watched: WatchedScore | None = None,
        held_out: HeldOut | None = None,
    ) -> None:
        options = options or ExamineOptions()
        levels = options.score, options.novelty, options.error
        asked = any(level is not None for level in (*levels, options.risk))
        held_out = held_out or (needed(model, name) if asked else HeldOut.of(model))
        more = options.risk, options.delta, options.novelty_promise
        self.judge = None if held_out is None else Judge.of(model, *levels, held_out, *more)
        self.measures = dict(NO_MEASURES if self.judge is None else self.judge.measures)
        self.measures |= {} if watched is None else watched.measures
        self.preprocessing, self.evidence, self.watched = model.preprocessing, evidence, watched
        self.model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        use_threads(self.model)
        self.frozen = self.model.frozen()
        self.batch = options.batch or batch_size(model)

    def examine(self, images: Any) -> Iterator[Examination | Unusable]:
        """Yield one judgement per image of what :func:`examine` takes, a few batches at a time."""
        for names, decoded in _decoded(sources(images), self.preprocessing, self.batch):
            good = [pair for pair in zip(names, decoded, strict=True) if isinstance(pair[1], Tensor)]
            judged = iter(self.judged(good) if good else ())
            for name, image in zip(names, decoded, strict=True):
                yield next(judged) if isinstance(image, Tensor) else Unusable(name, str(image))

    @torch.inference_mode()
    def judged(self, batch: Sequence[tuple[str, Any]]) -> list[Examination | Unusable]:
        """Return judgements of named images as the model sees them, (C, H, W) uint8, from one pass."""
        images = torch.stack([image for _, image in batch])
        try:
            outputs = self.frozen.outputs(to_float(images, self.model.device))
        except NonFiniteError as error:
            if len(batch) == 1:
                return [Unusable(batch[0][0], f"{OVERFLOW}: {error}")]
            return [judged for each in batch for judged in self.judged([each])]
        finite = outputs.logits.isfinite().all(1).tolist()  # a ResNet does not look for itself
        if all(finite):
            return list(self._examinations(outputs, images, tuple(name for name, _ in batch)))
        judged = iter(self.judged(kept) if (kept := list(compress(batch, finite))) else ())
        return [
            next(judged) if good else Unusable(name, OVERFLOW)
            for (name, _), good in zip(batch, finite, strict=True)
        ]

    def _examinations(
        self, outputs: Outputs, images: Tensor, names: tuple[str, ...]
    ) -> Iterator[Examination]:
        batch = images, torch.full((len(images),), -1), names
        predictions = Predictions.of(outputs, self.model, batch, self.measures)
        found = examinations(predictions, self.model.class_names, self.judge)
        if self.watched is not None:
            seen = self.watched.sightings(statistics_of(predictions))
            found = [replace(each, sighting=own) for each, own in zip(found, seen, strict=True)]
        for i, each in enumerate(found):
            if not self.evidence:
                yield each
                continue
            own = [None if part is None else part[i : i + 1] for part in outputs]
            yield replace(each, evidence=Evidence(images[i], Outputs(*own)))  # type: ignore[arg-type]


def _decoded(
    images: Iterable[tuple[str, Source]], preprocessing: Preprocessing, batch: int
) -> Iterator[tuple[list[str], list[Tensor | BadImageError]]]:
    """Yield batches of images as the model sees them; an error in place of one that can't be used."""
    remaining = iter(images)
    waiting: deque[tuple[list[str], list[Future[Tensor | BadImageError]]]] = deque()
    with ThreadPoolExecutor() as pool:
        while True:
            taken = list(islice(remaining, batch))
            if taken:
                futures = [pool.submit(_decode, image, preprocessing) for _, image in taken]
                waiting.append(([name for name, _ in taken], futures))
            if len(waiting) > (AHEAD if taken else 0):
                names, futures = waiting.popleft()
                yield names, [future.result() for future in futures]
            elif not taken:
                return


def _decode(image: Source, preprocessing: Preprocessing) -> Tensor | BadImageError:
    try:
        if isinstance(image, Path):
            return decode_as(image, preprocessing, None)
        return preprocess_image(image, preprocessing)
    except BadImageError as error:
        return error
