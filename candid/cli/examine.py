"""The command that judges images."""

import glob
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from candid._support.errors import CandidError
from candid._support.options import Option, check_fields
from candid._support.progress import ShardDisplay, TerminalProgress
from candid._support.text import printable
from candid.cli.app import MODEL_HELP, command, is_model
from candid.data import ARCHIVES
from candid.explanations.options import HeatmapRule, Regions
from candid.models import zoo
from candid.trust.promises import ExamineOptions

if TYPE_CHECKING:
    from candid.explanations.explainer import Explanation
    from candid.judging.examine import Examiner
    from candid.models.protocol import Model
    from candid.trust.verdict import Examination, UnusableImage


MODEL_FILES = (".onnx", ".pt", ".pt2", ".pth", ".ckpt", ".h5", ".safetensors")
"""Endings of files of networks: a first argument with one is meant as the model."""


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
    heatmap_rule: Annotated[
        HeatmapRule,
        Option(
            "Heatmaps: 'candid' subtracts what classes share in proportion to the saliency of a position, "
            "'paper' as the paper's text words it, which makes the maps of all classes look alike."
        ),
    ] = "candid"
    regions: Annotated[
        Regions,
        Option(
            "Decision space: 'candid' draws regions that hold 90 % of their class, 'paper' the paper's "
            "circles, which hold 90 % in each of the two directions."
        ),
    ] = "candid"
    towards: Annotated[
        str | None, Option("Show on the page how the image would change towards this class.", metavar="CLASS")
    ] = None
    against: Annotated[
        str | None,
        Option(
            "Photo models: add the heatmap 'why the class, not this one', and show photos of this one.",
            metavar="CLASS",
        ),
    ] = None
    target: Annotated[float, Option("The posterior that --towards should reach.", above=0, below=1)] = 0.5

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("towards", "against"):
            if getattr(self, name) is not None and self.figures is None:
                raise CandidError(f"--{name} is drawn on a page of figures: name a folder with --figures.")


@dataclass(frozen=True)
class BulkOptions:
    """Many images: one table for each shard, in the folder that --out names."""

    table: Annotated[
        Literal["csv", "jsonl", "parquet"],
        Option("Kind of the tables in the folder. Parquet needs the extra bulk."),
    ] = "csv"
    shard: Annotated[
        str,
        Option("Judge only part I of N of the shards; I is 0 to N - 1: one job of several.", metavar="I/N"),
    ] = "0/1"
    processes: Annotated[int, Option("Processes on this machine that share the shards.", least=1)] = 1

    def __post_init__(self) -> None:
        check_fields(self)


@command
def examine(
    model: Annotated[str, Option(MODEL_HELP, metavar="MODEL")] = zoo.DEFAULT,
    images: Annotated[
        list[str] | None,
        Option("Required: files, folders, or patterns such as 'photos/*.jpg'.", metavar="IMAGES"),
    ] = None,
    /,
    *,
    options: ExamineOptions,
    pages: PageOptions,
    bulk: BulkOptions,
    out: Annotated[
        Path | None,
        Option(
            "Also write a table, .csv, .jsonl or .parquet; what verdicts promise is in NAME.promises.json. A "
            "folder instead gets one table for each shard (tar, zip or Parquet file, URL, 5000 images of a "
            "folder), and those that it has are skipped.",
            metavar="PATH",
        ),
    ] = None,
    sort_into: Annotated[
        Path | None,
        Option("Copy the images into subfolders by verdict and class; originals stay.", metavar="DIR"),
    ] = None,
    as_json: Annotated[
        bool, Option("Print one JSON object for each image, and nothing else.", flag="--json")
    ] = False,
    verbose: Annotated[bool, Option("Say what verdicts promise with all numbers and conditions.")] = False,
) -> int | None:
    """Judge images: class, posterior, p-value and verdict, one line for each image.

    MODEL may be left out. Images that can't be used are named on standard error, and the exit code is then 2.
    The others are judged.
    """
    model, images = _model_and_images(model, images or [])

    if out is not None and (out.is_dir() or not out.suffix):
        others = {"figures": pages.figures, "sort-into": sort_into, "json": as_json, "fdr": options.fdr}
        return _in_bulk(model, images, options, bulk, out, others, verbose)
    _check_not_bulk(images, bulk)
    return _one_by_one(model, images, options, pages, out, sort_into, as_json, verbose)


