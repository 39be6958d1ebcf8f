"""Every measurement of the study, by the commands of the command line."""

import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from candid._support.errors import CandidError
from candid._support.files import safe_name
from candid._support.numbers import digest
from candid._support.text import number, short_name
from candid.data.formats import subfolders
from candid.data.splits import size_and_date
from candid.evaluation.compare import METRICS
from candid.evaluation.options import EvaluateOptions
from candid.models import checkpoint, saving
from candid.models.checkpoint import RECORD
from candid.models.flow.backbone import released_dct_scale
from candid.models.importers import import_any
from experiments.imagenet import paper
from experiments.imagenet.figures import draw_decisions
from experiments.imagenet.options import StudyOptions
from experiments.imagenet.photos import Photos, find_photos, link_folders
from experiments.imagenet.stages import Result, Stages, candid

AS_THE_AUTHORS = tuple(
    f"--{field.name.replace('_', '-')}" for field in fields(EvaluateOptions) if field.name == "as_published"
)
"""Arguments of 'candid evaluate' for the authors' own way to evaluate; empty while it has no such option."""
FIELD_IMAGES = 16
"""Photos for receptive fields."""


class Study:
    """One run: all stages in their order.

    Args:
        checkpoints: released files, model folders or torchvision's files.
        imagenet: a folder with ``val/<wnid>``, or with class folders alone.
        options: everything else.
    """

    def __init__(self, checkpoints: Sequence[str], imagenet: str, options: StudyOptions) -> None:
        self.options, self.out, self.work = options, options.out, options.out / "work"
        self.sources, self.imagenet = named_sources([Path(each) for each in checkpoints]), Path(imagenet)
        self.found = self._found()
        self.data = self.out / "photos"
        self.stages = Stages(self.out, 5 + 3 * len(self.sources) + bool(options.attacked))

    def _found(self) -> Photos:
        asked = self.options
        for path in (*map(Path, asked.photo), asked.imagenet_c):
            if path is not None and not path.exists():
                raise CandidError(f"There is no '{path}': check the name.")
        return find_photos(self.imagenet, asked.classes, asked.held_out, asked.held_out_share, asked.images)

    def results(self) -> Result:
        """Run every stage; return all results, ready for JSON."""
        run, found = self.stages.run, self.found
        photos = run("photos", "links to evaluated and held-out photos", found.key, self._photos)
        imported = [self._imported(name, path) for name, path in self.sources.items()]
        models = {each["name"]: each for each in sorted(imported, key=_order)}
        shown = next((name for name in models if _is_generative_classifier(models[name])), None)
        if shown is None:
            raise CandidError("Figures 4 to 6 need a generative model with a beta above 0: add one.")
        keys: dict[str, Any] = {name: [found.key, model["key"]] for name, model in models.items()}
        for name, model in models.items():
            run(f"calibrate-{name}", f"{name}: held-out scores", keys[name], partial(self._calibrated, name))
            model |= run(
                f"evaluate-{name}",
                f"{name}: Table 2 and calibration error",
                [keys[name], AS_THE_AUTHORS],
                partial(self._evaluated, model),
            )
        asked, every = self.options, list(keys.values())
        explained = run(
            "explain",
            f"{shown}: Figure 5 and receptive fields",
            [every, asked.group],
            partial(self._explained, shown, list(models)),
        )
        decided = run(
            "decisions",
            f"{shown}: Figures 4 and 6",
            [keys[shown], asked.photo],
            partial(self._decided, shown),
        )
        corrupted = run(
            "corrupt",
            "corrupted photos",
            [every, asked.corrupted, asked.imagenet_c],
            partial(self._corrupted, models),
        )
        attacked = None
        if asked.attacked:
            title = f"attacks on {asked.attacked} photos"
            attacked = run("attack", title, [every, asked.attacked], partial(self._attacked, models))
        return {
            "photos": photos | {"trial": asked.images is not None},
            "models": models,
            "shown": shown,
            "explanation": explained,
            "decisions": decided,
            "corruptions": corrupted["models"],
            "attacks": attacked,
        }

    def _photos(self) -> Result:
        self.found.link(self.data)
        count = {part: sum(map(len, getattr(self.found, part).values())) for part in ("test", "held_out")}
        return {
            "evaluated": count["test"],
            "held_out": count["held_out"],
            "own_held_out": self.found.own_held_out,
            "classes": len(self.found.names),
        }

    def _imported(self, name: str, path: Path) -> Result:
        record = checkpoint.model_folder(path) / RECORD if path.is_dir() else path
        key = digest(name, str(path), size_and_date(record), list(self.found.names.items())).hexdigest()
        make = partial(self._import, name, path)
        return self.stages.run(f"import-{name}", f"{name}: import", key, make) | {"key": key}

    def _import(self, name: str, path: Path) -> Result:
        model = checkpoint.load(path, held_out=False) if path.is_dir() else import_any(path)
        names, wnids = tuple(self.found.names.values()), tuple(self.found.names)
        if len(model.class_names) != len(names):
            raise CandidError(
                f"'{path}' has {len(model.class_names)} classes and '{self.imagenet}' {len(names)} "
                "class folders: give the photos of all its classes, and no others."
            )
        if model.class_names not in (names, wnids, tuple(map(str, range(len(names))))):
            raise CandidError(
                f"'{path}' has classes of its own, such as '{model.class_names[0]}' where the photos have "
                f"'{names[0]}': give a table with its names (--classes), or the released file."
            )
        model.class_names = names
        saving.save(model, self._model(name))
        beta = model.record.beta
        return {
            "name": name,
            "kind": model.kind,
            "beta": None if beta is None else number(float(beta)),
            "dct_error": dct_error(model),
            "files": [f"models/{name}/model.json"],
        }

    def _model(self, name: str) -> Path:
        return self.out / "models" / name

    def _calibrated(self, name: str) -> Result:
        folder, asked = self._model(name), self.options
        candid("calibrate", folder, self.data, "--part", "val", *asked.processes, launch=asked.launch)
        record = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        return {"files": [f"models/{name}/{record['held_out']['file']}"]}

    def _evaluated(self, model: Result) -> Result:
        name, asked = model["name"], self.options
        out, figure = self.work / "evaluation" / name, f"calibration-{name}.png"
        arguments = "--out", out, "--ten-crop", *AS_THE_AUTHORS, *asked.processes
        candid("evaluate", self._model(name), self.data, *arguments, launch=asked.launch)
        shutil.copy(out / "calibration.png", self.out / figure)
        metrics = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
        kept = (
            "images",
            "held_out_images",
            "held_out_overlap",
            "intervals",
            "false_positives",
            "verdicts",
            *METRICS,
        )
        found = {key: metrics[key] for key in kept if key in metrics} | {"files": [figure]}
        found["ten_crop"] = metrics.get("as_published", metrics)["ten_crop"]
        if "L_X" in found:
            found["L_X_printed"] = found["L_X"] - model["dct_error"]
            found["bits_printed"] = found["L_X_printed"] / math.log(2) + paper.BITS_OFFSET
        return found

    def _explained(self, shown: str, names: Sequence[str]) -> Result:
        asked, out = self.options, self.work / "explanation"
        groups = list(asked.group)
        if not groups and len(self.found.names) == paper.CLASSES:
            groups = [f"{name}={','.join(map(str, each))}" for name, each in paper.GROUPS.items()]
        others = [a for name in names if name != shown for a in ("--compare-with", self._model(name))]
        images = min(FIELD_IMAGES, asked.images or FIELD_IMAGES)
        chosen = ["--images", images, *others, *(a for each in groups for a in ("--group", each))]
        candid(
            "explain",
            self._model(shown),
            "--data",
            self.data,
            "--out",
            out,
            *chosen,
            "--workers",
            asked.workers,
        )
        copies = {
            "figure-5.png": "similarity_groups" if groups else "similarity",
            "similarity.png": "similarity",
            "mean_spread.png": "mean_spread",
            "receptive_fields.png": "receptive_fields",
        }
        for copy, figure in copies.items():
            shutil.copy(out / f"{figure}.png", self.out / copy)
        record = json.loads((out / "explanation.json").read_text(encoding="utf-8"))
        kept = {key: record[key] for key in ("closest_pairs", "receptive_fields")}
        return kept | {"groups": [each.partition("=")[0] for each in groups], "files": list(copies)}

    def _decided(self, shown: str) -> Result:
        table = self.work / "evaluation" / shown / "images.csv"
        return draw_decisions(
            checkpoint.load(self._model(shown)), table, list(map(Path, self.options.photo)), self.out
        )

    def _corrupted(self, models: dict[str, Result]) -> Result:
        asked, out = self.options, self.work / "corruption"
        more: list[object] = ["--images", asked.corrupted, "--out", out]
        if asked.imagenet_c is not None:
            more += ["--corrupted", self._linked_corruptions(asked.imagenet_c)]
        resnet = next((name for name in models if models[name]["kind"] == "resnet"), None)
        if resnet is not None and len(self.found.names) != paper.CLASSES:
            more += ["--baseline", self._model(resnet)]
        folders = [self._model(name) for name in models]
        candid("corrupt", *folders, self.data, *more, *asked.processes, launch=asked.launch)
        records = json.loads((out / "corruptions.json").read_text(encoding="utf-8"))
        return {"models": dict(zip(models, records, strict=True))}

    def _linked_corruptions(self, source: Path) -> Path:
        folder = self.out / "corrupted-photos"
        for corruption in subfolders(source):
            for severity in subfolders(corruption):
                link_folders(severity, folder / corruption.name / severity.name, self.found.names)
        return folder

    def _attacked(self, models: dict[str, Result]) -> Result:
        asked, out = self.options, self.work / "attacks"
        folders = [self._model(name) for name, model in models.items() if model["beta"] != "0"]
        more = "--images", asked.attacked, "--as-published", "--out", out, *asked.processes
        candid("attack", *folders, self.data, *more, launch=asked.launch)
        for figure in ("attacks.png", "examples.png"):
            shutil.copy(out / figure, self.out)
        record = json.loads((out / "attacks.json").read_text(encoding="utf-8"))
        return {"metrics": record["metrics"], "files": ["attacks.png", "examples.png"]}


