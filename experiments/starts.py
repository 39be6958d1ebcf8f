"""Compare two ways to start and train the class means: the recipe's and the authors'.

``python -m experiments.starts cifar-10-batches-bin``

Each run has six epochs of the recipe ``cifar10``. The runs are folders in ``runs/starts``; what was stopped
goes on where it was. The tables are printed as Markdown; all numbers go to ``runs/starts/starts.json``.
"""

import argparse
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from candid._support.files import replacing
from candid.models import checkpoint
from candid.models.flow.classifier import GenerativeClassifier
from experiments.geometry import markdown, measured_geometry
from experiments.models import train

EPOCHS, BETAS = 6, ("16", "1")
STARTS = {
    "recipe": (),
    "authors": ("--means-start", "blocks", "--means-rate", "1", "--no-clip-means"),
}
"""The options of each start."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the models that are missing and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m experiments.starts", description=__doc__)
    parser.add_argument("data", metavar="DATA", help="CIFAR-10 as published: the folder cifar-10-batches-bin")
    parser.add_argument("--runs", type=Path, default=Path("runs/starts"), help="the folder for runs")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at once; cores are shared")
    asked = parser.parse_args(arguments)
    threads = max(1, (os.cpu_count() or 1) // asked.jobs)
    common = ["candid", "train", asked.data, "--recipe", "cifar10", "--epochs", str(EPOCHS)]
    runs = {
        f"beta {beta}, {start}": (asked.runs / f"{start}-{beta}", [*common, "--beta", beta, *options])
        for beta in BETAS
        for start, options in STARTS.items()
    }
    with ThreadPoolExecutor(asked.jobs) as pool:
        for _ in pool.map(lambda each: train(each[1], each[0], threads), runs.values()):
            pass
    found, lines = {}, ["| class means | accuracy (%) | bits/dim |", "| --- | ---: | ---: |"]
    for name, (run, _) in runs.items():
        model = checkpoint.load(run)
        assert isinstance(model, GenerativeClassifier)
        test = json.loads((run / "results.json").read_text(encoding="utf-8"))["test"]
        found[name] = {"test": test, **measured_geometry(model, asked.data, None)}
        lines.append(f"| {name} | {100 * test['accuracy']:.1f} | {test['bits_per_dim']:.2f} |")
    with replacing(asked.runs / "starts.json") as file:
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(*lines, "", markdown(found), sep="\n")


if __name__ == "__main__":
    main()
