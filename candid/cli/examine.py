"""The command that asks a model about images."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from candid._support.errors import CandidError
from candid.cli.evaluate import ErrorLevel, ModelFolder, Novelty, TestName


def examine(
    model: ModelFolder,
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE...", help="Files, folders, or patterns such as 'photos/*.jpg'."),
    ],
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Draw a page of figures for each image here."),
    ] = None,
    top: Annotated[int, typer.Option(help="On a page: so many classes have a heatmap.")] = 3,
    contrast: Annotated[
        float,
        typer.Option(
            help="Heatmaps at 0 show mostly what differs between classes; larger, more of what they share."
        ),
    ] = 0.03,
    towards: Annotated[
        str | None,
        typer.Option(metavar="CLASS", help="On a page: how the image would change towards this class."),
    ] = None,
    target: Annotated[float, typer.Option(help="The posterior that --towards should reach.")] = 0.5,
    test: TestName = None,
    novelty: Novelty = None,
    error: ErrorLevel = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line and nothing else.")
    ] = False,
) -> None:
    """Class, posterior, p-value and verdict of images: one line each, however many there are.

    Images that can't be used are named on standard error, and the exit code is then 2; the others are judged.
    """
    from candid.explanations.explainer import Explainer
    from candid.trust.examine import Examination, Examiner, image_paths

    pages = _Pages(figures)
    paths = [path for path in image_paths(images) if not pages.is_one(path)]

    from candid._support.progress import TerminalProgress
    from candid.models import checkpoint
    from candid.reports.plots import examine as examine_plots
    from candid.reports.plots import style

    loaded = checkpoint.load_any(model)
    examiner = Examiner(loaded, model, test, novelty, error)
    explainer = None
    if figures is not None:
        goal = None if towards is None else _one_class(loaded.class_names, towards)
        explainer = Explainer(loaded, top, contrast, goal, target)
    elif towards is not None:
        raise CandidError("--towards is drawn on a page of figures: name a folder with --figures.")
    progress = TerminalProgress()
    if examiner.judge is None:
        progress.log(f"no p-values and verdicts: to add them, run 'candid calibrate {model} DATA'")
    names = loaded.class_names
    counts: Counter[str] = Counter()
    found = examiner.examine(paths)
    if not sys.stdout.isatty():
        found = iter(progress.track(found, "examining", len(paths)))
    if not as_json:
        print(_line("class", "posterior", "p-value", "verdict", "image"))
    for each in found:
        if not isinstance(each, Examination):
            counts["unusable"] += 1
            progress.log(f"'{each.path}' can't be used: {each.reason}")
            if as_json:
                print(json.dumps({"image": str(each.path), "error": each.reason}), flush=True)
            continue
        counts["judged" if each.verdict is None else each.verdict.kind] += 1
        explanation = None if explainer is None else explainer.explain(each)
        page = None
        if explanation is not None:
            page = style.save(examine_plots.examination(each, explanation, names), pages.path_for(each.path))
        if as_json:
            print(json.dumps(_record(each, explanation, page, loaded), allow_nan=False), flush=True)
        else:
            print(_readable(each, names), flush=True)
    progress.log(", ".join(f"{count:,} {kind}" for kind, count in counts.items()))
    if counts["unusable"]:
        raise typer.Exit(2)


def _one_class(names: Sequence[str], spec: str) -> int:
    from candid.explanations.similarity import chosen_classes

    found = chosen_classes(names, spec)
    if len(found) > 1:
        raise CandidError(f"--towards takes one class: '{spec}' stands for {len(found)}.")
    return found[0]


class _Pages:
    """Names for pages: that of the image with an ending of their own, and a number if it is taken."""

    ENDING = ".page.png"

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.used: set[Path] = set()

    def is_one(self, path: Path) -> bool:
        """Whether ``path`` was drawn by an earlier run."""
        own = self.folder is not None and path.resolve().parent == self.folder.resolve()
        return own and path.name.endswith(self.ENDING)

    def path_for(self, image: Path) -> Path:
        assert self.folder is not None
        names = (f"{image.stem}{'' if i == 1 else f'-{i}'}{self.ENDING}" for i in count(1))
        path = next(self.folder / name for name in names if self.folder / name not in self.used)
        self.used.add(path)
        return path


def _line(*columns: str) -> str:
    widths = (24, 10, 8, 10, 0)
    return " ".join(f"{column:<{width}}" for column, width in zip(columns, widths, strict=True)).rstrip()


def _readable(each: Any, names: Sequence[str]) -> str:
    p_value = "–" if each.p_value is None else f"{each.p_value:.3f}"
    verdict = "–" if each.verdict is None else each.verdict.kind
    line = _line(names[each.classes[0]], f"{100 * each.posterior[0]:.1f} %", p_value, verdict, str(each.path))
    if each.verdict is not None and each.verdict.kind == "ambiguous":
        agreeing = [names[y] for y in each.verdict.classes]
        line += f"  ({', '.join(agreeing[:5])}{', …' if len(agreeing) > 5 else ''})"
    return line


def _record(each: Any, explanation: Any, page: Path | None, model: Any) -> dict[str, Any]:
    names = model.class_names
    record = {
        "image": str(each.path),
        "class": names[each.classes[0]],
        "posterior": each.posterior[0],
        "classes": [
            {"class": names[y], "posterior": share}
            for y, share in zip(each.classes, each.posterior, strict=True)
        ],
        "p_value": each.p_value,
        "p_value_in_class": each.class_p_value,
        "verdict": None if each.verdict is None else each.verdict.kind,
        "agreeing": None if each.verdict is None else [names[y] for y in each.verdict.classes],
        "log_density_nats": each.log_density,
    }
    if explanation is None:
        return record
    record |= {"in_words": explanation.reading.sentence, "page": str(page)}
    changed = explanation.changed
    if isinstance(changed, str):
        record["counterfactual"] = {"error": changed}
    elif changed is not None:
        record["counterfactual"] = {
            "class": names[changed.y],
            "target": changed.target,
            "posterior_in_pixels": changed.in_pixels,
            "posterior_when_rounded": changed.when_rounded,
            "posterior": float(changed.posterior[changed.y]),
            "reached": changed.reached,
            "length_in_standard_deviations": changed.length,
            "bits_per_dim": list(changed.bits_per_dim),
        }
    return record
