"""Make the paper's tables and figures from checkpoints and an ImageNet folder.

``python -m experiments.imagenet beta_1.avg.pt beta_inf.avg.pt imagenet --out imagenet-results``

A checkpoint is a file that the paper's authors released, the folder of a model, or torchvision's ResNet-50.
The page, its figures and ``results.json`` are written to the folder of ``--out``. What was stopped goes on
where it was: the same command again computes nothing that is finished.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from candid._support.errors import CandidError
from candid._support.files import write_texts
from experiments.imagenet.figures import draw_trade_off
from experiments.imagenet.study import Options, Study
from experiments.imagenet.tables import tables
from experiments.tables import filled


def parsed(arguments: Sequence[str] | None) -> Options:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.imagenet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoints", metavar="CHECKPOINT", nargs="+", type=Path, help="a released file or a model folder")
    add("imagenet", metavar="IMAGENET", type=Path, help="a folder with val/<wnid>, and perhaps train/<wnid>")
    add("--out", metavar="DIR", type=Path, default=Path("imagenet-results"), help="the folder of the page")
    add(
        "--held-out",
        metavar="FOLDER",
        type=Path,
        help="photos to hold out, in class folders; then all of val is evaluated",
    )
    add(
        "--held-out-share",
        metavar="X",
        type=float,
        default=0.1,
        help="otherwise, the share of val to hold out (%(default)s)",
    )
    add(
        "--classes",
        metavar="FILE",
        type=Path,
        help="a table with index, wnid and name (IMAGENET/classes.csv)",
    )
    add("--images", metavar="N", type=_positive, help="evaluate only this number of photos, for a trial")
    add(
        "--corrupted",
        metavar="N",
        type=_positive,
        default=5000,
        help="photos for each corruption and severity (%(default)s)",
    )
    add(
        "--imagenet-c",
        metavar="FOLDER",
        type=Path,
        help="ImageNet-C, instead of corruptions that are made here",
    )
    add(
        "--attacked",
        metavar="N",
        type=int,
        default=0,
        help="photos to attack; the paper has 200 (none: it is slow)",
    )
    add(
        "--photo",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="a photo for Figures 4 and 6; repeat for more",
    )
    add(
        "--group",
        metavar="NAME=CLASSES",
        action="append",
        default=[],
        help="classes for Figure 5; repeat for more",
    )
    add("--devices", metavar="N", type=_positive, help="processes that compute (all GPUs, or 1 on a CPU)")
    add(
        "--workers",
        metavar="N",
        type=int,
        default=2,
        help="processes that load images, for each of these (%(default)s)",
    )
    add(
        "--launch",
        metavar="COMMAND",
        default="",
        help="what starts the processes instead, such as 'torchrun --nproc-per-node 6'",
    )
    return Options(**vars(parser.parse_args(arguments)))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on, not '{text}'")
    return int(text)


def write_page(results: dict[str, Any], out: Path) -> Path:
    """Write Figure 3, ``results.json`` and the page; return where the page is."""
    classes = results["photos"]["classes"]
    drawn = {"figure_3": draw_trade_off(results["models"], classes, out / "figure-3.png")}
    template = files("experiments.imagenet").joinpath("page.md").read_text(encoding="utf-8")
    texts = {
        "results.json": json.dumps(results, indent=1) + "\n",
        "README.md": filled(template, tables(results | drawn)),
    }
    return write_texts(texts, out)[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, draw and write; a mistake of the user ends in one line and exit code 2."""
    options = parsed(arguments)
    try:
        study = Study(options)
        results = study.results()
        print(f"[{study.stages.total}/{study.stages.total}] {write_page(results, options.out)}")
    except CandidError as error:
        message = str(error)
    except KeyboardInterrupt:
        message = "stopped; the same command goes on from here."
    else:
        return
    print(f"imagenet: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
