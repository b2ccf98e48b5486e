"""Sizes at the edge: one sample, one position, no sample, changing sizes, values not finite."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normkit
from cases import within
from known_answers import ANSWERS
from normkit.errors import NonFiniteWarning, NormkitError

C = 8
LAYERS = normkit.names(kind="activation")
NEEDED: dict[str, dict[str, Any]] = {"bgn": {"groups": 4}, "gbgn": {"groups": 4}}
GATED = ("rbn", "iebn")
MICRO = {"groups": 2, "micro": True, "update_rate": 0.5}


def make(name: str, **options: Any) -> nn.Module:
    return normkit.make(name, C, dtype=torch.float64, **{**NEEDED.get(name, {}), **options})


def some(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*shape, generator=g, dtype=torch.float64) + 0.7


def plain_in(x: Tensor) -> Tensor:
    axes = tuple(range(2, x.dim()))
    centred = x - x.mean(axes, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(axes, keepdim=True) + 1e-5)


def state(layer: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in layer.state_dict().items()}


def check_answer(layer: nn.Module, x: Tensor, **options: Any) -> None:
    """The output and all buffers are those of the known answer."""
    name = layer.card.name
    before = {k: v.detach().numpy().copy() for k, v in layer.state_dict().items()}
    chosen = {**NEEDED.get(name, {}), **options}
    found = ANSWERS[name](x.numpy(), before, chosen, layer.training)
    torch.testing.assert_close(layer(x), torch.from_numpy(found.y), rtol=1e-9, atol=1e-9)
    for key, value in {**before, **found.buffers}.items():
        expected = torch.as_tensor(value).to(layer.state_dict()[key].dtype)
        torch.testing.assert_close(layer.state_dict()[key], expected, rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------ one sample, several positions


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bn", {}),
        ("bn", {"form": "a1"}),
        ("bn", {"form": "a2"}),
        ("ghost_bn", {}),
        ("rbn", {"minus": True}),
        ("iebn", {"minus": True}),
        ("ibn", {}),
        ("sn", {}),
        ("bgn", {"groups": C}),
        ("gbgn", {"groups": C}),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())) or "defaults",
)
def test_one_sample_is_instance_norm(name: str, options: dict[str, Any]) -> None:
    layer = make(name, **options)
    gate = torch.sigmoid(layer.gate_bias.detach()).view(-1, 1, 1) if name in GATED else 1.0
    if name == "sn":
        with torch.no_grad():  # its batch part; the others have their own tests
            layer.mean_weight.copy_(torch.tensor([0.0, 0.0, 99.0]))
            layer.var_weight.copy_(torch.tensor([0.0, 0.0, 99.0]))
    x = some(1, C, 3, 3)
    torch.testing.assert_close(layer(x), gate * plain_in(x))


def test_one_sample_rbn_is_instance_norm_and_its_gate_has_no_signal() -> None:
    layer, x = make("rbn"), some(1, C, 3, 3)
    with torch.no_grad():
        layer.gate_weight.fill_(50.0)
        layer.center_weight.fill_(0.5)
    gate = torch.sigmoid(torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(layer(x), gate * plain_in(x))


def test_one_sample_iebn_is_instance_norm_with_an_active_gate() -> None:
    layer, x = make("iebn"), some(1, C, 3, 3)
    with torch.no_grad():
        layer.gate_weight.fill_(0.8)
    gate = torch.sigmoid(0.8 * x.mean((2, 3), keepdim=True) - 1)
    torch.testing.assert_close(layer(x), gate * plain_in(x))


def test_one_sample_bnet_is_instance_norm_and_convolution() -> None:
    layer, x = make("bnet"), some(1, C, 3, 3)
    expected = nn.functional.conv2d(plain_in(x), layer.weight, layer.bias, padding=1, groups=C)
    torch.testing.assert_close(layer(x), expected)


def test_one_sample_ubn_has_similarity_one_and_takes_the_batch_branch() -> None:
    layer = make("ubn", affine=False, centering=False, scaling=False, tau=0.05)
    with torch.no_grad():
        layer.score.zero_()
    x = some(1, C, 3, 3)
    torch.testing.assert_close(layer(x), plain_in(x))
    assert layer.score.item() == pytest.approx(0.1)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_one_sample_gbgn_is_gn(groups: int) -> None:
    x = some(1, C, 3, 3)
    expected = nn.functional.group_norm(x, groups)
    torch.testing.assert_close(make("gbgn", groups=groups)(x), expected)


def test_one_sample_bcn_begins_with_instance_norm() -> None:
    x = some(1, C, 3, 3)
    expected = nn.functional.group_norm(plain_in(x), 2)
    torch.testing.assert_close(make("bcn", groups=2)(x), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_one_sample_has_its_known_answer(name: str) -> None:
    check_answer(make(name), some(1, C, 3, 3))


def test_one_sample_micro_bcn_has_its_known_answer() -> None:
    check_answer(make("bcn", **MICRO), some(1, C, 3, 3), **MICRO)


# ------------------------------------------------------------------ one sample, one position


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bn", {}),
        ("bn", {"form": "a1"}),
        ("bn", {"form": "a2"}),
        ("input_norm", {}),
        ("ghost_bn", {}),
        ("shifted_bn", {}),
        ("rbn", {}),
        ("iebn", {}),
        ("bnet", {}),
        ("ubn", {}),
        ("in", {}),
        ("gn", {"groups": C}),
        ("bcn", {"groups": 2}),
        ("ibn", {}),
        ("sn", {"unbiased": True}),
        ("bgn", {"groups": C}),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())) or "defaults",
)
@pytest.mark.parametrize("shape", [(1, C), (1, C, 1, 1)], ids=["table", "1x1"])
def test_a_single_value_is_an_error_with_a_remedy(
    name: str, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    layer = make(name, **options)
    before = state(layer)
    with pytest.raises(NormkitError, match="Try") as caught:
        layer(some(*shape))
    assert isinstance(caught.value, ValueError)  # what torch.nn raises
    for key, value in before.items():
        assert torch.equal(layer.state_dict()[key], value), key


@pytest.mark.parametrize("name", ["bn", "rbn", "iebn", "bnet", "ubn", "bcn"])
def test_a_single_value_can_fall_back_to_running_statistics(name: str) -> None:
    options = {"on_single": "running"}
    layer, x = make(name, **options), some(1, C)
    with torch.no_grad():
        layer.running_mean.fill_(0.3)
        layer.running_var.fill_(2.0)
    before = state(layer)
    found = layer(x)
    torch.testing.assert_close(found, layer.eval()(x))
    for key in ("running_mean", "running_var"):
        assert torch.equal(layer.state_dict()[key], before[key]), key


def test_a_last_virtual_batch_of_one_value_is_an_error() -> None:
    with pytest.raises(NormkitError, match="Try"):
        make("ghost_bn", virtual_batch=4)(some(5, C))


def test_in_of_one_position_is_an_error_in_eval_mode_too() -> None:
    with pytest.raises(NormkitError, match="Try"):
        make("in").eval()(some(3, C, 1, 1))


def test_gn_of_one_value_per_group_is_its_bias_when_there_are_more_samples() -> None:
    layer = make("gn", groups=C)
    with torch.no_grad():
        layer.bias.copy_(torch.arange(C))
    torch.testing.assert_close(
        layer(some(2, C)), torch.arange(C, dtype=torch.float64).expand(2, -1)
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gn", {"groups": 2}),
        ("ln", {}),
        ("pn", {}),
        ("bgn", {"groups": 2}),
        ("bgn", {"groups": 3}),
        ("gbgn", {"groups": 2}),
        ("bcn", MICRO),
        ("sn", {}),
        ("batch_renorm", {}),
        ("batch_renorm", {"r_ramp": None, "d_ramp": None}),
        ("gw", {"groups": 2}),
        ("frozen_bn", {}),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())) or "defaults",
)
@pytest.mark.parametrize("shape", [(1, C), (1, C, 1, 1)], ids=["table", "1x1"])
def test_a_single_value_is_fine_where_the_group_is_larger(
    name: str, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    layer = make(name, **options)
    check_answer(layer, some(*shape), **options)
    assert all(torch.isfinite(v).all() for v in layer.state_dict().values())


def test_batch_renorm_of_a_single_value_is_its_clipped_distance_from_the_running_mean() -> None:
    """The batch deviation is √eps and what is left of the value is d."""
    layer = make("batch_renorm", r_ramp=None, d_ramp=None, d_max=0.5, momentum=1.0)
    with torch.no_grad():
        layer.running_mean.copy_(torch.linspace(-2, 2, C))
        layer.running_std.fill_(2.0)
    x = some(1, C)
    expected = ((x - layer.running_mean) / 2).clamp(-0.5, 0.5)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.running_std, torch.full((C,), 1e-3**0.5, dtype=x.dtype))


def test_gw_of_a_constant_map_is_finite_with_eps_and_was_not_without() -> None:
    x = torch.ones(2, C, 3, 3, dtype=torch.float64)
    assert torch.equal(make("gw", groups=4)(x), torch.zeros_like(x))
    assert torch.isnan(make("gw", groups=4, eps=0.0)(x)).all()  # the paper's reading: 0/0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gw_with_many_iterations_approaches_the_exact_root(dtype: torch.dtype) -> None:
    """In exact arithmetic Newton's iteration converges; in floating point it must not diverge."""
    x = some(4, C, 6, 6) * torch.linspace(0.1, 3, C, dtype=torch.float64).view(-1, 1, 1)
    exact = normkit.make("gw", C, groups=C, method="eigh", dtype=torch.float64)(x)
    layer = normkit.make("gw", C, groups=C, iterations=30, dtype=dtype)
    torch.testing.assert_close(layer(x.to(dtype)).double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", LAYERS)
@within(mode=(True, False))
def test_constant_input_stays_finite(name: str, mode: bool) -> None:
    layer = make(name).train(mode)
    x = torch.full((3, C, 2, 2), 4.0, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()


# ------------------------------------------------------------------ sizes that change


@pytest.mark.parametrize("name", LAYERS)
@within(mode=(True, False))
def test_every_size_of_map_has_its_known_answer(name: str, mode: bool) -> None:
    layer = make(name).train(mode)
    for step, (n, height, width) in enumerate([(4, 4, 4), (2, 6, 3), (5, 2, 2), (3, 1, 7)]):
        check_answer(layer, some(n, C, height, width, seed=step))


@pytest.mark.parametrize("groups", [16, 11], ids=["strips", "uneven"])
def test_bgn_strips_scale_with_the_map(groups: int) -> None:
    layer = make("bgn", groups=groups)
    for size in [(4, 4), (6, 3), (2, 2), (5, 7)]:
        check_answer(layer, some(3, C, *size), groups=groups)
        check_answer(layer.eval(), some(3, C, *size), groups=groups)
        layer.train()


# ------------------------------------------------------------------ means far from zero


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in LAYERS),
        ("dn", {"start": "in"}),
        ("dn", {"start": "gn", "groups": 4}),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())) or "defaults",
)
def test_channels_far_from_zero_keep_their_variance(name: str, options: dict[str, Any]) -> None:
    """As E[x²] − E[x]² a variance of 1 beside a mean of 1000 would be lost in float32.

    The bound: each of the 4 · 9 values of a mean and the few steps after it may round once, at
    the size of the numbers.
    """
    chosen = {**NEEDED.get(name, {}), **options}
    layer = normkit.make(name, C, **chosen)
    size = 1000.0
    x = (some(4, C, 3, 3) / 2 + torch.linspace(-size, size, C).view(-1, 1, 1)).float()
    before = {k: v.detach().numpy().astype(float) for k, v in layer.state_dict().items()}
    expected = torch.from_numpy(ANSWERS[name](x.double().numpy(), before, chosen, True).y)
    roundings = 50 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(layer(x).double(), expected, rtol=roundings, atol=roundings * size)


