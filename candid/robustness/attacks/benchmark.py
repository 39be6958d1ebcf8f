"""Attacks on models, measured: how far, how sure, and whether anyone would notice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from candid._support.distributed import first_error, gathered, launch
from candid._support.errors import CandidError
from candid._support.files import cache_file, replacing, write_tensors
from candid._support.files import digest as content_digest
from candid._support.progress import SILENT, Progress
from candid._support.randomness import generator
from candid._support.text import number, short_names
from candid.data.datasets import Part, open_part
from candid.data.loader import named_batches
from candid.data.splits import Split
from candid.inference.predictions import Predictions
from candid.inference.runner import Runner
from candid.models import checkpoint
from candid.robustness.attacks.attack import (
    LEARNING_RATE,
    PATIENCE,
    Attack,
    C,
    carlini_wagner,
    projected_gradient,
)
from candid.robustness.attacks.detection import typical_score
from candid.robustness.attacks.metrics import AttackFigures, figures_of, without_lone_detection
from candid.robustness.attacks.search import NUMBERS_A_BATCH
from candid.trust.judge import HeldOut

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Method = Literal["carlini-wagner", "projected-gradient"]
KAPPAS = (0.01, 1.0, math.inf)
DS = (0.0, 66.0, 1000.0)
"""The paper's weights d of fooling the detection."""
CHUNK = 25
"""Images that are attacked at once, and then kept; fewer if they are large."""
STEPS = {"carlini-wagner": 300, "projected-gradient": 40}
VERSION = 2
"""Of what an attack computes: files of another one are not used."""


@dataclass(frozen=True)
class Request:
    """What to attack, and how."""

    models: tuple[Path, ...]
    data: str
    out: Path
    """Attacks are kept in its folder ``attacks``: a campaign that was stopped goes on where it was."""
    part: Part | None = None
    images: int = 200
    method: Method = "carlini-wagner"
    kappas: tuple[float, ...] = KAPPAS
    ds: tuple[float, ...] = DS
    targeted: bool = True
    tighten: bool = True
    c: float = C
    learning_rate: float = LEARNING_RATE
    patience: int = PATIENCE
    steps: int | None = None
    """At most, of each phase; by default 300, of projected gradients 40."""
    radius: float = 0.5
    """Of projected gradients."""
    seed: int = 0
    skip_bad: bool = False
    devices: int | None = None
    workers: int = 2

    def __post_init__(self) -> None:
        if not self.models or not self.settings:
            raise CandidError("A campaign needs at least one model, one kappa and one d.")
        if any(not kappa >= 0 for kappa in self.kappas) or any(not 0 <= d < math.inf for d in self.ds):
            raise CandidError("'kappa' must be zero, positive or 'inf', and 'd' zero or positive.")

    @property
    def settings(self) -> tuple[tuple[float, float], ...]:
        """Pairs (kappa, d); of projected gradients, which have neither, (0, 0)."""
        if self.method == "projected-gradient":
            return ((0.0, 0.0),)
        return tuple(product(dict.fromkeys(self.kappas), dict.fromkeys(self.ds)))

    def options(self, kappa: float, d: float, median: float | None) -> dict[str, Any]:
        """Of the attack."""
        steps = STEPS[self.method] if self.steps is None else self.steps
        if self.method == "projected-gradient":
            return {"radius": self.radius, "steps": steps}
        return {
            "kappa": kappa,
            "d": d,
            "median": median if d > 0 else None,
            "c": self.c,
            "tighten": self.tighten,
            "learning_rate": self.learning_rate,
            "patience": self.patience,
            "steps": steps,
        }

    def described(self) -> dict[str, Any]:
        """What was asked for, as JSON."""
        common = {"data": self.data, "method": self.method, "targeted": self.targeted, "seed": self.seed}
        own = self.options(0, 0, None)
        return common | {key: value for key, value in own.items() if key not in ("kappa", "d", "median")}


