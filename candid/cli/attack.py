"""The command that attacks models and measures what it took."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from candid._support.errors import CandidError
from candid._support.files import safe_name
from candid._support.options import Option, check_fields
from candid._support.progress import Progress, TerminalProgress
from candid._support.text import percent
from candid.cli.app import JsonFlag, command, show_table
from candid.robustness.options import AttackOptions

if TYPE_CHECKING:
    from candid.robustness.attacks.metrics import AttackedModel, AttackMetrics, Measured

COLUMNS = ("", "d", "success", "L2", "8-bit success", "8-bit L2", "AUC")


@dataclass(frozen=True)
class TrajectoryOptions:
    """Which paths of attacks are drawn."""

    trajectories: Annotated[
        int, Option("Draw the paths of this number of images to one class, in latent space.", least=0, most=6)
    ] = 0
    towards: Annotated[
        str | None, Option("That class: its name or number.", metavar="CLASS", default="the last one")
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)


@command
def attack(
    targets: Annotated[
        list[str], Option("Models, then a data set, as for 'candid evaluate'.", metavar="MODEL... DATA")
    ],
    /,
    options: AttackOptions,
    paths: TrajectoryOptions,
    as_json: JsonFlag = False,
) -> None:
    """Find the smallest changes that make models wrong, and whether the changed images can be detected.

    Targeted Carlini-Wagner attacks, with and without fooling the detection: no detection is shown without the
    attack on it. Each is made with real-valued images and with 8-bit images, which work as a file. Attacks
    are cached in OUT: a benchmark that was stopped continues where it was.
    """
    if len(targets) < 2:
        raise CandidError("Name one or more models, then the data.")

    from candid.inference.study import named_models
    from candid.reports.plots.attacks import attack_bars, attack_examples
    from candid.reports.plots.style import save
    from candid.robustness.attacks.benchmark import attack as run
    from candid.robustness.attacks.benchmark import write_attack_tables

    progress = TerminalProgress()
    models = list(dict.fromkeys(targets[:-1]))
    if paths.trajectories:
        for model in named_models(models).values():
            _class_number(model.class_names, paths.towards)
    result = run(models, targets[-1], progress, **vars(options))
    if result is None:
        return
    files = write_attack_tables(result, options.out)
    files.append(save(attack_bars(result.models), options.out / "attacks.png", svg=True))
    files.append(save(attack_examples(result.models), options.out / "examples.png"))
    for attacked in result:
        files += _draw_trajectories(attacked, options, paths, progress)
    for note in result.notes:
        progress.log(note.text)
    if as_json:
        print(json.dumps(result.to_dict()))
        return
    metrics = [one for attacked in result for one in attacked.metrics]
    kind = "8-bit" if any(one.eight_bit for one in metrics) else "attacked"
    for kappa in dict.fromkeys(kappa for kappa, _ in options.settings):
        rows = [_row(one) for one in metrics if one.kappa == kappa]
        title = f"Attacks, {options.setting_name(kappa)} (median L2; AUCs of {kind} images; shares in %)"
        show_table(title, COLUMNS, rows, tight=True)
    progress.log(f"Written: {', '.join(map(str, files))}")


def _class_number(names: tuple[str, ...], towards: str | None) -> int:
    """Return the class that the paths in a figure lead to."""
    from candid.explanations.similarity import chosen_classes

    number, *others = [len(names) - 1] if towards is None else chosen_classes(names, towards)
    if others:
        raise CandidError(f"All paths of a figure lead to one class: '{towards}' stands for several.")
    return number


def _draw_trajectories(
    attacked: "AttackedModel", options: AttackOptions, chosen: TrajectoryOptions, progress: Progress
) -> list[Path]:
    """Draw paths of correctly classified images, a column for each kappa; a ResNet has no latents to draw."""
    from candid.reports.plots.style import save
    from candid.reports.plots.trajectories import trajectories as draw
    from candid.robustness.attacks.trajectories import trajectories

    if not chosen.trajectories or attacked.clean.log_density is None:
        return []
    if "invert" not in attacked.model.can:
        progress.log(f"No trajectories for {attacked.name}: they are drawn in the latent of a pixel model.")
        return []
    inputs = attacked.inputs
    target = _class_number(inputs.class_names, chosen.towards)
    right = (attacked.clean.logits.argmax(1) == inputs.labels) & (inputs.labels != target)
    rows = right.nonzero()[0][: chosen.trajectories]
    if not len(rows):
        progress.log(f"No trajectories for {attacked.name}: it already misclassifies every chosen image.")
        return []
    drawn = [
        trajectories(
            attacked.model.ready(),
            inputs.images[rows],
            target,
            labels=inputs.labels[rows],
            kappa=kappa,
            progress=progress,
            steps=200 if math.isinf(kappa) else 400,
        )
        for kappa in dict.fromkeys(options.kappa)
    ]
    title = f"Attacks on {attacked.name}, target: {inputs.class_names[target]}"
    return [save(draw(drawn, title), options.out / f"trajectories-{safe_name(attacked.name)}.png")]


def _row(metrics: "AttackMetrics") -> tuple[str, ...]:
    """Return what fits in a terminal, with intervals on a second line; the files have more."""
    seen = metrics.as_file
    area = None if seen.detection is None else seen.detection.two_tailed
    return (
        metrics.model,
        f"{metrics.d:g}",
        *_success_and_length(metrics),
        *_success_and_length(metrics.eight_bit),
        _cell(percent(area, sign=False), seen.intervals.get("two_tailed"), 100, ".0f"),
    )


def _success_and_length(measured: "Measured | None") -> tuple[str, str]:
    if measured is None:
        return "–", "–"
    ends, l2 = measured.intervals, measured.l2_median
    return (
        _cell(percent(measured.success, sign=False), ends.get("success"), 100, ".0f"),
        _cell("–" if l2 is None else f"{l2:#.3g}", ends.get("l2_median"), 1, ".2g"),
    )


def _cell(value: str, interval: Sequence[float] | None, scale: float, form: str) -> str:
    """Return a value, with its interval on a second line if it has one."""
    if interval is None or value == "–":
        return value
    return f"{value}\n{'–'.join(format(scale * end, form) for end in interval)}"
