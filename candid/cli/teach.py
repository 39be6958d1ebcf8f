"""The commands that change the classes of a photo model, and undo what they changed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from candid._support.errors import CandidError
from candid._support.options import Option
from candid._support.progress import TerminalProgress
from candid._support.text import named_pairs, plural, short_name
from candid.cli.app import ModelName, command

Out = Annotated[
    Path | None,
    Option(
        "Folder for the new model; the old one then stays as it is.",
        metavar="DIR",
        default="the folder of MODEL; 'candid undo' takes the change back",
    ),
]


@command
def teach(
    model: ModelName,
    classes: Annotated[
        list[str] | None,
        Option(
            "NAME=FOLDER: a class and its photos. Repeat for more classes, or for more folders of one.",
            metavar="NAME=FOLDER",
        ),
    ] = None,
    /,
    *,
    out: Out = None,
    from_store: Annotated[
        Path | None,
        Option("Teach the corrections in this folder of 'candid serve --store' instead.", metavar="DIR"),
    ] = None,
) -> None:
    """Teach a photo model a new class from five photos or more, or more photos of a class that it knows.

    It takes seconds and needs no old photos. A new class leaves the ratios of the posteriors of the known
    classes exactly as they were; more photos of a known class are added as if they had been trained on. The
    price is printed: how the recall of the known classes changes on the held-out photos.
    """
    if from_store is not None:
        if classes:
            raise CandidError("Give NAME=FOLDER or --from-store, not both.")
        from candid.judging.store import corrections_in
        from candid.serve.lessons import learn

        corrections = corrections_in(from_store, short_name(Path(model)))
        lesson = learn(model, from_store, corrections, out or model, TerminalProgress())
        print(f"{plural(sum(lesson.photos.values()), 'correction')} taught, in {out or model}")
        return
    sources: dict[str, list[str]] = {}
    for each in classes or ():
        for name, folder in named_pairs([each], "candid teach", "NAME=FOLDER").items():
            sources.setdefault(name, []).append(folder)

    from candid.training.teach import teach as teach_classes

    given = {name: folders[0] if len(folders) == 1 else folders for name, folders in sources.items()}
    place = out or model
    result = teach_classes(model, given, out=place, progress=TerminalProgress())
    _show(result.model.class_names, place, out)


@command
def forget(
    model: ModelName,
    name: Annotated[str, Option("A class of the model.", metavar="NAME")],
    /,
    *,
    out: Out = None,
) -> None:
    """Remove a class from a photo model.

    After the last class that was taught is removed, the model is exactly as it was before teaching.
    """
    from candid.training.changes import forget as forget_class

    made = forget_class(model, name, out=out or model, progress=TerminalProgress())
    _show(made.class_names, out or model, out)


@command
def rename(
    model: ModelName,
    names: Annotated[
        list[str], Option("OLD=NEW: a class and its new name. Repeat for more.", metavar="OLD=NEW")
    ],
    /,
    *,
    out: Out = None,
) -> None:
    """Rename classes of a photo model; nothing else changes."""
    pairs = named_pairs(names, "candid rename", "OLD=NEW")

    from candid.training.changes import rename as rename_classes

    made = rename_classes(model, pairs, out=out or model, progress=TerminalProgress())
    _show(made.class_names, out or model, out)


@command
def merge(
    model: ModelName,
    classes: Annotated[
        list[str],
        Option("NAME=CLASS,CLASS: classes that become one. Repeat for more.", metavar="NAME=CLASSES"),
    ],
    /,
    *,
    out: Out = None,
) -> None:
    """Merge classes of a photo model, as if their photos had been in one folder."""
    pairs = named_pairs(classes, "candid merge", "NAME=CLASS,CLASS")
    merged = {name: [each.strip() for each in listed.split(",")] for name, listed in pairs.items()}

    from candid.training.changes import merge as merge_classes

    made = merge_classes(model, merged, out=out or model, progress=TerminalProgress())
    _show(made.class_names, out or model, out)


@command
def undo(model: ModelName, /) -> None:
    """Take back the latest change of a model: teach, forget, rename or merge without --out."""
    from candid.training.changes import undo as undo_change

    made = undo_change(model, progress=TerminalProgress())
    print(f"{len(made.class_names)} classes, in {model}")


def _show(class_names: Iterable[str], place: str | Path, out: Path | None) -> None:
    """Say what is where, and how to undo it."""
    print(f"{len(list(class_names))} classes, in {place}")
    if out is None:
        print(f"take it back with: candid undo {place}")