@dataclass(frozen=True)
class Scene:
    """The images under attack, on the CPU."""

    images: Tensor
    """8-bit, (N, C, H, W)."""
    labels: Tensor
    targets: Tensor | None
    """(N,); None untargeted."""
    names: tuple[str, ...]
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class Victim:
    """A model and what it is to be attacked with."""

    name: str
    beta: float | None
    passes: Runner
    split: Split
    scene: Scene
    held_out: HeldOut | None
    median: float | None
    """Of the scores that its detection was fitted to, per dimension."""


@dataclass(frozen=True)
class Assaulted:
    """One model, all settings."""

    name: str
    beta: float | None
    scene: Scene
    clean: Predictions
    attacks: dict[tuple[float, float], Attack]
    """By kappa and d."""
    figures: tuple[AttackFigures, ...]


def campaign(request: Request, progress: Progress = SILENT) -> list[Assaulted] | None:
    """Every model under every attack; None in all processes but the first."""
    fabric = launch(request.devices)
    if not fabric.is_global_zero:
        progress = SILENT
    paths = list(dict.fromkeys(request.models))
    victims = [
        _victim(request, path, name, fabric, progress)
        for path, name in zip(paths, short_names(paths), strict=True)
    ]
    _check_together(request, victims)
    if request.method == "carlini-wagner" and not any(d > 0 for d in request.ds):
        progress.log("no detection figures: they need the attack that fools the detection (--d 0,66,1000)")
    found = [_assaulted(request, victim) for victim in victims]
    return [each for each in found if each is not None] if fabric.is_global_zero else None


def _victim(request: Request, path: Path, name: str, fabric: "Fabric", progress: Progress) -> Victim:
    model = checkpoint.load_any(path)
    is_generative = model.density_of is not None
    held_out = HeldOut.of(model) if is_generative else None
    if is_generative and held_out is None and any(d > 0 for _, d in request.settings):
        raise CandidError(
            f"'{path}' has no held-out scores, whose median fools the detection: add them with "
            f"'candid calibrate {path} DATA', or attack the decision alone with --d 0."
        )
    chosen = open_part(request.data, model.class_names, request.part, model.record.config).split
    if not chosen.can_index:
        raise CandidError("Tar shards are read from end to end: attack images of a folder instead.")
    preprocessing = model.preprocessing
    split = chosen.subsample(request.images).preprocess(
        preprocessing, request.skip_bad, progress, request.data
    )
    batches = list(named_batches(split, preprocessing, CHUNK, workers=request.workers))
    labels = torch.cat([batch[1] for batch in batches])
    return Victim(
        name,
        model.record.beta,
        Runner(model, fabric, request.out / "predictions", request.workers, progress),
        split,
        Scene(
            torch.cat([batch[0] for batch in batches]),
            labels,
            other_classes(labels, len(model.class_names), request.seed) if request.targeted else None,
            tuple(each for batch in batches for each in batch[2]),
            model.class_names,
        ),
        held_out,
        None if held_out is None else typical_score(model),
    )


def _check_together(request: Request, victims: Sequence[Victim]) -> None:
    """Models side by side must see the same images, and at least one of them must be attacked."""
    first = victims[0]
    for other in victims[1:]:
        one, two = first.scene, other.scene
        if (one.names, one.class_names) != (two.names, two.class_names) or not one.labels.equal(two.labels):
            raise CandidError(
                f"'{first.name}' and '{other.name}' have other classes, or other test images of "
                f"'{request.data}': attack them one by one."
            )
    if all(d > 0 for _, d in request.settings) and all(victim.median is None for victim in victims):
        raise CandidError("A ResNet has no likelihood to fool: add 0 to --d, or attack a generative model.")


def _assaulted(request: Request, victim: Victim) -> Assaulted | None:
    passes, scene = victim.passes, victim.scene
    clean = passes.predictions(victim.split, passes.model.preprocessing, f"{victim.name}, clean")
    attacks: dict[tuple[float, float], Attack] = {}
    for kappa, d in request.settings:
        if d > 0 and victim.median is None:
            continue  # a ResNet has no likelihood to fool
        attack = _attacked(request, victim, kappa, d)
        if attack is not None:
            attacks[kappa, d] = attack
    if clean is None:
        return None
    figures = [
        figures_of(
            victim.name, victim.beta, setting, attack, scene.images, clean, victim.held_out, scene.targets
        )
        for setting, attack in attacks.items()
    ]
    return Assaulted(victim.name, victim.beta, scene, clean, attacks, tuple(without_lone_detection(figures)))


