"""ImageNet as the commands take it: a folder of links, with a share of the validation photos held out."""

import csv
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from candid._support.errors import CandidError
from candid._support.numbers import digest
from candid.data.formats import is_image, subfolders
from candid.data.splits import size_and_date
from candid.judging.calibrate import FEWEST_IMAGES

ByClass = dict[str, list[Path]]
"""Photos by the name of their class folder."""


@dataclass(frozen=True)
class Photos:
    """Which photos are evaluated, and which are held out."""

    names: dict[str, str]
    """Names of the classes by class folder, in the order of the checkpoints' classes."""
    test: ByClass
    held_out: ByClass
    own_held_out: bool
    """Whether the held-out photos have a folder of their own, so that none is taken from the others."""
    train: Path | None
    """A folder with training photos, for the statistics of features."""

    @property
    def key(self) -> str:
        """A hash of everything that can change a result."""
        parts = (
            [(name, str(file), size_and_date(file)) for name, files in each.items() for file in files]
            for each in (self.test, self.held_out)
        )
        return digest(repr([self.names, *parts, self.train]).encode()).hexdigest()[:16]

    def link(self, folder: Path) -> None:
        """Make ``folder`` a data set of links: ``test``, ``val`` (held out) and perhaps ``train``."""
        shutil.rmtree(folder, ignore_errors=True)
        for part, classes in {"test": self.test, "val": self.held_out}.items():
            for wnid, files in classes.items():
                own = folder / part / self.names[wnid]
                own.mkdir(parents=True)
                for file in files:
                    (own / file.name).symlink_to(file.absolute())
        if self.train is not None:
            link_folders(self.train, folder / "train", self.names)


def link_folders(source: Path, folder: Path, names: Mapping[str, str]) -> None:
    """Link the class folders of ``source`` under their ``names`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in subfolders(source):
        link = folder / names[entry.name]
        link.unlink(missing_ok=True)
        link.symlink_to(entry.absolute(), target_is_directory=True)


def find_photos(
    imagenet: Path,
    classes: Path | None = None,
    held_out: Path | None = None,
    share: float = 0.1,
    images: int | None = None,
) -> Photos:
    """Return the photos to evaluate and those to hold out.

    Args:
        imagenet: a folder with ``val/<wnid>/*.JPEG`` and perhaps ``train``, or with class folders alone.
        classes: a table with the columns index, wnid and name; ``imagenet/classes.csv`` if it is there.
        held_out: a folder of photos to hold out; otherwise the share ``share`` of the photos of each class.
        share: which photos these are depends on their names alone.
        images: evaluate only this number of photos, for a trial; the training photos are left out, too.
    """
    source = _validation_folder(imagenet)
    found = photos_by_class(source)
    own_table = imagenet / "classes.csv"
    names = class_names(list(found), classes or (own_table if own_table.is_file() else None))
    if held_out is None:
        apart, rest = divided(found, share)
    else:
        apart, rest = photos_by_class(held_out), found
        _check_known(held_out, apart, names)
        evaluated = {file.resolve() for files in rest.values() for file in files}
        if any(file.resolve() in evaluated for files in apart.values() for file in files):
            raise CandidError(
                f"'{held_out}' has photos that are evaluated: hold out others, or leave --held-out out."
            )
    train = imagenet / "train" if (imagenet / "train").is_dir() and images is None else None
    if train is not None:
        _check_known(train, [entry.name for entry in subfolders(train)], names)
    if images is not None:
        apart, rest = _spread(apart, max(images, FEWEST_IMAGES)), _spread(rest, images)
    if (count := sum(map(len, apart.values()))) < FEWEST_IMAGES:
        raise CandidError(
            f"{count} photos are held out, too few for p-values, which need {FEWEST_IMAGES}: give a larger "
            "--held-out-share, or other photos with --held-out."
        )
    return Photos(names, rest, apart, held_out is not None, train)


def _validation_folder(imagenet: Path) -> Path:
    if not imagenet.is_dir():
        raise CandidError(
            f"There is no folder '{imagenet}': name the folder of ImageNet that has 'val' in it."
        )
    if (imagenet / "val").is_dir():
        return imagenet / "val"
    if (imagenet / "train").is_dir():
        raise CandidError(
            f"'{imagenet}' has train but no val, and results on training photos mean nothing: add val/<wnid>."
        )
    return imagenet


def photos_by_class(folder: Path) -> ByClass:
    """Return the photos of each class folder of ``folder``, both sorted by name."""
    if not folder.is_dir():
        raise CandidError(f"There is no folder '{folder}': name one with a folder of photos for each class.")
    found = {entry.name: list(_images(entry)) for entry in subfolders(folder)}
    if not found:
        raise CandidError(f"'{folder}' has no class folders: sort its photos into one folder for each class.")
    for wnid, files in found.items():
        if not files:
            raise CandidError(f"The class folder '{folder / wnid}' has no photos: unpack ImageNet again.")
    return found


def _images(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if is_image(path, folder))


def class_names(wnids: Sequence[str], table: Path | None) -> dict[str, str]:
    """Return the names of classes by wnid, in their order: from the ``table``, or the wnids themselves."""
    if table is None:
        return {wnid: wnid for wnid in wnids}
    try:
        with table.open(encoding="utf-8", newline="") as file:
            rows = sorted((int(row["index"]), row["wnid"], row["name"]) for row in csv.DictReader(file))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CandidError(
            f"'{table}' is not a table with the columns index, wnid and name ({error!r}): correct it."
        ) from error
    listed = [wnid for _, wnid, _ in rows]
    if listed != list(wnids):
        different = min({*listed} ^ {*wnids}, default="in another order")
        raise CandidError(
            f"'{table}' lists {len(listed)} classes that are not the {len(wnids)} class folders, sorted "
            f"({different}): give the table of these folders."
        )
    plain = {wnid: name.replace("_", " ").replace("/", " ").strip(" .") for _, wnid, name in rows}
    count = Counter(plain.values())
    return {
        wnid: name if name and count[name] == 1 else f"{name} {wnid}".strip() for wnid, name in plain.items()
    }


def _check_known(folder: Path, wnids: Sequence[str] | ByClass, names: Mapping[str, str]) -> None:
    for wnid in wnids:
        if wnid not in names:
            raise CandidError(
                f"'{folder}' has a class folder '{wnid}' that the photos to evaluate do not have: remove it."
            )


def divided(found: ByClass, share: float) -> tuple[ByClass, ByClass]:
    """Return the held-out photos of each class, at least one, and the others."""
    apart, rest = {}, {}
    for wnid, files in found.items():
        if len(files) < 2:
            raise CandidError(
                f"The class folder '{files[0].parent}' has a single photo, too few to hold one out: "
                "add photos, or name others with --held-out."
            )
        count = min(max(1, round(share * len(files))), len(files) - 1)
        chosen = sorted(files, key=lambda file: digest(f"{file.parent.name}/{file.name}").digest())[:count]
        apart[wnid] = sorted(chosen)
        rest[wnid] = [file for file in files if file not in chosen]
    return apart, rest


def _spread(found: ByClass, images: int) -> ByClass:
    """Return this number of photos, evenly spread over the classes; all if there are fewer."""
    every = [(wnid, file) for wnid, files in found.items() for file in files]
    chosen: ByClass = {}
    for i in range(min(images, len(every))):
        wnid, file = every[i * len(every) // min(images, len(every))]
        chosen.setdefault(wnid, []).append(file)
    return chosen
