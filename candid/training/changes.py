"""Change the classes of a photo model: rename, merge, forget; and undo what was changed."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from candid._support import __version__
from candid._support.errors import CandidError, did_you_mean
from candid._support.numbers import Array
from candid._support.progress import SILENT, Progress
from candid._support.text import listed
from candid.judging.by_class import ByClass
from candid.models import checkpoint, saving
from candid.models.checkpoint import FINGERPRINT
from candid.models.photo.model import PhotoModel
from candid.models.photo.revised import Photos
from candid.models.protocol import require
from candid.training.pieces import BEFORE, RECORD, Pieces, calibrated, changed_base

CHANGES = "changes"
"""The entry of the metadata that lists the changes since the training."""
EARLIER = "earlier"
"""The folder in that of a model with the models before its changes: 1, 2, ..."""
MOST_EARLIER = 10
"""Changes that can be undone; older models are removed."""
DISCARDED = (
    "the held-out scores that 'candid calibrate' stored are for the old classes and are not kept: run "
    "'candid calibrate' on the new model"
)


def rename(
    model: Any,
    names: Mapping[str, str],
    *,
    out: str | os.PathLike[str] | None = None,
    progress: Progress = SILENT,
) -> PhotoModel:
    """Rename classes of a photo model; nothing else changes.

    Args:
        model: a photo model or its folder.
        names: the new name by the old one.
        out: the folder for the new model; that of ``model`` replaces it. Nothing is saved if it is None.
        progress: where to show messages.

    Returns:
        The model with the new names.

    Example:
        >>> import candid
        >>> candid.rename("waste", {"trash": "other rubbish"}).class_names[-1]
        'other rubbish'
    """
    loaded: PhotoModel = require(checkpoint.resolve(model), "teach", "get other class names")
    target = target_of(model, out)
    for old in names:
        number_of(loaded, old)
    after = tuple(names.get(name, name) for name in loaded.class_names)
    _check_distinct(after)
    made = PhotoModel(loaded.config, after, loaded._eye)
    made.load_state(loaded.state())
    made.thumbnails, made.folder, made.tree = loaded.thumbnails, loaded.folder, loaded.tree
    made.held_out, made.metadata = dict(loaded.held_out), dict(loaded.metadata)
    records = made.metadata.get(RECORD, ())
    if records:
        made.metadata[RECORD] = [each | {"name": names.get(each["name"], each["name"])} for each in records]
    if stored := made.metadata.get("by_class"):
        made.metadata["by_class"] = ByClass.from_dict(stored).renamed(names).to_dict()
    for start, whose in (("", made), (BEFORE, Pieces.of(made).base)):
        if start + FINGERPRINT in made.held_out:
            digest = np.frombuffer(bytes.fromhex(whose.fingerprint()), np.uint8)
            made.held_out[start + FINGERPRINT] = digest
    text = "renamed " + listed(f"'{old}' to '{new}'" for old, new in names.items())
    made.metadata = with_change(loaded, made, "rename", text)
    progress.log(text)
    save_change(made, target, loaded)
    return made


def merge(
    model: Any,
    classes: Mapping[str, Sequence[str]],
    *,
    out: str | os.PathLike[str] | None = None,
    progress: Progress = SILENT,
) -> PhotoModel:
    """Merge classes of a photo model, as if their photos had been in one folder.

    Args:
        model: a photo model or its folder.
        classes: the classes to merge by the name that they get.
        out: the folder for the new model; that of ``model`` replaces it. Nothing is saved if it is None.
        progress: where to show messages.

    Returns:
        The model with fewer classes.

    Example:
        >>> import candid
        >>> merged = candid.merge("waste", {"packaging": ["metal", "plastic"]})
        >>> len(merged.class_names) - len(candid.load("waste").class_names)
        -1
    """
    loaded: PhotoModel = require(checkpoint.resolve(model), "teach", "have classes merged")
    target, pieces = target_of(model, out), Pieces.of(loaded)
    given = [old for merged in classes.values() for old in merged]
    for old in given:
        number_of(loaded, old)
    if len(set(given)) < len(given) or any(len(merged) < 2 for merged in classes.values()):
        raise CandidError("Name at least two classes to merge, and each class once.")
    for name, merged in classes.items():
        _check_distinct([name, *(other for other in loaded.class_names if other not in merged)])
    for name, merged in classes.items():
        pieces = _merged(pieces, name, merged)
    made, _ = pieces.model()
    text = "merged " + listed(f"{listed(merged)} into '{name}'" for name, merged in classes.items())
    return _finished(loaded, made, "merge", text, target, progress)


def forget(
    model: Any, name: str, *, out: str | os.PathLike[str] | None = None, progress: Progress = SILENT
) -> PhotoModel:
    """Remove a class from a photo model; without its last taught one the model is exactly as before.

    Of a class that the model was trained on, mean and frequency are removed. What its photos said of the
    covariance that all classes share stays.

    Args:
        model: a photo model or its folder.
        name: the class.
        out: the folder for the new model; that of ``model`` replaces it. Nothing is saved if it is None.
        progress: where to show messages.

    Returns:
        The model without the class.

    Raises:
        CandidError: if there is no such class, or too few would be left.

    Example:
        >>> import candid
        >>> candid.forget("cifar10-resnet", "cat")
        Traceback (most recent call last):
            ...
        candid._support.errors.CandidError: Only a photo model can forget a class, and this is ...
    """
    loaded: PhotoModel = require(checkpoint.resolve(model), "teach", "forget a class")
    target, pieces = target_of(model, out), Pieces.of(loaded)
    number_of(loaded, name)
    if name in pieces.names:
        pieces = pieces.without(name)
    else:
        kept = [each for each in pieces.base.class_names if each != name]
        _check_left(kept)
        groups = [kept.index(each) if each in kept else -1 for each in pieces.base.class_names]
        pieces = replace(pieces, base=changed_base(pieces.base, groups, kept)[0])
    made, _ = pieces.model()
    return _finished(loaded, made, "forget", f"forgot '{name}'", target, progress)


def undo(model: str | os.PathLike[str], progress: Progress = SILENT) -> PhotoModel:
    """Take the latest change of a model folder back: it has the model before it again.

    Args:
        model: a folder whose model was changed in place.
        progress: where to show messages.

    Returns:
        The model before the change.

    Raises:
        CandidError: if no change was made in this folder.

    Example:
        >>> import candid
        >>> candid.undo("everyday")
        Traceback (most recent call last):
            ...
        candid._support.errors.CheckpointError: 'everyday' comes with candid and stays as it is: ...
    """
    folder = checkpoint.own_folder(model)
    kept = _earlier(folder)
    if not kept:
        raise CandidError(
            f"No change was made to the model in '{folder}' since its training that could be undone: changes "
            "with --out leave the model before them in its own folder."
        )
    expected = saving.record_hash(folder)
    current, before = checkpoint.load(folder), checkpoint.load(kept[-1])
    before.metadata = dict(before.metadata)
    standing = standing_changes(current)
    entry = _entry("undo", f"undid: {standing[-1]['text'] if standing else 'the latest change'}")
    before.metadata[CHANGES] = [*changes_of(current), entry]
    with _changing(folder):
        saving.save(before, folder, expected=expected)
        shutil.rmtree(kept[-1])
    progress.log(entry["text"])
    return checkpoint.load(folder)


def changes_of(model: Any) -> list[dict[str, Any]]:
    """Return the changes since the training, the first one first: what, text, when, version."""
    return list(model.metadata.get(CHANGES, ()))


def standing_changes(model: Any) -> list[dict[str, Any]]:
    """Return the changes that were not undone, the first one first."""
    standing: list[dict[str, Any]] = []
    for change in changes_of(model):
        standing = standing[:-1] if change["what"] == "undo" else [*standing, change]
    return standing


def number_of(model: PhotoModel, name: str) -> int:
    """Return the number of a class.

    Raises:
        CandidError: if there is none of this name.
    """
    if name not in model.class_names:
        raise CandidError(f"The model has no class '{name}': {did_you_mean(name, model.class_names)}")
    return model.class_names.index(name)


def _merged(pieces: Pieces, name: str, merged: Sequence[str]) -> Pieces:
    """Return the pieces with some classes as one."""
    taught = [each for each in merged if each in pieces.names]
    places = [pieces.names.index(each) for each in taught]
    features = [pieces.features[place] for place in places]
    keys = [pieces.keys[place] for place in places]
    records = [pieces.records[place] for place in places]
    fitted = [each for each in merged if each in pieces.base.class_names]
    for each in taught:
        pieces = pieces.without(each)
    if not fitted:
        record = {
            "name": name,
            "photos": sum(map(len, features)),
            "copies": sum(each["copies"] for each in records),
            "source": ", ".join(each["source"] for each in records),
        }
        return pieces.with_class(record, np.concatenate(features), np.concatenate(keys))
    names = [name if each == fitted[0] else each for each in pieces.base.class_names]
    kept = [each for each in names if each not in fitted[1:] or each == name]
    kept = list(dict.fromkeys(kept))
    _check_left(kept)
    groups = [kept.index(name if each in fitted else each) for each in pieces.base.class_names]
    new: Photos | None = None
    all_keys: Array | None = None
    if taught:
        values, all_keys = np.concatenate(features), np.concatenate(keys)
        new = Photos(values, np.full(len(values), kept.index(name)))
    return replace(pieces, base=changed_base(pieces.base, groups, kept, new, all_keys)[0])


def _check_distinct(names: Sequence[str]) -> None:
    for name in names:
        if not name.strip():
            raise CandidError("A class needs a name.")
        if names.count(name) > 1:
            raise CandidError(f"Two classes would be called '{name}': merge them with 'candid merge'.")


def _check_left(names: Sequence[str]) -> None:
    if len(names) < 2:
        raise CandidError("At least two of the classes that the model was trained on must be left.")


def _finished(
    before: PhotoModel, made: PhotoModel, what: str, text: str, target: "Target | None", progress: Progress
) -> PhotoModel:
    made.metadata = with_change(before, made, what, text)
    progress.log(f"{text}: {listed(made.class_names)}")
    if calibrated(before):
        progress.log(DISCARDED)
    save_change(made, target, before)
    return made


def with_change(before: PhotoModel, made: PhotoModel, what: str, text: str) -> dict[str, Any]:
    """Return the metadata of ``made`` with one more change."""
    return {**made.metadata, CHANGES: [*changes_of(before), _entry(what, text)]}


def _entry(what: str, text: str) -> dict[str, Any]:
    when = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"what": what, "text": text, "when": when, "version": __version__}


class Target(NamedTuple):
    """Where a changed model is saved."""

    folder: Path
    in_place: bool
    """Whether the model that it was made from is there, and is kept for :func:`undo`."""
    expected: str
    """The hash of its record when the change began."""


def target_of(model: Any, out: str | os.PathLike[str] | None) -> Target | None:
    """Return where to save a changed model; None to save it nowhere.

    Raises:
        CandidError: if another model is there.
    """
    if out is None:
        return None
    folder = Path(out)
    if isinstance(model, str | os.PathLike) and os.fspath(model) == os.fspath(out):
        folder = checkpoint.own_folder(model)
        return Target(folder, True, saving.record_hash(folder))
    if (folder / checkpoint.RECORD).exists() or (folder / checkpoint.RUN).exists():
        raise CandidError(f"'{folder}' already has a model: choose another --out.")
    return Target(folder, False, "")


def save_change(made: PhotoModel, target: Target | None, before: PhotoModel) -> None:
    """Save a changed model; one that it replaces is kept for :func:`undo`."""
    if target is None:
        return
    if not target.in_place:
        saving.save(made, target.folder, expected=target.expected)
        return
    with _changing(target.folder):
        saving.check_unchanged(target.folder, target.expected)
        kept = _earlier(target.folder)
        copy = target.folder / EARLIER / str(int(kept[-1].name) + 1 if kept else 1)
        now = saving.record_hash(target.folder)
        try:
            saving.save(before, copy)
            saving.save(made, target.folder, expected=target.expected)
        except CandidError:
            if saving.record_hash(target.folder) == now:  # nothing has changed that could be undone
                shutil.rmtree(copy, ignore_errors=True)
            raise
        for old in kept[: max(0, len(kept) + 1 - MOST_EARLIER)]:
            shutil.rmtree(old)


@contextmanager
def _changing(folder: Path) -> Iterator[None]:
    """Let one process at a time change the model in a folder, and store and remove the models before it."""
    try:
        with saving.saving(folder / EARLIER):
            yield
    finally:
        with suppress(OSError):  # it has some
            (folder / EARLIER).rmdir()


def _earlier(folder: Path) -> list[Path]:
    """Return the folders of the models before changes, the latest one last."""
    records = (folder / EARLIER).glob(f"*/{checkpoint.RECORD}")  # a process that was killed left none
    folders = (record.parent for record in records if record.parent.name.isdigit())
    return sorted(folders, key=lambda earlier: int(earlier.name))
