"""Adopt a softmax classifier: keep its posteriors, fit a density to its features, hold images out."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.options import build
from candid._support.processes import launch
from candid._support.progress import SILENT, Progress
from candid.data import Part
from candid.data.class_names import named
from candid.data.datasets import open_images, open_part, trained_on
from candid.data.formats import FORMATS, Query, format_of, part_folders, subfolders
from candid.data.groups import GroupTable
from candid.data.images import image_keys, path_of
from candid.data.splits import ArraySplit, FileSplit, IndexedSplit, Split
from candid.inference.predictions import FEATURES, Predictions
from candid.inference.runner import Runner
from candid.judging.calibrate import (
    FEWEST_IMAGES,
    fewer,
    held_out_scores,
    in_named_series,
    without_training_images,
)
from candid.judging.held_out import HeldOut
from candid.models import saving
from candid.models.photo.adopted import AdoptedModel
from candid.models.photo.opening import open_softmax, tree_of
from candid.training.options import AdoptOptions
from candid.trust.arrays import fixed_halves, series_of
from candid.trust.gaussians import Moments
from candid.trust.scores import Columns
from candid.trust.tree import Tree

ALIKE = "All images look the same to the classifier: give different ones."
SMALLEST_PRIOR = 1e-9
"""A class that no image looks like has at least this prior before they are normalised."""


def adopt(
    model: Any,
    images: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    progress: Progress = SILENT,
    **options: Any,
) -> AdoptedModel:
    """Turn a softmax classifier into a generative one that has exactly its posteriors.

    p(features, class) = p(features) p(class | features): the posterior stays as it is, and one Gaussian with
    a shrunk covariance (Ledoit and Wolf) is fitted to each group of features of one half of the images. The
    other half is held out: novelty is the score ``combined`` of the distances of features and of the energy.
    Class sets need labels, that is, folders with the names of the classes (or ImageNet's WordNet numbers).
    Without labels only the share of false alarms is promised.

    Args:
        model: an eye with a classifier (``lite0``, ``lite1``, ``lite2``: 1000 classes of ImageNet); a ResNet
            of candid, its name or folder; an ONNX or ``.pt2`` file that returns logits; or a
            :class:`candid.ModuleSoftmax` for any network.
        images: images like those that it will see: a folder of any images, or a data set with labels.
        out: a folder to save the model in.
        progress: where to show messages and bars.
        **options: fields of :class:`~candid.training.options.AdoptOptions`: ``held_out`` names other
            images to hold out, then all of ``images`` are fitted.

    Returns:
        The model. It is loaded and used like every other one.

    Raises:
        CandidError: if the classifier can't be used, or the images.

    Example:
        >>> import candid
        >>> samples = Path(candid.__file__).parent / "reports" / "demo" / "samples"
        >>> model = candid.adopt("lite0", samples / "hats")
        >>> candid.examine(model, samples / "everyday" / "coffee.jpg")[0].label
        'espresso'
    """
    chosen, data = build(AdoptOptions, options), os.fspath(images)
    earlier = None if out is None else saving.record_hash(Path(out))
    processes = launch(chosen.devices, network=False)
    progress = progress if processes.is_global_zero else SILENT
    adopted = AdoptedModel.of(open_softmax(model, _names(chosen.class_names)))
    adopted.tree = tree_of(chosen.tree, adopted.class_names, data)
    table = None if chosen.together is None else GroupTable.together(chosen.together)
    fit, held_out = _splits(adopted, data, chosen, table, progress)
    runner = Runner(adopted, processes, None, chosen.workers, progress)
    fitted = _pass(runner, fit, "images", chosen, progress)
    if fitted is not None:
        _fit_density(adopted, fitted)
    adopted.load_state(processes.broadcast(adopted.state()))
    unseen = _pass(runner, held_out, "held-out images", chosen, progress)
    if fitted is None or unseen is None:
        return adopted
    adopted.held_out = {"training_keys": np.unique(fitted.columns["keys"])}
    unseen = without_training_images(unseen, adopted, progress)
    if table is not None:
        unseen = in_named_series(unseen, table, fitted.paths, progress)
    count = len(unseen)
    adopted.metadata["adopted"] = {"images": len(fitted), "held_out": count, "labels": _labelled(unseen)}
    if count >= FEWEST_IMAGES:
        _scores(unseen, adopted.tree).attach(adopted)
    else:
        progress.log(f"no p-values: {count} images were held out, at least {FEWEST_IMAGES} are needed")
    if out is not None:
        saving.save(adopted, out, expected=earlier)
    return adopted


def _names(file: Path | None) -> list[str] | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CandidError(f"'{file}' can't be read as a text file with class names: {error}.") from error


def _splits(
    model: AdoptedModel, data: str, options: AdoptOptions, table: GroupTable | None, progress: Progress
) -> tuple[Split, Split]:
    """Return the images that the density is fitted to, and those that are held out."""
    training = model.record.config
    labelled = _has_labels(data, model.class_names, progress)
    trained, parts = trained_on(data, training), _parts(data) if labelled else ()
    divided = trained or len(parts) > 1

    def part(name: Part) -> Split:
        return open_part(data, model.class_names, name, training).split

    fit = part("train") if divided else _all(data, model, labelled)
    if options.held_out is not None:
        return fit, _all(options.held_out, model, _has_labels(options.held_out, model.class_names, progress))
    if divided:
        return fit, part("val" if trained or "val" in parts else "test")
    if not isinstance(fit, IndexedSplit):
        raise CandidError(f"'{data}' is read from end to end: name images to hold out with --held-out.")
    names = None if table is None else table.of(fit.named(np.arange(len(fit))))
    first, second = fixed_halves(series_of(Columns({"keys": _copies(fit)}), names))
    if not len(first):
        raise CandidError(ALIKE)
    return fit.subset(first), fit.subset(second)


def _copies(split: IndexedSplit) -> Array:
    """Return a number for each image, (N,), equal for copies."""
    if isinstance(split, ArraySplit):
        keys = image_keys(split.images)
    else:
        assert isinstance(split, FileSplit)
        keys = np.array([digest.hex() for digest in split.digests()])
    return np.unique(keys, return_inverse=True)[1]


def _all(data: str, model: AdoptedModel, labelled: bool) -> Split:
    return open_part(data, model.class_names).split if labelled else open_images(data, model.preprocessing)


def _parts(data: str) -> Sequence[str]:
    read = format_of(data).read
    assert read is not None
    return tuple(read(Query(data)).parts)


def _has_labels(data: str, class_names: Sequence[str], progress: Progress) -> bool:
    """Return whether the folders of ``data`` are classes; an error if only some of them are."""
    if format_of(data, labelled=False) is not FORMATS["image folder"]:
        return format_of(data, labelled=False).read is not None
    folder = path_of(data)
    if not folder.is_dir():
        return True  # what opens it says what is wrong
    tops = part_folders(folder).values() or [folder]
    folders = sorted({entry.name for top in tops for entry in subfolders(top)})
    classes = set(named(folders, class_names)) & set(class_names)
    if classes or (folders and len(folders) == len(class_names) and class_names[0] == "0"):
        return True  # an unknown one among them is an error
    progress.log(f"'{data}' has no folders named like classes: without labels no class set is promised")
    return False


def _pass(
    runner: Runner, split: Split, name: str, options: AdoptOptions, progress: Progress
) -> Predictions | None:
    """Return logits, features and keys of images; None in all processes but the first."""
    view = runner.model.preprocessing
    ready = fewer(split).preprocess(view, options.skip_bad, progress, name)
    return runner.predictions(ready, view, name, FEATURES)


def _fit_density(model: AdoptedModel, predictions: Predictions) -> None:
    from scipy.linalg import block_diag

    features = predictions.columns["features"].astype(np.float32)
    if not np.isfinite(features).all():
        raise CandidError("The features of some images are not finite: leave these images out.")
    if not (features != features[0]).any():
        raise CandidError(ALIKE)
    groups = np.split(features, np.cumsum(model.config.features)[:-1], 1)
    moments = [Moments.of(group, np.zeros(len(group), np.int64)) for group in groups]
    priors = predictions.posterior.mean(0).clip(SMALLEST_PRIOR)
    model.set_density(
        np.concatenate([each.mean for each in moments]),
        block_diag(*(each.whitening for each in moments)),
        np.log(priors / priors.sum()),
    )


def _labelled(predictions: Predictions) -> bool:
    return bool((predictions.labels >= 0).all())


def _scores(predictions: Predictions, tree: Tree | None) -> HeldOut:
    columns = {name: column for name, column in predictions.columns.items() if name not in FEATURES}
    predictions = replace(predictions, columns=columns)
    if _labelled(predictions):
        return held_out_scores(predictions, tree=tree)
    return HeldOut(predictions.statistics, 1.0)
