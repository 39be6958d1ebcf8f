"""Every benchmark runs at small sizes and writes finite figures."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.p_values import LEVELS, bands, rates
from benchmarks.scaling_laws import stored
from candid import GenerativeClassifier
from candid.models.flow.config import preset
from candid.trust.scores import SCORES, Columns

TOGETHER = ("forward", "inverse", "mixture", "evaluation", "explanations", "corruptions", "attacks")
"""Benchmarks that may share a process, which loads torch once; the others start processes of their own."""
RUN = """
import importlib, sys
scripts, arguments = sys.argv[1].split(","), sys.argv[2:]
for script in scripts:
    sys.argv = [script, *arguments]
    assert not importlib.import_module(f"benchmarks.{script}").main(), script
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "scripts", [TOGETHER, ("training",), ("memory",), ("cifar",), ("photos",)], ids=",".join
)
def test_quick_run(scripts: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, ",".join(scripts), "--quick", "--threads", "1"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "BENCHMARK_RESULTS": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for script in scripts:
        check_results(tmp_path / f"{script}.json")


def check_results(path: Path) -> None:
    """Benchmarks write finite numbers, and claim nothing at small sizes."""
    results = json.loads(path.read_text())
    assert results["environment"]["quick"]
    assert results["figures"]
    for figure in results["figures"].values():
        assert all(math.isfinite(value) for value in figure["rounds"])
        assert figure["target"] is None
    for case in results["ratios of the first to each"].values():
        assert all(math.isfinite(ratio) and ratio > 0 for ratios in case.values() for ratio in ratios)


@pytest.mark.parametrize("changes", [{}, {"entry": "7x7"}, {"entry": "none"}, {"mixing": "permutation"}])
def test_the_memory_law_counts_what_autograd_keeps(changes: dict[str, Any]) -> None:
    config = preset("tiny", **changes)
    model = GenerativeClassifier(config).train()
    parameters = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        z, log_det = model.flow(torch.rand(8, *model.image_shape))
        held = z.square().sum() + log_det.sum()
    assert held.requires_grad
    found = sum(size for address, size in kept.items() if address not in parameters)
    counted = 4 * 8 * sum(stored(config.flow).values())
    assert found == pytest.approx(counted, rel=0.03)


def test_false_positives_of_valid_p_values_lie_in_their_bands() -> None:
    random = np.random.default_rng(0)
    values = {"log_density": random.normal(size=2000), "log_density_terms": random.normal(size=(2000, 3))}
    columns = Columns(values)
    for name in ("one-tailed", "typicality", "typical-set", "density-of-states"):
        test = SCORES[name]
        measured = rates(test, columns, splits=20)
        for level, column in zip(LEVELS, measured.T, strict=True):
            found = bands(2000, level, test)
            assert found["exact"][0] <= found["binomial"][0] < found["binomial"][1] <= found["exact"][1]
            inside = (column >= found["exact"][0]) & (column <= found["exact"][1])
            assert inside.mean() >= 0.75, (test.name, level)
