"""Groups of images, such as the camera or the site of each, from a table in a CSV file."""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from candid._support.errors import CandidError, did_you_mean

PATH = "path"
"""The column with the images."""


@dataclass(frozen=True)
class GroupTable:
    r"""A column of a table that has a row for each image.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "photos.csv"
        >>> _ = file.write_text("path,site\nnew/a.png,north\nnew/b.png,south\n")
        >>> GroupTable.read(f"{file}:site").of(["/photos/new/b.png", "/photos/new/a.png"])
        ['south', 'north']
    """

    file: Path
    groups: Mapping[str, str]
    """The group of each image, by the last parts of its path."""

    @classmethod
    def read(cls, by: str | None) -> "GroupTable | None":
        """Return the table that ``by`` names as ``FILE.csv:COLUMN``; None if it names something else."""
        name, _, column = (by or "").rpartition(":")
        if not name.lower().endswith(".csv"):
            return None
        file = Path(name)
        try:
            with file.open(encoding="utf-8-sig", newline="") as opened:
                rows = list(csv.DictReader(opened))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise CandidError(f"The table '{file}' can't be read ({error}): give a CSV file.") from error
        if not rows:
            raise CandidError(f"The table '{file}' has no rows: give one for each image.")
        for needed in (PATH, column):
            if needed not in rows[0]:
                columns = [name for name in rows[0] if name]
                raise CandidError(f"'{file}' has no column '{needed}': {did_you_mean(needed, columns)}")
        groups: dict[str, str] = {}
        for row in rows:
            path, group = _normal(row[PATH] or ""), row[column] or ""
            if groups.setdefault(path, group) != group:
                raise CandidError(f"'{file}' has '{path}' in two groups: give one row for each image.")
        return cls(file, groups)

    def of(self, paths: Iterable[str], needed: bool = True) -> list[str]:
        """Return the group of each image; an error names one without a row, or it is '' if not ``needed``.

        An image belongs to the row whose path it ends with, such as ``north/a.png`` or ``a.png``.
        """
        images = list(paths)
        groups = [self._group(path) for path in images]
        if needed and None in groups:
            first, missing = images[groups.index(None)], groups.count(None)
            others = f" and {missing - 1} more images" if missing > 1 else ""
            raise CandidError(f"'{self.file}' has no row for '{first}'{others}: add what is missing.")
        return [group or "" for group in groups]

    @classmethod
    def together(cls, spec: str) -> "GroupTable":
        """Return the table with the object, scene or day of each image.

        Without the name of a column, the first one that is not the path counts.

        Raises:
            CandidError: if ``spec`` names no table.
        """
        if spec.lower().endswith(".csv"):
            others = [name for name in _columns(Path(spec)) if name != PATH]
            spec = f"{spec}:{others[0]}" if others else spec
        table = cls.read(spec)
        if table is None:
            raise CandidError(
                "--together takes FILE.csv:COLUMN or FILE.csv (in training also 'folder' or 'none'), not "
                f"'{spec}'."
            )
        return table

    def _group(self, path: str) -> str | None:
        parts = _normal(path).split("/")
        ends = ("/".join(parts[i:]) for i in range(len(parts)))
        return next((self.groups[end] for end in ends if end in self.groups), None)


def _columns(file: Path) -> list[str]:
    """Return the names of the columns of a table."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            return next(csv.reader(opened), [])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CandidError(f"The table '{file}' can't be read ({error}): give a CSV file.") from error


def _normal(path: str) -> str:
    return path.strip().replace("\\", "/").removeprefix("./")
