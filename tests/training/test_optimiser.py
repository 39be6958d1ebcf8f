"""Parameter groups and learning-rate schedules."""

import math

import pytest
import torch
from torch import nn

from candid import GenerativeClassifier
from candid.training.options import TrainOptions
from candid.training.setup import build_optimiser, is_over, learning_rate, plateaus, set_learning_rate


def test_every_parameter_is_in_one_group_and_only_convolutions_decay() -> None:
    model = GenerativeClassifier.from_preset("digits")
    config = TrainOptions(data="digits", weight_decay=0.25, means_rate=0.5)
    optimiser = build_optimiser(model, config)
    ids = [id(p) for group in optimiser.param_groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    decaying = {id(p) for g in optimiser.param_groups if g["weight_decay"] for p in g["params"]}
    assert decaying == {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv2d)}
    set_learning_rate(optimiser, 0.1)
    rates = {id(p): g["lr"] for g in optimiser.param_groups for p in g["params"]}
    assert rates[id(model.mixture.mean)] == 0.05
    assert rates[id(next(model.flow.parameters()))] == 0.1


def test_the_rest_of_the_means_can_have_a_rate_and_a_decay() -> None:
    model = GenerativeClassifier.from_preset("digits", rank=2)
    config = TrainOptions(data="digits", means_rate=0.5, rest_rate=0.25, rest_decay=3.0)
    optimiser = build_optimiser(model, config)
    ids = [id(p) for group in optimiser.param_groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    set_learning_rate(optimiser, 1.0)
    groups = {id(p): (g["lr"], g["weight_decay"]) for g in optimiser.param_groups for p in g["params"]}
    mixture = model.mixture
    assert groups[id(mixture.mean)] == (0.5, 0.0)
    assert groups[id(mixture.alpha)] == groups[id(mixture.prototypes)] == (0.25, 3.0)
    without = build_optimiser(model, TrainOptions(data="digits"))
    assert len(without.param_groups) == 4  # as in run folders of earlier versions


def test_frozen_parameters_are_left_out() -> None:
    model = GenerativeClassifier.from_preset("digits")
    model.flow.requires_grad_(False)
    optimiser = build_optimiser(model, TrainOptions(data="digits"))
    ids = {id(p) for group in optimiser.param_groups for p in group["params"]}
    assert ids == {id(p) for p in model.mixture.parameters()}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_both_optimisers_lower_a_loss(name: str) -> None:
    layer = nn.Conv2d(1, 1, 1)
    config = TrainOptions(data="digits", optimiser=name, learning_rate=0.05)  # type: ignore[arg-type]
    optimiser = build_optimiser(layer, config)
    x = torch.ones(1, 1, 1, 1)
    losses = []
    for _ in range(50):
        loss = (layer(x) - 3).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_one_cycle_rises_to_its_top_and_falls_to_zero() -> None:
    config = TrainOptions(data="digits", epochs=10, warmup=0.2, learning_rate=3.0)
    rates = [learning_rate(config, step, 10, []) for step in range(100)]
    assert rates[20] == max(rates) == 3.0
    assert rates[:20] == sorted(rates[:20])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert 0 < rates[0] < 0.2
    assert 0 < rates[-1] < 0.01
    assert rates[60] == pytest.approx(1.5)  # the middle of the cosine


def test_the_plateau_schedule_cools_twice_and_ends_at_the_third_plateau() -> None:
    config = TrainOptions(
        data="digits", epochs=50, schedule="plateau", warmup=2.0, patience=2, learning_rate=0.07
    )
    assert learning_rate(config, 0, 10, []) == pytest.approx(0.07 / 20)
    assert learning_rate(config, 19, 10, [3.0]) == pytest.approx(0.07)
    losses = [3.0, 2.0]
    for cooled, more in ((0, [2.1]), (1, [2.2]), (1, [1.9, 1.9]), (2, [1.9]), (2, [1.95])):
        losses += more
        assert learning_rate(config, 200, 10, losses) == pytest.approx(0.07 / 10**cooled)
        assert not is_over(config, losses)
    losses += [2.0]
    assert is_over(config, losses)
    assert learning_rate(config, 200, 10, losses) == pytest.approx(0.07 / 100)
    assert not is_over(TrainOptions(data="digits"), losses)


def test_plateaus_need_a_strictly_lower_loss() -> None:
    assert plateaus([1.0] * 7, patience=3) == 2
    assert plateaus([math.inf, 1.0, 0.5], patience=1) == 1  # infinity is no improvement
    assert plateaus([], patience=1) == 0
