"""Layers that must coincide: the numbered identities between normalizers.

The numbers 7, 8 and 16 concern weight layers, 17 is the gradient check of every layer; they are
tested elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normkit
from cases import within
from normkit.errors import NormkitError

C = 8


def make(name: str, **options: Any) -> nn.Module:
    return normkit.make(name, C, dtype=torch.float64, **options)


def some(*shape: int, seed: int = 0) -> Tensor:
    """An input whose channels and samples differ in mean and scale."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*(shape or (6, C, 4, 4)), generator=g, dtype=torch.float64)
    side = [1] * (x.dim() - 2)
    x = x * (0.5 + torch.rand(x.shape[1], generator=g, dtype=torch.float64)).view(-1, *side)
    return x + torch.randn(x.shape[:2], generator=g, dtype=torch.float64).view(*x.shape[:2], *side)


def away(layer: nn.Module, seed: int = 1) -> nn.Module:
    """The layer with per-channel scales, shifts and running statistics away from their start."""
    g = torch.Generator().manual_seed(seed)
    values = {
        key: torch.rand(C, generator=g, dtype=torch.float64) + 0.5
        for key in ("weight", "bias", "running_mean", "running_var")
    }
    with torch.no_grad():
        for key, tensor in layer.state_dict().items():
            if key in values and tensor.shape == (C,):
                tensor.copy_(values[key])
    return layer


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def both_modes(one: nn.Module, other: nn.Module, factor: float | Tensor = 1.0) -> None:
    """The same values and the same running statistics, in training and then in eval mode."""
    x = some()
    same(one(x), other(x) * factor)
    for key, value in other.state_dict().items():
        if key.startswith("running"):
            same(one.state_dict()[key], value)
    same(one.eval()(x), other.eval()(x) * factor)


# ------------------------------------------------------------------ 1 to 4: gates, kernels, scores


@pytest.mark.parametrize("name", ["rbn", "iebn"])
@pytest.mark.parametrize("b", [-1.0, 0.0, 1.0])
def test_01_a_gate_without_signal_is_sigmoid_of_its_bias_times_bn(name: str, b: float) -> None:
    gated, plain = away(make(name)), away(make("bn"))
    with torch.no_grad():
        gated.gate_bias.fill_(b)
        for layer in (gated, plain):
            layer.bias.zero_()
    both_modes(gated, plain, torch.sigmoid(torch.tensor(b, dtype=torch.float64)))


@pytest.mark.parametrize("options", [{"kernel_size": 1}, {"init": "dirac"}], ids=["k1", "dirac"])
def test_02_bnet_with_one_tap_or_the_dirac_kernel_is_bn(options: dict[str, Any]) -> None:
    bnet, bn = away(make("bnet", **options)), away(make("bn"))
    with torch.no_grad():
        middle = bnet.weight.shape[-1] // 2
        bn.weight.copy_(bnet.weight[:, 0, middle, middle])
        bn.bias.copy_(bnet.bias)
    both_modes(bnet, bn)


def test_03_ubn_with_all_switches_off_is_bn() -> None:
    off = {"fct": False, "centering": False, "scaling": False, "affine_conv": False}
    both_modes(away(make("ubn", **off)), away(make("bn")))


def test_04_ubn_below_every_cosine_always_uses_the_batch() -> None:
    layer = make("ubn", tau=-1.01, affine=False, centering=False, scaling=False)
    with torch.no_grad():
        layer.score.fill_(-1.0)
    for seed in range(3):
        x = some(seed=seed) - some(seed=seed).mean(0)  # negative similarity
        same(layer(x), make("bn", affine=False)(x))


@pytest.mark.parametrize("tau", [1.0, 1.5])
def test_04_ubn_above_every_cosine_is_frozen_from_the_first_step(tau: float) -> None:
    layer = away(make("ubn", tau=tau, affine=False, centering=False, scaling=False))
    mean, var = layer.running_mean.clone(), layer.running_var.clone()
    x = some()[:1].expand(6, -1, -1, -1)  # similarity 1, the highest there is
    expected = (x - mean.view(-1, 1, 1)) / torch.sqrt(var.view(-1, 1, 1) + 1e-5)
    same(layer(x), expected)
    same(layer.running_mean, mean)
    same(layer.running_var, var)


# ------------------------------------------------------------------ 5 and 6: groups


