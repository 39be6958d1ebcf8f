"""An alarm that the images have changed, valid at any time: it knows scores and classes, not models."""

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np

from candid._support import __version__
from candid._support.errors import CandidError, CheckpointError
from candid._support.files import write_text
from candid._support.numbers import digest
from candid._support.old_formats import whole_watch
from candid.trust.bets import (
    Array,
    Bets,
    Carrier,
    FrequencyBets,
    Martingale,
    PowerBets,
    Ranks,
    RunningMean,
    ScoreBets,
    Wealth,
    bins_of,
    numbers,
    restored,
    same_number,
    saved,
    score_bets,
    uniform,
)

FORMAT, VERSION = "candid-watch", 1
BINS = 2**16
SCORES, CLASSES = 0, 1
"""The two watches: keys of their random numbers."""
SKIPPED = -1
"""The class of an image that the watch of class frequencies skips."""
FEW_VALUES = 20
"""Fewer different scores than this among held-out images are worth a warning."""
STRONG = math.log(10)
"""A watch that did not ring is mentioned from this logarithm of its wealth on."""
CLEAR = 3.0
"""Standard errors from which a change of the mean confidence is mentioned."""
UNPROVEN = (
    "No bound is proven for this level, since the held-out images also trained the model: calibrate it with "
    "other images, or train it with --holdout 0.2."
)
Among = Literal["held-out", "stream"]
Watched = Literal["images", "classes", "both"]
log = logging.getLogger("candid")


