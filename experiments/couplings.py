"""Measure whether trained couplings on top of the closed-form head of photo models help.

``python -m experiments.couplings FOLDER``

``FOLDER`` has ``train`` and ``test`` with a folder of photos for each class. Of every class, ``EACH``
training photos are fitted; the others are held out, to choose the epoch. The couplings see the coordinates in
which the closed form decides and the leading directions of the rest, both of photos out of fold. The control
trains the same mixture without couplings. Differences from the closed form are paired, with their 95 %
interval over test photos.
"""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from candid._support.distributed import launch
from candid._support.progress import SILENT
from candid.data.formats import image_files, subfolders
from candid.models.eyes import open_eye
from candid.models.heads.closed_form import ClosedForm, fit_head, out_of_fold_z
from candid.models.heads.gaussian import class_scores
from candid.training.features import Extraction, FeatureCache

EACH = 500
REST, WIDTH, COUPLINGS = 32, 64, 4
EPOCHS, BATCH, NOISE, SMOOTHING = 10, 128, 0.2, 0.01
BETAS, SEEDS = (1, 4, 16), 3
Known = tuple[Tensor, Tensor]
"""Inputs (N, D) and labels (N,)."""


class Inputs:
    """The coordinates of the second stage and the leading directions of the rest, of unit variance."""

    def __init__(self, head: ClosedForm, features: Tensor, labels: Tensor) -> None:
        self.head = head
        means = head.whitened.means
        self._basis = torch.linalg.qr((means[1:] - means[0]).T).Q  # (D, K - 1)
        rest = self._rest(out_of_fold_z(head, features, labels))
        self._centre = rest.mean(0)
        _, values, directions = torch.linalg.svd(rest - self._centre, full_matrices=False)
        self._directions = directions[:REST].T / (values[:REST] / math.sqrt(len(rest)))
        self.train = self._joined(head.out_of_fold.scores, rest), labels

    def __call__(self, features: Tensor) -> Tensor:
        """Return the inputs of new photos, (N, K - 1 + REST)."""
        z = self.head.standardised(features) @ self.head.whitened.factor.T
        return self._joined(class_scores(z, self.head.whitened.means), self._rest(z))

    def _rest(self, z: Tensor) -> Tensor:
        return z - z @ self._basis @ self._basis.T

    def _joined(self, scores: Tensor, rest: Tensor) -> Tensor:
        along = (rest - self._centre) @ self._directions
        return torch.cat((self.head.second.whitened(scores), along), 1).float()


class Couplings(nn.Module):
    """Affine couplings, the identity at first, and a mixture of unit Gaussians: that of the second stage."""

    def __init__(self, head: ClosedForm, dimensions: int, couplings: int) -> None:
        super().__init__()
        self.kept = dimensions // 2
        self.networks = nn.ModuleList(self._network(dimensions) for _ in range(couplings))
        self.orders = [torch.randperm(dimensions) for _ in range(couplings)]
        start = head.second.means.float()
        self.means = nn.Parameter(F.pad(start, (0, dimensions - start.shape[1])))
        self.log_priors = head.log_priors.float()
        # the temperature as the scale of the mixture, as in the closed form
        self.scale = nn.Parameter(torch.tensor(head.second_temperature).sqrt().float())

    def _network(self, dimensions: int) -> nn.Sequential:
        network = nn.Sequential(
            nn.Linear(self.kept, WIDTH),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(WIDTH, 2 * (dimensions - self.kept)),
        )
        for parameter in network[-1].parameters():
            nn.init.zeros_(parameter)
        return network

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return z (N, D) and the log determinant (N,)."""
        log_det = x.new_zeros(len(x)) + x.shape[1] * self.scale.log()
        for network, order in zip(self.networks, self.orders, strict=True):
            a, b = x[:, order[: self.kept]], x[:, order[self.kept :]]
            s, t = network(a).chunk(2, 1)
            s = s.tanh()
            log_det = log_det + s.sum(1)
            x = torch.empty_like(x).index_copy(1, order, torch.cat((a, b * s.exp() + t), 1))
        return self.scale * x, log_det

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log joint density of each class (N, K), and the log posterior (N, K)."""
        z, log_det = self.latent(x)
        squares = (z[:, None] - self.scale * self.means).square().sum(2)
        joint = self.log_priors - 0.5 * squares - 0.5 * x.shape[1] * math.log(2 * math.pi)
        return joint + log_det[:, None], joint.log_softmax(1)

    def loss(self, x: Tensor, labels: Tensor, beta: float) -> Tensor:
        """Return the information-bottleneck loss."""
        joint, posterior = self(x)
        l_x = -joint.logsumexp(1).mean() / x.shape[1]
        l_y = F.cross_entropy(posterior, labels, label_smoothing=SMOOTHING)
        return (l_x + beta * l_y) / (1 + beta)


