"""The command that watches a stream of images for drift."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

from candid._support.options import Option
from candid._support.text import printable
from candid.cli.app import JsonFlag, ModelName, command
from candid.trust.promises import WatchOptions

if TYPE_CHECKING:
    from candid.trust.drift import Watch


ALARM = 3
"""The exit code of --once if the alarm has rung."""


@command
def watch(
    model: ModelName,
    images: Annotated[
        str, Option("A folder, or a text file that names one image per line.", metavar="FOLDER")
    ],
    /,
    options: WatchOptions,
    as_json: JsonFlag = False,
) -> int | None:
    """Watch images for drift: raise an alarm when they are no longer like the held-out ones.

    It looks at the images in a folder and then at new ones as they arrive, until it is stopped. It needs no
    labels. While the images do not change, the probability that the alarm ever rings is at most --alarm (as
    measured, if the model also learned from its held-out photos; it says so). The order counts: images of a
    folder that arrive together are taken in a random order, those of a list as they are listed. Images that
    can't be used are named on standard error, not counted.

    An alarm that has rung is said at every start until --acknowledge. With --once, the exit code is 3 if the
    alarm has rung.
    """
    from candid.judging.watch_images import FileWatch
    from candid.models import checkpoint

    files = FileWatch(checkpoint.load(model), model, images, options)
    if files.watch.images:
        _log(f"goes on after {files.watch.images:,} images")
    if files.acknowledged is not None:
        _log(f"acknowledged: {files.acknowledged.sentence()} The watch starts again.")
    elif options.acknowledge:
        _log("there is no alarm to acknowledge")
    elif files.watch.alarm and not files.once:
        _log("the alarm has rung; to start again, add --acknowledge")
        if as_json:
            print(json.dumps(files.watch.report()), flush=True)
        else:
            _show(files.watch)
    if not files.once:
        _log(f"watching '{images}'; stop with Ctrl-C, the state is in '{files.state.path}'")
    broken = 0
    try:
        for counted in files.run():
            for each in counted.unusable:
                _log(f"'{each.path}' can't be used: {each.reason}")
            broken += len(counted.unusable)
            if files.once:
                continue
            if as_json:
                print(json.dumps(counted.watch.report()), flush=True)
            elif counted.rang:
                _show(counted.watch)
            else:
                _log(f"{counted.watch.images:,} images, evidence {counted.watch.evidence:.3g}")
    finally:
        files.state.close()
    if as_json:
        print(json.dumps(files.watch.report()))
    else:
        _show(files.watch)
    if files.once and files.watch.alarm:
        return ALARM
    return 2 if broken else None


def _show(watch: "Watch") -> None:
    print(printable(watch.sentence()), flush=True)
    for carrier in watch.carriers if watch.alarm else ():
        line = f"  image {carrier.image:,}, {carrier.name}: evidence x {carrier.gain:.2f}"
        print(printable(line), flush=True)


def _log(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
