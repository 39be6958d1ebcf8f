"""Train on more photos than one process can hold: their statistics stay in the cache of each process.

Counts, sums and products by fold are summed over the processes, so means and covariances are those of all
photos. What needs single photos (shrinkage, temperatures, second stage, logistic regression, held-out scores)
is done with a sample in the first process. At last, each process scores its own photos out of fold, and only
what is found goes to the first process.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar, cast

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.processes import Processes, first_error, gathered, summed
from candid._support.randomness import hashed
from candid.data.splits import Split
from candid.inference.predictions import Predictions
from candid.models.photo.gaussian import Totals
from candid.models.photo.head import FOLDS, ClosedForm, Division, FoldHead, fit_divided
from candid.training.features import Extraction, Features, Share
from candid.training.options import PhotoOptions
from candid.training.photo_report import Finding, Usual, wrong_labels
from candid.training.photo_series import named_series

MANY = 100_000
"""From this number of photos on, no process gets the statistics of all of them."""
SAMPLE = 20_000
"""Photos of each part that the first process gets, and findings of each kind that it lists."""
LEAST = 20
"""Training photos of each class in the sample, if the class has so many."""
MOST_CLASSES = 100
"""With more classes, no logistic regression is tried: it would take hours in one process."""
PIECE = 2048
"""Photos whose statistics are in memory at a time."""
FOLD, CHOSEN = 1, 2
"""Keys of the random numbers that divide photos into folds, and that choose the sample."""
T = TypeVar("T")


@dataclass(frozen=True)
class Whole:
    """What the first process knows of all photos."""

    parts: dict[str, Features]
    """A sample of each part, in a random order."""
    head: ClosedForm
    counts: Array
    """Training photos of each class, (K,)."""
    findings: tuple[Finding, ...]
    """Wrong labels and odd photos among all training photos, at most ``SAMPLE`` of each kind."""
    results: dict[str, float]
    """Of all training photos, out of fold."""


class _Sample(NamedTuple):
    photos: Features
    series: Array
    """A word for the series of each photo, (N,) uint64."""

    def rows(self, rows: Array) -> "_Sample":
        return _Sample(self.photos.rows(rows), self.series[rows])


class _Scan(NamedTuple):
    """What one process finds in its photos."""

    sums: Array
    """Photos that are right, the sum of log-losses, wrong labels, odd photos: (4,)."""
    findings: list[Finding]


def are_many(parts: Mapping[str, Split]) -> bool:
    """Return whether the photos are too many for one process."""
    return sum(map(len, parts.values())) >= MANY


def fit_shares(
    parts: Mapping[str, Split], extraction: Extraction, options: PhotoOptions, class_names: Sequence[str]
) -> Whole | None:
    """Compute the statistics of photos and fit a head to them; see :func:`fit_many`."""
    log = extraction.progress.log
    if options.together is None:
        log("series are not looked for among so many photos: name them with --together")
    shares = {name: extraction.share(part, f"{name} photos") for name, part in parts.items()}
    log(f"fitting the head to all photos, with a sample of at most {SAMPLE:,} to choose by")
    return fit_many(shares, options, class_names, extraction.eye.groups, extraction.processes)


def fit_many(
    shares: dict[str, Share],
    options: PhotoOptions,
    class_names: Sequence[str],
    groups: Sequence[int],
    processes: Processes,
) -> Whole | None:
    """Fit a head to the photos of all processes; only the first process gets what was found.

    The photos of a series have one fold, and held-out photos whose series is trained on are left out. A
    series is what ``options.together`` names; without names it is a photo and its exact copies.

    Args:
        shares: the photos of this process by part, with those to fit as ``train``.
        options: of the training.
        class_names: the names of the classes.
        groups: how many statistics each group has.
        processes: what shares the photos.
    """
    train, seed = shares["train"], options.seed
    words = _agreed(processes, lambda: _series(shares, options.together, class_names))
    totals = _totals(train, _folds(words["train"], seed), len(class_names), processes)
    least = {"train": np.full(len(class_names), LEAST)}
    samples = {
        name: _sample(share, words[name], least.get(name, np.zeros(len(class_names), int)), seed, processes)
        for name, share in shares.items()
    }
    if "val" in samples:
        samples["val"] = _unseen(samples["val"], words["train"], processes)
    known = samples["train"]

    def fit() -> ClosedForm:
        division = Division(_folds(known.series, seed), totals)
        uniform = options.priors == "uniform"
        photos, logistic = known.photos, len(class_names) <= MOST_CLASSES
        return fit_divided(photos.values, photos.labels, division, groups, uniform, logistic)

    head = _agreed(processes, lambda: fit() if processes.is_global_zero else None)
    chosen = None if head is None else (head.choices(), _usual(head, known.photos))
    choices, usual = cast(tuple[ClosedForm, Usual], processes.broadcast(chosen))
    heads = [choices.without(f, totals) for f in range(FOLDS)]
    scan = _scanned(train, _folds(words["train"], seed), heads, usual, class_names)
    findings = [each for part in gathered(processes, scan.findings) for each in part]
    right, loss, labels, odd = summed(processes, scan.sums).tolist()
    skipped = {name: gathered(processes, share.skipped) for name, share in shares.items()}
    if head is None:
        return None
    lines = {name: tuple(line for part in parts for line in part) for name, parts in skipped.items()}
    parts = {name: replace(sample.photos, skipped=lines[name]) for name, sample in samples.items()}
    counts = np.sum([each.counts for each in totals], 0)
    n = counts.sum()
    results = {"photos": n, "accuracy": right / n, "cross_entropy": loss / n, "label": labels, "odd": odd}
    return Whole(parts, head, counts, tuple(_worst(findings)), results)


def _agreed(processes: Processes, work: Callable[[], T]) -> T:
    """Return what ``work`` does in this process; an error of any process is raised by all."""
    value, error = None, None
    try:
        value = work()
    except CandidError as problem:
        error = problem
    error = first_error(processes, error)
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _series(shares: dict[str, Share], together: str | None, class_names: Sequence[str]) -> dict[str, Array]:
    """Return a word for the series of each photo: of its name, or of the photo itself."""
    words = {}
    for name, share in shares.items():
        named = named_series(together, share.names, share.labels, class_names)
        if named is None:
            words[name] = _first_words(share.digests)
        else:
            digests = [hashlib.sha256(each.encode(errors="replace")).digest() for each in named]
            words[name] = _first_words(np.frombuffer(b"".join(digests), np.uint8).reshape(len(named), -1))
    return words


def _first_words(digests: Array) -> Array:
    """Return the first 64 bits of digests, (N, 32), as (N,) uint64."""
    return np.ascontiguousarray(digests[:, :8]).view(np.uint64)[:, 0]


def _folds(words: Array, seed: int) -> Array:
    return (hashed(words, seed, FOLD) % np.uint64(FOLDS)).astype(np.int64)


def _totals(share: Share, folds: Array, classes: int, processes: Processes) -> tuple[Totals, ...]:
    """Return the totals of the photos of all processes in each fold; all processes get them."""
    dimensions = share.cache.dimensions
    counts, sums = np.zeros((FOLDS, classes)), np.zeros((FOLDS, classes, dimensions))
    products = np.zeros((FOLDS, dimensions, dimensions))
    for rows, photos in share.pieces(PIECE):
        for f in range(FOLDS):
            own = folds[rows] == f
            part = Totals.of(photos.values[own], photos.labels[own], classes)
            counts[f] += part.counts
            sums[f] += part.sums
            products[f] += part.products
    for sizes in (counts, sums, products):
        for f in range(FOLDS):
            sizes[f] = summed(processes, sizes[f])
    return tuple(Totals(*fold) for fold in zip(counts, sums, products, strict=True))


def _sample(share: Share, words: Array, least: Array, seed: int, processes: Processes) -> _Sample:
    """Return the photos with the lowest random numbers in the first process, none in the others.

    The number of a photo comes from its content: neither its place nor the number of processes changes it.
    ``least`` has the number of photos that each class has at least, if it has so many, (K,).
    """
    numbers = hashed(_first_words(share.digests), seed, CHOSEN)
    lowest = np.argsort(numbers, kind="stable")
    labels = share.labels[lowest]
    order = np.argsort(labels, kind="stable")
    places = np.empty_like(order)  # of each photo among those of its class
    places[order] = np.arange(len(order)) - np.searchsorted(labels[order], labels[order])
    lowest = lowest[(np.arange(len(order)) < SAMPLE) | (places < least[labels])]
    own = numbers[lowest], share.labels[lowest]
    bounds = processes.broadcast(_bounds(gathered(processes, own), least))
    rows = lowest[own[0] <= bounds[own[1]]]
    parts = gathered(processes, (numbers[rows], share.at(rows), words[rows]))
    if not processes.is_global_zero:
        return _Sample(share.at(rows[:0]), words[:0])
    names = [name for _, photos, _ in parts for name in photos.names]
    order = np.lexsort((np.array(names), np.concatenate([part for part, _, _ in parts])))
    labels, values, keys = (
        np.concatenate([getattr(photos, name) for _, photos, _ in parts])[order]
        for name in ("labels", "values", "keys")
    )
    photos = Features(tuple(names[i] for i in order.tolist()), labels, values, keys)
    return _Sample(photos, np.concatenate([part for _, _, part in parts])[order])


def _bounds(parts: Sequence[tuple[Array, Array]], least: Array) -> Array:
    """Return the highest number of a photo of each class in the sample, (K,), in the first process."""
    if not parts:
        return least
    numbers, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
    bounds = np.full(len(least), np.sort(numbers)[:SAMPLE].max(initial=0), np.uint64)
    for y, count in enumerate(least.tolist()):
        bounds[y] = max(bounds[y], np.sort(numbers[labels == y])[:count].max(initial=0))
    return bounds


def _unseen(sample: _Sample, train: Array, processes: Processes) -> _Sample:
    """Return the photos whose series no process trains on."""
    words = processes.broadcast(sample.series)
    seen = summed(processes, np.isin(words, train).astype(np.int64)) > 0
    return sample.rows(~seen) if processes.is_global_zero else sample


def _usual(head: ClosedForm, photos: Features) -> Usual:
    own = head.out_of_fold
    columns = {"novelty": own.novelty}
    return Usual.of(Predictions(photos.names, photos.labels, own.logits, head.log_priors, columns))


def _scanned(
    share: Share, folds: Array, heads: Sequence[FoldHead], usual: Usual, class_names: Sequence[str]
) -> _Scan:
    """Score the photos of this process, each by the head that has not seen its fold."""
    sums, findings = np.zeros(4), list[Finding]()
    for rows, photos in share.pieces(PIECE):
        logits, novelty = np.empty((len(rows), len(class_names))), np.empty((len(rows), 3))
        for f, head in enumerate(heads):
            own = folds[rows] == f
            if own.any():
                logits[own], novelty[own] = head(photos.values[own])
        priors = heads[0].whole.log_priors
        part = Predictions(photos.names, photos.labels, logits, priors, {"novelty": novelty})
        losses = -np.take_along_axis(part.log_posterior, part.labels[:, None], 1)
        labels, odd = wrong_labels(part, class_names), usual.odd(part, class_names)
        sums += (logits.argmax(1) == part.labels).sum(), losses.sum(), len(labels), len(odd)
        findings = _worst([*findings, *labels, *odd])
    return _Scan(sums, findings)


def _worst(findings: Sequence[Finding]) -> list[Finding]:
    """Return the ``SAMPLE`` worst findings of each kind."""
    labels = sorted(
        (each for each in findings if each.kind == "label"), key=lambda each: (each.value, each.path)
    )
    odd = sorted((each for each in findings if each.kind == "odd"), key=lambda each: (-each.value, each.path))
    return [*labels[:SAMPLE], *odd[:SAMPLE]]
