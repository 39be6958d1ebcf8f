"""Make ``docs/results`` from the bundled models: every table and figure, and the figures on their cards.

``python -m experiments.results images --ood tiny=tiny20 --ood mnist=mnist --tiny tiny20``

``images`` is CIFAR-10 as published, or as a folder with ``test/<class>/*.png``. Passes and attacks are kept
in ``runs/results``: what was stopped goes on where it was. Without ``images`` nothing is measured: pages and
cards are written again from ``docs/results/results.json``.

``--only NAME`` measures this model, and those that the page does not have yet; of the others, what was
measured earlier stays. ``--images 100 --corrupted 20 --attacked 4`` runs through in some minutes, to see that
everything works; its results replace those of the page, so do it in a copy of the repository.
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from candid._support.errors import CandidError
from candid._support.files import replacing
from candid._support.numbers import softmax
from candid.data.datasets import open_part
from candid.data.formats import CIFAR_CLASSES
from candid.data.splits import ArraySplit
from candid.evaluation.calibration_error import CRITICAL, all_bins, top_bins
from candid.evaluation.compare import METRICS
from candid.evaluation.selective import paired_difference
from candid.inference.metrics import log_odds
from candid.inference.predictions import Predictions
from candid.models import zoo
from candid.reports.plots import comparison as comparison_plots
from candid.reports.plots import style
from experiments.cards import add_figures
from experiments.class_tables import compared_distances
from experiments.decisions import SHOWN
from experiments.decisions import draw as draw_decisions
from experiments.geometry import measured_geometry, sources
from experiments.models import NOT_BUNDLED, command, with_test
from experiments.results_tables import card_figures, headline, tables
from experiments.tables import Results, filled, title

ROOT = Path(__file__).parent.parent
PAGE, IMAGES = ROOT / "docs" / "results", ROOT / "docs" / "images"
RESULTS = PAGE / "results.json"
TEMPLATE = Path(__file__).parent / "page.md"
"""Its words; the tables are put between the marks."""
ATTACKED = ("cifar10-beta1", "cifar10-betainf", "cifar10-resnet")
"""The models under all nine attacks of the paper."""
ZONES = "cifar10-betainf"
"""The model whose zones of the paper's three scores are drawn."""
SAMPLED = (SHOWN, "cifar10-beta0", "cifar10-betainf")
"""The models whose samples are drawn."""
LEVELS = ("--novelty", 0.01, "--error", 0.05, "--confidence", 0)
"""Verdicts of the page: an image is accepted if one class fits, whatever its posterior."""


class Counts(NamedTuple):
    """How many images are measured."""

    images: int | None
    """Test images, and images of each other set; all of them if None."""
    corrupted: int
    attacked: int

    @property
    def flags(self) -> tuple[object, ...]:
        """The option of a command for the number of test images."""
        return () if self.images is None else ("--images", self.images)


def candid(*arguments: object) -> None:
    """Run a command of the command line."""
    print("candid", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "candid", *map(str, arguments)], check=True)


def as_images(data: str, work: Path) -> str:
    """Return CIFAR-10 as a folder of images: ``data``, or its test images, written there from its batches."""
    folder, unfinished = work / "data" / "cifar10", work / "data" / "unfinished"
    if not any(Path(data).glob("data_batch_1*")):
        return data
    if not folder.is_dir():
        split, _ = open_part(data, CIFAR_CLASSES, "test")
        assert isinstance(split, ArraySplit)
        for i, (pixels, y) in enumerate(zip(split.images, split.labels, strict=True)):
            path = unfinished / "test" / CIFAR_CLASSES[y] / f"{i:05}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.transpose(1, 2, 0)).save(path)
        unfinished.rename(folder)
    return str(folder)