def test_dn_without_running_statistics_needs_whole_blocks_in_eval_mode_too() -> None:
    layer = make("dn", batch=4, start="bn", track_running_stats=False).eval()
    with pytest.raises(NormkitError, match="Try"):
        layer(some(3, C, 2, 2))


# ------------------------------------------------------------------ a forward computed twice


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in LAYERS),
        ("batch_renorm", {"r_ramp": (0, 3), "d_ramp": (0, 3)}),
        ("bcn", MICRO),
        ("bcn", {**MICRO, "update_every": "step"}),
        ("bn", {"momentum": None}),
        ("ssn", {"anneal_steps": 5}),
        ("ubn", {"train_stats": "ema", "momentum": None}),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())) or "defaults",
)
def test_activation_checkpointing_changes_nothing(name: str, options: dict[str, Any]) -> None:
    """The second computation of a forward must see what the first one saw and move no buffer."""
    plain, twice = make(name, **options), make(name, **options)
    with torch.no_grad():
        for control in ("mean_weight", "var_weight"):
            if hasattr(plain, control):
                getattr(plain, control).copy_(torch.tensor([0.2, 0.5, 0.3]))
    twice.load_state_dict(plain.state_dict())
    for step in range(3):
        inputs = [some(4, C, 3, 3, seed=step).requires_grad_() for _ in range(2)]
        toward = some(4, C, 3, 3, seed=step + 10)
        outputs = plain(inputs[0]), checkpoint(twice, inputs[1], use_reentrant=False)
        torch.testing.assert_close(*outputs)
        for y in outputs:
            (y * toward).sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(twice.state_dict()[key], value, msg=key)


