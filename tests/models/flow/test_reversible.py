"""Backpropagation by inversion gives plain autograd's gradients, whatever the circumstances."""

import copy
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from candid import CandidError, GenerativeClassifier, NonFiniteError, information_bottleneck_loss
from tests.helpers import LargestTensor, small_classifier

Gradients = dict[str, Tensor]


def gradients(
    model: GenerativeClassifier, x: Tensor, memory: str, autocast: bool = False
) -> tuple[Gradients, GenerativeClassifier]:
    model = copy.deepcopy(model)
    model.memory = memory  # type: ignore[assignment]
    y = torch.arange(len(x)) % model.config.classes
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        noise = torch.Generator().manual_seed(1)
        loss = information_bottleneck_loss(model, x, y, beta=1.0, generator=noise).total
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, model


def largest_relative_error(found: Gradients, truth: Gradients) -> float:
    assert found.keys() == truth.keys()
    return max(float((found[k] - truth[k]).norm() / truth[k].norm().clamp(min=1e-12)) for k in truth)


def distance(a: Gradients, b: Gradients) -> float:
    """Relative distance of the whole gradients."""
    assert a.keys() == b.keys()
    squares = sum(float((a[k] - b[k]).square().sum()) for k in a)
    return (squares / sum(float(b[k].square().sum()) for k in b)) ** 0.5


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-3)])
@pytest.mark.parametrize("mixing", ["orthogonal", "permutation"])
def test_same_gradients(training: bool, dtype: torch.dtype, tolerance: float, mixing: str) -> None:
    model = small_classifier(mixing=mixing).to(dtype).train(training)
    x = torch.rand(6, 3, 16, 16)
    plain, _ = gradients(model, x, "plain")
    inverse, _ = gradients(model, x, "inverse")
    assert len(plain) == len(list(model.parameters()))
    assert largest_relative_error(inverse, plain) < tolerance


def test_running_statistics_are_updated_once() -> None:
    model = small_classifier().train()
    x = torch.rand(6, 3, 16, 16)
    _, plain = gradients(model, x, "plain")
    _, inverse = gradients(model, x, "inverse")
    compared = 0
    for a, b in zip(plain.modules(), inverse.modules(), strict=True):
        if isinstance(a, nn.BatchNorm2d) and isinstance(b, nn.BatchNorm2d):
            assert a.running_mean is not None and b.running_mean is not None
            assert a.running_var is not None and b.running_var is not None
            torch.testing.assert_close(a.running_mean, b.running_mean)
            torch.testing.assert_close(a.running_var, b.running_var)
            assert b.num_batches_tracked == 1
            assert b.track_running_stats
            compared += 1
    assert compared > 0


@pytest.mark.parametrize("frozen", ["entry", "stage2_block1.coupling", "all but the last block"])
def test_frozen_parts(frozen: str) -> None:
    model = small_classifier().double()
    for name, p in model.flow.named_parameters():
        freeze = (
            not name.startswith("stage2_block1")
            if frozen == "all but the last block"
            else name.startswith(frozen)
        )
        p.requires_grad_(not freeze)
    x = torch.rand(4, 3, 16, 16)
    plain, _ = gradients(model, x, "plain")
    inverse, _ = gradients(model, x, "inverse")
    assert largest_relative_error(inverse, plain) < 1e-8


def test_everything_frozen_still_reaches_the_image() -> None:
    model = small_classifier().double().requires_grad_(False)
    results = []
    for memory in ("plain", "inverse"):
        model.memory = memory
        x = torch.full((2, 3, 16, 16), 0.4, dtype=torch.float64, requires_grad=True)
        model.log_density(x).sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(results[0], results[1], rtol=1e-8, atol=1e-10)


def test_autocast_keeps_the_bijection_exact() -> None:
    model = small_classifier()
    x = torch.rand(4, 3, 16, 16)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        z, log_det = model.flow(x)
        assert z.dtype == log_det.dtype == torch.float32
        back, _ = model.flow.inverse(z)
    # bfloat16 alone would give errors of 1e-2.
    assert (back - x).abs().max() < 1e-4


@pytest.mark.parametrize("training", [True, False])
def test_same_gradients_under_autocast(training: bool) -> None:
    model = small_classifier().train(training)
    x = torch.rand(6, 3, 16, 16)
    exact, _ = gradients(model, x, "plain")
    plain, _ = gradients(model, x, "plain", autocast=True)
    inverse, _ = gradients(model, x, "inverse", autocast=True)
    assert 0 < distance(plain, exact) < 0.1
    assert distance(inverse, plain) < distance(plain, exact)


def test_backward_inside_the_autocast_region() -> None:
    """The casts of the first pass, made without gradients, must not be found again in the second."""
    model = small_classifier()
    model.memory = "inverse"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = information_bottleneck_loss(model, torch.rand(2, 3, 16, 16), torch.tensor([0, 1]), beta=1.0)
        loss.total.backward()
    assert all(p.grad is not None for p in model.parameters())


def after_forward(model: GenerativeClassifier, batch: int = 4) -> Tensor:
    model.memory = "inverse"
    x, y = torch.rand(batch, 3, 16, 16), torch.arange(batch) % 3
    return information_bottleneck_loss(model, x, y, beta=1.0).total


@pytest.mark.parametrize("change", ["mode", "frozen", "weights"])
def test_a_network_changed_before_the_backward_pass_is_noticed(change: str) -> None:
    model = small_classifier().train()
    loss = after_forward(model)
    if change == "mode":
        model.eval()
    elif change == "frozen":
        model.flow.get_submodule("entry").requires_grad_(False)
    else:
        with torch.no_grad():
            next(model.flow.parameters()).add_(1.0)
    with pytest.raises((CandidError, RuntimeError), match="must not change|modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("entry", ["3x3", "none"])
def test_lost_digits_are_noticed(entry: str) -> None:
    """A nearly singular layer: the inverse can't find its input again, so gradients would be wrong."""
    model = small_classifier(entry=entry)
    with torch.no_grad():
        model.flow.get_parameter("stage1_block1.actnorm.gamma")[:6] = -20.0
    with pytest.raises(NonFiniteError, match="missed its input"):
        after_forward(model).backward()


def test_full_resolution_activations_exist_for_one_image_at_a_time() -> None:
    batch, width = 16, 8
    model = small_classifier(entry_width=width, mixing="permutation")
    loss = after_forward(model, batch)
    with LargestTensor() as largest:
        loss.backward()
    assert largest.numel < batch * width * 16 * 16


def distributed_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = small_classifier().double().train()
    model.memory = "inverse"
    parallel = nn.parallel.DistributedDataParallel(model)
    x = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0)).chunk(2)[rank]
    noise = torch.Generator().manual_seed(1)
    y = torch.arange(len(x)) % 3
    information_bottleneck_loss(parallel, x, y, beta=1.0, generator=noise).total.backward()
    torch.save({k: p.grad for k, p in model.named_parameters()}, Path(folder) / f"{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may still hold tensors, and Python aborts if they free them while it ends


def test_distributed_data_parallel_averages_the_gradients(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(distributed_worker, (str(tmp_path),), nprocs=2)  # type: ignore[attr-defined]
    x = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    halves = [gradients(small_classifier().double().train(), half, "plain")[0] for half in x.chunk(2)]
    truth = {k: (halves[0][k] + halves[1][k]) / 2 for k in halves[0]}
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert largest_relative_error(found, truth) < 1e-8
