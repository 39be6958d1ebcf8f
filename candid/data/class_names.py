"""Names of classes, and the 1000 classes of ImageNet: their names and WordNet numbers of their folders."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "imagenet_classes.txt"
"""One class on each line, in the order of labels: number of WordNet, name."""


IMAGENET_TREE = Path(__file__).parent / "imagenet_tree.json"
"""Kinds above these classes: hypernyms of WordNet 3.0."""


@cache
def names() -> dict[str, str]:
    """Return the short name of each class by its number of WordNet, in the order of labels.

    >>> len(names()), names()["n01440764"]
    (1000, 'tench')
    """
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return dict(line.split(" ", 1) for line in lines)


def named(folders: Sequence[str], class_names: Sequence[str]) -> list[str]:
    """Return names of folders as a model calls its classes: ``n02123159`` and ``tiger_cat`` are 'tiger cat'.

    >>> named(["n01440764", "tiger_cat", "dog"], ["tench", "tiger cat", "dog"])
    ['tench', 'tiger cat', 'dog']
    """
    classes = set(class_names)
    if classes.issuperset(folders):
        return list(folders)
    others = {
        folder: names().get(folder, folder.replace("_", " ")) for folder in folders if folder not in classes
    }
    return [others[folder] if others.get(folder) in classes else folder for folder in folders]
