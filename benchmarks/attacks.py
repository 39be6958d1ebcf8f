"""How far attacks of Carlini and Wagner move images to reach a target: Candid, foolbox and torchattacks.

All attack the same images of the same model in the same process, with the same targets: random classes, but
neither the label nor what the model says already. The peers take as many gradient steps for each image as
Candid takes passes on the average; passes are counted at the model. Of each peer, the settings with the
smallest median distance are compared; an image that is not taken for its target is infinitely far. Candid's
distances are compared with the right ones as well, which are known for linear logits.

The peers must not enter Candid's environment, so they are looked for in a folder of their own (``--peers``);
without it only Candid is measured. Without model and data, a ResNet is trained on scikit-learn's digits::

    python -m benchmarks.attacks --model runs/resnet/model/best --data DATA --peers FOLDER
"""

import math
import operator
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks.attacks_peers import PEERS, Run, import_peers, peers
from benchmarks.common import Figure, Timing, conclude, console, parsed, parser, show
from candid import GenerativeClassifier, ResNet, load
from candid._support.errors import CandidError
from candid._support.progress import TerminalProgress
from candid._support.randomness import generator
from candid.data.batches import named_batches
from candid.data.datasets import open_part
from candid.data.images import to_float
from candid.models.flow.config import preset
from candid.models.resnet import ResNetConfig
from candid.robustness.attacks.carlini_wagner import KAPPA, STEPS, carlini_wagner

OURS = "Candid"
BATCH = 64
TRAINING = 1500
"""Of the 1797 digits."""
SUCCESS, RATIO = "images taken for their target", f"median distance, {OURS} / "
WORST = "distance / the nearest peer's, largest of all images"
LINEAR = "distance / the right one for linear logits, largest"


class Logits(nn.Module):
    """A model as all contenders take it: images in [0, 1] to logits."""

    def __init__(self, model: GenerativeClassifier | ResNet) -> None:
        super().__init__()
        self.model, self.image_shape = model, model.image_shape
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        """Through the hook that counts."""
        return self(x)


class Linear:
    """Two classes with a random plane between them, through the grey image."""

    image_shape = (3, 32, 32)

    def __init__(self) -> None:
        size = math.prod(self.image_shape)
        self.weights = torch.randn(size, 2, generator=generator(0)) / math.sqrt(size)

    def logits(self, x: Tensor) -> Tensor:
        return (x - 0.5).flatten(1) @ self.weights.to(x)


@dataclass
class Attempt:
    """What one contender did with N images."""

    forward: float = 0.0
    """Passes of each image, on the average."""
    backward: float = 0.0
    seconds: float = 0.0
    distances: tuple[float, ...] = ()
    """L2 norms; infinity for images that are not taken for their target."""
    confident: float = 0.0
    """The share with a margin of kappa."""

    @property
    def median(self) -> float:
        return statistics.median(self.distances)

    @property
    def reached(self) -> list[float]:
        return [distance for distance in self.distances if math.isfinite(distance)]

    @property
    def success(self) -> float:
        return len(self.reached) / len(self.distances)

    def row(self, ours: "Attempt") -> tuple[str, ...]:
        nearer = sum(theirs < own for theirs, own in zip(self.distances, ours.distances, strict=True))
        shares = (f"{100 * share:.0f} %" for share in (self.success, self.confident))
        mean = f"{statistics.mean(self.reached):.4f}" if self.reached else ""
        passes = (f"{self.backward:.0f}", f"{self.forward:.0f}", f"{self.seconds:.0f}")
        return (*shares, f"{self.median:.4f}", mean, str(nearer), *passes)


def attempted(run: Run, model: Logits, images: Tensor, targets: Tensor) -> Attempt:
    """``run`` on all images; what passes through the model, or a copy of it, is counted and judged here."""
    attempt = Attempt()

    def backward(gradient: Tensor) -> None:
        attempt.backward += len(gradient) / len(images)

    def forward(_: nn.Module, __: object, logits: Tensor) -> None:
        attempt.forward += len(logits) / len(images)
        if logits.requires_grad:
            logits.register_hook(backward)

    counting = model.register_forward_hook(forward)
    start = time.perf_counter()
    parts = zip(images.split(BATCH), targets.split(BATCH), strict=True)
    found = torch.cat([run(*part) for part in parts]).clamp(0, 1)
    attempt.seconds = time.perf_counter() - start
    counting.remove()
    with torch.no_grad():
        margin = margins(model(found), targets)
    distances = (found.double() - images.double()).flatten(1).norm(dim=1)
    attempt.distances = tuple(distances.masked_fill(margin <= 0, math.inf).tolist())
    # Logits depend a little on what else is in a batch.
    attempt.confident = (margin >= 0.99 * KAPPA).double().mean().item()
    return attempt


def margins(logits: Tensor, targets: Tensor) -> Tensor:
    """By how much the target's logit exceeds the others', (B,)."""
    own = targets[:, None]
    return logits.gather(1, own).squeeze(1) - logits.scatter(1, own, -math.inf).amax(1)


