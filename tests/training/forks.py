"""``candid train`` in processes that are forked from one that has already imported everything."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
from multiprocessing.context import ForkServerProcess
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["sklearn.datasets", "torch._dynamo", "candid.training.train", "candid.cli.train"]
)


def _train(arguments: list[str], error: str, largest_file: int | None) -> None:
    from candid.cli.app import main

    with Path(error).open("w") as stream:
        os.dup2(stream.fileno(), sys.stderr.fileno())
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    for variable in [v for v in os.environ if v.startswith(("LOCAL_", "RANK", "WORLD_", "SLURM_"))]:
        del os.environ[variable]
    sys.argv = ["candid", "train", *arguments]
    main()


class Training:
    """A process that runs ``candid train`` with these arguments, without the seconds that imports take."""

    def __init__(self, *arguments: str | Path, largest_file: int | None = None) -> None:
        file, self._error = tempfile.mkstemp(prefix="stderr-")
        os.close(file)
        words = [*map(str, arguments)]
        self.process: ForkServerProcess = FORKS.Process(
            target=_train, args=(words, self._error, largest_file)
        )
        self.process.start()

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self.process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> "subprocess.CompletedProcess[str]":
        """Wait for the end; return the exit code and what was said on standard error."""
        self.process.join(240)
        assert self.process.exitcode is not None
        error = Path(self._error)
        done = subprocess.CompletedProcess("candid train", self.process.exitcode, "", error.read_text())
        error.unlink()
        return done
