"""Images to evaluate a trained model on: one part of a data set with the model's labels, or any images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from candid._support.errors import CandidError, did_you_mean
from candid._support.randomness import generator
from candid.data import shards
from candid.data.datasets import (
    image_files,
    is_image,
    of_classes,
    open_dataset,
    read_arrays,
    shards_have_all_classes,
    subfolders,
)
from candid.data.images import Preprocessing, path_of
from candid.data.splits import ArraySplit, FileSplit, IndexedSplit, Split

Part = Literal["train", "val", "test", "all"]
PARTS = ("train", "val", "test")
SYNTHETIC = ("uniform-noise", "constant")
SYNTHETIC_IMAGES = 2000


class Chosen(NamedTuple):
    """A part of a data set."""

    split: Split
    part: str


def open_part(
    spec: str,
    class_names: Sequence[str],
    part: Part | None = None,
    training: Mapping[str, Any] | None = None,
) -> Chosen:
    """The images of ``spec`` with labels among a model's ``class_names``.

    ``part`` is by default the test images, else the ones to validate on, else all. ``training`` is the
    configuration of the model's training: where a data set has no such folders, it decides which images
    were kept apart then. If the model was trained on only some classes, the others' images are left out.
    """
    training = training or {}
    only = training.get("only", ())
    if shards.is_shards(spec):
        shards_have_all_classes(spec, only)
        names = shards.class_names_of(spec)
        found, chosen = shards.open_part(spec, part, len(names) or len(class_names))
        numbers = _numbers(names, class_names, spec).tolist() if names else ()
        return Chosen(replace(found, numbers=tuple(numbers)), chosen)
    own, own_names = _own_parts(spec)
    if part is None:
        kept_apart: Part = "test" if trained_on(spec, training) else "all"
        part = "test" if "test" in own else "val" if "val" in own else kept_apart
    if part in own and part != "train":
        return Chosen(_relabelled(own[part](), own_names, class_names, spec, only), part)
    if part == "all":
        if len(own) > 1:
            raise CandidError(f"'{spec}' has {' and '.join(own)}: choose one of them.")
        (split,) = own.values()
        return Chosen(_relabelled(split(), own_names, class_names, spec, only), "all")
    if not own.keys() & {"train", "all"}:
        raise CandidError(f"'{spec}' has no {part} images: choose {' or '.join(own)}.")
    options = {key: training[key] for key in ("holdout", "split_seed") if key in training}
    data = open_dataset(spec, **options)
    if getattr(data, part) is None:
        raise CandidError(f"'{spec}' has no test images: choose another part of it, such as val.")
    return Chosen(_relabelled(getattr(data, part), data.class_names, class_names, spec, only), part)


def _own_parts(spec: str) -> tuple[dict[str, Callable[[], IndexedSplit]], tuple[str, ...]]:
    """The parts that the data set has, to be opened; all images as one part if it has only class folders."""
    arrays = read_arrays(spec)
    if arrays is not None:
        return {name: partial(_identity, split) for name, split in arrays[0].items()}, arrays[1]
    folder = path_of(spec)
    folders = {name: folder / name for name in PARTS if (folder / name).is_dir()} or {"all": folder}
    names = tuple(sorted({entry.name for part in folders.values() for entry in subfolders(part)}))
    if not names:
        raise CandidError(
            f"'{spec}' has no class folders: give a folder with the images of each class in a folder."
        )
    return {name: partial(image_files, part, names) for name, part in folders.items()}, names


def _identity(split: ArraySplit) -> ArraySplit:
    return split


def trained_on(spec: str, training: Mapping[str, Any]) -> bool:
    """Whether ``spec`` is what the model was trained on.

    By the folder's name alone: data may have been moved, or named from another folder.
    """
    if spec == "digits" or "data" not in training:
        return spec == "digits"
    return path_of(spec).resolve().name == path_of(training["data"]).resolve().name


def _relabelled(
    split: Split, names: Sequence[str], class_names: Sequence[str], spec: str, only: Sequence[str]
) -> ArraySplit | FileSplit:
    assert isinstance(split, ArraySplit | FileSplit)
    present = [name for name in names if name in only]
    if present:
        split, names = of_classes(split, names, present), present
    return replace(split, labels=_numbers(names, class_names, spec)[split.labels])


def _numbers(names: Sequence[str], class_names: Sequence[str], spec: str) -> Tensor:
    """What the model calls the classes ``names``: by name, or if there are none, by their order."""
    numbers = [str(i) for i in range(max(len(names), len(class_names)))]
    nameless = numbers[: len(class_names)] == list(class_names) or numbers[: len(names)] == list(names)
    if set(names) <= set(class_names):
        return torch.tensor([class_names.index(name) for name in names])
    if nameless and len(names) == len(class_names):
        return torch.arange(len(names))
    unknown = next(name for name in names if name not in class_names)
    if nameless:
        raise CandidError(
            f"'{spec}' has {len(names)} classes and the model {len(class_names)} without the same names: "
            "give both the names (candid import --class-names)."
        )
    raise CandidError(
        f"'{spec}' has a class '{unknown}', unknown to the model: {did_you_mean(unknown, class_names)}"
    )


def open_images(spec: str, preprocessing: Preprocessing) -> Split:
    """Any images, without labels: a folder, searched with all its subfolders, a data set or tar shards.

    Of a data set with several parts, the test images (or those to validate on). ``uniform-noise`` and
    ``constant`` (one colour an image) are made here.
    """
    if spec in SYNTHETIC:
        return _synthetic(spec, preprocessing)
    if shards.is_shards(spec):
        found, _ = shards.open_part(spec, None, None)
        return replace(found, numbers=(-1,) * found.classes)
    arrays = read_arrays(spec)
    if arrays is not None:
        split = arrays[0].get("test", arrays[0]["train"])
        return replace(split, labels=unknown(len(split)))
    folder = path_of(spec)
    if all((folder / name).is_dir() for name in ("train", "test")):
        folder = folder / "test"
    elif all((folder / name).is_dir() for name in ("train", "val")):
        folder = folder / "val"
    paths = tuple(sorted(path for path in folder.rglob("*") if is_image(path, folder)))
    if not paths:
        choices = ", ".join(SYNTHETIC)
        raise CandidError(f"'{spec}' has no images: name a folder with some, or one of {choices}.")
    return FileSplit(paths, unknown(len(paths)))


def _synthetic(kind: str, preprocessing: Preprocessing) -> ArraySplit:
    random = generator(SYNTHETIC.index(kind), 7)
    shape = (
        SYNTHETIC_IMAGES,
        preprocessing.channels,
        *(preprocessing.size if kind == "uniform-noise" else (1, 1)),
    )
    images = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    return ArraySplit(images.expand(-1, -1, *preprocessing.size).contiguous(), unknown(SYNTHETIC_IMAGES))


def unknown(images: int) -> Tensor:
    """The labels of so many images without labels."""
    return torch.full((images,), -1)


def subsample(split: Split, images: int | None) -> Split:
    """``images`` of ``split``, evenly spread over it; all if there are no more."""
    if images is None or images >= len(split):
        return split
    if images < 1:
        raise CandidError(f"The number of images must be at least 1, not {images}.")
    if not isinstance(split, ArraySplit | FileSplit):
        raise CandidError("Tar shards are read from end to end: leave --images out.")
    return split.subset(torch.arange(images) * len(split) // images)
