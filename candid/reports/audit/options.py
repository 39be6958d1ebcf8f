"""The options of an audit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from candid.data.datasets import Part
from candid.robustness.attacks.benchmark import DS, KAPPAS
from candid.robustness.corruptions.apply import CORRUPTIONS, SEVERITIES


@dataclass(frozen=True)
class AuditOptions:
    """What to audit, and how thoroughly."""

    models: tuple[Path, ...]
    data: str
    out: Path
    """Passes, attacks, tables and figures are kept here: an audit that was stopped goes on where it was."""
    part: Part | None = None
    ood: Mapping[str, str] = field(default_factory=dict)
    """Other sets of images by name."""
    images: int | None = None
    """Of each set; None: all."""
    corruption_images: int | None = None
    """Of each corruption and severity; None: as many as ``images``, 0: no corruptions."""
    attack_images: int = 200
    """0: no attacks."""
    examples: int = 4
    """Images that are examined, with a page for each generative model."""
    corruptions: tuple[str, ...] = tuple(CORRUPTIONS)
    severities: tuple[int, ...] = SEVERITIES
    kappas: tuple[float, ...] = KAPPAS
    ds: tuple[float, ...] = DS
    steps: int | None = None
    """Of attacks, at most."""
    ten_crop: bool = False
    quick: bool = False
    """Whether the numbers above are those of a quick look: the page says so."""
    skip_bad: bool = False
    workers: int = 2
