"""Verdicts with stated promises for any classifier, from its logits and, if there are any, its features.

A monitor on disk is a folder with ``monitor.json`` and the safetensors file that it names. ``monitor.json``
is replaced last and atomically, and carries a digest of itself and of the other file. Loading reads numbers
and text; it runs no code from the files.
"""

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from candid._support import __version__
from candid._support.errors import CandidError, CheckpointError
from candid._support.files import SAVE_SECONDS, file_hash, locked, remove_unfinished, replacing, write_by_hash
from candid._support.numbers import Array, digest, tensors_of
from candid._support.options import from_dict, loaded_again, to_dict, without_repeats
from candid._support.text import plural
from candid.trust.arrays import FEWEST_IMAGES, Arrays, checked_classes, checked_groups, checked_labels
from candid.trust.conformal import discoveries
from candid.trust.estimator import Estimator, given, numbered
from candid.trust.promises import Levels
from candid.trust.ranking import ALL, Standard
from candid.trust.rule import Rule
from candid.trust.tree import Tree
from candid.trust.verdict import Examination, NoveltyPromise, Promises, Risk, discovered

log = logging.getLogger("candid")
MOST_NAMED = 3
"""Up to this number of classes without held-out images are named."""
RECORD, FORMAT, VERSION = "monitor.json", "candid-monitor", 1
OURS = re.compile(r"monitor-[0-9a-f]{16}\.safetensors")


@dataclass(frozen=True)
class Fitted:
    """What a monitor has learned."""

    rule: Rule
    class_names: tuple[str, ...]
    features: int | None
    """The number of features of an image."""
    by: Literal["class", "name"] | None
    """Whether images are ranked in groups: by predicted class, or by a name that users give."""
    group_names: tuple[str, ...]


