"""Processes, devices and signals: what surrounds a training run or a pass over a data set."""

import atexit
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast, overload

from candid._support.errors import CandidError, require_extra

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from lightning_fabric import Fabric

SIGNALS = [signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""What a terminal and a supervisor send to all processes of a command."""
Started: TypeAlias = tuple[Any, Any]
"""The connection to a process, and the process."""
T = TypeVar("T")
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -3, -4, -8
"""Names of glibc's mallopt."""
PRECISION: dict[str, Any] = {"32": "32-true", "bf16": "bf16-mixed"}


class OneProcess:
    """The only process of a pass, with what passes use of Fabric."""

    world_size = 1
    global_rank = 0
    is_global_zero = True
    device = "cpu"

    def broadcast(self, value: T) -> T:
        """Return ``value``, which no other process needs."""
        return value


if TYPE_CHECKING:
    Processes: TypeAlias = Fabric | OneProcess
else:
    Processes = OneProcess
"""What a pass or a training run is shared by."""


@overload
def launch(devices: int | None = None, precision: str = "32", network: Literal[True] = True) -> "Fabric": ...
@overload
def launch(devices: int | None = None, precision: str = "32", network: bool = True) -> Processes: ...
def launch(devices: int | None = None, precision: str = "32", network: bool = True) -> Processes:
    """Start one process on each of ``devices`` (all GPUs, or one process on the CPU, if None).

    Under torchrun and SLURM the processes are there already: their number is taken from them.

    Args:
        devices: the number of processes on this machine.
        precision: a key of :data:`PRECISION`.
        network: whether torch computes; else the processes stay on the CPU, and a single one needs no torch.
    """
    around = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", 0)))
    if around and devices not in (None, around):
        raise CandidError(f"{around} processes were started but --devices is {devices}: leave --devices out.")
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", os.environ.get("SLURM_NNODES", 1)))
    if not network and (around or devices or 1) * nodes == 1:
        return OneProcess()
    return _launch_fabric(devices, around, nodes, precision, network)


def _launch_fabric(devices: int | None, around: int, nodes: int, precision: str, network: bool) -> "Fabric":
    purpose = "A network" if network else "More than one process"
    torch = require_extra("torch", "paper", purpose)
    fabric_package = require_extra("lightning_fabric", "paper", purpose)
    import logging

    from lightning_fabric.strategies.ddp import DDPStrategy

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    on_gpu = network and torch.cuda.is_available()
    if on_gpu and devices is not None and devices > torch.cuda.device_count():
        raise CandidError(f"There are {torch.cuda.device_count()} GPUs, not {devices}: use fewer --devices.")
    count = around or devices or (torch.cuda.device_count() if on_gpu else 1)
    strategy: Any = "auto"
    if count * nodes > 1:
        strategy_class = _local_strategy(count) if nodes == 1 and not around else DDPStrategy
        strategy = strategy_class(forward_sync_buffers=False)
    try:
        fabric: Fabric = fabric_package.Fabric(
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
    import tempfile

    import torch
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
    return _mallopt((MMAP_MAX, 0), (TRIM_THRESHOLD, -1))


def return_memory(one_arena: bool = False) -> bool:
    """Let large blocks of memory go back to the system as soon as they are freed, where glibc runs.

    Without it, the size of blocks that are mapped one by one grows up to that of images.

    Args:
        one_arena: let all threads share one heap; each further one reserves 64 MB of addresses.
    """
    return _mallopt((MMAP_THRESHOLD, 1_000_000), *([(ARENA_MAX, 1)] if one_arena else []))


@contextmanager
def limited_memory(more: int) -> Iterator[bool]:
    """Let this process allocate at most this number of further bytes; where Linux runs.

    Yields:
        Whether this limit holds; else there is none, or the process had a smaller one before.
    """
    try:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        yield False
        return
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + more
    if before != resource.RLIM_INFINITY and before <= limit:
        yield False
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    try:
        yield True
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


def _mallopt(*settings: tuple[int, int]) -> bool:
    if sys.platform != "linux":
        return False
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return all(mallopt(*each) for each in settings)


def _leave() -> None:
    """Close the connections before the interpreter ends its threads, which can abort it."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def summed(processes: Processes, values: T) -> T:
    """Return ``values``, an array or a tensor, summed over all processes, on the CPU."""
    if processes.world_size == 1:
        return values
    import torch

    total = values if isinstance(values, torch.Tensor) else torch.tensor(values)
    total = total.to(processes.device)
    torch.distributed.all_reduce(total)
    return cast(T, total.cpu() if isinstance(values, torch.Tensor) else total.cpu().numpy())


def gathered(processes: Processes, value: T) -> list[T]:
    """Return the ``value`` of every process, in their order, in the first process; nothing in the others."""
    if processes.world_size == 1:
        return [value]
    from torch.distributed import gather_object

    values: list[Any] = [None] * processes.world_size
    gather_object(value, values if processes.is_global_zero else None)
    return values if processes.is_global_zero else []


def first_error(processes: Processes, error: CandidError | None) -> CandidError | None:
    """Return, in all processes, the first error that any of them has."""
    if processes.world_size == 1:
        return error
    from torch.distributed import all_gather_object

    errors: list[CandidError | None] = [None] * processes.world_size
    all_gather_object(errors, error)
    return next((e for e in errors if e is not None), None)


def ending_signals() -> list[signal.Signals]:
    """Return SIGTERM, and SIGHUP, which a terminal sends when it is closed, unless it is ignored (nohup)."""
    hang_up = getattr(signal, "SIGHUP", None)
    if hang_up is None or signal.getsignal(hang_up) is signal.SIG_IGN:
        return [signal.SIGTERM]
    return [signal.SIGTERM, hang_up]


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process in order, also if it is the first one of a container.

    The system ignores signals for which such a process has no handler.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def started_ahead(module: str, function: str, wanted: bool) -> Iterator[list[Started]]:
    """Start a process before it is needed; who takes it out of the list ends it."""
    ahead = [start_process(module, function)] if wanted else []
    try:
        yield ahead
    finally:
        for connection, process in ahead:
            connection.close()
            process.kill()
            process.join()


def start_process(module: str, function: str, forked: bool = False) -> Started:
    """Start a process that calls ``module.function(connection)``, and return the other end of the connection.

    Its messages go where those of this process go. It gets no signals: this process decides when it ends,
    and it ends with this one.

    Args:
        module: where the function is.
        function: its name.
        forked: fork it from a small process that has imported ``module`` (:func:`begin_forking`), which takes
            milliseconds; else it begins with a new interpreter.
    """
    import multiprocessing
    from multiprocessing import util
    from multiprocessing.connection import Connection

    context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
    here, there = context.Pipe()
    errors = os.dup(_descriptor(sys.stderr) or 2)
    with Connection(errors, readable=False) as messages:  # of all objects, these hand a descriptor on
        process = context.Process(target=_called, args=(there, messages, module, function), daemon=True)
        with _signals_blocked():
            process.start()
    there.close()
    # at the end of this process, multiprocessing would wait for one that gets no SIGTERM
    util.Finalize(process, process._popen.kill, exitpriority=10)
    return here, process


def begin_forking(*modules: str) -> None:
    """Start the process that others are forked from; it ends with this one.

    Args:
        modules: what it imports meanwhile, of those that this process has imported.
    """
    from multiprocessing import forkserver

    forkserver.set_forkserver_preload([name for name in modules if name in sys.modules])
    with _signals_blocked():
        forkserver.ensure_running()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Let processes that are started here never get the signals of a terminal or a supervisor."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _called(connection: "Connection", messages: "Connection", module: str, function: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    write_errors_to(os.dup(messages.fileno()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    getattr(importlib.import_module(module), function)(connection)


def _end_with_parent() -> None:
    """End this process when the one that started it has ended, also in the middle of an answer."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def answer_calls(connection: "Connection", call: Callable[..., Any] | None = None) -> None:
    """Answer each message, a pickled (function, arguments), until the other side is closed.

    Args:
        connection: the end that :func:`start_process` gave to this process.
        call: ``call(function, *arguments)`` returns the answer, by default that of the function itself. An
            exception is an answer, too.
    """
    while True:
        try:
            function, arguments = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):  # closed
            return
        try:
            answer = function(*arguments) if call is None else call(function, *arguments)
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = error
        try:
            connection.send_bytes(packed(answer))
        except OSError:
            return


def packed(answer: object) -> bytes:
    """Return a pickled answer; what can't be pickled becomes an error that says so."""
    try:
        return pickle.dumps(answer)
    except Exception as error:
        return pickle.dumps(RuntimeError(f"an answer can't be sent: {error!r}"))


@contextmanager
def silent_libraries() -> Iterator[None]:
    """Let what libraries write to descriptor 2 go nowhere; Python's own messages go where they went before.

    libtiff writes a line for each error in a file, past ``logging`` and ``warnings``.
    """
    stream = sys.stderr
    copy = os.dup(2)
    with os.fdopen(os.dup(copy), "w", buffering=1, errors="backslashreplace") as kept:
        try:
            if _descriptor(stream) == 2:
                sys.stderr = kept
            _silence()
            yield
        finally:
            os.dup2(copy, 2)
            os.close(copy)
            sys.stderr = stream


def write_errors_to(descriptor: int) -> None:
    """Let Python's own messages go there, and what libraries write to descriptor 2 nowhere, until the end."""
    sys.stderr = os.fdopen(descriptor, "w", buffering=1, errors="backslashreplace")
    _silence()


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _descriptor(stream: Any) -> int | None:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):  # it is no file
        return None


class StopFlag:
    """Set by the first SIGTERM, SIGHUP or Ctrl-C; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


@contextmanager
def stopping_on_signals() -> Iterator[StopFlag]:
    """Let SIGTERM, SIGHUP and Ctrl-C set a flag instead of ending the process."""
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = {number: signal.signal(number, flag) for number in (*ending_signals(), signal.SIGINT)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
