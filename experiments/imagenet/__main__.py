"""The command ``python -m experiments.imagenet``: measure, draw and write the page."""

import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, CycloptsError

from candid._support.errors import CandidError
from candid._support.options import Option
from candid.cli.app import command
from experiments.imagenet.options import StudyOptions


@command
def imagenet(
    targets: Annotated[
        list[str],
        Option(
            "Released files, model folders or torchvision's ResNet-50; then a folder with val/<wnid>/*.JPEG, "
            "and perhaps train/<wnid>.",
            metavar="CHECKPOINT... IMAGENET",
        ),
    ],
    /,
    options: StudyOptions,
) -> None:
    """Make the paper's tables and figures from checkpoints and an ImageNet folder.

    OUT gets the page (README.md), its figures and results.json. A study that was stopped continues where it
    was: the same command again computes nothing that is finished.
    """
    if len(targets) < 2:
        raise CandidError("Name one or more checkpoints, then the folder of ImageNet.")

    from experiments.imagenet.study import Study
    from experiments.imagenet.tables import write_page

    study = Study(targets[:-1], targets[-1], options)
    results = study.results()
    study.stages.last(f"page: {write_page(results, options.out)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; a user's mistake ends in one line on standard error and exit code 2."""
    app = App(
        name="python -m experiments.imagenet",
        version_flags=(),
        help_format="plaintext",
        group_parameters="Options",
        result_action="return_value",
    )
    app.default(imagenet)
    try:
        app(sys.argv[1:] if arguments is None else arguments, exit_on_error=False, print_error=False)
        return
    except KeyboardInterrupt:
        message = "stopped; the same command continues from here."
    except (CandidError, CycloptsError, OSError) as error:
        message = " ".join(str(error).split())
    print(f"imagenet: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
