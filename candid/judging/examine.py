"""Examine images: what a model says about each, one after the other, for any number of images."""

import glob
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from itertools import compress, count, islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from candid._support.errors import CandidError, NonFiniteError
from candid._support.numbers import Array, one_blas_thread, use_threads
from candid._support.options import build
from candid._support.text import natural
from candid.data.formats import images_in
from candid.data.images import (
    BadImageError,
    Preprocessing,
    decode_as,
    is_special,
    path_of,
    preprocess_image,
    to_float,
)
from candid.judging.held_out import HeldOut, measures_for, needed
from candid.judging.watched import WatchedScore
from candid.models import checkpoint
from candid.models.protocol import Outputs, batch_size
from candid.trust.promises import ExamineOptions
from candid.trust.rule import Rule
from candid.trust.scores import Columns
from candid.trust.sets import Posterior
from candid.trust.verdict import Examination, UnusableImage, discovered

if TYPE_CHECKING:
    from candid.judging.table_files import Table

AHEAD = 2
"""Batches that are decoded while one passes the network."""
OVERFLOW = "the network's numbers overflow on this image; it can't be judged"
OPEN = 2
"""Examiners from other processes that a process has open at a time."""
GivenImage = Path | bytes | Array | Image.Image
"""One image: a file, its content, or pixels."""
_opening = Lock()


class Evidence(NamedTuple):
    """What an explanation starts from."""

    image: Array
    """As the model saw it, (C, H, W) uint8."""
    outputs: Outputs
    """Outputs of the forward pass, (1, ...)."""


def examine(model: Any, images: Any, **options: Any) -> list[Examination]:
    """Return what a model says of images: classes, p-values and a verdict for each.

    Args:
        model: a model, the name of a bundled one, a model folder or a run folder.
        images: one image or a list of them: arrays (H, W, C), (H, W) or (B, H, W, C), 8-bit or floats in
            [0, 1]; tensors of torch (C, H, W) or (B, C, H, W); PIL images; contents of files as bytes; names
            of files, folders and patterns such as ``"photos/*.jpg"``.
        **options: ``score``, ``novelty``, ``error``, ``risk``, ``delta``, ``novelty_promise``,
            ``confidence``, ``accept_kinds``, ``fdr``, ``skip_bad`` and ``batch``; see
            :class:`~candid.trust.promises.ExamineOptions`.

    Returns:
        One :class:`~candid.trust.verdict.Examination` for each image, in their order.

    Raises:
        CandidError: if an image can't be used, unless ``skip_bad`` is set.

    Example:
        >>> import candid
        >>> grey = np.full((32, 32, 3), 0.5)
        >>> [examined.verdict for examined in candid.examine("cifar10-beta1", grey)]
        ['novel']
    """
    skip_bad = build(ExamineOptions, options).skip_bad
    examinations = []
    for judged in examine_stream(model, images, **options):
        if isinstance(judged, Examination):
            examinations.append(judged)
        elif not skip_bad:
            raise CandidError(
                f"'{judged.path}' can't be used: {judged.reason}. Leave it out, or set skip_bad=True."
            )
    return examinations


def examine_stream(model: Any, images: Any, **options: Any) -> Iterator[Examination | UnusableImage]:
    """Yield what a model says of each image, in bounded memory for any number of images.

    Args:
        model: see :func:`examine`.
        images: see :func:`examine`; also an endless iterator of such images.
        **options: see :func:`examine`.

    Returns:
        An :class:`~candid.trust.verdict.Examination` or an :class:`UnusableImage` for each image.

    Example:
        >>> import candid
        >>> stream = candid.examine_stream("cifar10-beta1", np.zeros((2, 32, 32, 3)))
        >>> len(list(stream))
        2
    """
    chosen = build(ExamineOptions, options)
    name = model if isinstance(model, str | os.PathLike) else "this model"
    return Examiner(model, name, chosen).examine(images)


