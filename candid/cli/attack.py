"""The command that attacks models, and measures what it took."""

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from candid._support.errors import CandidError
from candid._support.files import safe_name
from candid._support.text import hundredths
from candid.cli.evaluate import Devices, JsonFlag, PartOption, SkipBad, Workers

COLUMNS = ("", "d", "wrong", "success", "8-bit", "L2", "sure", "AUC", "adaptive AUC", "its success")


def attack(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL... DATA",
            help="Folders of saved models, then a data set, as for 'candid evaluate'.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder for tables, figures and kept attacks.")] = Path(
        "attacks"
    ),
    images: Annotated[int, typer.Option(help="So many, evenly spread over DATA.")] = 200,
    kappa: Annotated[
        str, typer.Option(help="By how much the wrong logit must lead; 'inf' for as much as it gets.")
    ] = "0.01,1,inf",
    d: Annotated[
        str, typer.Option(help="Weights of fooling the detection as well; 0 is the decision alone.")
    ] = "0,66,1000",
    method: Annotated[
        Literal["carlini-wagner", "projected-gradient"], typer.Option(help="The attack.")
    ] = "carlini-wagner",
    radius: Annotated[float, typer.Option(help="L2, of projected gradients.")] = 0.5,
    untargeted: Annotated[
        bool, typer.Option("--untargeted", help="To any wrong class, not to a random one.")
    ] = False,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="Stop where Adam does: larger perturbations.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(help="At most, of each phase.", show_default="300; of projected gradients, 40"),
    ] = None,
    c: Annotated[float, typer.Option(help="Weight of the decision.")] = 10.0,
    trajectories: Annotated[
        int, typer.Option(help="Draw the ways of so many images (up to 6) to one class, in latent space.")
    ] = 0,
    towards: Annotated[
        str | None,
        typer.Option(metavar="CLASS", help="That class: its name or number.", show_default="the last one"),
    ] = None,
    part: PartOption = None,
    seed: Annotated[int, typer.Option(help="For the choice of wrong classes.")] = 0,
    skip_bad: SkipBad = False,
    devices: Devices = None,
    workers: Workers = 2,
    as_json: JsonFlag = False,
) -> None:
    """The smallest changes that make models wrong, and whether the changed images can be detected.

    Targeted Carlini-Wagner attacks, with and without fooling the detection: no detection is shown without the
    attack on it. Attacks are kept in OUT: what was stopped goes on where it was.
    """
    if len(targets) < 2:
        raise CandidError("Name one or more models, then the data.")
    if not 0 <= trajectories <= 6:
        raise CandidError(f"--trajectories draws up to 6 ways in a figure, not {trajectories}.")

    from candid._support.progress import TerminalProgress
    from candid.reports.plots import attacks as attacks_plots
    from candid.reports.plots import style
    from candid.robustness.attacks.benchmark import Request, campaign, setting_name
    from candid.robustness.attacks.tables import record, write_attack_tables

    progress = TerminalProgress()
    request = Request(
        models=tuple(map(Path, targets[:-1])),
        data=targets[-1],
        out=out,
        part=part,
        images=images,
        method=method,
        kappas=_numbers("kappa", kappa),
        ds=_numbers("d", d),
        targeted=not untargeted,
        tighten=not as_published,
        c=c,
        steps=steps,
        radius=radius,
        seed=seed,
        skip_bad=skip_bad,
        devices=devices,
        workers=workers,
    )
    ends = [_class_number(path, towards) for path in dict.fromkeys(request.models)] if trajectories else []
    found = campaign(request, progress)
    if found is None:
        return
    files = write_attack_tables(found, request, out)
    files.append(style.save(attacks_plots.attack_bars(found), out / "attacks.png", svg=True))
    files.append(style.save(attacks_plots.attack_examples(found), out / "examples.png"))
    for path, end, each in zip(dict.fromkeys(request.models), ends, found, strict=False):
        files += _draw_trajectories(path, each, request, trajectories, end, progress)
    if as_json:
        print(json.dumps(record(found, request)))
        return
    for lead in dict.fromkeys(lead for lead, _ in request.settings):
        own = [figures for each in found for figures in each.figures if figures.kappa == lead]
        _print_table(setting_name(request, lead), own)
    progress.log(f"Written: {', '.join(map(str, files))}")


def _class_number(path: Path, towards: str | None) -> int:
    """The class that the ways in a figure lead to."""
    from candid.explanations.classes import chosen_classes
    from candid.models import checkpoint

    names = checkpoint.load_any(path).class_names
    number, *others = [len(names) - 1] if towards is None else chosen_classes(names, towards)
    if others:
        raise CandidError(f"All ways of a figure lead to one class: '{towards}' means several.")
    return number


def _draw_trajectories(
    path: Path, found: Any, request: Any, number: int, target: int, progress: Any
) -> list[Path]:
    """Of images that the model classifies rightly, at each kappa; of a ResNet, which has no latents, none."""
    from candid._support.distributed import best_device
    from candid.models import checkpoint
    from candid.reports.plots import style
    from candid.reports.plots import trajectories as trajectories_plots
    from candid.robustness.attacks.benchmark import setting_name
    from candid.robustness.attacks.trajectories import trajectories

    if found.clean.log_density is None:
        return []
    scene = found.scene
    right = (found.clean.logits.argmax(1) == scene.labels) & (scene.labels != target)
    chosen = right.nonzero()[:number, 0]
    if not len(chosen):
        progress.log(f"no ways of {found.name}: it classifies no image rightly that could be led astray")
        return []
    model = checkpoint.load(path).to(best_device())
    files = []
    for kappa in dict.fromkeys(request.kappas):
        drawn = trajectories(
            model,
            scene.images[chosen],
            target,
            labels=scene.labels[chosen],
            kappa=kappa,
            steps=200 if math.isinf(kappa) else 400,
            progress=progress,
        )
        title = (
            f"Attacks on {found.name}, {setting_name(request, kappa)}, target: {scene.class_names[target]}"
        )
        file = request.out / f"trajectories-{safe_name(found.name)}-{kappa:g}.png"
        files.append(style.save(trajectories_plots.trajectories(drawn, title), file))
    return files


def _numbers(name: str, spec: str) -> tuple[float, ...]:
    try:
        return tuple(math.inf if each.strip() in ("inf", "∞") else float(each) for each in spec.split(","))
    except ValueError as error:
        raise CandidError(f"--{name} takes numbers with commas between them, not '{spec}'.") from error


def _print_table(caption: str, figures: Any) -> None:
    """What fits in a terminal; the files have more."""
    title = f"Attacks, {caption} (median L2; shares and areas under the ROC curve in %)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="right" if name else "left")
    for each in figures:
        areas: tuple[float | None, ...] = (None,) * 3
        if each.detection is not None:
            areas = (each.detection.two_tailed, each.adaptive_two_tailed, each.adaptive_success)
        distance = "–" if each.l2_median is None else f"{each.l2_median:.3f}"
        counted = f"{each.d:g}", f"{each.misclassified}/{each.images}"
        shares = hundredths(each.success), hundredths(each.rounded_success)
        table.add_row(
            escape(each.model),
            *counted,
            *shares,
            distance,
            hundredths(each.confidence),
            *(hundredths(area) for area in areas),
        )
    Console().print(table)