def setting_name(request: Request, kappa: float) -> str:
    """For people."""
    if request.method == "projected-gradient":
        return f"radius {request.radius:g}"
    return f"κ = {number(kappa)}"


def other_classes(labels: Tensor, classes: int, seed: int) -> Tensor:
    """A random class other than the label for each image, (N,).

    >>> targets = other_classes(torch.tensor([0, 1, 2, 1]), 3, seed=0)
    >>> bool((targets != torch.tensor([0, 1, 2, 1])).all())
    True
    """
    if classes < 2:
        raise CandidError("A model of one class can't be fooled: attack one with two classes or more.")
    return (labels + torch.randint(1, classes, labels.shape, generator=generator(seed, 11))) % classes


def _attacked(request: Request, victim: Victim, kappa: float, d: float) -> Attack | None:
    """All images, in chunks shared by the processes; None in all but the first."""
    passes, fabric = victim.passes, victim.passes.fabric
    size = max(1, min(CHUNK, NUMBERS_A_BATCH // victim.scene.images[0].numel()))
    chunks = torch.arange(len(victim.scene.images)).split(size)
    own = chunks[fabric.global_rank :: fabric.world_size]
    title = f"{victim.name}, {setting_name(request, kappa)}, d = {d:g}"
    made, error = [], None
    try:
        for chunk in passes.progress.track(own, title, len(own), size * fabric.world_size):
            made.append(_kept_or_made(request, victim, chunk, kappa, d, title))
    except CandidError as problem:
        error = problem
    error = first_error(fabric, error)
    if error is not None:
        raise error
    by_process = gathered(fabric, made)
    if not by_process:
        return None
    return joined([by_process[i % len(by_process)][i // len(by_process)] for i in range(len(chunks))])


def _kept_or_made(
    request: Request, victim: Victim, chunk: Tensor, kappa: float, d: float, title: str
) -> Attack:
    passes, scene = victim.passes, victim.scene
    images, labels = scene.images[chunk], scene.labels[chunk]
    targets = None if scene.targets is None else scene.targets[chunk]
    options = request.options(kappa, d, victim.median)
    digest = passes.model_hash.copy()
    digest.update(repr((VERSION, request.method, passes.model.config, options)).encode())
    digest.update(content_digest(images, labels, *(() if targets is None else (targets,))).digest())
    file = cache_file(request.out / "attacks", f"{title}, {int(chunk[0])}", digest)
    kept = _load(file)
    if kept is not None:
        return kept
    attack = carlini_wagner if request.method == "carlini-wagner" else projected_gradient
    found = attack(passes.frozen, images, targets, labels=labels, **options)
    try:
        _save(found, file)
    except (OSError, SafetensorError) as error:
        raise CandidError(
            f"Can't write to '{file.parent}' ({error}): free some space, or change --out."
        ) from error
    return found


def _columns(attack: Attack) -> dict[str, Tensor]:
    values = {each.name: getattr(attack, each.name) for each in fields(attack)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _save(attack: Attack, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        write_tensors(_columns(attack), temporary)


def _load(file: Path) -> Attack | None:
    """What :func:`_save` wrote; None if there is nothing whole."""
    try:
        tensors: dict[str, Any] = load_file(file)
        return Attack(**{"log_density": None, "traces": None, **tensors})
    except (OSError, SafetensorError, TypeError):
        return None


def joined(parts: Sequence[Attack]) -> Attack:
    """All images of ``parts``, without their ways."""
    columns = [_columns(part) for part in parts]
    return replace(
        parts[0], traces=None, **{name: torch.cat([c[name] for c in columns]) for name in columns[0]}
    )