def sources(images: Any) -> Iterator[tuple[str, GivenImage]]:
    """Yield the name and the file or pixels of each image in what :func:`examine` takes."""
    numbers = count()
    one = isinstance(images, str | bytes | os.PathLike) or _is_pixels(images)
    for image in [images] if one else images:
        if isinstance(image, Path) and not image.is_dir():  # patterns are text
            yield str(image), image
        elif isinstance(image, bytes):
            yield str(next(numbers)), image
        elif isinstance(image, str | os.PathLike):
            yield from ((str(path), path) for path in image_paths([os.fspath(image)]))
        elif _is_pixels(image) and getattr(image, "ndim", 3) == 4:
            yield from ((str(next(numbers)), part) for part in image)
        elif _is_pixels(image):
            yield str(next(numbers)), image
        else:
            raise CandidError(f"An image is a tensor, an array, a PIL image or a file, not {image!r}.")


def _is_pixels(image: Any) -> bool:
    """Return whether it is an array, a tensor of torch or a PIL image."""
    return isinstance(image, np.ndarray | Image.Image) or hasattr(image, "detach")


def image_paths(sources: Sequence[str]) -> list[Path]:
    """Return the files that ``sources`` name: files, folders with their images, patterns such as 'a/*.png'.

    Each file comes once, in the order of the sources; those of a folder or pattern are sorted,
    photo 2 before photo 10.
    """
    paths: dict[Path, None] = {}
    for source in sources:
        path = path_of(source)
        if path.exists():
            matches = [path]
        else:
            matches = [Path(name) for name in sorted(glob.glob(str(path), recursive=True), key=natural)]  # noqa: PTH207
        files = [
            file
            for match in matches
            for file in (sorted(images_in(match), key=natural) if match.is_dir() else [match])
        ]
        if not matches:
            raise CandidError(f"There is no image, folder or match for '{source}': check the name.")
        if not files:
            raise CandidError(f"'{source}' has no images: name a folder with some.")
        if special := next((file for file in files if is_special(file)), None):
            raise CandidError(f"'{special}' is a pipe, a device or a socket: name image files.")
        paths |= dict.fromkeys(files)
    return list(paths)


