"""Small, real training runs for the tests."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from candid.training.options import TrainOptions
from candid.training.recipes import load_options
from candid.training.run_folder import RunFolder
from candid.training.train import TrainResult, train_network

MODEL = {"blocks": [1, 1], "widths": [4, 8], "pointwise_width": 4, "mixing": "orthogonal"}
SMALL = [f"--set={key}={value}" for key, value in MODEL.items()]
COMMAND = [sys.executable, "-m", "candid", "train"]


def small_config(**changes: Any) -> TrainOptions:
    settings = {
        "data": "digits",
        "epochs": 2,
        "workers": 0,
        "model": MODEL,
        "learning_rate": 8e-3,
        "crop": "none",
    }
    return load_options("digits", **(settings | changes))


def train(options: TrainOptions, out: Path, resume: bool = False) -> TrainResult:
    return train_network(options, RunFolder(out), resume)


def environment(**more: str) -> dict[str, str]:
    """One thread; free of what a surrounding launcher may have set."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LOCAL_", "RANK", "WORLD_", "SLURM_"))}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def start(*arguments: str | Path, command: list[str] = COMMAND) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str | Path, command: list[str] = COMMAND) -> "subprocess.CompletedProcess[str]":
    process = start(*arguments, command=command)
    out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def weights(folder: Path) -> dict[str, str]:
    """Names of the last and the best weights: hashes of their content."""
    models = {name: folder / "model" / name / "model.json" for name in ("last", "best")}
    return {name: json.loads(path.read_text())["weights"]["file"] for name, path in models.items()}


def curve(folder: Path, column: str) -> list[float]:
    header, *rows = (line.split(",") for line in (folder / "metrics.csv").read_text().splitlines())
    return [float(row[header.index(column)]) for row in rows]
