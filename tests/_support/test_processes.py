"""Threads, spinning and memory are bounded, and never against the user; what processes share."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from candid import CandidError, GenerativeClassifier
from candid._support import numbers as threads
from candid._support.processes import OneProcess, first_error, gathered, launch, summed

SHOW = (
    "import os, sys, candid; assert 'torch' not in sys.modules;"
    "from candid import GenerativeClassifier; from candid._support.numbers import use_threads;"
    "both = [use_threads(GenerativeClassifier.from_preset(name)) for name in ('digits', 'cifar')];"
    "print(os.environ.get('GOMP_SPINCOUNT'), *both)"
)
NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS", threads.OURS)


def test_only_pythons_own_messages_are_written() -> None:
    code = """
import logging, os, sys
from candid._support.processes import silent_libraries
with silent_libraries():
    os.write(2, b"a library\\n")
    logging.getLogger("candid.serve").warning("a message")
    print("more", file=sys.stderr)
os.write(2, b"the end\\n")
print("as before", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "a message\nmore\nthe end\nas before\n"


def found_with(script: str = SHOW, **settings: str) -> str:
    around = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", script], env=around | settings, capture_output=True, text=True, check=True
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


THREADS = (
    "import sys; from types import SimpleNamespace; "
    "from candid._support.numbers import prepare_threads, threads, use_threads; "
    "prepare_threads(); print(threads(), use_threads(SimpleNamespace(can=())), 'torch' in sys.modules)"
)


def test_models_that_are_no_networks_get_threads_without_torch() -> None:
    cpus = threads.usable_cpus()
    assert found_with(THREADS) == f"{cpus} {cpus} False"
    assert found_with(THREADS, OMP_NUM_THREADS="7") == "7 7 False"
    assert found_with(THREADS, OMP_NUM_THREADS="3,2") == "3 3 False"
    assert found_with(THREADS, LOCAL_WORLD_SIZE="1000") == "1 1 False"
    assert found_with(f"import torch; torch.set_num_threads(5); {THREADS}") == "5 5 True"


def test_one_process_without_a_network_is_no_fabric() -> None:
    process = launch(network=False)
    assert isinstance(process, OneProcess) and isinstance(launch(1, network=False), OneProcess)
    values, error = np.arange(3), CandidError("An error.")
    assert summed(process, values) is values and gathered(process, "a") == ["a"]
    assert first_error(process, None) is None and first_error(process, error) is error
    assert process.broadcast(values) is values and process.is_global_zero
    script = (
        "import sys; from candid._support.processes import launch; launch(network=False).broadcast(0); "
        "print({'torch', 'lightning_fabric', 'numpy'} & set(sys.modules))"
    )
    assert found_with(script) == "set()"


def test_several_processes_without_torch_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    said = r"More than one process needs lightning-fabric: pip install 'candid-vision\[paper\]'"
    with pytest.raises(CandidError, match=said):
        launch(2, network=False)
    with pytest.raises(CandidError, match="A network needs lightning-fabric"):
        launch()


SUMS = """
import os
import numpy as np
import torch
from candid._support.processes import first_error, gathered, launch, summed
processes = launch(2, network=False)
rank = processes.global_rank
values, tensor = np.arange(3.0) + rank, torch.ones(2) * rank
lines = [summed(processes, values).tolist(), values.tolist(), summed(processes, tensor).tolist()]
lines += [gathered(processes, np.full(2, rank)), str(first_error(processes, None))]
if rank == 0:
    os.write(1, repr(lines).encode())
"""


def test_two_processes_share_arrays(tmp_path: Path) -> None:
    script = tmp_path / "sums.py"
    script.write_text(SUMS)
    free = {k: v for k, v in os.environ.items() if not k.startswith(("LOCAL_", "RANK", "WORLD_", "SLURM_"))}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=free, timeout=240
    )
    expected = "[[1.0, 3.0, 5.0], [0.0, 1.0, 2.0], [1.0, 1.0], [array([0, 0]), array([1, 1])], 'None']"
    assert done.stdout == expected, done.stderr


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


SCRIPT = """
import resource, torch
from candid._support.processes import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        torch.ones(20_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def settled():
    return [faults() for _ in range(8)][-1]

usual, told, kept = settled(), keep_freed_memory(), settled()
print(told, usual, kept)
"""


def test_freed_memory_is_used_again_without_asking_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    told, usual, kept = done.stdout.split()
    is_glibc = platform.libc_ver()[0] == "glibc"
    assert told == str(is_glibc)
    if is_glibc:
        assert int(kept) < int(usual) / 10
