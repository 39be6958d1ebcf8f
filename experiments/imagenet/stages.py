"""The stages of a study: each leaves a JSON file, and what is finished is not computed again."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from candid._support import __version__
from candid._support.errors import CandidError
from candid._support.files import write_texts
from candid._support.numbers import digest

Result = dict[str, Any]


class Stages:
    """Runs stages one after the other and shows a line for each.

    Args:
        out: the folder of the study; results are kept in its folder ``stages``.
        total: number of stages.
    """

    def __init__(self, out: Path, total: int) -> None:
        self.out, self.total, self.started = out, total, 0

    def run(self, name: str, title: str, key: object, make: Callable[[], Result]) -> Result:
        """Return what ``make`` returns, or what it returned in an earlier run with the same ``key``.

        If the result has ``files``, relative to the folder of the study, they must still be there.
        """
        self.started += 1
        line = f"[{self.started}/{self.total}] {title}"
        path, found = self.out / "stages" / f"{name}.json", digest(__version__, repr(key)).hexdigest()
        earlier = _read(path)
        if earlier.get("key") == found and self._has_files(earlier["result"]):
            print(f"{line}: finished before", flush=True)
            return earlier["result"]
        print(line, flush=True)
        result = make()
        write_texts({path.name: json.dumps({"key": found, "result": result}, indent=1) + "\n"}, path.parent)
        return result

    def last(self, title: str) -> None:
        """Show the line of the last stage, which leaves no JSON file."""
        print(f"[{self.total}/{self.total}] {title}", flush=True)

    def _has_files(self, result: Result) -> bool:
        return all((self.out / name).exists() for name in result.get("files", ()))


def _read(path: Path) -> Result:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or it was cut: the stage is run again
        return {}


def candid(*arguments: object, launch: str | None = None) -> None:
    """Run a command of the command line; ``launch`` starts its processes in place of this Python."""
    print("  candid", *arguments, flush=True)
    before = [sys.executable] if launch is None else shlex.split(launch)
    done = subprocess.run([*before, "-m", "candid", *map(str, arguments)], stdout=subprocess.DEVNULL)
    if done.returncode:
        raise CandidError(
            f"'candid {arguments[0]}' stopped, for the reason above: put it right and run this "
            "command again; it goes on from here."
        )