def named_sources(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the checkpoints by name: ``beta_1`` for beta_1.avg.pt and for runs/beta_1/model/best."""
    found: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise CandidError(f"There is no checkpoint '{path}': name a released file or a model folder.")
        name = short_name(path) if path.is_dir() else path.name
        name = safe_name(re.sub(r"(\.avg)?\.pth?$", "", name))
        if name in ("model", "best", "last"):  # the commands leave these words out of a model's name
            name = f"checkpoint-{name}"
        if name in found:
            raise CandidError(f"'{found[name]}' and '{path}' are both called '{name}': rename one of them.")
        found[name] = path
    return found


def _order(model: Result) -> tuple[bool, bool, float]:
    """By beta; then those without a known one, ResNets last."""
    beta = model["beta"]
    value = math.inf if beta == "∞" else float(beta or 0)
    return model["kind"] == "resnet", beta is None, value


def _is_generative_classifier(model: Result) -> bool:
    return model["kind"] != "resnet" and model["beta"] != "0"


def dct_error(model: Any) -> float:
    """Return by how many nats per dimension the authors' code overstates the log-determinant.

    It counts log 0.5 for its cosine transform, whose true value is smaller; 0 for other models.
    """
    if getattr(getattr(model.config, "flow", None), "dct", None) != "released":
        return 0.0
    return math.log(0.5) - float(released_dct_scale(model.grid[0]).log().mean())
