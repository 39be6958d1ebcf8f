"""The command that corrupts images and shows what models make of them."""

import json
from pathlib import Path
from typing import Annotated

from candid._support.errors import CandidError
from candid._support.options import Option
from candid._support.progress import TerminalProgress
from candid._support.text import printable
from candid.cli.app import JsonFlag, command, show_table
from candid.robustness.options import CorruptOptions

ROOM = 2
"""The number of models up to which the table on a terminal has room for intervals."""


@command
def corrupt(
    targets: Annotated[
        list[str] | None,
        Option("Models, then a data set, as for 'candid evaluate'.", metavar="MODEL... DATA"),
    ] = None,
    /,
    options: CorruptOptions = CorruptOptions(),  # noqa: B008  frozen
    preview: Annotated[
        Path | None, Option("Only draw this image with all corruptions and severities.", metavar="IMAGE")
    ] = None,
    size: Annotated[int, Option("Pixels a side of a preview.", least=8)] = 224,
    as_json: JsonFlag = False,
) -> None:
    """Measure errors, entropy and detection of models on the corruptions of ImageNet-C.

    Predictions are cached in OUT: a benchmark that was stopped continues where it was.
    """
    if preview is not None:
        if targets:
            raise CandidError("--preview draws one image, without models: leave the other names out.")
        _draw_preview(preview, options.out / "preview.png", size, options.seed)
        return
    if targets is None or len(targets) < 2:
        raise CandidError("Name one or more models, then the data, or an image with --preview.")

    from candid.robustness.corruptions.benchmark import corrupt as run
    from candid.robustness.corruptions.metrics import table, write_tables

    progress = TerminalProgress()
    result = run(targets[:-1], targets[-1], progress, **vars(options))
    if result is None:
        return
    files = write_tables(result, options.out)
    for note in result.notes:
        progress.log(note.text)
    if as_json:
        print(json.dumps(result.to_dict()))
        return
    room = len(result.models) <= ROOM
    head, rows = table(result, intervals=room)
    lines = [(name, *(row[i][0] for row in rows)) for i, name in enumerate(head[1:], start=1)]
    metrics = f"metrics ({'95 % intervals' if room else '95 % intervals are in the files'})"
    title = f"Corruptions: {metrics}, then areas under the ROC curve (%) of the score '{options.score}'"
    show_table(title, ("", *(row[0][0] for row in rows)), lines)
    progress.log(f"Written: {', '.join(map(str, files))}")


def _draw_preview(source: Path, path: Path, size: int, seed: int) -> None:
    import numpy as np

    from candid._support.randomness import draws
    from candid.data.images import BadImageError, centre_box, decode
    from candid.reports.plots.comparison import corruption_grid
    from candid.reports.plots.style import save
    from candid.robustness.corruptions.benchmark import CORRUPTIONS, SEVERITIES, corrupted

    try:
        image = decode(source, 3, (size, size), lambda w, h: centre_box(w, h, (size, size)))
    except BadImageError as error:
        raise CandidError(f"'{source}' can't be used: {error}.") from error
    tracked = TerminalProgress().track(CORRUPTIONS.items(), "corrupting", len(CORRUPTIONS))
    rows = {
        name: np.concatenate(
            [corrupted(image[None], name, s, draws(seed, corruption.number).numpy) for s in SEVERITIES]
        )
        for name, corruption in tracked
    }
    figure = save(corruption_grid(image, rows, source.name), path, svg=True)
    print(printable(f"Figure: {figure}, also as SVG."))
