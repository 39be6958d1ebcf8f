"""The photos of a training: which of them are fitted to, held out and tested."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from candid._support.errors import CandidError, CheckpointError
from candid._support.text import listed
from candid.data.datasets import open_dataset
from candid.data.formats import Query, format_of
from candid.data.splits import FileSplit, Split
from candid.models import checkpoint
from candid.training.options import ENOUGH, SHARE, PhotoOptions
from candid.training.run_folder import RESTORE, RunFolder, splits_digest

FEWEST_HELD_OUT = 20
PART_WORDS = {"val": "held-out", "test": "test"}
MOST_NAMED = 5
"""Classes that a warning names."""


@dataclass(frozen=True)
class PhotoData:
    """The photos of each part; without ``val``, all training photos are scored out of fold."""

    parts: dict[str, Split]
    """By name: train, maybe val, maybe test."""
    class_names: tuple[str, ...]

    @classmethod
    def of(cls, options: PhotoOptions) -> "PhotoData":
        """Open the data, and decide which photos are held out."""
        data = open_dataset(
            options.data,
            holdout=options.holdout or SHARE,
            split_seed=options.split_seed,
            val_spec=options.val_data,
            only=options.only,
            nested=options.tree == "folders",
        )
        parts = {"train": data.train, "val": data.val, "test": data.test}
        if isinstance(data.train, FileSplit) and isinstance(data.val, FileSplit):
            few = len(data.train) + len(data.val) < ENOUGH if options.holdout is None else not options.holdout
            if few and not has_val(options.data, options.tree == "folders"):
                paths, labels = (*data.train.paths, *data.val.paths), (data.train.labels, data.val.labels)
                parts |= {"train": FileSplit(paths, np.concatenate(labels)), "val": None}
        elif data.train.can_index:
            raise CandidError(f"'{options.data}' is no folder of photos: train a pixel model with --preset.")
        return cls({name: part for name, part in parts.items() if part is not None}, data.class_names)

    @property
    def digest(self) -> str:
        """The SHA-256 of the photos, their labels and the class names."""
        return splits_digest(self.class_names, self.parts.values())

    def described(self) -> str:
        """Return what was understood, in one sentence."""
        train = self.parts["train"]
        each = ""
        if isinstance(train, FileSplit):
            counts = np.bincount(train.labels, minlength=len(self.class_names))
            least, most = int(counts.min()), int(counts.max())
            each = f" ({least} each)" if least == most else f" ({least} to {most} each)"
        held_out = "all of them scored out of fold"
        if "val" in self.parts:
            count = len(self.parts["val"])
            held_out = f"{count:,} held out"
            if count < FEWEST_HELD_OUT:
                held_out += f", fewer than {FEWEST_HELD_OUT}: p-values are out of fold"
        tested = f", {len(self.parts['test']):,} to test" if "test" in self.parts else ""
        return f"{len(train):,} photos of {len(self.class_names)} classes{each} to fit, {held_out}{tested}"

    def missing(self) -> list[str]:
        """Return a warning for each part that lacks photos of some classes."""
        warnings = []
        for name, part in self.parts.items():
            if isinstance(part, FileSplit) and name != "train":
                counts = np.bincount(part.labels, minlength=len(self.class_names)).tolist()
                absent = [each for each, count in zip(self.class_names, counts, strict=True) if not count]
                if absent:
                    rest = [f"{len(absent) - MOST_NAMED} more"] if len(absent) > MOST_NAMED else []
                    warnings.append(
                        f"warning: no {PART_WORDS[name]} photos of {listed(absent[:MOST_NAMED] + rest)}: "
                        f"{PART_WORDS[name]} results say nothing about {'it' if len(absent) == 1 else 'them'}"
                    )
        return warnings


def has_val(data: str, nested: bool) -> bool:
    """Return whether the data set has its own part to validate on."""
    read = format_of(data).read
    return read is not None and "val" in read(Query(data, True, nested=nested)).parts


def earlier_results(folder: RunFolder, digests: dict[str, str]) -> dict[str, Any] | None:
    """Return the results of a finished run; None of a new one, and of one that was killed at its end.

    Raises:
        CandidError: if the run has a model of other data or options, or results without a model.
    """
    results = folder.results
    if not folder.has_best:
        if results is not None:
            raise CheckpointError(f"The run's model '{folder.best}' is missing: {RESTORE}")
        return None
    recorded = checkpoint.load(folder.best).metadata.get("training", {}).get("digests", {})
    for name, current in digests.items():
        if recorded.get(name, current) != current:
            what = {"data": "photos or labels", "options": "options"}[name]
            raise CandidError(f"The {what} are not those that the run was started with: {RESTORE}")
    return results
