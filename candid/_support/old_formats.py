"""Readers of what earlier versions wrote, with the version that may drop each of them."""

import hashlib
from collections.abc import Mapping
from typing import Any

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
}
"""Options of later versions with what earlier ones did: these values don't enter the digest of a run."""


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


def version_1_digest(weights_digest: "hashlib._Hash") -> bytes:
    """Return what version 1 keeps with held-out scores: a digest of the weights alone."""
    digest = weights_digest.copy()
    digest.update(b"3")
    return digest.digest()


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
