"""What turns the outputs of an exported model into verdicts: numbers that stay outside of its file."""

import math
from typing import Any

from candid.models.protocol import Model
from candid.trust.combined import CLIP
from candid.trust.judge import HeldOut, Judge


def thresholds(model: Model) -> dict[str, Any] | None:
    """Return the held-out scores and levels behind the verdicts of a photo model or an adopted one, as JSON.

    Args:
        model: a model that has novelty scores of its own.

    Returns:
        None if it has none, or no held-out scores. Else, with the image's ``novelty`` (J,) and posterior:

        - ``held_out_novelty``: (n, J). The p-value of an image is the combined rank among them; terms are
          clipped at ``clip``.
        - ``novelty``: an image with this p-value or less is novel.
        - ``smallest_ratio``: a class is in the class set if its posterior is at least this share of the
          largest one. It is 1 if the held-out images have no labels.
    """
    held_out = HeldOut.of(model)
    if held_out is None or "novelty" not in held_out.statistics:
        return None
    judge = Judge.of(model, "combined")
    smallest = 1.0
    if held_out.true_ratios is not None:
        true = held_out.true_ratios.double().sort().values
        rank = math.floor(judge.error * (len(true) + 1) + 1e-9)  # this many true classes may be missed
        smallest = float(true[rank - 1]) if rank else 0.0
    return {
        "class_names": list(model.class_names),
        "fingerprint": model.fingerprint(),
        "novelty": judge.promises.novelty.cut,
        "clip": CLIP,
        "smallest_ratio": smallest,
        "promises": judge.promises.sentences(),
        "held_out_novelty": held_out.statistics["novelty"].tolist(),
    }
