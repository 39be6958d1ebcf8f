"""Readers of what earlier versions wrote, with the version that may drop each of them."""

import hashlib
from collections.abc import Mapping
from typing import Any

from candid._support.numbers import digest

# Options of training, in recipes, in config.toml of run folders and in the record of a model: until 0.3.
RENAMED_OPTIONS = {"burn_in": "warmup", "coolings": "lr_decays", "accumulate": "grad_accumulation"}
"""Keys of older recipes and run folders, with their present names."""
CROPS = {"wobble": "jitter"}
"""Random crops of older recipes and models, with their present names."""
LATER_OPTIONS: dict[str, Any] = {
    "means_start": "random",
    "clip_means": True,
    "rest_rate": None,
    "rest_decay": 0.0,
    "tree": None,
    "together": None,
}
"""Options of later versions with what earlier ones did: these values don't enter the digest of a run."""
ORDER = (
    *("data", "eye", "priors", "preset", "model", "beta", "baseline", "start", "means_only", "epochs"),
    *("batch", "grad_accumulation", "optimiser", "schedule", "learning_rate", "means_rate", "means_start"),
    *("scales_rate", "warmup", "patience", "lr_decays", "momentum", "weight_decay", "clip", "clip_means"),
    *("label_smoothing", "actnorm_from_data", "crop", "flip", "holdout", "split_seed", "split", "only"),
    *("val_data", "epoch_images", "skip_bad", "thumbnails", "seed", "precision", "memory", "compile"),
    *("workers", "save_minutes", "tensorboard"),
)
"""Options in the order in which the digest of a run takes them; later ones follow as they are declared."""


def without_later(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that enter the digest of a run, in their order there.

    >>> without_later({"seed": 1, "tree": None, "beta": 2.0})
    {'beta': 2.0, 'seed': 1}
    """
    ordered = [*(key for key in ORDER if key in options), *(key for key in options if key not in ORDER)]
    return {key: options[key] for key in ordered if LATER_OPTIONS.get(key, ...) != options[key]}


def renamed_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a recipe or a recorded configuration under their present names.

    >>> renamed_options({"burn_in": 1.0, "crop": "wobble"})
    {'warmup': 1.0, 'crop': 'jitter'}
    """
    options = {RENAMED_OPTIONS.get(key, key): value for key, value in values.items()}
    return options | {"crop": CROPS.get(options["crop"], options["crop"])} if "crop" in options else options


def recorded_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run folder; without the option 'split', its images were shuffled.

    >>> recorded_options({"epochs": 3})
    {'split': 'shuffled', 'epochs': 3}
    """
    return renamed_options({"split": "shuffled", **values})


# Model folders of format version 1, which have no digests: until 0.3.
HELD_OUT = "calibration"
"""What version 1 calls the held-out scores in ``model.json``."""


def version_1_belongs(scores: Mapping[str, Any], weights_digest: "hashlib._Hash") -> bool:
    """Return whether held-out scores of version 1 fit the weights: it keeps a digest of these alone."""
    digest = weights_digest.copy()
    digest.update(b"3")
    stored = scores.get("weights")
    return stored is not None and stored.dtype.kind == "u" and stored.tobytes() == digest.digest()


def first_fingerprint(model: Any, config: Mapping[str, Any]) -> str:
    """Return the fingerprint of a model as the first models with one have it: of the whole configuration.

    Args:
        model: the model.
        config: its configuration as it stands in ``model.json``, with the keys of its version.
    """
    described = [config, list(model.class_names), list(model.image_shape), model.record.crop]
    return digest(described, model.weights_digest().digest()).hexdigest()


def whole_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a model with all entries; the first models were all of one kind.

    >>> whole_record({"calibration": None})
    {'kind': 'generative', 'held_out': None, 'calibration': None}
    """
    return {"kind": "generative", "held_out": record.get(HELD_OUT), **record}


# Monitors that stored posteriors of true classes instead of ratios: until 0.3.
def current_monitor(arrays: "Mapping[str, Any]") -> dict[str, Any]:
    """Return the numbers of a monitor under their present names.

    Posteriors of true classes are at most their ratios: class sets are larger, but valid.
    """
    return {"true_ratios" if name == "true_posterior" else name: values for name, values in arrays.items()}


def monitor_options(options: "Mapping[str, Any]") -> dict[str, Any]:
    """Return the options of a monitor; earlier ones accepted every posterior, at a novelty of 1 %.

    >>> monitor_options({"novelty": None})
    {'novelty': 0.01, 'confidence': 0.0}
    """
    if "confidence" in options:
        return dict(options)
    novelty = options.get("novelty")
    return {**options, "novelty": 0.01 if novelty is None else novelty, "confidence": 0.0}


# Cached passes and held-out scores: until 0.3.
COLUMN_NAMES = {"terms": "log_density_terms", "distance": "mahalanobis"}
"""Columns that have another name in files of earlier versions."""
MAHALANOBIS = "gaussian."
"""How the names of the parts of the score ``mahalanobis`` start in models of earlier versions."""


def mahalanobis_state(state: "Mapping[str, Any]") -> dict[str, Any]:
    """Return the numbers of a Mahalanobis score; earlier versions have no centre, which was 0."""
    centre = {} if "centre" in state else {"centre": 0 * state["means"][0]}
    return {**centre, **state}


def with_taught(statistics: "dict[str, Any]", held_out: "Mapping[str, Any]", fitted: int) -> "dict[str, Any]":
    """Return held-out scores with the class that each photo taught; earlier versions did not store it.

    Args:
        statistics: columns of held-out photos.
        held_out: all that the model carries: the keys of the photos of its taught classes are there.
        fitted: the number of the first taught class.
    """
    import numpy as np

    taught, number = np.full(len(statistics["keys"]), -1), 0
    while (keys := held_out.get(f"taught.{number}.keys")) is not None:
        taught[np.isin(statistics["keys"], keys)] = fitted + number
        number += 1
    return {**statistics, "taught": taught} if (taught >= 0).any() else statistics


NO_DIGEST = "'%s' is of an older version without a digest: damage to it can't be seen."
"""What is said of a cached pass or the state of a run that has none."""


LATER_CONFIG = (", pooling='haar'", ", circle=False")
"""Keys of the configurations of models that earlier versions don't have, with what these did."""


def described_pass(version: int, config: Any, preprocessing: Any, key: str) -> str:
    """Return what names the file of a cached pass, in the words of earlier versions."""
    crop = "wobble" if preprocessing.crop == "jitter" else preprocessing.crop
    view = (
        f"View(channels={preprocessing.channels}, height={preprocessing.height}, width={preprocessing.width}"
    )
    configured = repr(config)
    for later in LATER_CONFIG:
        configured = configured.replace(later, "")
    return f"({version}, {configured}, {view}, crop={crop!r}, flip={preprocessing.flip}), {key!r})"


# States of watches: until 0.3.
ALL_PARTS = "all own parts"
"""What a photo model's score is called in the state of a watch; earlier ones left the first part out."""


def whole_watch(record: Mapping[str, Any], proven: bool) -> dict[str, Any]:
    """Return the state of a watch with all entries, and ``proven`` if it does not say it."""
    return {"among": "held-out", "proven": proven, "score": "", "bets": 1, **record}
