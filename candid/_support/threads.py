"""How many threads torch uses, and how long they spin while they wait for each other.

Threads that spin burn the time of the core that they wait for as soon as another job wants it, and training
then becomes many times slower. So spinning is bounded before torch is loaded, small networks run on one
thread, and no process starts more threads than the CPUs it may use. Nothing that the user has set is changed.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

SPINS = "10000"
"""Rounds that a thread spins before it sleeps: that costs little on a free machine and on a busy one."""
SMALL_WORK = 10**8
"""Parameters times pixels; below this, threads wait for each other longer than they compute."""
OURS = "CANDID_THREADS"
"""The number of threads that this module has put into OMP_NUM_THREADS, for child processes to recognise."""

_last_set: int | None = None


def prepare_threads() -> None:
    """Bound threads and spinning through the environment; call it before torch is imported.

    OpenMP reads these variables when it is loaded, with torch. Child processes inherit them.
    """
    if "torch" in sys.modules:
        return
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = SPINS
    if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & set(os.environ):
        os.environ["OMP_NUM_THREADS"] = os.environ[OURS] = str(usable_cpus())


class Network(Protocol):
    """What decides how many threads a model gets."""

    @property
    def image_shape(self) -> tuple[int, int, int]: ...
    def parameters(self) -> Iterable[Any]: ...


def use_threads(model: Network) -> int:
    """Set torch's threads for a model and return their number.

    A small network gets one thread, any other one its share of the usable CPUs. A number that the user has
    chosen, through the environment or ``torch.set_num_threads``, stays.
    """
    import torch

    global _last_set
    found = torch.get_num_threads()
    wanted = os.environ.get("OMP_NUM_THREADS", os.environ.get("MKL_NUM_THREADS"))
    untouched = (usable_cpus(), os.cpu_count()) if _last_set is None else (_last_set,)
    if wanted != os.environ.get(OURS) or found not in untouched:
        return found
    _, height, width = model.image_shape
    small = sum(p.numel() for p in model.parameters()) * height * width < SMALL_WORK
    _last_set = 1 if small else max(1, usable_cpus() // _processes())
    torch.set_num_threads(_last_set)
    return _last_set


def _processes() -> int:
    """The number of training processes that share the CPUs; SLURM gives each process CPUs of its own."""
    if "SLURM_PROCID" in os.environ:
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs that affinity and the quotas of control groups leave to this process."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, int(min(count, _quota(root))))


def _quota(root: Path) -> float:
    """The smallest CPU quota of this process's control groups, version 1 or 2, and of those above them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return float("inf")
    quotas = [float("inf")]
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controllers and "cpu")
        here = top / place.lstrip("/")
        quotas += [_read_quota(group) for group in (here, *here.parents) if group.is_relative_to(top)]
    return min(quotas)


def _read_quota(group: Path) -> float:
    """Quota divided by period of one control group; infinity without a limit."""
    for files in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((group / name).read_text() for name in files).split()
            return float(quota) / float(period) if float(quota) > 0 else float("inf")
        except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
            continue
    return float("inf")