class Watch:
    """Raises an alarm when images are no longer like the held-out ones, without labels and at any time.

    As long as the images of the stream are exchangeable with the held-out ones, the probability that the
    alarm *ever* rings is at most ``alarm``, however long the stream is and however often one looks. The state
    has a constant size, and the same images give the same bits also after :meth:`save` and :meth:`load`.

    The scores must be fixed by other images: those that the model was trained on. They are rounded to
    float16, so standardise them if they are large numbers that differ little.

    Args:
        alarm: the probability that it ever rings on a stream that has not changed.
        seed: the key of the random numbers that break ties.
        among: the images that each new one is ranked among: the held-out ones and the earlier ones of the
            stream, or these alone (``"stream"``). Then the level holds however held-out images were scored,
            but images that are different from the first one on are not noticed.
        proven: whether new images are scored as the held-out ones were. It is False if these trained the
            model, each being scored by a model without it, so that new ones look slightly less novel. Then
            only more novel images count, and the level is said not to be proven.

    Example:
        >>> import candid
        >>> from sklearn.datasets import load_digits
        >>> from sklearn.linear_model import LogisticRegression
        >>> x, y = load_digits(return_X_y=True)
        >>> x = x / 16
        >>> classifier = LogisticRegression().fit(x[:500], y[:500])
        >>> logits = classifier.decision_function
        >>> monitor = candid.Monitor(novelty=0.05).fit(logits(x[500:1000]), y[500:1000], x[500:1000])
        >>> scores = monitor.scores(logits(x), x)  # of images that the monitor has not seen, too
        >>> watch = candid.Watch(alarm=0.01).fit(scores[1000:1600])
        >>> watch.update(scores[1600:1700]).alarm
        False
        >>> noisy = 0.6 * x[1700:] + 0.4 * (1 - x[1700:])
        >>> watch.update(monitor.scores(logits(noisy), noisy)).alarm
        True
        >>> watch.directions, watch.after - watch.since < 50
        (('more novel',), True)
    """

    def __init__(
        self, alarm: float = 0.01, seed: int = 0, among: Among = "held-out", proven: bool = True
    ) -> None:
        if not 0 < alarm < 1:
            raise CandidError(f"The level of the alarm must be above 0 and below 1, not {alarm}.")
        if among not in get_args(Among):
            raise CandidError(f"Images are ranked among 'held-out' or 'stream', not '{among}'.")
        self.level, self.seed, self.among = alarm, seed, among
        self.proven = proven or among == "stream"
        self.images = 0
        """Images of the stream so far."""
        self.score = ""
        """What the scores are, if that can differ: a stream must go on with the same."""
        self._ranks: dict[int, Ranks] = {}
        self._bets: dict[int, Bets] = {}
        self._martingales: dict[int, Martingale] = {}
        self._class_names: tuple[str, ...] = ()
        self._predicted = np.zeros(0, dtype=np.int64)  # of each class, since the lowest wealth
        self._confidence = [RunningMean(), RunningMean()]  # of held-out images, and since the lowest wealth
        self._rang: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"Watch(alarm={self.level!r}, seed={self.seed!r}, among={self.among!r})"

    def fit(
        self,
        scores: Any = None,
        classes: Any = None,
        frequencies: Mapping[str, float] | Sequence[float] | None = None,
        confidence: Any = None,
    ) -> Self:
        """Start to watch: learn the scores of held-out images, and forget an earlier stream.

        With ``classes``, a second watch looks at the frequencies of predicted classes. Both together keep the
        level: each rings at 2 / level instead of 1 / level.

        Args:
            scores: (n,), rising with outlyingness, of images that nothing was fitted to; None to watch the
                class frequencies alone.
            classes: the predicted classes of the same images, (n,): numbers from 0, or -1 for images that
                the watch of frequencies skips, here and in the stream.
            frequencies: the share of each class among *other* images, such as those of the training, in the
                order of their numbers or by name; needed with ``classes``. They fix the bets.
            confidence: of the same images, (n,); only to say whether images became less confident.

        Returns:
            The watch itself.
        """
        Watch.__init__(self, self.level, self.seed, self.among, self.proven)
        if scores is None and classes is None:
            raise CandidError("Give a watch scores, classes, or both.")
        values = numbers("scores" if scores is not None else "classes", classes if scores is None else scores)
        if len(values) == 0:
            raise CandidError("A watch needs the scores of held-out images: there are none.")
        if scores is not None:
            self._start(SCORES, ScoreBets(2 if self.proven else 1), BINS, bins_of(values))
        if scores is not None and len(values) > FEW_VALUES > len(np.unique(bins_of(values))):
            log.warning(
                "The held-out scores have fewer than 20 different values in float16, so that small changes "
                "can't be seen: standardise the scores with numbers from other images."
            )
        if classes is not None:
            if frequencies is None:
                raise CandidError("With 'classes', give 'frequencies': their shares in training.")
            shares = frequencies.values() if isinstance(frequencies, Mapping) else frequencies
            q = numbers("frequencies", list(shares))
            if len(q) < 2 or not (q > 0).all():
                raise CandidError("The frequencies of at least two classes must be above 0.")
            names = frequencies if isinstance(frequencies, Mapping) else map(str, range(len(q)))
            self._class_names, self._predicted = tuple(names), np.zeros(len(q), dtype=np.int64)
            predicted = self._classes(classes, len(values))
            self._start(CLASSES, FrequencyBets(q), len(q), predicted[predicted != SKIPPED])
        if confidence is not None:
            for value in same_number("confidence", confidence, len(values)).tolist():
                self._confidence[0].add(value)
        return self

    def _start(self, key: int, bets: Bets, bins: int, held_out: Array) -> None:
        self._ranks[key], self._bets[key] = Ranks(bins), bets
        if self.among == "held-out":
            self._ranks[key].count(held_out)
        self._martingales[key] = Martingale(Wealth.on(bets))

    def update(
        self,
        scores: Any = None,
        classes: Any = None,
        confidence: Any = None,
        names: Iterable[str] | None = None,
    ) -> Self:
        """Take one image of the stream, or several in their order.

        Args:
            scores: one number, or (N,), if the watch was fitted with scores.
            classes: the predicted class of each, if the watch was fitted with classes.
            confidence: of each, if the watch was fitted with it.
            names: what the images are called, to name those that carried the evidence.

        Returns:
            The watch itself.
        """
        self._needed()
        if (scores is None) != (SCORES not in self._ranks):
            raise CandidError("Give scores to both fit and update of a watch, or to neither.")
        if (classes is None) != (CLASSES not in self._ranks):
            raise CandidError("Give classes to both fit and update of a watch, or to neither.")
        if (confidence is None) != (self._confidence[0].n == 0):
            raise CandidError("Give the confidence to both fit and update of a watch, or to neither.")
        counted = classes if scores is None else scores
        values = numbers("classes" if scores is None else "scores", counted)
        bins = {} if scores is None else {SCORES: bins_of(values)}
        if classes is not None:
            bins[CLASSES] = self._classes(classes, len(values))
        sure = None if confidence is None else same_number("confidence", confidence, len(values))
        called = [None] * len(values) if names is None else list(names)
        if len(called) != len(values):
            raise CandidError(f"There are {len(called)} names and scores of {len(values)} images.")
        for i, name in enumerate(called):
            bin_of = {key: int(column[i]) for key, column in bins.items() if column[i] != SKIPPED}
            self._add(bin_of, None if sure is None else sure[i], name)
        return self

    def _add(self, bins: dict[int, int], confidence: float | None, name: str | None) -> None:
        """Take one image."""
        self.images += 1
        for key, bin_ in bins.items():
            p = self._ranks[key].add(bin_, uniform(self.seed, key, self.images))
            lowest = self._martingales[key].step(self._bets[key].factors(np.array(p)), self.images, name)
            if key == SCORES and lowest:
                self._confidence[1] = RunningMean()
            elif key == CLASSES:
                self._predicted = 0 * self._predicted if lowest else self._predicted
                self._predicted[bin_] += not lowest
        leading = self._martingales.get(SCORES, self._martingales.get(CLASSES))
        if confidence is not None and leading is not None and leading.low_at < self.images:
            self._confidence[1].add(float(confidence))
        if self._rang is None and self._log_evidence >= -math.log(self.level):
            key = max(self._martingales, key=lambda number: self._martingales[number].peak)
            leading = self._martingales[key]
            self._rang = {
                "after": self.images,
                "since": leading.low_at + 1,
                "directions": self._directions(key),
                "carriers": leading.carriers,
            }

    @property
    def alarm(self) -> bool:
        """Whether it has rung."""
        self._needed()
        return self._rang is not None

    @property
    def watched(self) -> tuple[int, ...]:
        """What is watched: scores (0), class frequencies (1), or both."""
        return tuple(sorted(self._ranks))

    @property
    def drift_detected(self) -> bool:
        """The same as :attr:`alarm`, under the name that libraries for streams use."""
        return self.alarm

    @property
    def after(self) -> int | None:
        """The number of images after which it rang; None if it has not."""
        return None if self._rang is None else self._rang["after"]

    @property
    def since(self) -> int | None:
        """The first image after the lowest wealth: an estimate of the first changed one; None before."""
        return None if self._rang is None else self._rang["since"]

    @property
    def directions(self) -> tuple[str, ...]:
        """What changed when it rang: more novel, less confident, other class frequencies; () before."""
        return () if self._rang is None else tuple(self._rang["directions"])

    @property
    def carriers(self) -> tuple[Carrier, ...]:
        """The images that carried most of the evidence, when it rang or since the wealth was lowest."""
        if self._rang is not None:
            return tuple(self._rang["carriers"])
        self._needed()
        leading = max(self._martingales.values(), key=lambda martingale: martingale.peak)
        return tuple(leading.carriers)

    @property
    def evidence(self) -> float:
        """The largest wealth so far, divided by the number of watches: it rings at 1 / level."""
        self._needed()
        return math.exp(min(self._log_evidence, 700.0))

    def report(self) -> dict[str, Any]:
        """Return all of this as JSON."""
        return {
            "alarm": self.alarm,
            "after": self.after,
            "evidence": self.evidence,
            "level": self.level,
            "proven": self.proven,
            "images": self.images,
            "held_out": next(iter(self._ranks.values())).n - self.images,
            "since": self.since,
            "directions": list(self.directions),
            "carriers": [carrier._asdict() for carrier in self.carriers],
        }

    def sentence(self) -> str:
        """Return in words whether it has rung, since when and in which direction."""
        if not self.alarm:
            quiet = (
                f"No alarm after {self.images:,} images: the evidence reached {self.evidence:.3g}, and it "
                f"rings at {1 / self.level:g}."
            )
            return quiet if self.proven else f"{quiet} {UNPROVEN}"
        bound = f"Without a change it would ever ring with a probability of at most {self.level:g}."
        return (
            f"ALARM after image {self.after:,}: the images have changed since about image {self.since:,} "
            f"({'; '.join(self.directions)}). {bound if self.proven else UNPROVEN}"
        )

    @property
    def _log_evidence(self) -> float:
        peaks = [martingale.peak for martingale in self._martingales.values()]
        return max(peaks) - math.log(len(peaks))

    def _directions(self, first: int) -> list[str]:
        """Return what changed: by the watch that rang, then by others with strong evidence."""
        directions = []
        for key in sorted(self._martingales, key=lambda key: key != first):
            martingale = self._martingales[key]
            if key != first and martingale.peak < STRONG:
                continue
            if key == SCORES:
                bets, on_bets = self._bets[SCORES], martingale.wealth.shares[1:]
                assert isinstance(bets, ScoreBets | PowerBets)
                small = on_bets[: bets.small].sum() > on_bets[bets.small :].sum()
                directions.append("more novel" if small else "less novel")
            elif self._predicted.any():  # none if this very image brought its lowest wealth
                expected = self._predicted.sum() * np.array(_frequencies(self._bets[CLASSES]))
                surprise = (self._predicted - expected) / np.sqrt(expected)
                y = int(abs(surprise).argmax())
                often = "more" if surprise[y] > 0 else "less"
                directions.append(f"other class frequencies: '{self._class_names[y]}' {often} often")
        errors = self._confidence[1].errors_above(self._confidence[0])
        if abs(errors) >= CLEAR:
            directions.append("less confident" if errors < 0 else "more confident")
        return directions

    def _classes(self, classes: Any, n: int) -> Array:
        values = same_number("classes", classes, n)
        whole = (values >= SKIPPED) & (values < len(self._class_names)) & (values == np.floor(values))
        if not whole.all():
            last = len(self._class_names) - 1
            raise CandidError(f"Classes are whole numbers from 0 to {last}, or -1 to skip an image.")
        return values.astype(np.int64)

    def _needed(self) -> None:
        if not self._ranks:
            raise CandidError("The watch has seen no held-out images yet: call fit first.")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state into one JSON file, whole or not at all."""
        target = Path(path)
        try:
            write_text(self.to_json(), target)
        except OSError as error:
            raise CandidError(
                f"Can't write the state of the watch to '{target}' ({error}): free some space, or name "
                "another file."
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Watch":
        """Return the watch that :meth:`save` wrote; it goes on to the same bits."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"Can't read the state of a watch from '{path}': {error}.") from error
        return cls.from_json(text, path)

    def to_json(self) -> str:
        """Return the whole state as text."""
        self._needed()
        record = {
            "format": FORMAT,
            "format_version": VERSION,
            "library_version": __version__,
            "level": self.level,
            "seed": self.seed,
            "among": self.among,
            "proven": self.proven,
            "score": self.score,
            "bets": 2 if isinstance(self._bets.get(SCORES, ScoreBets(2)), ScoreBets) else 1,
            "images": self.images,
            "classes": {}
            if CLASSES not in self._bets
            else dict(zip(self._class_names, _frequencies(self._bets[CLASSES]), strict=True)),
            "predicted": self._predicted.tolist(),
            "watches": [saved(self._ranks[key], self._martingales[key]) for key in sorted(self._ranks)],
            "confidence": [asdict(moments) for moments in self._confidence],
            "rang": self._rang,
        }
        if SCORES not in self._ranks:
            record["watched"] = [CLASSES]
        return json.dumps(record | {"digest": digest(record).hexdigest()})

    @classmethod
    def from_json(cls, text: str, path: object = "the state", proven: bool = True) -> "Watch":
        """Return the watch with the state that :meth:`to_json` returned.

        Args:
            text: the state.
            path: where it is from, for messages.
            proven: of a state of an earlier version, which does not say it.
        """
        try:
            record = json.loads(text)
            if record["format"] != FORMAT or record["format_version"] != VERSION:
                raise ValueError("another format or version")
            if record.pop("digest", None) != digest(record).hexdigest():
                raise ValueError("changed since it was written")
            record = whole_watch(record, proven)
            watch = cls(record["level"], record["seed"], record["among"], record["proven"])
            watch.images, watch._rang = record["images"], record["rang"]
            watch.score = record["score"]
            watch._class_names = tuple(record["classes"])
            watch._predicted = np.array(record["predicted"], dtype=np.int64)
            kinds: dict[int, tuple[Bets, int]] = {}
            if record.get("watched") != [CLASSES]:
                begun = score_bets(record["bets"], len(record["watches"][0]["shares"]))
                kinds[SCORES] = begun, BINS
            if record["classes"]:
                frequencies = list(record["classes"].values())
                kinds[CLASSES] = FrequencyBets(frequencies), len(frequencies)
            for (key, (bets, bins)), state in zip(kinds.items(), record["watches"], strict=True):
                watch._bets[key] = bets
                watch._ranks[key], watch._martingales[key] = restored(state, bets, bins)
            watch._confidence = [RunningMean(**each) for each in record["confidence"]]
            if watch._rang is not None:
                watch._rang["carriers"] = [Carrier(*each) for each in watch._rang["carriers"]]
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
            raise CheckpointError(
                f"'{path}' holds no state of a watch that this candid {__version__} can read ({error}): "
                "start again with fit."
            ) from error
        return watch


def _frequencies(bets: Bets) -> list[float]:
    assert isinstance(bets, FrequencyBets)
    frequencies: list[float] = bets.frequencies.tolist()
    return frequencies
