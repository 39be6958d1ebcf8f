"""Every benchmark runs at small sizes and writes finite figures; the page on speed has what was measured."""

import json
import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import limit, page
from benchmarks.p_values import LEVELS, bands, rates
from benchmarks.scaling_laws import stored
from candid import GenerativeClassifier
from candid.models.flow.config import preset
from candid.trust.scores import SCORES, Columns

TOGETHER = (
    *("forward", "inverse", "mixture", "evaluation", "explanations", "monitor", "loading", "corruptions"),
    "attacks",
)
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
    "scripts", [TOGETHER, ("training",), ("memory",), ("cifar",), ("photos",), ("startup",)], ids=",".join
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


def made_up(script: str) -> dict[str, Any]:
    """Results as a script writes them."""
    place = {"date": "2026-11-19T00:00:00+00:00", "seconds": 30.0, "load_average": 0.1, "quick": False}
    place |= {"processor": "a CPU", "threads": 2, "torch": "2.13.0", "python": "3.11.9"}
    figures = {
        "aimed": {"rounds": [0.5, 0.7, 0.6], "target": 0.65, "at_least": False},
        "missed": {"rounds": [0.5], "target": 0.9, "at_least": True},
    }
    seconds = {f"case of {script}": {"Candid": [1.0, 3.0], "peer": [2.0, 2.0]}}
    return {"environment": place, "seconds": seconds, "figures": figures}


def test_the_page_on_speed_has_what_was_measured() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.written(text, page.committed()) == text
    prose = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->|```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    assert not re.findall(r"[\d.]+ (?:s|ms|MB|images/s)\b|\([\d.]+ to [\d.]+\)", prose)


def test_the_results_of_all_scripts_become_tables(tmp_path: Path) -> None:
    for script in page.SCRIPTS:
        (tmp_path / f"{script}.json").write_text(json.dumps(made_up(script)))
    results = page.collected(tmp_path)
    assert not results["quick"] and results["minutes"] == len(page.SCRIPTS) / 2
    text = page.written(page.PAGE.read_text(encoding="utf-8"), results)
    assert page.MISSING not in text
    assert text.count("| peer | 2 (2 to 2) | 1.000 (0.500 to 1.500) |") == len(page.SCRIPTS)
    assert text.count("| aimed | 0.600 (0.500 to 0.700) | ≤ 0.65 |") == len(page.SCRIPTS)
    assert text.count("| missed | 0.500 | ≥ 0.9: missed |") == len(page.SCRIPTS)
    (tmp_path / "photos.json").unlink()
    with pytest.raises(SystemExit, match="photos"):
        page.collected(tmp_path)


def test_a_quick_run_is_refused(tmp_path: Path) -> None:
    for script in page.SCRIPTS:
        (tmp_path / f"{script}.json").write_text(json.dumps(made_up(script)))
    quick = made_up("photos")
    quick["environment"]["quick"] = True
    (tmp_path / "photos.json").write_text(json.dumps(quick))
    results = page.collected(tmp_path)
    assert results["quick"]
    (tmp_path / "speed.json").write_text(json.dumps(results))
    with pytest.raises(ValueError, match="quick run"):
        page.committed(tmp_path / "speed.json")


def test_the_limit_is_the_fastest_of_all_that_are_tried() -> None:
    works = [limit.Work(str(n), n**3, partial(torch.mm, *torch.rand(2, n, n))) for n in (8, 64)]
    spun = [0]

    def spin() -> None:
        spun[0] += 1

    fastest = limit.Limit([*works, limit.Work("nothing", 1e15, spin)])
    assert fastest.name == "nothing" and set(fastest.rates) == {"8", "64", "nothing"}
    before = spun[0]
    assert fastest.rate() > 1e6 and spun[0] == before + 1


def test_every_convolution_of_a_network_is_tried_and_counted_as_torch_counts() -> None:
    model = GenerativeClassifier(preset("digits")).eval()
    x = torch.rand(2, *model.image_shape)
    works = limit.of_networks([model, model.frozen()], x)
    kinds = {work.name.split()[0] for work in works}
    assert kinds == {"Conv2d", "FrozenConvolution"}
    for work in works:
        work.run()
    conv = torch.nn.Conv2d(4, 6, 3, bias=False)
    (work,) = limit.of_networks([conv], torch.rand(2, 4, 8, 8))
    with FlopCounterMode(display=False) as counter:
        conv(torch.rand(2, 4, 8, 8))
    assert work.macs == counter.get_total_flops() / 2


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