def _one_by_one(
    model: str,
    images: list[str],
    options: ExamineOptions,
    pages: PageOptions,
    out: Path | None,
    sort_into: Path | None,
    as_json: bool,
    verbose: bool,
) -> int | None:
    """Print a line for each image, and write what was asked for."""
    from candid.judging.examine import Examiner, image_paths
    from candid.judging.table_files import TableFile, verdict_places
    from candid.models import checkpoint
    from candid.trust.ranking import ALL
    from candid.trust.verdict import UnusableImage, heading

    folder, table = _Pages(pages.figures), None if out is None else TableFile(out)
    paths = _not_copied([path for path in image_paths(images) if not folder.is_one(path)], sort_into)
    loaded = checkpoint.load(model)
    examiner = Examiner(loaded, model, options, evidence=pages.figures is not None)
    draw = None if pages.figures is None else _drawing(loaded, pages, folder)
    _say_promises(examiner, model, verbose)
    counts: Counter[str] = Counter()
    examinations = examiner.examine(paths)
    if len(paths) > 1 and not sys.stdout.isatty():
        examinations = iter(TerminalProgress().track(examinations, "examining", len(paths)))
    if not as_json:
        print(heading())
    places: dict[str, str] = {}
    with ExitStack() as written:
        if table is not None:
            written.enter_context(table.open(None if examiner.rule is None else examiner.rule.promises[ALL]))
        for examined in examinations:
            if table is not None:
                table.add(examined)
            counts[_shown(examined, draw, as_json)] += 1
            if sort_into is not None and not isinstance(examined, UnusableImage):
                places |= verdict_places([examined])
    _say_counts(counts, out)
    if sort_into is not None:
        _copied(places, sort_into)
    return 2 if counts["unusable"] else None


def _check_not_bulk(images: Sequence[str], bulk: BulkOptions) -> None:
    """Raise an error if options or images need a folder of tables, and there is none."""
    shard = next((image for image in images if image.lower().endswith(ARCHIVES) or "://" in image), None)
    if shard is not None:
        raise CandidError(f"'{shard}' holds many images: name a folder for the tables, as '--out verdicts'.")
    if bulk != BulkOptions():
        raise CandidError(
            "--table, --shard and --processes are for a folder of tables: name it, as '--out verdicts'."
        )


def _in_bulk(
    model: str,
    images: list[str],
    options: ExamineOptions,
    bulk: BulkOptions,
    out: Path,
    others: Mapping[str, object],
    verbose: bool,
) -> int | None:
    """Write a table for each shard into the folder ``out``."""
    from candid.judging.bulk import Job, Outcome, judged, part_of, prepare, shards_of
    from candid.judging.examine import Examiner
    from candid.judging.table_files import TableFile

    if wrong := [name for name, value in others.items() if value not in (None, False)]:
        raise CandidError(f"--{wrong[0]} does not go with a folder of tables: leave it out.")
    ending = f".{bulk.table}"
    TableFile(out / f"table{ending}")
    shards = shards_of(images, part_of(bulk.shard))
    job = Job(Examiner(model, model, options), out, ending)
    left = [shard for shard in shards if not job.table(shard).exists()]
    prepare(job, model, options)
    _say_promises(job.examiner, model, verbose)
    _log(f"tables: {len(left):,} to write, {len(shards) - len(left):,} exist already")
    counts: Counter[str] = Counter()
    failed = 0
    with ShardDisplay(len(left)) as display:
        for event in judged(job, left, bulk.processes) if left else ():
            if not isinstance(event, Outcome):
                display.seen(*event)
                continue
            display.done(event.name, event.verdicts.total())
            if event.error is not None:
                failed += 1
                display.log(event.error)
            counts += event.verdicts
    _say_counts(counts, out)
    if failed:
        _log(f"{failed} shards can't be read: mend them, then run the command again")
    return 2 if failed or counts["unusable"] else None


def _say_counts(counts: Counter[str], out: Path | None) -> None:
    """Say how many images have each verdict, and where the table is."""
    from candid.trust.verdict import KINDS

    for kind, number in counts.items():
        _log(f"{number:,} {kind}: {KINDS[kind].sentence}" if kind in KINDS else f"{number:,} {kind}")
    if out is not None:
        _log(f"written: {out}")


def _say_promises(examiner: "Examiner", model: str, verbose: bool) -> None:
    """Say what verdicts promise."""
    from candid.trust.ranking import ALL

    if examiner.rule is None:
        _log(f"no p-values and verdicts: to add them, run 'candid calibrate {model} DATA'")
    else:
        promises = examiner.rule.promises[ALL]
        for sentence in promises.sentences() if verbose else [*promises.raised(), promises.plain()]:
            _log(sentence)


def _shown(
    examined: "Examination | UnusableImage",
    draw: "Callable[[Examination], dict[str, Any]] | None",
    as_json: bool,
) -> str:
    """Print what was said of an image, and return its verdict."""
    from candid.trust.verdict import UnusableImage

    if isinstance(examined, UnusableImage):
        _log(printable(f"'{examined.path}' can't be used: {examined.reason}", breaks=False))
        if as_json:
            print(json.dumps({"path": examined.path, "error": examined.reason}), flush=True)
        return "unusable"
    drawn = {} if draw is None else draw(examined)
    if as_json:
        print(json.dumps(examined.to_dict() | drawn, allow_nan=False), flush=True)
    else:
        line = examined.line()
        print(line if line.isprintable() else printable(line, breaks=False), flush=True)
    return examined.verdict or "judged"


