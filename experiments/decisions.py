"""Draw the four cases of the paper's Figure 4, chosen by rules, and the page of docs/explanations.md.

``python -m experiments.decisions runs/results/evaluation/cifar10-beta1 --work runs/results``

The folder is that of ``candid evaluate cifar10-beta1 images``, with images in files. Three cases are test
images: a right decision of median confidence among the confident ones, and the most even ones between two
similar classes and between two that are not (:func:`experiments.imagenet.figures.chosen_photos`). The fourth
is a photo of clothes or hats that may be shown on a page: of those that verdicts call novel, one that the
density rejects most.
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from candid.judging.examine import Examiner
from candid.models import checkpoint
from candid.models.protocol import Model
from candid.reports.demo import SAMPLES
from candid.trust.promises import ExamineOptions
from candid.trust.verdict import Examination
from experiments.imagenet.figures import chosen_photos, similar_classes

ROOT = Path(__file__).parent.parent
PAGE, IMAGES = ROOT / "docs" / "results", ROOT / "docs" / "images"
SHOWN = "cifar10-beta1"
"""The model that explanations are shown of."""
FOREIGN = ("clothes", "hats")
"""Folders of the demo's photos that are in the public domain (CC0)."""
CASES = ("sure", "torn", "unsure")
"""What the pages of test images are called."""


def rejected_by_density(model: Model, photos: Sequence[Path]) -> Path:
    """Return the photo with the smallest two-tailed p-value among those that verdicts call novel.

    Of equal p-values, it is the photo that the length of a code, which needs no model, finds most usual.
    """

    def p_values(score: str | None) -> dict[str, float]:
        examiner = Examiner(model, options=ExamineOptions(score=score))
        return {
            each.path: each.p_value or 0.0
            for each in examiner.examine(photos)
            if isinstance(each, Examination) and (score is not None or each.verdict == "novel")
        }

    novel, by_density, by_length = map(p_values, (None, "two-tailed", "code-length"))
    return Path(min(novel, key=lambda path: (by_density[path], -by_length[path])))


def chosen(evaluation: Path) -> dict[str, tuple[Path, str]]:
    """Return the image of each case, and its second class."""
    model = checkpoint.load(SHOWN)
    with (evaluation / "images.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["set"] == "test" and Path(row["path"]).is_file()]
    photos = chosen_photos(rows, similar_classes(model))
    cases = {
        case: (Path(row["path"]), [*json.loads(row["posterior"])][1])
        for case, row in zip(CASES, photos, strict=False)
    }
    foreign = sorted(path for folder in FOREIGN for path in (SAMPLES / folder).rglob("*.jpg"))
    return cases | {"novel": (rejected_by_density(model, foreign), "")}


def draw(evaluation: Path, work: Path) -> None:
    """Draw the pages of all cases, and that of the explanations with a counterfactual."""
    cases = chosen(evaluation)
    for case, (image, _) in cases.items():
        _page(image, work / "pages" / case, PAGE / f"page-{case}.png")
    image, second = cases["torn"]
    _page(image, work / "pages" / "examine", IMAGES / "examine.png", "--towards", second, "--target", "0.9")


def _page(image: Path, folder: Path, figure: Path, *options: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    command = ["examine", SHOWN, str(image), "--figures", str(folder), *options]
    print("candid", *command, flush=True)
    subprocess.run([sys.executable, "-m", "candid", *command], check=True)
    (page,) = folder.glob("*.png")
    shutil.copy(page, figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Choose and draw."""
    parser = argparse.ArgumentParser(prog="python -m experiments.decisions", description=__doc__)
    parser.add_argument("evaluation", type=Path, help=f"the folder of 'candid evaluate {SHOWN} images'")
    parser.add_argument("--work", type=Path, default=Path("runs/results"), help="the folder for what is kept")
    asked = parser.parse_args(arguments)
    draw(asked.evaluation, asked.work)


if __name__ == "__main__":
    main()
