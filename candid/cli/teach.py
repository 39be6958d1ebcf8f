"""The commands that add a class to a photo model and take it away again."""

from pathlib import Path
from typing import Annotated

from candid._support.errors import CandidError
from candid._support.options import Option
from candid._support.progress import TerminalProgress
from candid._support.text import named_pairs, plural
from candid.cli.app import ModelName, command

Out = Annotated[Path, Option("Folder for the new model; the old one stays as it is.", metavar="DIR")]


@command
def teach(
    model: ModelName,
    classes: Annotated[
        list[str] | None,
        Option("NAME=FOLDER: the new class and its photos. Repeat for more.", metavar="NAME=FOLDER"),
    ] = None,
    /,
    *,
    out: Out,
    from_store: Annotated[
        Path | None,
        Option("Teach the corrections in this folder of 'candid serve --store' instead.", metavar="DIR"),
    ] = None,
) -> None:
    """Teach a photo model new classes, each from five photos or more.

    It takes seconds and needs no old photos. The ratios of the posteriors of the known classes stay exactly
    as they were. The price is printed: how the recall of the known classes changes on the held-out photos.
    """
    if from_store is not None:
        if classes:
            raise CandidError("Give NAME=FOLDER or --from-store, not both.")
        from candid.judging.store import corrections_in
        from candid.serve.lessons import learn

        lesson = learn(model, from_store, corrections_in(from_store), out, TerminalProgress())
        print(f"{plural(sum(lesson.photos.values()), 'correction')} taught, in {out}")
        return
    pairs = named_pairs(classes or (), "candid teach", "NAME=FOLDER")

    from candid.training.teach import teach as teach_classes

    result = teach_classes(model, pairs, out=out, progress=TerminalProgress())
    print(f"{len(result.model.class_names)} classes, in {out}")


@command
def forget(
    model: ModelName,
    name: Annotated[str, Option("A class that was taught.", metavar="NAME")],
    /,
    *,
    out: Out,
) -> None:
    """Remove a class that a photo model was taught.

    After the last one is removed, the model is exactly as it was before teaching.
    """
    from candid.training.teach import forget as forget_class

    made = forget_class(model, name, out=out, progress=TerminalProgress())
    print(f"{len(made.class_names)} classes, in {out}")