def evaluated(name: str, data: str, ood: Sequence[str], counts: Counts, work: Path) -> dict[str, Any]:
    """What ``candid evaluate`` says of a model, and how often it is sure."""
    out = work / "evaluation" / name
    others = [argument for each in ood for argument in ("--ood", each)]
    options = (*LEVELS, "--temperature", "--ten-crop", *others, *counts.flags)
    candid("evaluate", name, data, "--out", out, *options)
    metrics = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    predictions = passed(name, data, counts, work)
    scaled = metrics["temperature_scaled"]
    after = softmax(predictions.logits.astype(np.float64) / scaled["temperature"])
    return {
        "beta": metrics["beta"] if metrics["kind"] == "generative" else None,
        "images": metrics["images"],
        **_figures(metrics),
        "ten_crops": _figures(metrics["ten_crop"]),
        "sure": int((predictions.posterior >= CRITICAL).sum()),
        "scaled": {
            "temperature": scaled["temperature"],
            **_figures(scaled),
            "sure": int((after >= CRITICAL).sum()),
        },
        "false_positives": metrics["false_positives"],
        "ood": metrics["ood"],
        "verdicts": metrics["verdicts"],
        "selective": selective(metrics["selective"], out / "images.csv", predictions),
    }


def selective(found: Results, table: Path, predictions: Predictions) -> Results:
    """What verdicts accept next to a threshold on the posterior alone, which knows no novelty.

    ``table`` has the verdicts of the images of ``predictions``, in their order.
    """
    with table.open(encoding="utf-8", newline="") as file:
        accepted = np.array(
            [row["verdict"] == "accept" for row in csv.DictReader(file) if row["set"] == "test"]
        )
    confident = np.zeros_like(accepted)
    confident[np.argsort(-log_odds(predictions.logits), kind="stable")[: accepted.sum()]] = True
    right = predictions.logits.argmax(1) == predictions.labels
    kept = {key: found[key] for key in ("images", "aurc", "augrc", "intervals", "verdicts")}
    difference = paired_difference(accepted, confident, right)._asdict() if accepted.any() else None
    return kept | {"plain": found["without_novelty"], "difference": difference}


def _figures(metrics: dict[str, Any]) -> dict[str, Any]:
    found = {key: metrics[key] for key in METRICS if key in metrics}
    return found | {"intervals": {key: ends for key, ends in metrics["intervals"].items() if key in found}}


def passed(name: str, data: str, counts: Counts, work: Path) -> Predictions:
    """The pass of a model over the test images, from the folder of its evaluation if it is there."""
    out = work / "evaluation" / name
    pattern = "predictions/test-????????????????.safetensors"
    if not any(out.glob(pattern)):
        candid("evaluate", name, data, "--out", out, *counts.flags)
    files = list(out.glob(pattern))
    if len(files) > 1:
        raise CandidError(f"'{out}' has passes of several versions of a model: remove it.")
    found = Predictions.load(files[0])
    assert found is not None, files
    return found


def corrupted(names: Sequence[str], data: str, images: int, work: Path) -> Any:
    """What ``candid corrupt`` says of these models."""
    out = work / "corruption"
    candid("corrupt", *names, data, "--baseline", "cifar10-resnet", "--images", images, "--out", out)
    return json.loads((out / "corruptions.json").read_text(encoding="utf-8"))


