"""What studies of a model on data share: the images as the model sees them, and notes for the user."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from candid._support.errors import CandidError
from candid._support.progress import SILENT, Progress
from candid._support.text import short_names
from candid.data import Part
from candid.data.datasets import open_part
from candid.data.splits import Split
from candid.inference.options import DataOptions
from candid.models import checkpoint
from candid.models.protocol import Model


class Note(NamedTuple):
    """Something that a user should know about a result."""

    topic: str
    """A fixed word for programs, such as "held-out"."""
    text: str


def labelled_images(
    model: Model, data: str, options: DataOptions, progress: Progress = SILENT, part: Part | None = None
) -> tuple[str, Split]:
    """Return the part of ``data`` that was chosen, and its labelled images as ``model`` sees them."""
    chosen = open_part(data, model.class_names, part or options.part, model.record.config)
    return chosen.part, prepared(model, chosen.split, data, options, progress)


def prepared(
    model: Model, split: Split, name: str, options: DataOptions, progress: Progress = SILENT
) -> Split:
    """Return the chosen number of images of ``split``, called ``name``, as ``model`` sees them."""
    chosen = split.subsample(options.images)
    return chosen.preprocess(model.preprocessing, options.skip_bad, progress, name)


def named_models(models: Any) -> dict[str, Model]:
    """Return models by a short name.

    Args:
        models: a model, a bundled name, a model folder or a run folder; a list of these; or a dictionary of
            them by name.

    >>> list(named_models(["cifar10-beta1", "cifar10-resnet"]))
    ['cifar10-beta1', 'cifar10-resnet']
    """
    if isinstance(models, Mapping):
        return {name: checkpoint.resolve(model) for name, model in models.items()}
    listed = list(models) if isinstance(models, list | tuple) else [models]
    if not listed:
        raise CandidError("Name at least one model.")
    sources = {
        str(model) if isinstance(model, str | Path) else f"model-{id(model)}": model for model in listed
    }
    paths = [Path(model) if isinstance(model, str | Path) else Path(model.kind) for model in sources.values()]
    names = short_names(paths)
    unique = [name if names.count(name) == 1 else f"{name}-{i}" for i, name in enumerate(names, 1)]
    return {name: checkpoint.resolve(model) for name, model in zip(unique, sources.values(), strict=True)}
