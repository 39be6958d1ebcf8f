"""`experiments.geometry` describes a refitted model as it is and as it was, from one pass."""

import copy

import pytest
import torch

from candid import GenerativeClassifier
from candid.models.flow.classifier import FlowOutputs
from candid.models.flow.means import rescale
from experiments.geometry import COLUMNS, geometry, markdown, of_pixel_model
from tests.helpers import randomise


def test_one_pass_gives_the_geometry_before_and_after() -> None:
    trained = randomise(GenerativeClassifier.from_preset("digits"), strength=0.05).eval()
    refitted = copy.deepcopy(trained)
    rescale(refitted, 2.0)
    found = of_pixel_model(refitted, "digits", 150)
    alone = of_pixel_model(trained, "digits", 150)
    own, before, after = alone["before"], found["before"], found["after"]
    assert alone.keys() == {"images", "similarity", "before"} and found["images"] == 150
    assert own.keys() == before.keys() == after.keys() == COLUMNS.keys()
    for key, value in before.items():
        assert value == (None if own[key] is None else pytest.approx(own[key], rel=1e-4, abs=1e-4)), key
    assert after["largest_change"] < 1e-4
    assert after["mean_distance"] == pytest.approx(2 * own["mean_distance"], rel=1e-4)
    assert after["class_average_distance"] == pytest.approx(own["class_average_distance"] / 2, rel=1e-3)
    assert after["measured"] == pytest.approx(own["measured"], abs=1e-4)
    table = markdown({"digits": found})
    assert len(table.splitlines()) == 4 and "| digits, after |" in table


def test_draws_of_the_mixture_lie_where_it_says() -> None:
    model = GenerativeClassifier.from_preset("digits").eval()
    rescale(model, 3.0)
    y = torch.arange(10).repeat(100)
    z = model.mixture.sample(y, generator=torch.Generator().manual_seed(0)).detach()
    outputs = FlowOutputs(z, torch.zeros(len(z)), model.mixture.logits(z).detach())
    found = geometry(model, outputs, y.numpy())
    assert found["inside"] == pytest.approx(found["inside_draws"], abs=0.04)
    assert found["class_average_distance"] == pytest.approx(found["mean_distance"], rel=0.05)
    assert found["expected"] == pytest.approx(found["measured"], abs=0.01)
