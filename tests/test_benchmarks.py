"""Every benchmark runs at small sizes and writes finite figures."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("script", ["forward", "training", "inverse", "mixture", "memory", "cifar"])
def test_quick_run(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{script}", "--quick", "--threads", "1"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "BENCHMARK_RESULTS": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / f"{script}.json").read_text())
    assert results["environment"]["quick"]
    assert results["figures"]
    for figure in results["figures"].values():
        assert all(math.isfinite(value) for value in figure["rounds"])
        assert figure["target"] is None
    for case in results["ratios of the first to each"].values():
        assert all(math.isfinite(ratio) and ratio > 0 for ratios in case.values() for ratio in ratios)
