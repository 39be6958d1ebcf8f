"""What the C library is told about memory."""

import platform
import subprocess
import sys

SCRIPT = """
import resource, torch
from candid._support.distributed import keep_freed_memory

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
