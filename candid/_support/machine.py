"""What the machine under torch can be told, and what it says."""

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Names of glibc's mallopt."""


def keep_freed_memory() -> bool:
    """Tells the C library to keep freed memory for later instead of giving it back; whether it could be told.

    Without it, Linux takes back every large tensor as it is freed and hands out new, zeroed pages for
    the next one, which can take half of a training step on a CPU. The price is fragmentation: the
    process holds more at its peak. It holds for the whole process, and does nothing without glibc.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(MMAP_MAX, 0) and mallopt(TRIM_THRESHOLD, -1))


def is_first_process() -> bool:
    """Of those that work together; known before they are connected."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
