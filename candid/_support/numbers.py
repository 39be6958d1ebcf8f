"""Numbers: arrays, their sums and digests, and how many threads compute with them.

Threads that spin burn the time of the core that they wait for as soon as another job wants it, and training
then becomes many times slower. So spinning is bounded before torch is loaded, small networks run on one
thread, and no process starts more threads than the CPUs it may use. Nothing that the user has set is changed.

This module imports numpy only where it computes, so that commands can name the type of arrays before that.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]
else:
    Array = Any
"""An array of numbers; docstrings say its shape."""
SPINS = "10000"
"""Rounds that a thread spins before it sleeps: that costs little on a free machine and on a busy one."""
SMALL_WORK = 10**8
"""Parameters times pixels; below this, threads wait for each other longer than they compute."""
OURS = "CANDID_THREADS"
"""The number of threads that this module has put into OMP_NUM_THREADS, for child processes to recognise."""
_last_set: int | None = None


def logsumexp(values: Array, axis: int = -1, keepdims: bool = False) -> Array:
    """Return the log of the sum of the exponentials along ``axis``; exports trace it as it stands.

    >>> import numpy as np
    >>> logsumexp(np.log([[1.0, 2.0, 5.0]]))
    array([2.07944154])
    """
    import numpy as np

    largest = values.max(axis=axis, keepdims=True)
    finite = np.where(np.isfinite(largest), largest, 0)
    with np.errstate(divide="ignore"):
        result = np.log(np.exp(values - finite).sum(axis=axis, keepdims=True)) + finite
    return result if keepdims else result.squeeze(axis)


def log_softmax(logits: Array, axis: int = -1) -> Array:
    """Return the log of :func:`softmax`."""
    import numpy as np

    shifted = logits - logits.max(axis=axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))


def softmax(logits: Array, axis: int = -1) -> Array:
    """Return probabilities along ``axis``: exponentials that are divided by their sum.

    >>> import numpy as np
    >>> softmax(np.log([[1.0, 3.0]]))
    array([[0.25, 0.75]])
    """
    import numpy as np

    shifted = np.exp(logits - logits.max(axis=axis, keepdims=True))
    return shifted / shifted.sum(axis=axis, keepdims=True)


def packed(lower: Array, *sizes: int) -> Array:
    """Return the lower triangle of a matrix (F, F), or of blocks of it, row by row without zeros."""
    return lower[_triangles(*(sizes or (len(lower),)))]


def unpacked(values: Array, *sizes: int) -> Array:
    """Return the matrix with lower triangles of these sizes along its diagonal, whose rows are ``values``.

    >>> import numpy as np
    >>> unpacked(np.array([1.0, 2.0, 3.0, 4.0]), 2, 1)
    array([[1., 0., 0.],
           [2., 3., 0.],
           [0., 0., 4.]])
    """
    import numpy as np

    lower = np.zeros((sum(sizes), sum(sizes)), values.dtype)
    lower[_triangles(*sizes)] = values
    return lower


def _triangles(*sizes: int) -> Array:
    """Return where the lower triangles of these sizes are, (F, F) of bool."""
    import numpy as np

    where, end = np.zeros((sum(sizes), sum(sizes)), bool), 0
    for size in sizes:
        start, end = end, end + size
        where[start:end, start:end] = np.tri(size, dtype=bool)
    return where


def as_array(values: Any) -> Array:
    """Return an array or a tensor of torch as an array in C order."""
    import numpy as np

    return np.asarray(values.detach().cpu().numpy() if hasattr(values, "detach") else values, order="C")


def tensors_of(content: bytes) -> dict[str, Array]:
    """Return the arrays of a safetensors file, in memory of their own.

    Without the copy, their place in memory, and with it the last bits of sums, would differ from run to run.
    """
    from safetensors.numpy import load

    arrays, header = load(content), header_of(content)
    names = sorted(arrays, key=lambda name: (header[name]["data_offsets"], name))  # as they were written
    return {name: arrays[name].copy() for name in names}


def header_of(content: bytes) -> dict[str, Any]:
    """Return the header of a safetensors file."""
    return dict(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]))


def digest(*parts: Any) -> "hashlib._Hash":
    """Return the SHA-256 of ``parts``: the bytes of arrays, tensors and bytes, the JSON of everything else.

    >>> digest(b"a", {"beta": 1}).hexdigest() == digest(b"a", {"beta": 1}).hexdigest()
    True
    """
    sha256 = hashlib.sha256()
    for part in parts:
        if isinstance(part, dict | list | tuple | str | int | float | None):
            part = json.dumps(part, sort_keys=True).encode()
        elif hasattr(part, "dtype"):
            part = as_array(part).reshape(-1).view("u1").data
        sha256.update(part)
    return sha256


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


def use_threads(model: Any) -> int:
    """Return the number of threads for a model, and set it in torch if the model is a network.

    A small network gets one thread, any other model its share of the usable CPUs. A number that the user has
    chosen, through the environment or ``torch.set_num_threads``, stays.
    """
    chosen = _chosen_threads()
    if chosen is not None or "network" not in model.can:
        return chosen or _share()
    import torch

    global _last_set
    _, height, width = model.image_shape
    small = sum(p.numel() for p in model.parameters()) * height * width < SMALL_WORK
    _last_set = 1 if small else _share()
    torch.set_num_threads(_last_set)
    return _last_set


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let numpy's products use one thread meanwhile.

    Those of a batch of images are small: a second thread gains nothing, and spins between them while the
    network and the decoders need its core.
    """
    with _libraries().limit(limits=1, user_api="blas"):
        yield


@cache
def _libraries() -> Any:
    import numpy  # noqa: F401  # before its library is looked for
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController()


def threads() -> int:
    """Return the number of threads for what runs outside torch: the user's, or a share of the usable CPUs."""
    return _chosen_threads() or _share()


def _chosen_threads() -> int | None:
    """Return the number of threads that the user has set, in the environment or in torch; None if neither."""
    wanted = os.environ.get("OMP_NUM_THREADS", os.environ.get("MKL_NUM_THREADS"))
    by_user = wanted != os.environ.get(OURS)
    torch = sys.modules.get("torch")
    if torch is None:
        first = (wanted or "").partition(",")[0].strip()
        return int(first) if by_user and first.isdigit() and int(first) else None
    count = int(torch.get_num_threads())
    untouched = (usable_cpus(), os.cpu_count()) if _last_set is None else (_last_set,)
    return count if by_user or count not in untouched else None


def _share() -> int:
    """Return the usable CPUs of this process if the others take as many."""
    return max(1, usable_cpus() // _processes())


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