class Examiner:
    """A model that is ready to judge images, in this process or in those of an engine.

    Pickled, it is the name of its model and the options. Each process that receives it opens the model once,
    however often it receives it.

    Args:
        model: a model, the name of a bundled one, a model folder or a run folder. It is moved to a GPU if
            there is one.
        name: what users call it.
        options: score and levels.
        evidence: whether examinations carry what explanations start from.
        watched: the score that a watch for drift needs: examinations then carry it.
        held_out: the held-out scores of the model, if they were read already.

    Example:
        >>> examiner = Examiner("cifar10-beta1")
        >>> [examined.verdict for examined in examiner.examine(np.full((32, 32, 3), 0.5))]
        ['novel']
        >>> examiner.table([np.full((32, 32, 3), 0.5), b"no image"])["verdict"]
        ['novel', None]
    """

    def __init__(
        self,
        model: Any,
        name: object = None,
        options: ExamineOptions | None = None,
        evidence: bool = False,
        watched: WatchedScore | None = None,
        held_out: HeldOut | None = None,
    ) -> None:
        options = options or ExamineOptions()
        by_name = isinstance(model, str | os.PathLike)
        self._pickled = (os.fspath(model), options, evidence) if by_name else None
        name = name or (model if by_name else "this model")
        model = checkpoint.resolve(model)
        asked = (options.score, options.novelty, options.error, options.risk, options.fdr)
        if held_out is None:
            held_out = HeldOut.of(model) if all(level is None for level in asked) else needed(model, name)
        self.rule = None if held_out is None else held_out.rule(options)
        self.measures = {}
        if held_out is not None and self.rule is not None:
            self.measures = measures_for((self.rule.score,), held_out.learned)
        self.measures |= {} if watched is None else watched.measures
        self.preprocessing, self.evidence, self.watched = model.preprocessing, evidence, watched
        self.model = model.ready()
        use_threads(self.model)
        self.frozen = self.model.frozen()
        self.batch, self.fdr = options.batch or batch_size(model), options.fdr

    @property
    def fingerprint(self) -> str:
        """What tells this model from all others."""
        return self.model.fingerprint()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._pickled is None or self.watched is not None:
            raise CandidError(
                "An examiner goes to other processes by the name of its model: make it with a bundled name "
                "or a folder, as Examiner('runs/mine'), not with an open model."
            )
        return _open_once, self._pickled

    def table(self, images: Iterable[Any], names: Iterable[object] | None = None) -> "Table":
        """Return one row for each image, in their order: what engines call with a column of images.

        Args:
            images: contents of files (bytes), names of files, arrays (H, W, C) or (H, W), PIL images, or
                records with the entry ``bytes`` or ``path``, as data sets of Hugging Face have them. What is
                none of these, or can't be read, is a row with an ``error``.
            names: what the images are called; by default their files, or their numbers.

        Returns:
            A mapping of columns as :func:`candid.table` gives it, with ``to_pandas()``, ``to_polars()`` and
            ``to_arrow()``.
        """
        from candid.judging.table_files import Table

        named = (_one(image, str(i)) for i, image in enumerate(images))
        if names is not None:
            named = ((str(name), image) for name, (_, image) in zip(names, named, strict=True))
        return Table(self.named(named))

    def examine(self, images: Any) -> Iterator[Examination | UnusableImage]:
        """Yield one judgement per image of what :func:`examine` takes, a few batches at a time.

        A rate of false discoveries is about all images of the call: then nothing is yielded before the last.
        """
        return self.named(sources(images))

    def named(self, images: Iterable[tuple[str, Any]]) -> Iterator[Examination | UnusableImage]:
        """Yield one judgement for each pair of a name and an image, a few batches at a time."""
        if self.fdr is None:
            yield from self._one_by_one(images)
            return
        judged = list(self._one_by_one(images))
        together = iter(discovered([entry for entry in judged if isinstance(entry, Examination)], self.fdr))
        yield from (next(together) if isinstance(entry, Examination) else entry for entry in judged)

    def _one_by_one(self, images: Iterable[tuple[str, Any]]) -> Iterator[Examination | UnusableImage]:
        for names, decoded in _decoded(images, self.preprocessing, self.batch):
            usable = [pair for pair in zip(names, decoded, strict=True) if isinstance(pair[1], np.ndarray)]
            judged = iter(self.judged(usable) if usable else ())
            for name, image in zip(names, decoded, strict=True):
                yield next(judged) if isinstance(image, np.ndarray) else UnusableImage(name, str(image))

    def judged(self, batch: Sequence[tuple[str, Any]]) -> list[Examination | UnusableImage]:
        """Return judgements of named images as the model sees them, (C, H, W) uint8, from one pass."""
        with one_blas_thread():
            return self._judged(batch)

    def _judged(self, batch: Sequence[tuple[str, Any]]) -> list[Examination | UnusableImage]:
        images = np.stack([image for _, image in batch])
        try:
            outputs = self.frozen.outputs(to_float(images))
        except NonFiniteError as error:
            if len(batch) == 1:
                return [UnusableImage(batch[0][0], f"{OVERFLOW}: {error}")]
            return [judged for named in batch for judged in self._judged([named])]
        # a ResNet does not look for itself
        finite = [bool(np.isfinite(row).all()) for row in outputs.logits]
        if all(finite):
            return list(self._examinations(outputs, images, tuple(name for name, _ in batch)))
        judged = iter(self._judged(kept) if (kept := list(compress(batch, finite))) else ())
        return [
            next(judged) if good else UnusableImage(name, OVERFLOW)
            for (name, _), good in zip(batch, finite, strict=True)
        ]

    def examine_features(self, features: Array, names: Sequence[str] | None = None) -> list[Examination]:
        """Return judgements of stored features, (N, D), as a model of ``--preset vector`` takes them.

        Args:
            features: what the eye of the model sees of images, or what a network of yours sees.
            names: what they are called; their numbers by default.

        Raises:
            CandidError: if the model takes no features.
        """
        outputs_of = getattr(self.frozen, "outputs_of", None)
        if outputs_of is None or "geometry" not in self.model.can:
            raise CandidError(
                f"A {self.model.kind} model takes images, not features: examine images with it."
            )
        columns = Columns(outputs_of(np.asarray(features, np.float32)).columns())
        names = [str(i) for i in range(columns.images)] if names is None else names
        return examinations(columns, names, self.model.class_names, self.rule)

    def _examinations(self, outputs: Outputs, images: Array, names: tuple[str, ...]) -> Iterator[Examination]:
        measured = {name: measure(images, outputs) for name, measure in self.measures.items()}
        columns = Columns({**measured, **outputs.columns()})
        judged = examinations(columns, names, self.model.class_names, self.rule)
        if self.watched is not None:
            sightings = self.watched.sightings(columns)
            judged = [replace(e, sighting=seen) for e, seen in zip(judged, sightings, strict=True)]
        for i, examination in enumerate(judged):
            evidence = Evidence(images[i], outputs.at(i)) if self.evidence else None
            yield examination if evidence is None else replace(examination, evidence=evidence)


