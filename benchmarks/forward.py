"""What a forward pass costs: pixels to latent, log-determinant and logits of 1000 classes, imagenet preset.

Peers: the straightforward formulation (benchmarks/straightforward.py), FrEIA's blocks
(benchmarks/freia.py), ResNet-50 with batch norm folded, and the limit: the network's multiply-accumulates
at the highest rate that is found on this machine (benchmarks/limit.py). What the mixture computes once for
all images, the norms of its means, is left out of the limit: a frozen model has them.

First the results are compared: they must agree to 1e-4. A network that is faster than the limit would show an
error of the limit.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import freia
from benchmarks.common import (
    LIMIT,
    Figure,
    Timing,
    alternate_with_limit,
    conclude,
    console,
    parsed,
    parser,
    show,
    show_times,
)
from benchmarks.limit import Limit, candidates, of_networks
from benchmarks.models import classifier, folded, imagenet, macs, moved
from benchmarks.straightforward import Straightforward
from candid import GenerativeClassifier, ResNet, ResNetConfig

FROZEN, PLAIN, STRAIGHT, RESNET = "Candid, frozen", "Candid", "straightforward", "ResNet-50"
TOLERANCE = 1e-4


def inference(model: Callable[[Tensor], object], x: Tensor) -> None:
    with torch.inference_mode():
        model(x)


@torch.inference_mode()
def differences(model: GenerativeClassifier, x: Tensor) -> dict[str, float]:
    """Largest differences to ``model``, relative to the largest value.

    The straightforward logits have |z|^2 in them, so that float32 leaves few digits for what differs
    between classes: they are compared after the mean over the classes is subtracted, but relative to
    their full value.
    """
    ours, fast = model(x), model.frozen()(x)
    z, log_det, joint = Straightforward(model).eval()(x)
    between_classes = [logits - logits.mean(1, keepdim=True) for logits in (joint, ours.logits)]
    return {
        "frozen, z": _distance(fast.z, ours.z),
        "frozen, log_det": _distance(fast.log_det, ours.log_det),
        "frozen, logits": _distance(fast.logits, ours.logits),
        "straightforward, z": _distance(z, ours.z),
        "straightforward, log_det": _distance(log_det, ours.log_det),
        "straightforward, logits": float(
            (between_classes[0] - between_classes[1]).abs().max() / joint.abs().max()
        ),
    }


def _gmacs(network: nn.Module, x: Tensor) -> float:
    """Of an image."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(x[:1])
    return float(counter.get_total_flops()) / 2e9


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def main() -> int:
    options = parsed(parser("benchmarks.forward", __doc__))
    quick: bool = options.quick
    rounds = {1: 2, 8: 2} if quick else {1: 5, 8: 5}
    cases: dict[str, dict[str, Timing]] = {}
    with console.status("measuring"):
        model, x = imagenet(quick)
        found = differences(model, x[:4])
        gmacs, _ = macs(model)
        resnet = folded(ResNet(ResNetConfig.matching(model.config)))
        models: dict[str, nn.Module] = {
            FROZEN: model.frozen(),
            PLAIN: model,
            STRAIGHT: Straightforward(model).eval(),
            **{name: peer.eval() for name, peer in freia.peers(model, x).items()},
            RESNET: resnet,
        }
        limit = Limit([*candidates(quick), *of_networks([models[FROZEN], resnet], x)])
        for batch, repeats in rounds.items():
            cases[f"batch {batch}"] = alternate_with_limit(
                {name: partial(inference, peer, x[:batch]) for name, peer in models.items()},
                repeats,
                gmacs * batch,
                limit,
            )
        of_resnet = _gmacs(resnet, x)
        del models
        mixed = moved(classifier(quick, mixing="orthogonal"), x[:4])
        mixed_gmacs, _ = macs(mixed)
        cases['batch 8, mixing="orthogonal"'] = alternate_with_limit(
            {FROZEN: partial(inference, mixed.frozen(), x), PLAIN: partial(inference, mixed, x)},
            rounds[8],
            mixed_gmacs * 8,
            limit,
        )
        halved = Limit(candidates(quick, torch.bfloat16))
    show(
        "Largest relative differences of the results",
        ("", f"(at most {TOLERANCE:.0e})"),
        [(name, f"{difference:.1e}") for name, difference in found.items()],
    )
    for case, times in cases.items():
        show_times(f"Forward pass, {case}", times)
    times = cases["batch 8"]
    shares = {name: times[LIMIT].ratios(times[name]) for name in (FROZEN, RESNET)}
    shares[RESNET] = tuple(share * of_resnet / gmacs for share in shares[RESNET])
    figures = {
        "batch 8, frozen / straightforward": Figure(times[FROZEN].ratios(times[STRAIGHT]), 0.35),
        **{f"batch 8, rate of {name} / the limit": Figure(share, 1.0) for name, share in shares.items()},
        "limit in bfloat16 / in float32": Figure((max(halved.rates.values()) / max(limit.rates.values()),)),
    }
    missed = conclude(
        "forward",
        quick,
        cases,
        figures,
        {
            "differences": found,
            "GMAC an image": {"permutation": gmacs, "orthogonal": mixed_gmacs, RESNET: of_resnet},
            "GMAC per second": limit.rates,
            "GMAC per second in bfloat16": halved.rates,
        },
    )
    if max(found.values()) > TOLERANCE:
        console.print("[red]The results don't agree: the times mean nothing.[/]")
        return 1
    return missed


if __name__ == "__main__":
    sys.exit(main())
