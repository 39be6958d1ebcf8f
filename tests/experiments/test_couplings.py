"""Couplings on top of the head of photo models: where they start, and their log determinant."""

import torch

from candid.models.heads.closed_form import fit_head
from experiments.couplings import Couplings, Inputs
from tests.models.heads.test_closed_form import CLASSES, GROUPS, clouds


def test_couplings_start_as_the_second_stage_and_know_their_determinant() -> None:
    features, labels = clouds(30)
    head = fit_head(features, labels, CLASSES, GROUPS, logistic=False)
    inputs = Inputs(head, features, labels)
    x, _ = inputs.train
    model = Couplings(head, x.shape[1], 3).eval()
    scores = head.out_of_fold.scores
    second = head.second_temperature * (head.second.whitened(scores) @ head.second.means.T)
    second = second - 0.5 * head.second_temperature * head.second.means.square().sum(1) + head.log_priors
    torch.testing.assert_close(model(x)[1].double(), second.log_softmax(1), rtol=1e-3, atol=1e-4)
    assert inputs(features).shape == x.shape
    for parameter in model.networks.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.double()
    row = x[0].double()
    jacobian = torch.autograd.functional.jacobian(lambda each: model.latent(each[None])[0][0], row)
    torch.testing.assert_close(torch.linalg.slogdet(jacobian)[1], model.latent(row[None])[1][0])
