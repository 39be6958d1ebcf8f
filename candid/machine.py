"""What the machine under torch can be told."""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
"""Names of glibc's mallopt."""


def keep_freed_memory(keep: bool = True) -> bool:
    """Tells the C library to keep freed memory for the next step of training; whether it could be told.

    Without it, Linux takes back every large tensor as it is freed and hands out new, zeroed pages for
    the next one: up to a third of a training step on a CPU. The memory in use at the peak stays the same.
    ``keep=False`` is the C library's own way. It does nothing where there is no glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    settings = {MMAP_MAX: 0, TRIM_THRESHOLD: -1}
    if not keep:
        settings = {MMAP_MAX: 2**16, MMAP_THRESHOLD: 2**25, TRIM_THRESHOLD: 2**26}
    return sys.platform == "linux" and all(mallopt(name, value) for name, value in settings.items())
