"""torch.compile as an option: the same steps."""

from dataclasses import replace

import pytest
import torch

from candid import CandidError, GenerativeClassifier, information_bottleneck_loss
from candid.training.options import TrainOptions
from candid.training.setup import build_model

CONFIG = TrainOptions(data="digits", model={"blocks": (1,), "widths": (4,), "pointwise_width": 4})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_compiled_steps_and_frozen_passes_are_the_same() -> None:
    x, y = torch.rand(4, 1, 8, 8), torch.arange(4)
    found = []
    for compiled in (False, True):
        model = build_model(replace(CONFIG, compile=compiled), tuple("0123456789"))
        assert isinstance(model, GenerativeClassifier)
        noise = torch.Generator().manual_seed(0)
        losses = information_bottleneck_loss(model, x, y, beta=1, generator=noise)
        losses.total.backward()
        fast = model.frozen()
        if compiled:
            fast.flow.compile()
        with torch.inference_mode():
            found.append([losses.total.detach(), *(p.grad for p in model.parameters()), fast.log_density(x)])
    for plain, compiled_ in zip(*found, strict=True):
        torch.testing.assert_close(compiled_, plain, rtol=1e-4, atol=1e-5)


def test_compiling_needs_plain_memory() -> None:
    with pytest.raises(CandidError, match="'compile' works with memory = 'plain' only"):
        replace(CONFIG, compile=True, memory="inverse")