def test_05_bgn_with_a_group_per_channel_is_bn() -> None:
    both_modes(away(make("bgn", groups=C)), away(make("bn")))


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_05_bgn_of_one_sample_is_gn(groups: int) -> None:
    x = some(1, C, 4, 4)
    same(away(make("bgn", groups=groups))(x), away(make("gn", groups=groups))(x))


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_05_gbgn_of_one_example_is_gn(groups: int) -> None:
    gbgn = away(make("gbgn", groups=groups, examples_per_group=1))
    same(gbgn(some()), away(make("gn", groups=groups))(some()))


def test_05_gbgn_with_one_channel_per_group_and_the_whole_batch_is_bn() -> None:
    same(away(make("gbgn", groups=C))(some()), away(make("bn"))(some()))


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_05_gbgn_of_the_whole_batch_is_bgn(groups: int) -> None:
    x = some()
    same(away(make("gbgn", groups=groups))(x), away(make("bgn", groups=groups))(x))


def test_06_gn_with_one_group_is_ln() -> None:
    same(away(make("gn", groups=1))(some()), away(make("ln"))(some()))


def test_06_gn_with_a_group_per_channel_is_in() -> None:
    same(away(make("gn", groups=C))(some()), away(make("in"))(some()))


@pytest.mark.parametrize("shape", [(6, C), (6, C, 1, 1)], ids=["table", "1x1"])
def test_06_pn_on_single_pixels_is_ln(shape: tuple[int, ...]) -> None:
    same(away(make("pn"))(some(*shape)), away(make("ln"))(some(*shape)))


# ------------------------------------------------------------------ 9 to 11: corrected batches


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_09_bcn_without_second_affine_is_group_norm_of_bn(groups: int) -> None:
    bcn, bn = away(make("bcn", groups=groups)), away(make("bn"))
    x = some()
    same(bcn(x), F.group_norm(bn(x), groups))
    same(bcn.eval()(x), F.group_norm(bn.eval()(x), groups))


def test_10_micro_bcn_at_full_rate_is_bn_in_value_but_not_in_gradient() -> None:
    micro = away(make("bcn", groups=2, micro=True, update_rate=1.0))
    bn = away(make("bn"))
    x = some()
    with torch.no_grad():
        micro.running_mean.copy_(x.mean((0, 2, 3)))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [micro(inputs[0]), F.group_norm(bn(inputs[1]), 2)]
    same(*outputs)
    weights = some(seed=5)
    slopes = [
        torch.autograd.grad((y * weights).sum(), i)[0] for y, i in zip(outputs, inputs, strict=True)
    ]
    assert (slopes[0] - slopes[1]).abs().max() > 1e-3


def test_11_batch_renorm_without_room_is_bn_in_training() -> None:
    fixed = {"r_max": 1.0, "d_max": 0.0, "r_ramp": None, "d_ramp": None}
    renorm, bn = away(make("batch_renorm", **fixed)), away(make("bn", eps=1e-3))
    with torch.no_grad():
        renorm.running_std.fill_(3.0)
    same(renorm(some()), bn(some()))


def test_11_batch_renorm_without_limits_trains_on_its_eval_output() -> None:
    free = {"r_max": 1e9, "d_max": 1e9, "r_ramp": None, "d_ramp": None}
    renorm = away(make("batch_renorm", **free))
    with torch.no_grad():
        renorm.running_std.copy_(torch.linspace(0.3, 3, C))
    expected = renorm.eval()(some())
    same(renorm.train()(some()), expected)


# ------------------------------------------------------------------ 12 to 15: mixtures, whitening

PARTS = [(0, "in"), (1, "ln"), (2, "bn")]


@pytest.mark.parametrize(("part", "name"), PARTS)
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_12_sn_with_all_weight_on_one_part_is_that_part(part: int, name: str, mode: bool) -> None:
    sn, alone = away(make("sn")).train(mode), away(make(name)).train(mode)
    with torch.no_grad():
        for control in (sn.mean_weight, sn.var_weight):
            control.fill_(0.0)[part] = 100.0  # e^-100 is nothing beside 1
    same(sn(some()), alone(some()))


@pytest.mark.parametrize(("part", "name"), PARTS)
def test_12_ssn_at_full_radius_is_one_part(part: int, name: str) -> None:
    ssn, alone = away(make("ssn")), away(make(name))
    with torch.no_grad():
        for control in (ssn.mean_weight, ssn.var_weight):
            control.fill_(0.9)[part] = 1.1
        ssn.radius.fill_((2 / 3) ** 0.5)  # from the centre of the simplex to a corner
    same(ssn(some()), alone(some()))


