"""Make ``docs/results`` from the bundled models: every table and figure, and the figures on their cards.

``python -m experiments.results images --ood tiny=tiny20 --ood mnist=mnist --tiny tiny20``

``images`` is CIFAR-10 as a folder with ``test/<class>/*.png``. Passes and attacks are kept in
``runs/results``: what was stopped goes on where it was. Without ``images`` nothing is measured: pages and
cards are written again from ``docs/results/results.json``.
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from candid._support.errors import CandidError
from candid._support.files import replacing
from candid._support.numbers import softmax
from candid.evaluation.calibration_error import CRITICAL, all_bins, top_bins
from candid.evaluation.compare import METRICS
from candid.inference.predictions import Predictions
from candid.models import zoo
from candid.reports.demo.chapters import SAMPLES
from candid.reports.plots import comparison as comparison_plots
from candid.reports.plots import style
from experiments.cards import add_figures
from experiments.geometry import main as geometry
from experiments.models import NOT_BUNDLED, command
from experiments.results_tables import card_figures, headline, tables
from experiments.tables import filled, title

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results"
RESULTS = PAGE / "results.json"
TEMPLATE = Path(__file__).parent / "page.md"
"""Its words; the tables are put between the marks."""
SHOWN = "cifar10-beta1"
"""The model that explanations are shown of."""
ATTACKED = ("cifar10-beta1", "cifar10-betainf", "cifar10-resnet")
"""The models under all nine attacks of the paper."""


def candid(*arguments: object) -> None:
    """Run a command of the command line."""
    print("candid", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "candid", *map(str, arguments)], check=True)


def evaluated(name: str, data: str, ood: Sequence[str], work: Path) -> dict[str, Any]:
    """What ``candid evaluate`` says of a model, and how often it is sure."""
    out = work / "evaluation" / name
    others = [argument for each in ood for argument in ("--ood", each)]
    candid("evaluate", name, data, "--out", out, "--temperature", "--ten-crop", *others)
    metrics = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    predictions = test_predictions(out)
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
        "selective": {key: value for key, value in metrics["selective"].items() if key != "curve"},
    }


def _figures(metrics: dict[str, Any]) -> dict[str, Any]:
    found = {key: metrics[key] for key in METRICS if key in metrics}
    return found | {"intervals": {key: ends for key, ends in metrics["intervals"].items() if key in found}}


def test_predictions(out: Path) -> Predictions:
    """The pass over the test images in an evaluation's folder."""
    files = list((out / "predictions").glob("test-????????????????.safetensors"))
    if len(files) > 1:
        raise CandidError(f"'{out}' has passes of several versions of a model: remove it.")
    found = Predictions.load(files[0])
    assert found is not None, files
    return found


def corrupted(names: Sequence[str], data: str, images: int, work: Path) -> Any:
    """What ``candid corrupt`` says of all models."""
    out = work / "corruption"
    candid("corrupt", *names, data, "--baseline", "cifar10-resnet", "--images", images, "--out", out)
    return json.loads((out / "corruptions.json").read_text(encoding="utf-8"))


