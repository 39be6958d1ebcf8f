import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import MultivariateNormal

from candid._support.errors import CandidError
from candid.models.flow.mixture import LatentMixture, _Gram, log_standard_normal
from tests.helpers import LargestTensor, randomise


def mixture(
    rank: int | None = 2, priors: list[float] | None = None, planar: bool = False, circle: bool = False
) -> LatentMixture:
    return randomise(LatentMixture(4, 3, 10, rank, priors, planar, circle).double(), strength=3)


@pytest.mark.parametrize(
    ("rank", "planar", "circle"),
    [
        (None, False, False),
        (1, False, False),
        (2, False, False),
        (7, False, False),
        (None, True, False),
        (None, True, True),
    ],
)
@pytest.mark.parametrize("priors", [None, [0.1, 0.2, 0.3, 0.4]])
def test_logits_and_posterior_are_those_of_the_gaussians(
    rank: int | None, planar: bool, circle: bool, priors: list[float] | None
) -> None:
    m = mixture(rank, priors, planar, circle)
    z = torch.randn(5, 10, dtype=torch.float64)
    means = m.means(torch.arange(4))
    truth = torch.stack([MultivariateNormal(mu, torch.eye(10).double()).log_prob(z) for mu in means], 1)
    torch.testing.assert_close(m.logits(z) + log_standard_normal(z)[:, None], truth + m.log_priors)
    joint = truth.exp() * torch.tensor(priors or [0.25] * 4)
    torch.testing.assert_close(m.posterior(z), joint / joint.sum(1, keepdim=True), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(m.posterior(z).sum(1), torch.ones(5).double())
    torch.testing.assert_close(m.squared_norms(), means.square().sum(1))
    torch.testing.assert_close(m.pairwise_distances(), torch.cdist(means, means), atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize(
    ("rank", "planar", "circle"), [(2, False, False), (None, True, False), (None, True, True)]
)
def test_the_gradient_is_that_of_the_materialised_means(rank: int | None, planar: bool, circle: bool) -> None:
    m = mixture(rank, [0.1, 0.2, 0.3, 0.4], planar, circle)
    z = torch.randn(5, 10, dtype=torch.float64, requires_grad=True)
    m.logits(z).logsumexp(1).sum().backward()
    found = {name: p.grad for name, p in m.named_parameters()} | {"z": z.grad}
    m.zero_grad()
    z.grad = None
    means = m.means(torch.arange(4))
    (z @ means.T - means.square().sum(1) / 2 + m.log_priors).logsumexp(1).sum().backward()
    for name, p in [*m.named_parameters(), ("z", z)]:
        torch.testing.assert_close(found[name], p.grad)


def test_planar_means_lie_in_one_plane_of_all_dimensions() -> None:
    m = mixture(None, planar=True)
    means = m.means(torch.arange(4))
    spread = torch.linalg.svdvals(means - means.mean(0))
    assert spread[1] > 0.1 and spread[2] < 1e-12 * spread[0]
    torch.testing.assert_close(means[2], m.prototypes[0] + m.alpha[2] @ m.prototypes[1:])  # type: ignore[index]
    assert sum(p.numel() for p in m.parameters()) == 3 * 10 + 4 * 2
    with pytest.raises(CandidError, match="'planar' means have no 'rank': leave rank = 2 out"):
        LatentMixture(4, 3, 10, rank=2, planar=True)


@pytest.mark.parametrize("rank", [None, 2])
def test_means_without_a_rest_learn_one(rank: int | None) -> None:
    m = LatentMixture(4, 3, 10, rank)
    m.start_without_rest()
    means = m.means(torch.arange(4))
    assert means[:, :3].abs().min() > 0 and means[:, 3:].abs().max() == 0
    m.logits(torch.randn(5, 10)).logsumexp(1).sum().backward()
    gradients = [p.grad for p in m.rest()]
    assert max(float(g.abs().max()) for g in gradients if g is not None) > 0
    with pytest.raises(CandidError, match="no mean-pooled part"):
        LatentMixture(4, 3, 10, planar=True).start_without_rest()


def test_means_on_a_circle_have_one_radius_and_an_angle_each() -> None:
    m = mixture(None, planar=True, circle=True)
    means = m.means(torch.arange(4)) - m.prototypes[0]
    radius = m.log_radius.exp()  # type: ignore[union-attr]
    torch.testing.assert_close(means.norm(dim=1), radius.expand(4))
    steps = torch.diff(m.angles)  # type: ignore[arg-type]
    torch.testing.assert_close((means[1:] * means[:-1]).sum(1), radius**2 * steps.cos())
    assert torch.linalg.matrix_rank(means, rtol=1e-9) == 2
    assert sum(p.numel() for p in m.parameters()) == 3 * 10 + 4 + 1
    new = LatentMixture(10, 3, 20, planar=True, circle=True)
    distances = new.pairwise_distances()
    assert float(distances.diagonal(1).min()) == pytest.approx(2 * math.sin(math.pi / 10), abs=1e-5)
    with pytest.raises(CandidError, match="'circle' lie in a plane: set planar = true"):
        LatentMixture(4, 3, 10, circle=True)


def test_logits_keep_their_digits_where_squared_distances_lose_them() -> None:
    m = LatentMixture(3, 100, 150_000, rank=2)
    z = torch.randn(2, 150_000)
    truth = m.double().posterior(z.double())
    m.float()
    torch.testing.assert_close(m.posterior(z).double(), truth, atol=1e-5, rtol=0)
    distances = -0.5 * torch.stack([(z - mu).square().sum(1) for mu in m.means(torch.arange(3))], 1)
    assert (distances.softmax(1).double() - truth).abs().max() > 1e-5


def test_no_classes_by_dimensions_matrix_is_ever_formed() -> None:
    classes, dimensions, rank, batch = 200, 3000, 5, 4
    m = LatentMixture(classes, 100, dimensions, rank)
    z = torch.randn(batch, dimensions, requires_grad=True)
    with LargestTensor() as largest:
        m.logits(z).sum().backward()
    assert largest.numel <= classes * 100  # the free means; the rest would have 580 000


def test_samples_have_the_asked_mean_and_spread(generator: torch.Generator) -> None:
    m = mixture()
    y = torch.full((20_000,), 2)
    z = m.sample(y, temperature=0.5, generator=generator)
    torch.testing.assert_close(z.mean(0), m.means(y[:1])[0].detach(), atol=0.02, rtol=0)
    torch.testing.assert_close(z.std(0), torch.full((10,), 0.5).double(), atol=0.02, rtol=0)


@settings(max_examples=50, deadline=None)
@given(
    scale=st.floats(1e-3, 1e3),
    priors=st.lists(st.floats(1e-3, 1), min_size=2, max_size=5).map(lambda p: [v / math.fsum(p) for v in p]),
)
def test_posterior_always_sums_to_one(scale: float, priors: list[float]) -> None:
    m = LatentMixture(len(priors), 4, 12, rank=2, priors=priors)
    posterior = m.posterior(scale * torch.randn(3, 12))
    torch.testing.assert_close(posterior.sum(1), torch.ones(3))
    assert (posterior >= 0).all()


def test_a_prior_shifts_the_posterior_by_bayes_rule() -> None:
    priors = [0.7, 0.2, 0.1]
    uniform, given_priors = (LatentMixture(3, 4, 12, 2, p).double() for p in (None, priors))
    given_priors.load_state_dict(uniform.state_dict() | {"log_priors": given_priors.log_priors})
    z = torch.randn(6, 12, dtype=torch.float64)
    truth = uniform.posterior(z) * torch.tensor(priors)
    torch.testing.assert_close(
        given_priors.posterior(z), truth / truth.sum(1, keepdim=True), rtol=1e-6, atol=1e-9
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_and_reverse_derivatives_of_the_gram_matrix_agree() -> None:
    m = mixture(rank=2)
    torch.autograd.gradcheck(lambda p: _Gram.apply(p), m.prototypes, check_forward_ad=True)
    torch.autograd.gradgradcheck(lambda p: _Gram.apply(p), m.prototypes)


@pytest.mark.parametrize("priors", [[0.5, 0.5], [0.5, 0.5, 0.5], [1.0, 0.0, 0.0], [0.5, 0.7, -0.2]])
def test_bad_priors_are_refused(priors: list[float]) -> None:
    with pytest.raises(CandidError, match="priors"):
        LatentMixture(3, 4, 12, priors=priors)
