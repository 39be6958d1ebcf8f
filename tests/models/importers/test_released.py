"""The importer of released checkpoints, against their arithmetic written plainly and a reference file."""

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import candid
from candid import CheckpointError
from candid.models.flow.backbone import released_dct_scale
from candid.models.flow.coupling import random_orthogonal

State = dict[str, Tensor]
Content = dict[str, Any]


def test_the_reference_file_is_reproduced(released_file: Path, released_expected: Path) -> None:
    model, expected = candid.import_released(released_file), np.load(released_expected)
    config = model.config.flow
    assert (config.blocks, config.widths, config.entry_width) == ((1, 1, 2, 1), (4, 8, 16, 32), 4)
    assert (config.height, model.config.classes, model.config.rank) == (64, 7, 3)
    with torch.inference_mode():
        z, log_det = model.flow(torch.from_numpy(expected["x"]))
        log_joint = model.mixture.logits(z) - model.mixture.log_priors - 0.5 * z.square().sum(1)[:, None]
    constant = config.constant_coefficients
    shuffle = np.random.RandomState(0).permutation(constant)
    np.testing.assert_allclose(z[:, :constant].numpy()[:, shuffle], expected["z_fc"], atol=5e-6, rtol=0)
    np.testing.assert_allclose(z[:, constant:].numpy(), expected["z_conv"], atol=5e-6, rtol=0)
    np.testing.assert_allclose(log_joint.numpy(), expected["log_joint"], rtol=1e-6)
    declared = model.dimensions * math.log(0.5)  # the original's own value for its DCT, which is wrong
    true = constant * released_dct_scale(2).log().sum().item()
    np.testing.assert_allclose(log_det.numpy() - true + declared, expected["log_jacobian"], rtol=1e-6)


def released_state(generator: torch.Generator) -> Content:
    """A small file of the released layout: 3 x 16 x 16, stages of 1 and 2 blocks, 5 classes, K = 2."""

    def draw(*shape: int, spread: float = 0.3) -> Tensor:
        return spread * torch.randn(*shape, generator=generator)

    def norm(name: str, channels: int) -> State:
        return {
            f"{name}.weight": 1 + draw(channels),
            f"{name}.bias": draw(channels),
            f"{name}.running_mean": draw(channels),
            f"{name}.running_var": 1 + draw(channels).abs(),
            f"{name}.num_batches_tracked": torch.tensor(7),
        }

    def bottleneck(name: str, c_in: int, c_out: int, w: int) -> State:
        return {
            **norm(f"{name}.0", c_in),
            f"{name}.2.weight": draw(w, c_in, 1, 1),
            **norm(f"{name}.3", w),
            f"{name}.5.weight": draw(w, w, 3, 3),
            **norm(f"{name}.6", w),
            f"{name}.8.weight": draw(4 * w, w, 1, 1),
            **norm(f"{name}.9", 4 * w),
            f"{name}.11.weight": draw(c_out, 4 * w, 1, 1),
            f"{name}.11.bias": draw(c_out),
        }

    def rest(channels: int) -> State:
        permutation = torch.eye(channels)[torch.randperm(channels, generator=generator)][:, :, None, None]
        return {
            "act_norm": 7 + draw(1, channels, 1, 1, spread=1),
            "act_offset": draw(1, channels, 1, 1),
            "w": permutation,
            "w_inv": permutation.transpose(0, 1),
        }

    entry = {
        "s_hi.0.weight": draw(4, 2, 3, 3),
        **norm("s_hi.1", 4),
        "s_hi.3.weight": draw(4, 4, 3, 3),
        **norm("s_hi.4", 4),
        "s_hi.6.weight": draw(8, 4, 1, 1),
        "s_hi.6.bias": draw(8),
        "s_lo.0.weight": draw(4, 4, 3, 3),
        **norm("s_lo.1", 4),
        "s_lo.3.weight": draw(16, 4, 1, 1),
    }
    pointwise = {
        "s.0.weight": draw(48, 24, 1, 1),
        "s.0.bias": draw(48),
        "s.2.weight": draw(48, 48, 1, 1),
        "s.2.bias": draw(48),
    }
    down = bottleneck("s_hi", 24, 192, 3) | bottleneck("s_lo", 96, 192, 3)
    modules = {
        1: rest(12) | entry,
        3: rest(48) | pointwise,
        4: rest(48) | bottleneck("s", 24, 48, 2),
        5: rest(192) | down,
        7: rest(192) | bottleneck("s", 96, 192, 3),
        9: {"weight": torch.zeros(2, 2), "inv_weight": torch.zeros(2, 2)},
    }
    inn = {f"module_list.{i}.{name}": t for i, module in modules.items() for name, t in module.items()}
    return {
        "inn": inn | {"tmp_var_2": torch.zeros(3)},
        "mu": draw(1, 5, 192),
        "mu_t": draw(5, 2),
        "mu_m": draw(2, 576),
        "opt": {},
    }