@pytest.mark.parametrize(("ratio", "name"), [(0.0, "bn"), (1.0, "in")], ids=["bn", "in"])
def test_13_ibn_at_ratio_0_and_1_is_bn_and_in(ratio: float, name: str) -> None:
    both_modes(away(make("ibn", ratio=ratio)), away(make(name)))


@pytest.mark.parametrize("iterations", [1, 2, 5, 9])
def test_14_gw_with_one_group_is_ln_without_eps(iterations: int) -> None:
    gw = away(make("gw", groups=1, eps=0.0, iterations=iterations))
    same(gw(some()), away(make("ln", eps=0.0))(some()))


def test_15_no_estimation_shift_when_running_statistics_come_from_an_exact_pass() -> None:
    """Two batch norms in a row, the lower in eval mode while the upper is measured."""
    lower, upper = away(make("bn")).eval(), make("bn").eval()
    data = [some(seed=s) for s in range(3)]
    seen = lower(torch.cat(data)).detach()
    with torch.no_grad():
        upper.running_mean.copy_(seen.mean((0, 2, 3)))
        upper.running_var.copy_(seen.var((0, 2, 3), correction=0))
    inputs = torch.cat([lower(batch) for batch in data])
    expected_mean = inputs.mean((0, 2, 3))
    expected_std = inputs.std((0, 2, 3), correction=0)
    shift_of_mean = torch.linalg.vector_norm(upper.running_mean - expected_mean)
    shift_of_std = torch.linalg.vector_norm(upper.running_var.sqrt() - expected_std)
    assert shift_of_mean < 1e-12
    assert shift_of_std < 1e-12


# ------------------------------------------------------------------ 18 to 20: memory, state, half


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bgn", {"groups": 2}),
        ("bgn", {"groups": 32}),
        ("bgn", {"groups": 11}),
        ("bcn", {"groups": 2}),
        ("gn", {"groups": 2}),
        ("gw", {"groups": 4}),
    ],
    ids=["bgn", "bgn_strips", "bgn_uneven", "bcn", "gn", "gw"],
)
def test_18_channels_last_changes_no_group(name: str, options: dict[str, Any]) -> None:
    layer, x = away(make(name, **options)), some()
    plain = layer(x)
    moved = layer(x.to(memory_format=torch.channels_last))
    same(moved, plain)
    assert moved.is_contiguous(memory_format=torch.channels_last)


STATEFUL = {
    "ubn": {"tau": 0.5},
    "bcn": {"groups": 2, "micro": True, "update_rate": 0.3},
    "batch_renorm": {"r_ramp": (0, 4), "d_ramp": (0, 4)},
    "gbgn": {"groups": 2},
    "ssn": {},
}


@pytest.mark.parametrize("name", sorted(STATEFUL))
def test_19_a_state_dict_carries_everything_that_training_changed(name: str) -> None:
    """Also the score of UBN, the rate of BCN and the counters of renormalization."""
    layer, other = (away(make(name, **STATEFUL[name])) for _ in range(2))
    if name == "bcn":
        other = away(make(name, **{**STATEFUL[name], "update_rate": 0.9}))
    for seed in range(3):
        layer(some(seed=seed))
    other.load_state_dict(layer.state_dict())
    for seed in range(3, 6):
        same(layer(some(seed=seed)), other(some(seed=seed)))
    for key, value in layer.state_dict().items():
        torch.testing.assert_close(other.state_dict()[key], value)


ACTIVATION_LAYERS = normkit.names(kind="activation")


@pytest.mark.parametrize("name", ACTIVATION_LAYERS)
@within(shape=((1, C), (2, C), (1, C, 1, 2), (2, C, 1, 1), (2, C, 1, 2)))
def test_20_float16_under_autocast_is_finite_or_a_clear_error(
    name: str, shape: tuple[int, ...]
) -> None:
    layer = normkit.make(name, C)
    x = (100 * some(*shape)).half().requires_grad_()
    refusal = None
    with torch.autocast("cpu", dtype=torch.float16):
        try:
            y = layer(x)
        except NormkitError as error:
            refusal = str(error)
    if refusal is not None:
        assert "Try" in refusal
        return
    assert y.dtype == torch.float16
    y.float().square().sum().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()
