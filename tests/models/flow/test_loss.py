import math

import pytest
import torch

from candid import CandidError, information_bottleneck_loss
from candid.models.flow.mixture import Losses, log_standard_normal
from tests.helpers import small_classifier


def losses(beta: float, label_smoothing: float = 0.05) -> Losses:
    x = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 0, 1])
    return information_bottleneck_loss(small_classifier().double(), x, y, beta, label_smoothing)


def test_parts_are_the_formulas_of_the_documentation() -> None:
    model = small_classifier().double()
    x = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 0, 1])
    z, log_det, _ = model(x)
    joint = model.mixture.logits(z) + log_standard_normal(z)[:, None]
    l_x = -(joint.logsumexp(1) + log_det).mean() / model.dimensions
    target = 0.95 * torch.eye(3).double()[y] + 0.05 / 3
    l_y = -(target * joint.log_softmax(1)).sum(1).mean()
    found = information_bottleneck_loss(model, x, y, beta=3.0, label_smoothing=0.05)
    torch.testing.assert_close(found.L_X, l_x)
    torch.testing.assert_close(found.L_Y, l_y)
    torch.testing.assert_close(found.total, (l_x + 3 * l_y) / 4)


def test_limits_of_beta_are_exact() -> None:
    assert losses(0.0).total == losses(0.0).L_X
    assert losses(math.inf).total == losses(math.inf).L_Y
    torch.testing.assert_close(losses(1e300).total, losses(math.inf).total)
    torch.testing.assert_close(losses(1e-300).total, losses(0.0).total)


def test_l_x_and_log_density_tell_the_same() -> None:
    """bits/dim = L_X / ln 2 + log2(255 std), averaged over channels."""
    model = small_classifier().double()
    x = torch.rand(5, 3, 16, 16)
    l_x = information_bottleneck_loss(model, x, torch.zeros(5, dtype=torch.long), beta=0).L_X
    bits = -model.log_density(x).mean() / model.dimensions / math.log(2)
    torch.testing.assert_close(bits, l_x / math.log(2) + math.log2(255 * 0.25))


@pytest.mark.parametrize("beta", [-1.0, math.nan, -math.inf])
def test_bad_beta_is_refused(beta: float) -> None:
    with pytest.raises(CandidError, match="beta"):
        losses(beta)


def test_bad_smoothing_is_refused() -> None:
    with pytest.raises(CandidError, match="label_smoothing"):
        losses(1.0, label_smoothing=1.5)


def test_training_noise_comes_from_the_generator() -> None:
    model = small_classifier().train()
    x, y = torch.rand(4, 3, 16, 16), torch.zeros(4, dtype=torch.long)
    values = [
        information_bottleneck_loss(model, x, y, 1.0, generator=torch.Generator().manual_seed(s)).total.item()
        for s in (0, 0, 1)
    ]
    assert values[0] == values[1] != values[2]