def examinations(
    columns: Columns, names: Sequence[str], class_names: tuple[str, ...], rule: Rule | None = None
) -> list[Examination]:
    """Return what a model says of images; without p-values and verdicts if there is no ``rule``.

    Args:
        columns: of the images, with ``logits``.
        names: what the images are called.
        class_names: the names of all classes.
        rule: what decides the verdicts.
    """
    if rule is not None:
        return rule.examine(columns, names, class_names)
    densities = columns["log_density"].tolist() if "log_density" in columns else [None] * len(names)
    return [
        Examination(name, Posterior(class_names, row), log_density=density)
        for name, row, density in zip(names, columns["posterior"], densities, strict=True)
    ]


def _decoded(
    images: Iterable[tuple[str, Any]], preprocessing: Preprocessing, batch: int
) -> Iterator[tuple[list[str], list[Array | BadImageError]]]:
    """Yield batches of images as the model sees them; an error in place of one that can't be used."""
    remaining = iter(images)
    waiting: deque[tuple[list[str], list[Future[Array | BadImageError]]]] = deque()
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


def _decode(image: Any, preprocessing: Preprocessing) -> Array | BadImageError:
    try:
        if isinstance(image, BadImageError):
            return image
        if isinstance(image, Path | bytes):
            return decode_as(image, preprocessing, None)
        return preprocess_image(image, preprocessing)
    except BadImageError as error:
        return error
    except (OSError, ValueError) as error:  # of PIL and numpy: a cut PIL image, a name with a zero byte
        return BadImageError(str(error))


def _one(image: Any, number: str) -> tuple[str, Any]:
    """Return the name of one cell of a column, and what is in it; an error if that is no image."""
    if isinstance(image, Mapping):
        content, path = image.get("bytes"), image.get("path")
        name = str(path) if path else number
        return name, _one(content if content is not None else path, number)[1]
    if isinstance(image, str | os.PathLike):
        return os.fspath(image), Path(image)
    if isinstance(image, bytes | bytearray | memoryview):
        return number, bytes(image)
    if _is_pixels(image):
        return number, image
    return number, BadImageError(f"a {type(image).__name__} is no image: give bytes, a file or an array")


def _open_once(model: str, options: ExamineOptions, evidence: bool) -> Examiner:
    """Return the examiner of this process for a model."""
    with _opening:
        return _opened(model, options, evidence)


@lru_cache(OPEN)
def _opened(model: str, options: ExamineOptions, evidence: bool) -> Examiner:
    return Examiner(model, None, options, evidence)
