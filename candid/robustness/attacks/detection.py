"""What an attack must know of a model's detection to fool it."""

import math

from candid._support.errors import CandidError
from candid.models.protocol import Model
from candid.trust.judge import HeldOut


def typical_score(model: Model) -> float:
    """Where the detection by log q(x) suspects least, for ``median`` of the attacks, in nats per dimension.

    It is the median of log q(x) / D over the held-out images that the model carries, which its tests are
    fitted to.
    """
    held_out = HeldOut.of(model)
    if held_out is None:
        raise CandidError("The model has no held-out scores to take the median of: calibrate it first.")
    if "log_density" not in held_out.statistics:
        raise CandidError("A ResNet has no likelihood to fool: attack a generative model.")
    return float(held_out.statistics["log_density"].median()) / math.prod(model.image_shape)
