"""The command line: it parses, calls one function and shows the result.

The module of a command is imported when the command runs; help and mistakes don't wait for torch.
"""

import os
import sys
from io import TextIOWrapper

from cyclopts import App, CycloptsError

from candid._support.call import from_command_line
from candid._support.errors import CandidError, did_you_mean
from candid._support.files import system_error
from candid._support.pipes import FLAG, allowing_pipes
from candid._support.progress import is_first_process
from candid._support.text import printable
from candid._support.version import __version__
from candid.cli.arguments import ordered, sentence

COMMANDS = {
    "examine": "candid.cli.examine:examine",
    "train": "candid.cli.train:train",
    "adopt": "candid.cli.adopt:adopt",
    "evaluate": "candid.cli.evaluate:evaluate",
    "calibrate": "candid.cli.evaluate:calibrate",
    "refit": "candid.cli.evaluate:refit",
    "compare": "candid.cli.evaluate:compare",
    "group": "candid.cli.group:group",
    "teach": "candid.cli.teach:teach",
    "forget": "candid.cli.teach:forget",
    "corrupt": "candid.cli.corrupt:corrupt",
    "attack": "candid.cli.attack:attack",
    "explain": "candid.cli.explain:explain",
    "plane": "candid.cli.plane:plane",
    "models": "candid.cli.models:models",
    "info": "candid.cli.models:info",
    "import": "candid.cli.models:import_model",
    "watch": "candid.cli.watch:watch",
    "serve": "candid.cli.serve:serve",
    "export": "candid.cli.export:export",
    "audit": "candid.cli.audit:audit",
    "demo": "candid.cli.demo:demo",
}
"""Where the function of each command is; it is imported when the command runs or help lists it."""
USAGE = {"examine": "Usage: candid examine [OPTIONS] [MODEL] IMAGES..."}
"""Of commands whose first argument may be left out, which a signature can't say."""
FLAGS = ("-h", "--help", "--version")


def main() -> None:
    """Run the command line; a user's mistake ends in one line on standard error and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        sys.exit(run(sys.argv[1:]))
    except BrokenPipeError:  # the reader stopped, as in '| head'
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        message = "stopped."
    except CandidError as error:
        message = str(error)
    except OSError as error:
        message = system_error(error)
    except CycloptsError as error:
        message = sentence(error)
    if is_first_process():
        print(f"candid: {printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(2)


def run(arguments: list[str]) -> int | None:
    """Run the command in ``arguments`` and return its exit code."""
    name = arguments[0] if arguments else "--help"
    if name.startswith("-") and name not in FLAGS:
        raise CandidError(f"There is no option '{name}': {did_you_mean(name, FLAGS)}")
    if not name.startswith("-") and name not in COMMANDS:
        raise CandidError(f"There is no command '{name}': {did_you_mean(name, COMMANDS)}")
    if name in ("-h", "--help"):
        for each in COMMANDS:  # the list needs their first sentences
            app[each].help  # noqa: B018
    given = [each for each in arguments if each != FLAG]
    if name in COMMANDS:
        given[1:] = ordered(app[name], given[1:])
    with from_command_line(), allowing_pipes(given if FLAG in arguments else ()):
        result = app(given, exit_on_error=False, print_error=False)
    return result if isinstance(result, int) else None


app = App(
    name="candid",
    help="Image classifiers that say when not to trust them.",
    version=f"candid {__version__}",
    version_flags="--version",
    help_format="plaintext",
    group_parameters="Options",
    result_action="return_value",
)
for _name, _function in COMMANDS.items():
    app.command(_function, name=_name, usage=USAGE.get(_name))
