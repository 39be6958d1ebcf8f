"""The 1000 classes of ImageNet: their names, and the numbers of WordNet that its folders are called by."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "imagenet_classes.txt"
"""One class on each line, in the order of labels: number of WordNet, name."""


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
    known = set(class_names)
    if known.issuperset(folders):
        return list(folders)
    others = {each: names().get(each, each.replace("_", " ")) for each in folders if each not in known}
    return [others[each] if others.get(each) in known else each for each in folders]
