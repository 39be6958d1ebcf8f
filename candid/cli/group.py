"""The command that groups what a model does not know."""

import sys
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from candid._support.errors import CandidError
from candid._support.options import Option
from candid._support.progress import TerminalProgress
from candid.cli.app import ModelName, command
from candid.trust.promises import ErrorLevel, Novelty, ScoreName


@command
def group(
    model: ModelName,
    images: Annotated[list[str], Option("Files, folders, or patterns such as 'photos/*.jpg'.")],
    /,
    *,
    groups: Annotated[
        int | None, Option("The number of groups, if you know it.", least=1, default="found")
    ] = None,
    out: Annotated[Path, Option("Folder for groups.csv and groups.html.", metavar="DIR")] = Path("groups"),
    sort_into: Annotated[
        Path | None,
        Option("Copy the images into subfolders of this folder; originals stay.", metavar="DIR"),
    ] = None,
    score: ScoreName = None,
    novelty: Novelty = None,
    error: ErrorLevel = None,
) -> int | None:
    """Group the images that a model does not know: unknown 1, unknown 2, …

    Images that can't be used are named on standard error, and the exit code is then 2.
    """
    from candid.judging.examine import image_paths
    from candid.judging.group import SINGLE, is_sorted_copy
    from candid.judging.group import group as group_images
    from candid.judging.group import sort_into as copy_images
    from candid.reports.pages import write_groups

    paths = image_paths(images)
    if sort_into is not None:
        paths = [path for path in paths if not is_sorted_copy(path, sort_into)]
    if not paths:
        raise CandidError(f"All of these images are copies that an earlier run made in '{sort_into}'.")
    levels = {"score": score, "novelty": novelty, "error": error}
    progress = TerminalProgress()
    result = group_images(model, paths, groups=groups, progress=progress, skip_bad=True, **levels)
    for image in result.unusable:
        progress.log(f"'{image.path}' can't be used: {image.reason}")
    table = Table(title=f"novel images: {result.novel} of {len(result.examinations)}", title_justify="left")
    for column in ("group", "images", "nearest class", "central image"):
        table.add_column(column, justify="right" if column == "images" else "left", overflow="fold")
    for each in result.groups:
        table.add_row(each.name, str(len(each.members)), escape(each.nearest), escape(each.members[0].path))
    table.add_row("single images", str(len(result.singles)), "", "")
    Console().print(table)
    if result.singles and not result.groups:
        progress.log(
            "no group was found: --groups 1 makes one of all novel images; with --sort-into they are in "
            f"'{SINGLE}'"
        )
    files = write_groups(result, out)
    print(f"written: {', '.join(map(str, files))}", file=sys.stderr)
    if sort_into is not None:
        counts = copy_images(result.places(), sort_into)
        progress.log(
            f"copied into {sort_into}: {', '.join(f'{n} {name}' for name, n in sorted(counts.items()))}"
        )
    return 2 if result.unusable else None