def _not_copied(paths: list[Path], folder: Path | None) -> list[Path]:
    """Return the images that no earlier run has copied into ``folder``, if there is one."""
    if folder is None:
        return paths
    from candid.judging.group import is_sorted_copy

    left = [path for path in paths if not is_sorted_copy(path, folder)]
    if not left:
        raise CandidError(f"All of these images are copies that an earlier run made in '{folder}'.")
    return left


def _copied(places: dict[str, str], folder: Path) -> None:
    """Copy images into the folders of their verdicts."""
    from candid.judging.group import sort_into as copy_images

    copied = copy_images(places, folder)
    _log(f"copied into {folder}: {', '.join(f'{number} {name}' for name, number in copied.items())}")


def _log(text: str) -> None:
    print(text if text.isprintable() else printable(text), file=sys.stderr, flush=True)


def _drawing(
    model: "Model", pages: PageOptions, folder: "_Pages"
) -> "Callable[[Examination], dict[str, Any]]":
    """Return a function that draws the page of an examination and returns what it adds to the record."""
    from candid.explanations.explainer import Explainer
    from candid.reports.plots import style
    from candid.reports.plots.examine import examination

    towards, against = (
        None if spec is None else _one_class(model.class_names, name, spec)
        for name, spec in (("towards", pages.towards), ("against", pages.against))
    )
    explainer = Explainer(
        model, pages.top, pages.contrast, towards, pages.target, pages.heatmap_rule, against, pages.regions
    )

    def draw(examined: "Examination") -> dict[str, Any]:
        explanation = explainer.explain(examined)
        page = folder.path_for(Path(examined.path))
        style.save(examination(examined, explanation, model.class_names), page)
        return _record(explanation, page, model.class_names)

    return draw


def _one_class(names: Sequence[str], option: str, spec: str) -> int:
    from candid.explanations.similarity import chosen_classes

    classes = chosen_classes(names, spec)
    if len(classes) > 1:
        raise CandidError(f"--{option} takes one class: '{spec}' stands for {len(classes)}.")
    return classes[0]


def _model_and_images(first: str, others: list[str]) -> tuple[str, list[str]]:
    """Return the model and the images; if the first argument is no model but an image, the default model.

    cyclopts reads positionals from left to right, so the first one is the model until this looks at it.
    """
    path = Path(first)
    named = is_model(first) or path.suffix.lower() in MODEL_FILES
    if not named and others and (path / "config.toml").is_file():
        raise CandidError(f"The training in '{first}' has ended before it had a model: run it again.")
    if not named and (path.exists() or glob.has_magic(first) or "://" in first):
        return zoo.DEFAULT, [first, *others]
    if not others and not named and path.suffix:
        from candid.data.images import EXTENSIONS

        if path.suffix.lower() in EXTENSIONS:  # a photo that is not there
            return zoo.DEFAULT, [first]
    if not others:
        folder = (
            f" The folder '{first}' of images is ./{first}." if first in zoo.MODELS and path.is_dir() else ""
        )
        raise CandidError(f"Name the images to judge: candid examine [MODEL] IMAGES.{folder}")
    return first, others


class _Pages:
    """Names for pages: that of the image with an ending of their own, and a number if it is taken."""

    ENDING = ".page.png"

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.used: set[Path] = set()

    def is_one(self, path: Path) -> bool:
        """Whether ``path`` was drawn by an earlier run."""
        inside = self.folder is not None and path.resolve().parent == self.folder.resolve()
        return inside and path.name.endswith(self.ENDING)

    def path_for(self, image: Path) -> Path:
        assert self.folder is not None
        names = (f"{image.stem}{'' if i == 1 else f'-{i}'}{self.ENDING}" for i in count(1))
        path = next(self.folder / name for name in names if self.folder / name not in self.used)
        self.used.add(path)
        return path


def _record(explanation: "Explanation", page: Path, names: Sequence[str]) -> dict[str, Any]:
    record: dict[str, Any] = {"page": str(page)}
    if explanation.summary is not None:
        record = {"summary": explanation.summary.sentence, **record}
    if explanation.parts:
        record["p_values_of_parts"] = explanation.parts
    if explanation.nearest is not None:
        nearest = explanation.nearest
        record["nearest_known_photos"] = [names[photo.y] for photo in nearest.nearest]
        record["could_be_instead"] = names[nearest.instead]
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