def trained(model: Couplings, train: Known, held_out: Known, test: Tensor, beta: float) -> Tensor:
    """Return the log posterior of test photos, (N, K), by the epoch with the best held-out log-loss."""
    x, labels = train
    networks = {"params": model.networks.parameters(), "weight_decay": 0.01}
    optimiser = torch.optim.AdamW([networks, {"params": [model.means, model.scale], "weight_decay": 0.0}])
    steps = EPOCHS * math.ceil(len(x) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    best, found = math.inf, torch.empty(0)
    for _ in range(EPOCHS):
        model.train()
        for rows in torch.randperm(len(x)).split(BATCH):
            optimiser.zero_grad()
            model.loss(x[rows] + NOISE * torch.randn_like(x[rows]), labels[rows], beta).backward()
            optimiser.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            loss = float(F.nll_loss(model(held_out[0])[1], held_out[1]))
            if loss < best:
                best, found = loss, model(test)[1]
    return found


def figures(posterior: Tensor, labels: Tensor, closed_form: Tensor) -> dict[str, float]:
    """Return accuracy and log-loss of test photos, and their differences from those of the closed form."""
    right, loss = _of(posterior, labels)
    found = {"accuracy": float(right.mean()), "nll": float(loss.mean())}
    for name, own, other in zip(("accuracy", "nll"), (right, loss), _of(closed_form, labels), strict=True):
        away = own - other
        found[f"{name}, difference"] = float(away.mean())
        found[f"{name}, interval"] = 1.96 * float(away.std()) / math.sqrt(len(away))
    return found


def _of(posterior: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    right = (posterior.argmax(1) == labels).double()
    return right, F.nll_loss(posterior.double(), labels, reduction="none")


def measured(folder: Path, cache: Path) -> dict[str, dict[str, float]]:
    """Return the figures of the closed form and of couplings on top, mean posterior of ``SEEDS`` models."""
    eye = open_eye("lite0")
    extract = Extraction(eye, FeatureCache(eye, SILENT, cache), launch(1), SILENT)
    names = tuple(entry.name for entry in subfolders(folder / "train"))
    known, test = (extract(image_files(folder / part, names)) for part in ("train", "test"))
    one_hot = F.one_hot(known.labels)
    own = (one_hot.cumsum(0) * one_hot).sum(1) <= EACH  # the first photos of each class
    features, labels = known.values[own], known.labels[own]
    head = fit_head(features, labels, len(names), eye.groups, logistic=False)
    inputs = Inputs(head, features, labels)
    z = head.standardised(test.values) @ head.whitened.factor.T
    scores = class_scores(z, head.whitened.means)
    closed_form = (head.temperature * (scores + head.log_priors)).log_softmax(1)
    if head.posterior == "second-stage":
        second = class_scores(head.second.whitened(scores), head.second.means) + head.log_priors
        closed_form = (head.second_temperature * second).log_softmax(1)
    results = {f"closed form: {head.posterior}": figures(closed_form, test.labels, closed_form)}
    held_out, new = (inputs(known.values[~own]), known.labels[~own]), inputs(test.values)
    for couplings, beta in ((0, 16), *((COUPLINGS, beta) for beta in BETAS)):
        found = []
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            model = Couplings(head, new.shape[1], couplings)
            found.append(trained(model, inputs.train, held_out, new, beta))
        mean = torch.stack(found).exp().mean(0).log()
        results[f"{couplings} couplings, beta {beta}"] = figures(mean, test.labels, closed_form)
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m experiments.couplings", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/couplings"), help="where features are stored")
    asked = parser.parse_args()
    print(json.dumps(measured(asked.folder, asked.work), indent=1))


if __name__ == "__main__":
    main()