class Monitor(Estimator):
    """Says of each image whether to accept the classifier's answer: accept, ambiguous or novel.

    It works with any classifier. It needs the logits, and if possible features, of labelled images that the
    classifier was not trained on. Levels that the number of these images does not allow are raised to
    the smallest that it does; :meth:`sentences` says what is in force.

    Args:
        novelty: the share of ordinary images that may be called novel; None is 0.05 unless ``fdr`` is given.
        error: the share of ordinary images whose answer may miss the true class.
        risk: the share of accepted images that may be wrong; None for no such promise. With it, one half of
            the images fixes the rest of the rule and the other half tests the whole rule.
        delta: the probability that the promise of ``risk`` is wrong.
        score: what decides whether an image is novel: ``"combined"``, or a name in
            :data:`~candid.trust.scores.SCORES` that logits and features suffice for, such as ``"energy"`` or
            ``"mahalanobis"``.
        novelty_promise: ``"average"``: the rate of novelty holds on average over held-out sets;
            ``"confident"``: it holds with 95 % confidence for this monitor.
        confidence: the posterior that an accepted answer has at least; 0 for no such bound.
        accept_kinds: accept a named kind of at most this many classes; see ``tree`` in :meth:`fit`.
        fdr: of the images of one call of :meth:`examine` that are called novel, the share that may be
            ordinary on average; it replaces ``novelty``.
        from_probabilities: whether probabilities are given in place of logits; zeros are allowed.

    Example:
        >>> import candid
        >>> from sklearn.datasets import load_digits
        >>> from sklearn.linear_model import LogisticRegression
        >>> x, y = load_digits(return_X_y=True)
        >>> x = x / 16
        >>> classifier = LogisticRegression().fit(x[:700], y[:700])
        >>> logits = classifier.decision_function
        >>> monitor = candid.Monitor(novelty=0.05).fit(logits(x[700:1700]), y[700:1700], x[700:1700])
        >>> new = [x[1700], 1 - x[1700]]  # a digit, and its negative
        >>> [examined.verdict for examined in monitor.examine(logits(new), new)]
        ['accept', 'novel']
    """

    _fitted: Fitted | None = None

    def __init__(
        self,
        novelty: float | None = None,
        error: float | None = 0.05,
        risk: float | None = None,
        delta: float = 0.05,
        score: str = "combined",
        novelty_promise: NoveltyPromise = "average",
        confidence: float = 0.8,
        accept_kinds: int = 0,
        fdr: float | None = None,
        from_probabilities: bool = False,
    ) -> None:
        self.novelty, self.error, self.risk, self.delta = novelty, error, risk, delta
        self.score, self.novelty_promise, self.confidence = score, novelty_promise, confidence
        self.accept_kinds, self.fdr, self.from_probabilities = accept_kinds, fdr, from_probabilities

    def __repr__(self) -> str:
        return f"Monitor({', '.join(f'{name}={value!r}' for name, value in self.get_params().items())})"

    @property
    def levels(self) -> Levels:
        """The arguments of the constructor, checked."""
        values = {name: getattr(self, name) for name in Levels.__dataclass_fields__}
        return Levels(**values)

    def fit(
        self,
        logits: Any,
        labels: Any,
        features: Any = None,
        class_names: Sequence[str] | None = None,
        by: Any = None,
        together: Any = None,
        tree: Mapping[str, str] | Tree | str | os.PathLike[str] | None = None,
    ) -> Self:
        """Learn from labelled images that the classifier was not trained on.

        One half of the images fits the scores and the other half ranks them, whatever their order; with fewer
        than 400 images each fold of five is ranked by scores that the others fitted.

        Args:
            logits: what comes before the softmax, or log-probabilities, (N, M): numpy, torch or anything like
                them.
            labels: the true classes, (N,): columns of the logits, or names.
            features: what the last layer gets, (N, F), or other numbers that describe an image.
            class_names: names of the classes; by default their numbers, or sorted names of the labels. A
                class without held-out images stays in the class set of an image until its posterior is
                below 1 / (n + 1) of the largest, with n held-out images.
            by: groups within which the levels of novelty and error hold: ``"class"`` (the predicted one), or
                the name of the group of each image, (N,), such as its camera.
            together: the name of the object, scene or day of each image, (N,): images with one name count
                once and are on one side of every split. Copies are found without it.
            tree: the kind above each class and each kind, such as ``{"cat": "animal", "dog": "animal"}``;
                or a CSV file with a class or kind, and the kind above it, on each line.

        Returns:
            The monitor itself.

        Raises:
            CandidError: if the arrays are wrong, or if the risk can't be promised.
        """
        levels = self.levels
        arrays = given(logits, features, self.from_probabilities)
        numbers, names = numbered(labels, class_names, arrays.logits.shape[1])
        truth, unseen = _truth(numbers, arrays, names, levels)
        kind, group_names, groups = _groups(by, arrays, names)
        named = None if together is None else checked_groups(together, len(arrays), "together")
        kinds = _tree(tree, names)
        rule = replace(Rule.fit(arrays.columns, truth, groups, named, levels, kinds), unseen=unseen)
        width = None if arrays.features is None else arrays.features.shape[1]
        self._fitted = Fitted(rule, names, width, kind, group_names)
        for sentence in (*self.promises.raised(), *self._gaps()):
            log.warning(sentence)
        return self

    def examine(
        self, logits: Any, features: Any = None, by: Any = None, paths: Sequence[object] | None = None
    ) -> list[Examination]:
        """Return the verdict on each image, with its p-value, class set and promises.

        Args:
            logits: (N, M), or (M,) of a single image.
            features: (N, F), if the monitor was fitted with features; (F,) of a single image.
            by: the name of the group of each image, if the monitor was fitted with groups.
            paths: what the images are called; by default their numbers.
        """
        fitted = self.fitted
        arrays = given(logits, features, self.from_probabilities, len(fitted.class_names))
        _check_same(arrays, fitted)
        if paths is not None and len(paths) != len(arrays):
            raise CandidError(f"There are {len(paths)} paths and logits of {len(arrays)} images.")
        names: Sequence[object] = range(len(arrays)) if paths is None else paths
        groups = _known_groups(by, arrays, fitted)
        examinations = fitted.rule.examine(
            arrays.columns, names, fitted.class_names, groups, groups_are_classes=fitted.by == "class"
        )
        fdr = fitted.rule.levels.fdr
        return examinations if fdr is None else discovered(examinations, fdr)

    @staticmethod
    def select(p_values: Any, fdr: float) -> Array:
        """Return which images are novel, (N,), with at most a share ``fdr`` of false discoveries on average.

        The p-values, (N,), must come from a monitor with ``fdr`` or with the promise "confident": its score
        is fixed before the images that rank it are seen.

        >>> Monitor.select([0.001, 0.9, 0.5], fdr=0.1)
        array([ True, False, False])
        """
        return discoveries(np.asarray(p_values, np.float64), fdr)

    def scores(self, logits: Any, features: Any = None) -> Array:
        """Return one score of each image for a :class:`candid.Watch`, (N,): it rises with outlyingness.

        It is the sum of the scores that decide what is novel, standardised by the images of :meth:`fit`. So
        the watch needs held-out images that this monitor was not fitted to.

        Args:
            logits: (N, M).
            features: (N, F), if the monitor was fitted with features.
        """
        arrays = given(logits, features, self.from_probabilities, len(self.fitted.class_names))
        _check_same(arrays, self.fitted)
        standardised = [
            Standard.of(_rising(ranking.values)).sum(_rising(ranking.statistic(arrays.columns)))
            for ranking in self.fitted.rule.rankings
        ]
        return np.mean(standardised, axis=0)

    @property
    def fitted(self) -> Fitted:
        """What was learned; an error if there is nothing yet."""
        if self._fitted is None:
            raise CandidError("The monitor has seen no held-out images yet: call fit first.")
        return self._fitted

    @property
    def promises(self) -> Promises:
        """What verdicts promise, over the images of all groups."""
        return self.fitted.rule.promises[ALL]

    def sentences(self) -> list[str]:
        """Return in words what verdicts promise, and which groups are too small for these levels."""
        return [*self.promises.sentences(), *self._gaps()]

    def _gaps(self) -> list[str]:
        """Return which groups are too small for these levels, and which classes have no held-out image."""
        fitted, unseen = self.fitted, sorted(self.fitted.rule.unseen)
        sentences = fitted.rule.too_small(fitted.group_names)
        if unseen:
            named = ", ".join(f"'{fitted.class_names[y]}'" for y in unseen[:MOST_NAMED])
            sentences.append(
                f"{plural(len(unseen), 'class', 'classes')} without held-out images "
                f"({named}{', …' * (len(unseen) > MOST_NAMED)}): nothing is promised about their images, and "
                "class sets rule them out only at very small posteriors."
            )
        return sentences

    @property
    def classes_(self) -> Array:
        """The names of the classes, (M,)."""
        if self._fitted is None:
            raise AttributeError("The monitor has no classes_ before fit.")
        return np.array(self._fitted.class_names)

    @property
    def n_features_in_(self) -> int:
        """The number of columns of the logits."""
        return len(self.classes_)

    def false_alarms(self) -> dict[str, tuple[int, int]]:
        """Return by true class how many held-out images would be called novel, and of how many."""
        return self.fitted.rule.false_alarms(self.fitted.class_names)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the monitor into the folder ``path``: numbers and text, whole or not at all."""
        from safetensors import SafetensorError

        folder, fitted, risk = Path(path), self.fitted, self.promises.risk
        if folder.is_file():
            raise CheckpointError(f"'{folder}' is a file: name a folder to save the monitor in.")
        record = {
            "format": FORMAT,
            "format_version": VERSION,
            "library_version": __version__,
            "options": to_dict(self.levels),
            "class_names": list(fitted.class_names),
            "features": fitted.features,
            "by": fitted.by,
            "group_names": list(fitted.group_names),
            "risk": None if risk is None else to_dict(risk),
            "copies": self.promises.copies,
            "tree": None if fitted.rule.tree is None else fitted.rule.tree.to_dict(),
            "unseen": sorted(fitted.rule.unseen),
            "from_probabilities": self.from_probabilities,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder, "saves a monitor in", SAVE_SECONDS):
                _write(folder, record, fitted.rule.state())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"Can't save the monitor in '{folder}': {error}; free some space, or choose another folder."
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Monitor":
        """Return the monitor that :meth:`save` wrote into the folder ``path``; this runs no code from it."""
        folder = Path(path)
        levels, from_probabilities, fitted = loaded_again(folder / RECORD, lambda: _load(folder))
        asked = {name: getattr(levels, name) for name in Levels.__dataclass_fields__}
        monitor = cls(**asked, from_probabilities=from_probabilities)
        monitor._fitted = fitted
        return monitor


def _tree(
    tree: Mapping[str, str] | Tree | str | os.PathLike[str] | None, class_names: tuple[str, ...]
) -> Tree | None:
    """Return the tree of these classes that was given."""
    if isinstance(tree, str | os.PathLike):
        return Tree.read(tree, class_names)
    if isinstance(tree, Mapping):
        return Tree.of(tree, class_names)
    if tree is not None and not isinstance(tree, Tree):
        raise CandidError(
            "'tree' is a dictionary with the kind above each class and each kind, a Tree, or a CSV file, not "
            f"{type(tree).__name__}."
        )
    if tree is not None and len(tree.class_parents) != len(class_names):
        raise CandidError(
            f"The tree is of {len(tree.class_parents)} classes, but the logits have {len(class_names)} "
            "columns: give the tree of these classes."
        )
    return tree


def _truth(
    labels: Any, arrays: Arrays, class_names: tuple[str, ...], levels: Levels
) -> tuple[Array, frozenset[int]]:
    """Return the true classes of held-out images, and the classes without any."""
    if levels.risk is not None:  # its test needs an image of every class
        return checked_labels(labels, arrays, class_names), frozenset()
    truth = checked_classes(labels, arrays)
    if len(truth) < FEWEST_IMAGES:
        raise CandidError(f"{len(truth)} held-out images are too few: give at least {FEWEST_IMAGES}.")
    counts = np.bincount(truth, minlength=len(class_names))
    return truth, frozenset(np.flatnonzero(counts == 0).tolist())


def _rising(statistic: Array) -> Array:
    """Return a statistic, (N,) low for outliers or (N, J) high for them, as (N, J) high for outliers."""
    return statistic if statistic.ndim == 2 else -statistic[:, None]


def _groups(
    by: Any, arrays: Arrays, class_names: tuple[str, ...]
) -> tuple[Literal["class", "name"] | None, tuple[str, ...], Array]:
    """Return the kind of groups, their names, and the number of the group of each image."""
    if by is None:
        return None, (), np.full(len(arrays), ALL)
    if isinstance(by, str):
        if by != "class":
            raise CandidError(f"'by' is \"class\" or names the group of each image, not '{by}'.")
        return "class", class_names, arrays.logits.argmax(1)
    named = checked_groups(by, len(arrays))
    numbers = {name: number for number, name in enumerate(sorted(set(named)))}
    return "name", tuple(numbers), np.array([numbers[name] for name in named], np.int64)


def _known_groups(by: Any, arrays: Arrays, fitted: Fitted) -> Array:
    """Return the number of the group of each new image; ``ALL`` for groups that were not seen before."""
    if fitted.by == "class":
        return arrays.logits.argmax(1)
    if fitted.by is None:
        if by is not None:
            raise CandidError("The monitor was fitted without groups: leave 'by' out, or fit it with 'by'.")
        return np.full(len(arrays), ALL)
    if by is None:
        raise CandidError("The monitor was fitted with groups: name the group of each image with 'by'.")
    numbers = {name: number for number, name in enumerate(fitted.group_names)}
    return np.array([numbers.get(name, ALL) for name in checked_groups(by, len(arrays))], np.int64)


def _check_same(arrays: Arrays, fitted: Fitted) -> None:
    """Raise an error unless the arrays have the columns that the monitor was fitted to."""
    classes, width = arrays.logits.shape[1], None if arrays.features is None else arrays.features.shape[1]
    if classes != len(fitted.class_names):
        raise CandidError(
            f"The monitor was fitted to {len(fitted.class_names)} classes, but these logits have {classes} "
            "columns: give those of the same classifier."
        )
    if width != fitted.features:
        expected, given = (
            "no features" if count is None else f"{count} features per image"
            for count in (fitted.features, width)
        )
        raise CandidError(
            f"The monitor was fitted to {expected}, but given are {given}: give the same columns."
        )


def _write(folder: Path, record: dict[str, Any], arrays: dict[str, Array]) -> None:
    file = write_by_hash(folder, "monitor", arrays)
    record["numbers"] = {"file": file.name, "sha256": file_hash(file)}
    with replacing(folder / RECORD) as temporary:
        sealed = record | {"digest": digest(record).hexdigest()}
        temporary.write_text(json.dumps(sealed, indent=1), encoding="utf-8")
    for old in folder.glob("monitor-*.safetensors"):
        if OURS.fullmatch(old.name) and old != file:
            old.unlink(missing_ok=True)
    remove_unfinished(folder)


def _load(folder: Path) -> tuple[Levels, bool, Fitted]:
    from candid._support.old_formats import current_monitor, monitor_options

    record = _read_record(folder)
    arrays = _read_numbers(folder, record["numbers"])
    try:
        arrays = current_monitor(arrays)
        levels = from_dict(Levels, monitor_options(record["options"]))
        risk = None if record["risk"] is None else from_dict(Risk, record["risk"])
        tree = None if record.get("tree") is None else Tree.from_dict(record["tree"])
        promised = {"risk": risk, "copies": int(record.get("copies", 0))}
        rule = Rule.restored(levels.score or "combined", arrays, levels, promised, tree)
        rule = replace(rule, unseen=frozenset(map(int, record.get("unseen", ()))))
        names, groups = tuple(record["class_names"]), tuple(record["group_names"])
        return (
            levels,
            bool(record.get("from_probabilities", False)),
            Fitted(rule, names, record["features"], record["by"], groups),
        )
    except (CandidError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"'{folder}' holds a monitor that this candid {__version__} can't read ({error}): fit it again."
        ) from error


def _read_record(folder: Path) -> dict[str, Any]:
    path = folder / RECORD
    if not path.is_file():
        raise CheckpointError(f"There is no {RECORD} in '{folder}': name the folder of a saved monitor.")
    try:
        record = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_repeats)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"'{path}' can't be read as JSON (cut or overwritten?): {error}.") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"'{path}' was not written by candid: save a monitor with Monitor.save first.")
    if record.get("format_version") != VERSION:
        raise CheckpointError(
            f"'{path}' has format version {str(record.get('format_version'))[:20]}, but this candid reads "
            f"{VERSION}: use the candid that wrote it ({str(record.get('library_version'))[:20]})."
        )
    if record.pop("digest", None) != digest(record).hexdigest():
        raise CheckpointError(
            f"'{path}' was edited since candid wrote it: restore it, or fit the monitor again."
        )
    return record


def _read_numbers(folder: Path, entry: dict[str, Any]) -> dict[str, Array]:
    from safetensors import SafetensorError

    path = folder / str(entry.get("file"))
    if not OURS.fullmatch(path.name) or not path.is_file():
        raise CheckpointError(
            f"The file '{path.name[:60]}' is missing from '{folder}': copy the whole folder."
        )
    try:
        content = path.read_bytes()
        if digest(content).hexdigest() != entry.get("sha256"):
            raise CheckpointError(f"'{path}' was cut or changed since it was saved: copy it again.")
        return tensors_of(content)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' is not a whole safetensors file: {error}; copy it again.") from error
