"""The peers of benchmarks/attacks.py: foolbox's and torchattacks' attacks of Carlini and Wagner."""

import importlib
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from candid._support.errors import CandidError
from candid.robustness.attacks.carlini_wagner import KAPPA, LEARNING_RATE

PEERS = ("foolbox", "torchattacks")
PACKAGES = (
    "foolbox==3.3.4 torchattacks==3.5.1 "
    "eagerpy GitPython gitdb smmap requests urllib3 charset-normalizer certifi idna"
)

Run = Callable[[Tensor, Tensor], Tensor]
"""Images and targets to attacked images."""


class Raised(nn.Sequential):
    """Logits above zero: torchattacks has no gradient for the negative logit of a target."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits - logits.detach().amin(1, keepdim=True) + 1


class AllSteps(int):
    """So many steps, all of them: torchattacks would look every ``steps // 10`` whether to stop."""

    def __floordiv__(self, _: int) -> int:
        return int(self)


def foolbox(model: nn.Module, steps: int, searches: int, c: float) -> Run:
    package = importlib.import_module("foolbox")
    attack = package.attacks.L2CarliniWagnerAttack(
        searches, math.ceil(steps / searches), LEARNING_RATE, KAPPA, initial_const=c, abort_early=False
    )
    taken = package.PyTorchModel(model, bounds=(0, 1))

    def run(images: Tensor, targets: Tensor) -> Tensor:
        found = attack.run(taken, images, package.criteria.TargetedMisclassification(targets))
        nothing = (found == 0).flatten(1).all(1)  # was found, so it is black
        return torch.where(nothing[:, None, None, None], images, found)

    return run


def torchattacks(model: nn.Module, steps: int, c: float) -> Run:
    package = importlib.import_module("torchattacks")
    attack = package.CW(model.eval(), c=c, kappa=KAPPA, steps=AllSteps(steps), lr=LEARNING_RATE)
    attack.set_mode_targeted_by_label(quiet=True)
    return attack


def peers(model: nn.Module, steps: int) -> dict[str, Run]:
    """With several settings, each with at least ``steps`` gradient steps.

    foolbox's own search for the constant c starts so low that few steps are left when it is large enough; a
    constant of 0.1 suits both better than what they start from.
    """
    return {
        "foolbox, 9 searches": foolbox(model, steps, 9, 1e-3),
        "foolbox, 4 from c 0.1": foolbox(model, steps, 4, 0.1),
        "foolbox, c 1": foolbox(model, steps, 1, 1.0),
        "foolbox, c 10": foolbox(model, steps, 1, 10.0),
        "torchattacks, c 0.1, raised": torchattacks(Raised(model), steps, 0.1),
        "torchattacks, c 1": torchattacks(model, steps, 1.0),
        "torchattacks, c 1, raised": torchattacks(Raised(model), steps, 1.0),
        "torchattacks, c 10": torchattacks(model, steps, 10.0),
        "torchattacks, c 10, raised": torchattacks(Raised(model), steps, 10.0),
    }


def import_peers(folder: Path) -> None:
    """From ``folder``, behind the packages of this environment."""
    sys.path.append(str(folder))
    try:
        with warnings.catch_warnings(action="ignore"):
            for name in PEERS:
                importlib.import_module(name)
    except ImportError as error:
        install = f"pip install --no-deps --target {folder} {PACKAGES}"
        raise CandidError(f"The peers can't be imported ({error}): {install}") from error