def attacked(names: Sequence[str], data: str, images: int, work: Path) -> Any:
    """What ``candid attack`` says of all models that classify.

    Some are attacked in all settings of the paper, the others in four, with a quarter of the images.
    """
    others = [name for name in names if name not in (*ATTACKED, "cifar10-beta0")]
    found: dict[str, Any] = {}
    for kind, models, count, settings in (
        ("whole", ATTACKED, images, ()),
        ("others", others, max(1, images // 4), ("--kappa", "0.01,inf", "--d", "0,1000")),
    ):
        out = work / "attacks" / kind
        candid("attack", *models, data, *settings, "--images", count, "--out", out)
        record = json.loads((out / "attacks.json").read_text(encoding="utf-8"))
        found = {"attack": record["attack"], "metrics": found.get("metrics", []) + record["metrics"]}
    shutil.copy(work / "attacks" / "whole" / "attacks.png", PAGE)
    found["attack"].pop("data")
    found["metrics"].sort(key=lambda each: names.index(each["model"]))
    return found


def explained(names: Sequence[str], data: str, work: Path) -> Any:
    """What ``candid explain`` says: similar classes, receptive fields, samples."""
    found = {}
    for name in (SHOWN, *(name for name in ("cifar10-beta0", "cifar10-betainf") if name in names)):
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


def at_64_pixels(data: str, images: int, work: Path) -> Any:
    """Return what evaluation, corruptions and similar classes say of the model of 64-pixel photos."""
    name, out = "tiny20", work / "tiny20"
    found = evaluated(name, data, (), work)
    candid("corrupt", name, data, "--baseline", name, "--images", images, "--out", out / "corruption")
    (record,) = json.loads((out / "corruption" / "corruptions.json").read_text(encoding="utf-8"))
    candid("explain", name, "--data", data, "--pairs", 190, "--out", out / "explanation")
    shutil.copy(out / "explanation" / "similarity.png", PAGE / "similarity-tiny20.png")
    explanation = json.loads((out / "explanation" / "explanation.json").read_text(encoding="utf-8"))
    return found | {"corruptions": record, "closest_pairs": explanation["closest_pairs"]}


def examined(work: Path) -> None:
    """Pages of four images, as the paper's Figure 4 has them: sure, torn between two, unsure, novel.

    The novel one is a photo that may be shown on a page: the bottom of a tin.
    """
    with (work / "evaluation" / SHOWN / "images.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if Path(row["path"]).is_file()]
    usual = [row for row in rows if row["set"] == "test" and float(row["p_value"]) > 0.2]
    confident = sorted((r for r in usual if float(r["confidence"]) > 0.95), key=lambda r: r["confidence"])
    torn = [row for row in usual if row["classes"].count(";") == 1]
    chosen = {
        "sure": confident[len(confident) // 2]["path"],
        "torn": min(torn, key=lambda row: abs(float(row["confidence"]) - 0.5))["path"],
        "unsure": min(usual, key=lambda row: float(row["confidence"]))["path"],
        "novel": SAMPLES / "waste" / "tin.jpg",
    }
    for kind, path in chosen.items():
        out = work / "pages" / kind
        shutil.rmtree(out, ignore_errors=True)
        candid("examine", SHOWN, path, "--figures", out)
        (page,) = out.glob("*.png")
        shutil.copy(page, PAGE / f"page-{kind}.png")


def described(work: Path, data: str) -> Any:
    """Return whether the mixtures of all models describe the latents of test images."""
    file = work / "geometry.json"
    if not file.is_file():
        geometry(["--json", str(file), data])
    return json.loads(file.read_text(encoding="utf-8"))


def measured(data: str, ood: Sequence[str], corrupted_images: int, attacked_images: int, work: Path) -> Any:
    """All figures of all bundled models; what is drawn goes to the page's folder."""
    names = sorted((name for name in zoo.names() if name.startswith("cifar10")), key=_order)
    models = {name: evaluated(name, data, ood, work) for name in names}
    candid("compare", *(work / "evaluation" / name for name in names), "--out", work / "comparison")
    shutil.copy(work / "comparison" / "trade_off.png", PAGE)
    bins = {}
    for name in names:
        if zoo.card(name)["beta"] == "0.0":  # it does not classify
            continue
        found = test_predictions(work / "evaluation" / name)
        bins[title(name)] = all_bins(found.posterior, found.labels), top_bins(found.posterior, found.labels)
    style.save(comparison_plots.calibration_curves(bins), PAGE / "calibration.png")
    results = {
        "models": models,
        "corruptions": corrupted(names, data, corrupted_images, work)
        if corrupted_images
        else [each for each in _earlier()["corruptions"] if each["model"] in names],
        "attacks": attacked(names, data, attacked_images, work) if attacked_images else _earlier()["attacks"],
        "explanations": explained(names, data, work),
        "geometry": described(work, data),
        "tiny20": _earlier().get("tiny20"),
    }
    examined(work)
    return with_not_bundled(results)


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
    paper = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
    for path, text in (
        (PAGE / "README.md", filled(template, tables(results))),
        (ROOT / "docs/paper.md", filled(paper, {"headline": headline(results)})),
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
    parser.add_argument("data", metavar="DATA", nargs="?", help="CIFAR-10 as a folder of images")
    parser.add_argument("--ood", metavar="NAME=PATH", action="append", default=[], help="other images")
    parser.add_argument(
        "--tiny", metavar="FOLDER", help="20 classes of Tiny ImageNet: train/ and test/; else earlier results"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/results"), help="the folder for what is kept")
    parser.add_argument(
        "--corrupted", type=int, default=1000, help="images for each corruption; 0 keeps earlier results"
    )
    parser.add_argument("--attacked", type=int, default=200, help="images to attack; 0 keeps earlier results")
    asked = parser.parse_args(arguments)
    if asked.tiny is not None and not (Path(asked.tiny) / "test").is_dir():
        parser.error(f"'{asked.tiny}' has no folder 'test': the model tiny20 was trained on 'train' alone")
    if asked.data is not None:
        PAGE.mkdir(parents=True, exist_ok=True)
        ood = [*asked.ood, "noise=uniform-noise", "constant=constant"]
        results = measured(asked.data, ood, asked.corrupted, asked.attacked, asked.work)
        if asked.tiny is not None:
            results["tiny20"] = at_64_pixels(asked.tiny, asked.corrupted, asked.work)
        with replacing(RESULTS) as file:
            file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    written(_earlier())


def _order(name: str) -> tuple[bool, float, str]:
    """By beta, ResNets last."""
    beta = zoo.card(name)["beta"]
    return beta is None, float(beta or 0), name


if __name__ == "__main__":
    main()
