"""Threads and spinning are bounded before torch is loaded, and never against the user."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from candid import GenerativeClassifier
from candid._support import threads

SHOW = (
    "import os, sys, candid; assert 'torch' not in sys.modules;"
    "from candid import GenerativeClassifier; from candid._support.threads import use_threads;"
    "both = [use_threads(GenerativeClassifier.from_preset(name)) for name in ('digits', 'cifar')];"
    "print(os.environ.get('GOMP_SPINCOUNT'), *both)"
)
NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS", threads.OURS)


def found_with(**settings: str) -> str:
    around = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env=around | settings, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_importing_candid_bounds_spinning_and_small_networks_get_one_thread() -> None:
    assert found_with() == f"10000 1 {threads.usable_cpus()}"


def test_what_the_user_has_set_stays() -> None:
    assert found_with(OMP_NUM_THREADS="1", GOMP_SPINCOUNT="7") == "7 1 1"
    assert found_with(OMP_WAIT_POLICY="passive", OMP_NUM_THREADS="1") == "None 1 1"


def test_a_number_set_in_torch_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_last_set", None)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads.usable_cpus() + 1)
        model = GenerativeClassifier.from_preset("digits")
        assert threads.use_threads(model) == threads.usable_cpus() + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "100000 100000\n"}, 1),
        ("0::/gone\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        (
            "3:cpu,cpuacct:/x\n2:memory:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "150000\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
            1,
        ),
        ("3:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_quotas_of_control_groups(
    tmp_path: Path, groups: str, files: dict[str, str], cpus: int | None
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert threads.usable_cpus(tmp_path) == (cpus or len(os.sched_getaffinity(0)))
