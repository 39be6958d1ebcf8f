"""Which files does one image pass, from the command line to its verdict?

    python -m benchmarks.walk [MODEL] [IMAGE]

Lists the files of candid that ``candid examine MODEL IMAGE`` enters by function calls, in their order; the
modules of the pixel model count as one. What runs while a module is imported does not count. The command runs
once before, in a process of its own: the first photo after an installation writes the graph of its eye, too.
"""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import FrameType

import candid
from candid.cli.app import run

ROOT = Path(candid.__file__).parent
SAMPLE = str(ROOT / "reports" / "demo" / "samples" / "everyday" / "cat.jpg")


@contextmanager
def files_entered() -> Iterator[dict[str, str]]:
    """Collect files and the first function that is called in each, in every thread."""
    found: dict[str, str] = {}

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<") or not code.co_filename.startswith(str(ROOT)):
            return
        file = Path(code.co_filename).relative_to(ROOT).as_posix()
        if not _while_importing(frame):
            found.setdefault("models/flow/" if file.startswith("models/flow/") else file, code.co_name)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _while_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(str(ROOT)):
            return True
        frame = frame.f_back
    return False


def main() -> int:
    model, image = (*sys.argv[1:], *("cifar10-beta1", SAMPLE)[len(sys.argv) - 1 :])
    subprocess.run([sys.executable, "-m", "candid", "examine", model, image], check=True, capture_output=True)
    with files_entered() as found, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        run(["examine", model, image])
    for i, (file, function) in enumerate(found.items(), 1):
        print(f"{i:3d} {file:32s} {function}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