def opened(model: str, data: str, images: int) -> tuple[Logits, Tensor, Tensor]:
    """A saved model, images of ``data`` and their labels."""
    loaded = load(model)
    preprocessing = loaded.preprocessing
    split = open_part(data, loaded.class_names, None, loaded.record.config).split.subsample(images)
    ready = split.preprocess(preprocessing, True, TerminalProgress(), data)
    x, y, _ = next(iter(named_batches(ready, preprocessing, len(ready))))
    return Logits(loaded), torch.from_numpy(to_float(x)), torch.from_numpy(y)


def digits(images: int, steps: int) -> tuple[Logits, Tensor, Tensor]:
    """A ResNet that has learnt scikit-learn's digits, other ones of them and their labels."""
    found = load_digits()
    x, y = torch.tensor(found.images[:, None]).float() / 16, torch.tensor(found.target)
    model = ResNet(ResNetConfig.matching(preset("digits")), seed=0)
    weights = list(model.parameters())
    for step in range(steps):
        batch = torch.randint(TRAINING, (BATCH,), generator=generator(step))
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        with torch.no_grad():
            for weight, slope in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.sub_(slope, alpha=0.1)  # torch.optim takes seconds to import
    return Logits(model), x[TRAINING:][:images], y[TRAINING:][:images]


@torch.no_grad()
def random_targets(model: Logits, images: Tensor, labels: Tensor) -> Tensor:
    """Classes that are neither the labels nor what ``model`` says, (N,)."""
    logits = torch.cat([model(part) for part in images.split(BATCH)])
    if logits.shape[1] < 3:
        raise CandidError("Targets are neither label nor prediction: give a model of three classes or more.")
    draws = torch.rand(logits.shape, generator=generator(0))
    return draws.scatter(1, torch.stack([labels, logits.argmax(1)], 1), -1).argmax(1)


def linear_ratio(images: int) -> float:
    """The largest ratio of Candid's distances to the right ones, ``(kappa - margin) / |w_t - w_y|``."""
    model = Linear()
    x = 0.3 + 0.4 * torch.rand(images, *model.image_shape, generator=generator(1))
    targets = model.logits(x).argmin(1)
    right = (KAPPA - margins(model.logits(x.double()), targets)) / model.weights.diff().double().norm()
    return float((carlini_wagner(model, x, targets).distance / right.numpy()).max())


def main() -> int:
    options = parser("benchmarks.attacks", __doc__)
    options.add_argument("--model", help="a saved ResNet or generative model")
    options.add_argument("--data", help="as for candid evaluate")
    options.add_argument("--images", type=int, default=50, help="so many (default: %(default)s)")
    options.add_argument("--peers", type=Path, metavar="FOLDER", help="has foolbox and torchattacks")
    chosen = parsed(options)
    if (chosen.model is None) != (chosen.data is None):
        options.error("give --model and --data, or none of them for digits.")
    number, training, most = (4, 2, 50) if chosen.quick else (chosen.images, 400, STEPS)
    try:
        if chosen.peers:
            import_peers(chosen.peers)
        prepared = opened(chosen.model, chosen.data, number) if chosen.model else digits(number, training)
        model, images, labels = prepared
        targets = random_targets(model, images, labels)
    except CandidError as error:
        options.error(str(error))
    steps: list[int] = []

    def ours(x: Tensor, wanted: Tensor) -> Tensor:
        found = carlini_wagner(model, x, wanted, steps=most)
        steps.extend(found.steps.tolist())
        return torch.from_numpy(found.images)

    with console.status("attacking") as status:
        attempts = {OURS: attempted(ours, model, images, targets)}
        passes = math.ceil(max(attempts[OURS].forward, attempts[OURS].backward))
        for name, run in (peers(model, passes) if chosen.peers else {}).items():
            status.update(f"attacking: {name}")
            attempts[name] = attempted(run, model, images, targets)
    columns = ("success", f"margin >= {KAPPA}", "median L2", "mean L2", "nearer", "gradients", "passes", "s")
    rows = [(name, *attempt.row(attempts[OURS])) for name, attempt in attempts.items()]
    show(f"{len(images)} images, and how many come nearer than {OURS}'s", ("", *columns), rows)
    figures = {SUCCESS: Figure((attempts[OURS].success,), 1.0, at_least=True)}
    for peer in PEERS if chosen.peers else ():
        best = min(attempt.median for name, attempt in attempts.items() if name.startswith(peer))
        figures[RATIO + peer] = Figure((attempts[OURS].median / best,), 1.0)
    if chosen.peers:
        others = zip(*(attempt.distances for name, attempt in attempts.items() if name != OURS), strict=True)
        farther = map(operator.truediv, attempts[OURS].distances, map(min, others))
        figures[WORST] = Figure((max(farther),))
    figures[LINEAR] = Figure((linear_ratio(number),), 1.05)
    seconds = {name: Timing((attempt.seconds,)) for name, attempt in attempts.items()}
    more = {
        "targets": targets.tolist(),
        f"steps of {OURS}": steps,
        "attempts": {name: asdict(attempt) for name, attempt in attempts.items()},
    }
    return conclude("attacks", chosen.quick, {"attack": seconds}, figures, more)


if __name__ == "__main__":
    sys.exit(main())
