"""The command that judges images."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

from candid._support.config import Option, check_fields
from candid._support.errors import CandidError
from candid._support.progress import TerminalProgress
from candid._support.text import printable
from candid.cli.options import ModelName, command
from candid.trust.options import ExamineOptions


@dataclass(frozen=True)
class PageOptions:
    """What is drawn for each image."""

    figures: Annotated[Path | None, Option("Draw a page for each image into this folder.", metavar="DIR")] = (
        None
    )
    top: Annotated[int, Option("Number of classes that get a heatmap on a page.", least=1)] = 3
    contrast: Annotated[
        float,
        Option(
            "Heatmaps: 0 shows mostly what differs between classes, larger values more of what they share.",
            least=0,
        ),
    ] = 0.03
    towards: Annotated[
        str | None, Option("Show on the page how the image would change towards this class.", metavar="CLASS")
    ] = None
    target: Annotated[float, Option("The posterior that --towards should reach.", above=0, below=1)] = 0.5

    def __post_init__(self) -> None:
        check_fields(self)
        if self.towards is not None and self.figures is None:
            raise CandidError("--towards is drawn on a page of figures: name a folder with --figures.")


@command
def examine(
    model: ModelName,
    images: Annotated[list[str], Option("Files, folders, or patterns such as 'photos/*.jpg'.")],
    /,
    options: ExamineOptions,
    pages: PageOptions,
    as_json: Annotated[
        bool, Option("Print one JSON object for each image, and nothing else.", flag="--json")
    ] = False,
) -> int | None:
    """Judge images: class, posterior, p-value and verdict, one line for each image.

    Images that can't be used are named on standard error, and the exit code is then 2. The others are judged.
    """
    from candid.models import checkpoint
    from candid.trust.examine import Examination, Examiner, image_paths

    folder = _Pages(pages.figures)
    paths = [path for path in image_paths(images) if not folder.is_one(path)]
    loaded = checkpoint.load_any(model)
    examiner = Examiner(loaded, model, options.score, options.novelty, options.error)
    explainer = None
    if pages.figures is not None:
        from candid.explanations.explainer import Explainer
        from candid.reports.plots import style
        from candid.reports.plots.examine import examination

        goal = None if pages.towards is None else _one_class(loaded.class_names, pages.towards)
        explainer = Explainer(loaded, pages.top, pages.contrast, goal, pages.target)
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
            page = style.save(examination(each, explanation, names), folder.path_for(each.path))
        if as_json:
            print(json.dumps(_record(each, explanation, page, loaded), allow_nan=False), flush=True)
        else:
            print(printable(_readable(each, names)), flush=True)
    progress.log(", ".join(f"{count:,} {kind}" for kind, count in counts.items()))
    return 2 if counts["unusable"] else None


def _one_class(names: Sequence[str], spec: str) -> int:
    from candid.explanations.classes import chosen_classes

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
