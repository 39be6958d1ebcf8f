"""Processes, devices and signals: what surrounds a training run or a pass over a data set."""

import atexit
import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from candid._support.errors import CandidError

if TYPE_CHECKING:  # it takes seconds to import, and a model alone does without
    from lightning_fabric import Fabric

T = TypeVar("T")
TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Names of glibc's mallopt."""
PRECISION: dict[str, Any] = {"32": "32-true", "bf16": "bf16-mixed"}


def launch(devices: int | None = None, precision: str = "32") -> "Fabric":
    """Start one process on each of ``devices`` (all GPUs, or one process on the CPU, if None).

    Under torchrun and SLURM the processes are there already: their number is taken from them.
    """
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.ddp import DDPStrategy

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    on_gpu = torch.cuda.is_available()
    around = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", 0)))
    if around and devices not in (None, around):
        raise CandidError(f"{around} processes were started but --devices is {devices}: leave --devices out.")
    if on_gpu and devices is not None and devices > torch.cuda.device_count():
        raise CandidError(f"There are {torch.cuda.device_count()} GPUs, not {devices}: use fewer --devices.")
    count = around or devices or (torch.cuda.device_count() if on_gpu else 1)
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", os.environ.get("SLURM_NNODES", 1)))
    strategy: Any = "auto"
    if count * nodes > 1:
        own = _local_strategy(count) if nodes == 1 and not around else DDPStrategy
        strategy = own(forward_sync_buffers=False)
    try:
        fabric = Fabric(
            accelerator="cuda" if on_gpu else "cpu",
            devices=count,
            num_nodes=nodes,
            strategy=strategy,
            precision=PRECISION[precision],
        )
    except (ValueError, RuntimeError) as error:  # such as srun without --ntasks-per-node
        raise CandidError(f"The processes can't be set up as they were started: {error}") from error
    fabric.launch()
    atexit.register(_leave)
    if not on_gpu:
        keep_freed_memory()
    return fabric


STORE = "CANDID_STORE"
"""The environment variable that tells the other processes of a command where they meet."""


def _local_strategy(processes: int) -> Any:
    """Return the class that lets processes on one machine meet in a file and talk over loopback alone.

    Otherwise torch opens a port on all interfaces, and anybody who reaches it could take part.
    """
    from lightning_fabric.strategies.ddp import DDPStrategy

    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo0" if sys.platform == "darwin" else "lo")
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if rank == 0:  # it starts the others; the last one to leave removes the file
        file, os.environ[STORE] = tempfile.mkstemp(prefix="candid-")
        os.close(file)

    class LocalStrategy(DDPStrategy):
        def setup_environment(self) -> None:
            if not torch.distributed.is_initialized():
                store = torch.distributed.FileStore(os.environ[STORE], processes)  # type: ignore[attr-defined]
                backend = "nccl" if self.root_device.type == "cuda" else "gloo"
                torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=processes)
            super().setup_environment()

    return LocalStrategy


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory for later use; return whether it could be told.

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


def best_device() -> torch.device:
    """Return a GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _leave() -> None:
    """Close the connections before the interpreter ends its threads, which can abort it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def summed(fabric: "Fabric", values: Tensor) -> Tensor:
    """Return ``values`` summed over all processes, on the CPU."""
    if fabric.world_size == 1:
        return values
    values = values.to(fabric.device)
    torch.distributed.all_reduce(values)
    return values.cpu()


def gathered(fabric: "Fabric", value: T) -> list[T]:
    """Return the ``value`` of every process, in their order, in the first process; nothing in the others."""
    if fabric.world_size == 1:
        return [value]
    values: list[Any] = [None] * fabric.world_size
    torch.distributed.gather_object(value, values if fabric.is_global_zero else None)
    return values if fabric.is_global_zero else []


def first_error(fabric: "Fabric", error: CandidError | None) -> CandidError | None:
    """Return, in all processes, the first error that any of them has."""
    errors: list[CandidError | None] = [error]
    if fabric.world_size > 1:
        errors = [None] * fabric.world_size
        torch.distributed.all_gather_object(errors, error)
    return next((e for e in errors if e is not None), None)


class StopFlag:
    """Set by the first SIGTERM or Ctrl-C; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


@contextmanager
def stopping_on_signals() -> Iterator[StopFlag]:
    """Let SIGTERM and Ctrl-C set a flag instead of ending the process."""
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = {number: signal.signal(number, flag) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
