"""Measure verdicts, similar classes, heatmaps, corruptions and attacks of photo models.

``python -m experiments.photo_trust DATA_FOLDER``

``DATA_FOLDER`` has the folders ``bloodcells8``, ``trashnet6``, ``clothing10``, ``clothing-other`` and
``imagenet-val``. The figures go to ``docs/results/photo_trust.json``, the tables to
``docs/results/photos.md``, between marks of their names, and two pictures next to it. The verdicts of bundled
models come from ``docs/results/photo_models.json``. Without ``DATA_FOLDER`` nothing is measured: the tables
are written again.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from candid._support.files import replacing, write_texts
from candid._support.progress import TerminalProgress
from candid._support.randomness import draws
from candid.data import Part
from candid.evaluation.evaluate import evaluate
from candid.inference.metrics import area_under_curve
from candid.inference.predictions import Predictions
from candid.judging.held_out import code_lengths_by_scale
from candid.models.checkpoint import load
from candid.reports.plots import style
from candid.robustness.attacks.benchmark import attack
from candid.robustness.corruptions.benchmark import CORRUPTIONS, corrupt, corrupted
from candid.trust.conformal import DensityOfStates
from experiments import class_map, photo_models
from experiments.photo_tables import FIGURES, PAGE, page
from experiments.pointing import UNKNOWN, Maps, deletion, part_photos, photo_model, pointing

CORRUPTED, SEVERITIES = 200, (1, 3, 5)
"""Photos of clothing10 that are corrupted, and how severely."""
ATTACKED, KAPPA, WEIGHTS = 10, 0.01, (0.0, 66.0)
"""Photos of clothing10 that are attacked, and the settings of the attacks."""
EXAMPLES = ("dress", "hat", "shoes", "t-shirt")
"""The classes of clothing10 whose first test photo is drawn with its map."""


@dataclass(frozen=True)
class Study:
    """Where the photos are, and where models, passes and attacks are stored."""

    data: Path
    work: Path

    def everyday(self) -> dict[str, Any]:
        """Return accuracy and calibration of ``everyday`` on the validation photos that it was not fitted to.

        They are its held-out photos, so its levels are not measured on them.
        """
        second = self.work / "second"
        for folder in (each for each in (self.data / "imagenet-val").iterdir() if each.is_dir()):
            (second / folder.name).mkdir(parents=True, exist_ok=True)
            photo = sorted(folder.iterdir())[1]
            with contextlib.suppress(FileExistsError):
                (second / folder.name / photo.name).symlink_to(photo)
        result = evaluate(photo_models.EVERYDAY, str(second), out=self.work / "everyday")
        assert result is not None
        metrics = result.metrics
        keys = ("accuracy", "top1_ece", "cross_entropy")
        (file,) = (self.work / "everyday" / "predictions").glob("*.safetensors")
        predictions = Predictions.load(file)
        assert predictions is not None
        return {
            "images": metrics["images"],
            "confidence": float(predictions.posterior.max(1).mean()),
            **{key: metrics[key] for key in keys},
            "intervals": {key: metrics["intervals"][key] for key in keys},
        }

    def similar(self) -> dict[str, Any]:
        """Compare the 1000 classes of ``everyday``, and draw their map."""
        found = class_map.class_map(load(photo_models.EVERYDAY))
        style.save(class_map.draw(found), PAGE / "similarity-everyday.png")
        return class_map.figures(found)

    def near(self) -> dict[str, Any]:
        """Return what models make of photos of a kind that they do not know, but that looks like theirs."""
        found = {}
        for name, unknown in UNKNOWN.items():
            photo_model(self.data / name, unknown, self.work / "pointing" / name)
            other = f"{name}/{unknown}" if unknown else "clothing-other"
            result = evaluate(
                self.work / "pointing" / name,
                str(self.data / name),
                ood={"unknown": str(self.data / other)},
                out=self.work / "near" / name,
            )
            assert result is not None
            metrics = result.metrics
            found[other] = {
                "known": metrics["verdicts"]["sets"]["test"],
                "unknown": metrics["verdicts"]["sets"]["unknown"],
                "plain": metrics["selective"]["without_novelty"]["foreign"]["unknown"],
                "auc": metrics["ood"]["unknown"]["combined"]["auc"],
            }
        return found

    def pointing(self) -> dict[str, Any]:
        """Compare heatmaps with Grad-CAM, and draw some."""
        found = {}
        for name, unknown in UNKNOWN.items():
            model = photo_model(self.data / name, unknown, self.work / "pointing" / name)
            maps, photos = Maps(model), part_photos(model, self.data / name, "test")
            found[name] = {"pointing": pointing(maps, photos), "deletion": deletion(maps, photos)}
        chosen = [sorted((self.data / "clothing10" / "test" / each).iterdir())[0] for each in EXAMPLES]
        with replacing(PAGE / "heatmaps-clothing.jpg") as file:
            class_map.draw_heatmaps(load("clothing"), chosen).savefig(file, dpi=110, format="jpeg")
        return found

    def corruptions(self) -> dict[str, Any]:
        """Corrupt photos of 224 pixels."""
        options = {"images": CORRUPTED, "severities": SEVERITIES, "out": self.work / "corruption"}
        with contextlib.chdir(self.data):
            found = corrupt("clothing", "clothing10", TerminalProgress(), workers=0, **options)
        assert found is not None
        return {**found.to_dict()[0], "control": self.control()}

    def control(self) -> dict[str, float]:
        """Return the AUC of code lengths for each corruption: a score without a model.

        Its held-out photos are training photos; corruptions have other random numbers than those above.
        """
        model = load("clothing")
        photos = {}
        parts: tuple[Part, ...] = ("train", "test")
        for part in parts:
            seen = np.rint(part_photos(model, self.data / "clothing10", part).images * 255).astype(np.uint8)
            photos[part] = seen[np.linspace(0, len(seen) - 1, CORRUPTED).round().astype(int)]
        detector = DensityOfStates().fit(code_lengths_by_scale(photos["train"]))
        inside = detector.score(code_lengths_by_scale(photos["test"]))
        found = {}
        for name, each in CORRUPTIONS.items():
            changed = [corrupted(photos["test"], name, s, draws(0, each.number, s).numpy) for s in SEVERITIES]
            scores = np.concatenate([detector.score(code_lengths_by_scale(images)) for images in changed])
            found[name] = area_under_curve(inside, scores)
        return found

    def attacks(self) -> list[dict[str, Any]]:
        """Attack photos, with and without fooling the detection."""
        options = {"images": ATTACKED, "kappa": (KAPPA,), "d": WEIGHTS, "out": self.work / "attacks"}
        with contextlib.chdir(self.data):
            found = attack("clothing", "clothing10", TerminalProgress(), workers=0, **options)
        assert found is not None
        metrics: list[dict[str, Any]] = found.to_dict()["metrics"]
        return metrics


SECTIONS: dict[str, Callable[[Study], Any]] = {
    "everyday": Study.everyday,
    "similar": Study.similar,
    "near": Study.near,
    "pointing": Study.pointing,
    "corruptions": Study.corruptions,
    "attacks": Study.attacks,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the figures and the page."""
    parser = argparse.ArgumentParser(prog="python -m experiments.photo_trust", description=__doc__)
    parser.add_argument("data", metavar="DATA_FOLDER", type=Path, nargs="?", help="the folder of photo sets")
    parser.add_argument(
        "--section", action="append", choices=list(SECTIONS), help="measure only this one again; repeats"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/photo_trust"), help="the folder of the runs")
    asked = parser.parse_args(arguments)
    if asked.data is not None:
        study = Study(asked.data.resolve(), asked.work.resolve())
        for name in asked.section or SECTIONS:
            print(name, flush=True)
            found = SECTIONS[name](study)
            results = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.is_file() else {}
            write_texts({FIGURES.name: json.dumps({**results, name: found}, indent=1) + "\n"}, PAGE)
    target = PAGE / "photos.md"
    with replacing(target) as file:
        file.write_text(page(target.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