def plain_forward(inn: State, x: Tensor) -> tuple[Tensor, Tensor]:
    """The released arithmetic, as documented: dense permutations, no classes, nothing shared with candid."""

    def subnet(module: int, name: str, strided: bool, y: Tensor) -> Tensor:
        prefix = f"module_list.{module}.{name}."
        numbers = sorted({int(k.removeprefix(prefix).split(".")[0]) for k in inn if k.startswith(prefix)})
        for n in numbers:
            weight = inn[f"{prefix}{n}.weight"]
            if weight.dim() == 4:
                is_strided = strided and weight.shape[2] == 3 and n > 0
                bias = inn.get(f"{prefix}{n}.bias")
                y = F.conv2d(y, weight, bias, stride=2 if is_strided else 1, padding=weight.shape[2] // 2)
                if name == "s" and module == 3 and n == 0:
                    y = y.relu()  # the 1 x 1 subnet has no batch norm
            else:
                stats = inn[f"{prefix}{n}.running_mean"], inn[f"{prefix}{n}.running_var"]
                y = F.batch_norm(y, *stats, weight, inn[f"{prefix}{n}.bias"]).relu()
        return y

    def affine(y: Tensor, a: Tensor, gain: float, shift: float) -> tuple[Tensor, Tensor]:
        a_s, a_t = a.chunk(2, 1)
        log_s = 0.7 * torch.tanh(gain * a_s)
        return y * log_s.exp() + shift * a_t, log_s.flatten(1).sum(1)

    total = torch.zeros(len(x), dtype=x.dtype)
    for module in (1, None, 3, 4, 5, 7):
        if module is None:
            a, b, c, d = x[..., ::2, ::2], x[..., ::2, 1::2], x[..., 1::2, ::2], x[..., 1::2, 1::2]
            x = torch.cat((a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d), 1) / 4
            total += x[0].numel() * math.log(0.5)
            continue
        x1, x2 = x.split([x.shape[1] - x.shape[1] // 2, x.shape[1] // 2], 1)
        if module in (1, 5):
            x2, term = affine(F.pixel_unshuffle(x2, 2), subnet(module, "s_hi", True, x1), 0.2, 1.0)
            x1, second = affine(F.pixel_unshuffle(x1, 2), subnet(module, "s_lo", False, x2), 0.2, 1.0)
            total += term + second
        else:
            x2, term = affine(x2, subnet(module, "s", False, x1), 0.1, 0.1)
            total += term
        gamma, offset = inn[f"module_list.{module}.act_norm"], inn[f"module_list.{module}.act_offset"]
        scale = 0.1 * torch.log(1 + torch.exp(0.5 * gamma)) / 0.5
        total += x1.shape[2] * x1.shape[3] * scale.log().sum()
        x = F.conv2d(torch.cat((x1, x2), 1) * scale + offset, inn[f"module_list.{module}.w"])
    n = torch.arange(2, dtype=x.dtype)
    basis = 2 * torch.cos(math.pi / 2 * n[:, None] * (n + 0.5)) / math.sqrt(4 * 3)
    x = basis @ x @ basis.T
    jacobian = torch.kron(basis, basis)
    total += 192 * torch.linalg.slogdet(jacobian).logabsdet
    return x.permute(0, 3, 2, 1).flatten(1), total


def test_an_import_computes_what_the_released_code_did(tmp_path: Path, generator: torch.Generator) -> None:
    content = released_state(generator)
    path = tmp_path / "beta_1.avg.pt"
    torch.save(content, path)
    model = candid.import_released(path).double()
    x = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)
    inn = {k: v.double() if v.is_floating_point() else v for k, v in content["inn"].items()}
    truth, true_log_det = plain_forward(inn, x)
    z, log_det = model.flow(x)
    torch.testing.assert_close(z, truth, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(log_det, true_log_det, atol=1e-4, rtol=1e-7)
    shuffle = torch.from_numpy(np.random.RandomState(0).permutation(192))
    squares = [
        (truth[:, :192][:, shuffle, None] - content["mu"][0].T).square().sum(1),
        (truth[:, 192:, None] - (content["mu_t"] @ content["mu_m"]).T).square().sum(1),
    ]
    posterior = (-0.5 * (squares[0] + squares[1])).softmax(1)
    torch.testing.assert_close(model.mixture.posterior(z), posterior, atol=1e-6, rtol=1e-5)
    back, _ = model.flow.inverse(z)
    torch.testing.assert_close(back, x, atol=1e-6, rtol=0)
    rotated = inn | {"module_list.4.w": random_orthogonal(48)[:, :, None, None]}
    torch.save(content | {"inn": rotated}, path)
    mixed = candid.import_released(path).double()
    assert mixed.config.flow.mixing == "orthogonal"
    torch.testing.assert_close(mixed.flow(x)[0], plain_forward(rotated, x)[0], atol=1e-5, rtol=1e-5)
    loaded = candid.load(candid.save(model.float(), tmp_path / "model"))
    image = torch.rand(1, 3, 16, 16)
    torch.testing.assert_close(loaded.log_density(image), model.log_density(image))


def test_foreign_files_are_refused_in_one_sentence(tmp_path: Path, generator: torch.Generator) -> None:
    good = released_state(generator)
    inn: State = good["inn"]
    cases: dict[str, tuple[object, str]] = {
        "no dictionary": ([1], "holds no dictionary"),
        "no mu": ({k: v for k, v in good.items() if k != "mu"}, "no tensor 'mu'"),
        "no inn": (good | {"inn": torch.zeros(1)}, "no state dictionary"),
        "unknown name": (good | {"inn": inn | {"head.weight": torch.zeros(1)}}, "'head.weight' is unknown"),
        "unknown module": (good | {"inn": inn | {"module_list.20.extra": torch.zeros(1)}}, "extra"),
        "no tensor": (good | {"inn": inn | {"module_list.4.s.2.weight": 3}}, "unknown"),
        "number for a name": (good | {"inn": inn | {4: torch.zeros(1)}}, "'4' is unknown"),
        "two means": (good | {"mu": torch.zeros(2, 5, 192)}, "no tensor 'mu'"),
        "whole numbers": (good | {"mu_t": torch.zeros(5, 2, dtype=torch.int64)}, "no tensor 'mu_t'"),
        "flat mixing": (good | {"inn": inn | {"module_list.4.w": torch.eye(48)}}, "not orthogonal"),
        "skewed mixing": (
            good | {"inn": inn | {"module_list.4.w": torch.randn(48, 48, 1, 1)}},
            "not orthogonal",
        ),
        "unknown tensor": (good | {"inn": inn | {"module_list.4.gain": torch.zeros(1)}}, "gain"),
        "lacks one": (
            good | {"inn": {k: v for k, v in inn.items() if "4.s.11.bias" not in k}},
            "lacks tensor",
        ),
        "wrong shape": (good | {"mu_m": torch.zeros(2, 575)}, "prototypes"),
        "no DCT": (good | {"inn": {k: v for k, v in inn.items() if ".9." not in k}}, "layout"),
    }
    for name, (content, message) in cases.items():
        torch.save(content, tmp_path / "file.pt")
        with pytest.raises(CheckpointError, match=message) as caught:
            candid.import_released(tmp_path / "file.pt")
        assert "\n" not in str(caught.value), name


def test_broken_files_are_refused_and_no_code_in_them_is_run(tmp_path: Path) -> None:
    marker, path = tmp_path / "executed", tmp_path / "file.pt"

    class Malice:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (marker,)  # type: ignore[return-value]

    torch.save(Malice(), path)
    with pytest.raises(CheckpointError, match="no plain PyTorch file") as caught:
        candid.import_released(path)
    assert not marker.exists()
    assert "weights_only" not in str(caught.value)
    torch.save({"inn": torch.zeros(10_000)}, path)
    for content, message in (
        (path.read_bytes()[:5000], "cut, or no plain"),
        (b"", "cut, or no plain"),
        (b"\x1f\x8b compressed", "gunzip"),
        (pickle.dumps({"a": 1}), "no tensor 'mu'|cut, or no plain"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message) as caught:
            candid.import_released(path)
        assert "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_anywhere_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "file.pt"
    torch.save(released_state(torch.Generator().manual_seed(0)), path)
    content = bytearray(path.read_bytes())
    cut = data.draw(st.integers(0, len(content)))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content[:cut] if data.draw(st.booleans()) else content)
    try:
        candid.import_released(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