# ------------------------------------------------------------------ no sample


@pytest.mark.parametrize("name", LAYERS)
@within(mode=(True, False), shape=((0, C), (0, C, 3, 3)))
def test_no_sample_gives_nothing_and_gradients_of_zero(
    name: str, mode: bool, shape: tuple[int, ...]
) -> None:
    layer = make(name).train(mode)
    before = state(layer)
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == shape
    for key, parameter in layer.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, torch.zeros_like(parameter)), key
    for key, value in before.items():
        assert torch.equal(layer.state_dict()[key], value), key


# ------------------------------------------------------------------ values that are not finite

TRACKING = [name for name in LAYERS if "running_mean" in make(name).state_dict()]


@pytest.mark.parametrize("name", [n for n in TRACKING if n != "frozen_bn"])
@within(value=(float("nan"), float("inf"), -float("inf")))
def test_a_value_that_is_not_finite_never_reaches_the_buffers(name: str, value: float) -> None:
    layer, bad = make(name), some(4, C, 3, 3)
    layer(some(4, C, 3, 3, seed=1))
    before = state(layer)
    bad[1, C - 1, 0, 0] = value  # in a channel that every layer tracks
    with pytest.warns(NonFiniteWarning, match="not finite"):
        layer(bad)
    layer(bad)  # warns once, not at every step
    for key, kept in before.items():
        assert torch.equal(layer.state_dict()[key], kept), key
    assert layer.nonfinite_batches.item() == 2
    # and the next good batch counts as if nothing had happened
    good = some(4, C, 3, 3, seed=2)
    untouched = make(name)
    untouched.load_state_dict(before)
    torch.testing.assert_close(layer(good), untouched(good))
    for key, expected in state(untouched).items():
        torch.testing.assert_close(layer.state_dict()[key], expected)


def test_micro_bcn_keeps_its_estimates_from_a_value_that_is_not_finite() -> None:
    layer, bad = make("bcn", **MICRO), some(4, C, 3, 3)
    before = state(layer)
    bad[0, 0, 0, 0] = float("nan")
    with pytest.warns(NonFiniteWarning):
        layer(bad)
    for key, kept in before.items():
        assert torch.equal(layer.state_dict()[key], kept), key


@pytest.mark.parametrize("name", [n for n in LAYERS if not make(n).card.pools_samples])
def test_a_bad_sample_leaves_the_others_alone(name: str) -> None:
    layer, x = make(name), some(4, C, 3, 3)
    clean = layer(x)
    x[1] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteWarning)  # a layer may track without pooling
        found = layer(x)
    others = [0, 2, 3]
    torch.testing.assert_close(found[others], clean[others])