def attacked(names: Sequence[str], data: str, images: int, work: Path) -> Any:
    """What ``candid attack`` says of those models that classify.

    Some are attacked in all settings of the paper, the others in four, with a quarter of the images. All of
    the former are in one figure, so they are attacked together.
    """
    whole = ATTACKED if set(ATTACKED) & set(names) else ()
    others = [name for name in names if name not in (*ATTACKED, "cifar10-beta0")]
    found: dict[str, Any] = {"attack": _earlier()["attacks"]["attack"], "metrics": []}
    for kind, models, count, settings in (
        ("whole", whole, images, ()),
        ("others", others, max(1, images // 4), ("--kappa", "0.01,inf", "--d", "0,1000")),
    ):
        if not models:
            continue
        out = work / "attacks" / kind
        candid("attack", *models, data, *settings, "--images", count, "--out", out)
        record = json.loads((out / "attacks.json").read_text(encoding="utf-8"))
        record["attack"].pop("data")
        found = {"attack": record["attack"], "metrics": found["metrics"] + record["metrics"]}
    if whole:
        shutil.copy(work / "attacks" / "whole" / "attacks.png", PAGE)
        shutil.copy(work / "attacks" / "whole" / "examples.png", IMAGES / "attack_examples.png")
    return found


def explained(names: Sequence[str], chosen: Sequence[str], data: str, work: Path) -> Any:
    """What ``candid explain`` says of models ``chosen``: similar classes, samples, receptive fields."""
    found = {}
    for name in SAMPLED:
        if name != SHOWN and name not in chosen:
            found[name] = _earlier()["explanations"][name]
            continue
        out = work / "explanation" / name
        others = [name for name in names if name != SHOWN and "unsmoothed" not in name]
        compared = [a for other in others for a in ("--compare-with", other)] if name == SHOWN else []
        candid("explain", name, "--data", data, "--pairs", 45, *compared, "--out", out)
        shutil.copy(out / "samples.png", PAGE / f"samples-{name}.png")
        record = json.loads((out / "explanation.json").read_text(encoding="utf-8"))
        found[name] = {key: record[key] for key in ("closest_pairs", "receptive_fields")}
        if name == SHOWN:
            for figure in ("similarity", "receptive_fields", "interpolation"):
                shutil.copy(out / f"{figure}.png", PAGE)
    return found


def at_64_pixels(data: str, counts: Counts, work: Path) -> Any:
    """Return what evaluation, corruptions and similar classes say of the model of 64-pixel photos."""
    name, out = "tiny20", work / "tiny20"
    found = evaluated(name, data, (), counts, work)
    corrupting = ("--baseline", name, "--images", counts.corrupted, "--out", out / "corruption")
    candid("corrupt", name, data, *corrupting)
    (record,) = json.loads((out / "corruption" / "corruptions.json").read_text(encoding="utf-8"))
    candid("explain", name, "--data", data, "--pairs", 190, "--out", out / "explanation")
    shutil.copy(out / "explanation" / "similarity.png", PAGE / "similarity-tiny20.png")
    explanation = json.loads((out / "explanation" / "explanation.json").read_text(encoding="utf-8"))
    return found | {"corruptions": record, "closest_pairs": explanation["closest_pairs"]}


def described(work: Path, data: Mapping[str, str], counts: Counts) -> Any:
    """Return whether mixtures describe the latents of test images, and similarity their confusions.

    Of models that are still the same, and of those without data here, it is what was measured earlier.
    """
    kept, earlier = work / "geometry.json", _earlier()["geometry"]
    if not kept.is_file():
        with replacing(kept) as file:
            file.write_text(json.dumps(earlier, indent=1) + "\n", encoding="utf-8")
    found = measured_geometry(data, kept, counts.images)
    return found | {name: each for name, each in earlier.items() if name not in found}


def measured(data: str, ood: Sequence[str], counts: Counts, work: Path, only: Sequence[str] = ()) -> Any:
    """All figures of all bundled models, or of ``only`` some; what is drawn goes to the page's folder."""
    names = sorted((name for name in zoo.names() if name.startswith("cifar10")), key=_order)
    earlier = _earlier()
    chosen = [name for name in names if not only or name in only or name not in earlier["models"]]
    models = {
        name: evaluated(name, data, ood, counts, work) if name in chosen else earlier["models"][name]
        for name in names
    }
    drawn(models, data, counts, work)
    corruptions = corrupted(chosen, data, counts.corrupted, work) if chosen and counts.corrupted else []
    attacks = earlier["attacks"]
    if chosen and counts.attacked:
        found = attacked(chosen, data, counts.attacked, work)
        attacks = found | {"metrics": merged(names, attacks["metrics"], found["metrics"])}
    results = {
        "models": models,
        "corruptions": merged(names, earlier["corruptions"], corruptions),
        "attacks": attacks,
        "explanations": explained(names, chosen, data, work) if chosen else earlier["explanations"],
        "tiny20": earlier.get("tiny20"),
    }
    if ZONES in chosen:
        shutil.copy(work / "evaluation" / ZONES / "ood_zones.png", IMAGES)
    if SHOWN in chosen:
        draw_decisions(work / "evaluation" / SHOWN, work)
    return with_not_bundled(results)


def merged(names: Sequence[str], earlier: Sequence[Results], found: Sequence[Results]) -> list[Results]:
    """Return what was ``found`` of some models and the ``earlier`` records of others, in the order of names.

    >>> merged(["a", "b"], [{"model": "c"}, {"model": "b", "n": 1}], [{"model": "a", "n": 2}])
    [{'model': 'a', 'n': 2}, {'model': 'b', 'n': 1}]
    """
    models = {each["model"] for each in found}
    kept = [each for each in earlier if each["model"] in names and each["model"] not in models]
    return sorted([*kept, *found], key=lambda each: names.index(each["model"]))


def drawn(models: Results, data: str, counts: Counts, work: Path) -> None:
    """Draw the figures of the trade-off and of calibration, with all models."""
    rows = [
        {**model, "name": name, "beta": None if model["beta"] is None else float(model["beta"])}
        | {"accuracy": model["ten_crops"]["accuracy"], "crops": 10}
        for name, model in models.items()
    ]
    style.save(comparison_plots.trade_off(rows), PAGE / "trade_off.png")
    bins = {}
    for name in (row["name"] for row in rows if row["beta"] != 0):  # of beta 0, none is a classifier
        found = passed(name, data, counts, work)
        bins[title(name)] = all_bins(found.posterior, found.labels), top_bins(found.posterior, found.labels)
    style.save(comparison_plots.calibration_curves(bins), PAGE / "calibration.png")


def with_not_bundled(results: Any) -> Any:
    """Return ``results`` with the earlier ones of models that are no longer bundled, marked as such."""
    earlier = _earlier()
    for name in NOT_BUNDLED:
        trained_by = " ".join(command(name))
        results["models"][name] = earlier["models"][name] | {"bundled": False, "command": trained_by}
        results["corruptions"] += [each for each in earlier["corruptions"] if each["model"] == name]
    return results


def _earlier() -> Any:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def written(results: Any) -> None:
    """The pages' tables and the figures on the cards."""
    template = TEMPLATE.read_text(encoding="utf-8")
    paper, theory = ((ROOT / f"docs/{page}.md").read_text(encoding="utf-8") for page in ("paper", "theory"))
    for path, text in (
        (PAGE / "README.md", filled(template, tables(results))),
        (ROOT / "docs/paper.md", filled(paper, {"headline": headline(results)})),
        (ROOT / "docs/theory.md", filled(theory, {"distances": compared_distances(results)})),
    ):
        with replacing(path) as file:
            file.write_text(text, encoding="utf-8")
    for name in _own_models(results):
        add_figures(name, *card_figures(name, results))


def _own_models(results: Any) -> list[str]:
    """The bundled models that this page is about; photo models have their own."""
    return [name for name in zoo.names() if name in results["models"] or name == "tiny20"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, draw and write."""
    parser = argparse.ArgumentParser(prog="python -m experiments.results", description=__doc__)
    parser.add_argument(
        "data", metavar="DATA", nargs="?", help="CIFAR-10: a folder with test/CLASS/*.png, or its batches"
    )
    parser.add_argument("--ood", metavar="NAME=PATH", action="append", default=[], help="other images")
    parser.add_argument(
        "--tiny",
        metavar="FOLDER",
        help="20 classes of Tiny ImageNet: train/ and test/ (or val/); else earlier results",
    )
    parser.add_argument(
        "--photos", type=Path, metavar="FOLDER", help="the folder of the photo sets; else earlier results"
    )
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="a model to measure; all by default"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/results"), help="the folder for what is kept")
    parser.add_argument(
        "--images", type=int, metavar="N", help="test images, and images of each other set; all by default"
    )
    parser.add_argument(
        "--corrupted", type=int, default=1000, help="images for each corruption; 0 keeps earlier results"
    )
    parser.add_argument("--attacked", type=int, default=200, help="images to attack; 0 keeps earlier results")
    asked = parser.parse_args(arguments)
    tiny = None if asked.tiny is None else str(with_test(asked.tiny, asked.work))
    if asked.data is not None:
        counts = Counts(asked.images, asked.corrupted, asked.attacked)
        PAGE.mkdir(parents=True, exist_ok=True)
        ood = [*asked.ood, "noise=uniform-noise", "constant=constant"]
        results = measured(as_images(asked.data, asked.work), ood, counts, asked.work, asked.only)
        if tiny is not None and (not asked.only or "tiny20" in asked.only):
            results["tiny20"] = at_64_pixels(tiny, counts, asked.work)
        models = sources(asked.data, tiny, asked.photos)
        results["geometry"] = described(asked.work, models, counts)
        with replacing(RESULTS) as file:
            file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    written(_earlier())


def _order(name: str) -> tuple[bool, float, str]:
    """By beta, ResNets last."""
    beta = zoo.card(name)["beta"]
    return beta is None, float(beta or 0), name


if __name__ == "__main__":
    main()
