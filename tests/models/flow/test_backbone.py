import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import candid
from candid import PRESETS, FlowConfig
from candid._support.errors import CandidError, NonFiniteError
from candid.models.flow import config as presets
from candid.models.flow.backbone import build_flow
from candid.models.info import flow_stages
from candid.training.recipes import load_options
from tests.helpers import autograd_log_det, randomise

SMALL = {
    "imagenet": {"height": 16, "width": 32, "widths": (3, 3, 3), "blocks": (1, 2, 1), "entry_width": 4},
    "tiny": {"height": 16, "width": 16, "widths": (4, 4, 4), "blocks": (1, 2, 1), "entry_width": 4},
    "cifar": {"height": 16, "width": 8, "widths": (4, 4, 4)},
    "digits": {},
}


@pytest.mark.parametrize("mixing", ["orthogonal", "permutation"])
@pytest.mark.parametrize("name", SMALL)
def test_small_preset_is_exact_in_float64(name: str, mixing: str) -> None:
    config = replace(PRESETS[name].flow, mixing=mixing, **SMALL[name])  # type: ignore[arg-type]
    flow = randomise(build_flow(config).double(), strength=0.2).eval()
    x = torch.randn(1, config.channels, config.height, config.width, dtype=torch.float64)
    with torch.no_grad():
        z, log_det = flow(x)
        back, inverse_log_det = flow.inverse(z)
    assert z.shape == (1, config.dimensions)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-8)
    assert abs(log_det) > 1
    torch.testing.assert_close(log_det, autograd_log_det(lambda v: flow(v)[0], x), rtol=1e-8, atol=0)
    truth = autograd_log_det(lambda v: flow.inverse(v)[0], z)
    torch.testing.assert_close(inverse_log_det, truth, rtol=1e-8, atol=0)


@settings(max_examples=40, deadline=None)
@given(
    channels=st.integers(1, 4),
    height=st.integers(1, 4),
    width=st.integers(1, 4),
    unit=st.sampled_from([1, 2, 4, 8]),
    blocks=st.lists(st.integers(1, 2), min_size=1, max_size=3).map(tuple),
    entry=st.sampled_from(["3x3", "7x7", "none"]),
    mixing=st.sampled_from(["orthogonal", "permutation"]),
    actnorm=st.sampled_from(["paper", "released"]),
    preactivation=st.booleans(),
)
def test_any_layout_is_right_or_refused(
    channels: int, height: int, width: int, unit: int, blocks: tuple[int, ...], **options: object
) -> None:
    try:
        config = FlowConfig(
            channels,
            height * unit,
            width * unit,
            blocks,
            (2,) * len(blocks),
            entry_width=2,
            **options,  # type: ignore[arg-type]
        )
    except CandidError as error:
        assert "\n" not in str(error)
        return
    flow = randomise(build_flow(config).double(), strength=0.1).eval()
    x = torch.randn(2, channels, height * unit, width * unit, dtype=torch.float64)
    with torch.no_grad():
        z, log_det = flow(x)
        back, inverse_log_det = flow.inverse(z)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-7)
    torch.testing.assert_close(log_det, -inverse_log_det, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"height": 225}, "multiples of 32"),
        ({"channels": 1}, "entry = 'none'"),
        ({"blocks": (3, 4)}, "one entry for each"),
        ({"blocks": (3, 0, 6, 3)}, "'blocks' must be at least 1"),
        ({"clamp": 0.0}, "positive"),
        ({"entry_width": 0}, "'entry_width' must be at least 1"),
    ],
)
def test_impossible_layout_is_refused_when_built(change: dict[str, object], message: str) -> None:
    with pytest.raises(CandidError, match=message):
        replace(PRESETS["imagenet"].flow, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("direction", ["forward", "inverse"])
def test_nonfinite_numbers_are_traced_to_their_layer(direction: str) -> None:
    config = FlowConfig(3, 8, 8, blocks=(1, 2), widths=(4, 4), entry_width=4)
    flow = build_flow(config).eval()
    z, _ = flow(torch.rand(1, 3, 8, 8))
    start = torch.rand(1, 3, 8, 8) if direction == "forward" else z.detach()
    assert flow.first_nonfinite(start, direction) is None  # type: ignore[arg-type]
    with torch.no_grad():
        flow.stage2_block2.actnorm.offset.fill_(float("inf"))  # type: ignore[union-attr, operator]
    error = flow.first_nonfinite(start, direction)  # type: ignore[arg-type]
    assert isinstance(error, NonFiniteError)
    assert "stage2_block2.actnorm" in str(error)
    assert direction in str(error)


def test_receptive_field_is_the_support_of_the_gradient() -> None:
    """The table's number is the distance between the outermost pixels that reach one feature."""
    config = FlowConfig(3, 128, 128, blocks=(1, 2), widths=(16, 16), entry_width=16)
    flow = randomise(build_flow(config).double()).eval()
    body = [layer for name, layer in flow.leaves() if name != "dct"]
    x = torch.rand(1, 3, 128, 128, dtype=torch.float64, requires_grad=True)
    y = x
    for layer in body:
        y, _ = layer(y)
    y[0, :, y.shape[2] // 2, y.shape[3] // 2].square().sum().backward()
    assert x.grad is not None
    touched = (x.grad[0] != 0).any(0).any(0).nonzero().flatten()
    stages = {stage.layer: stage for stage in flow_stages(config)}
    assert int(touched[-1] - touched[0]) == stages["Stage 2"].receptive_field


def test_a_new_preset_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (presets.PRESETS, presets.RECIPE_OF_PRESET):
        monkeypatch.setitem(registry, "small", None)  # so that it is gone afterwards
    presets.register_preset("small", presets.preset("digits", blocks=(1,), widths=(4,)), "digits")
    assert candid.GenerativeClassifier.from_preset("small").config.flow.blocks == (1,)
    assert load_options(data="digits", preset="small").model_config(3).flow.widths == (4,)


def test_configurations_and_presets_need_no_torch() -> None:
    code = "import sys, candid.models.flow.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
