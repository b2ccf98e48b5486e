"""Numbers and warnings that papers and their code are known for, seen on our layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normkit
from answers.gated import condensation
from answers.mixed import sparsestmax
from normkit import SSN
from normkit.errors import NormkitError


def make(name: str, channels: int, **options: Any) -> nn.Module:
    return normkit.make(name, channels, dtype=torch.float64, **options)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ------------------------------------------------------------------ where every layer starts

STARTS: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    ("bn", {}, {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1}),
    ("bn", {"scale_init": 0.1, "form": "a2"}, {"weight": 0.1, "inner_weight": 1, "bias": 0}),
    ("rbn", {}, {"center_weight": 0, "gate_weight": 0, "gate_bias": 1, "weight": 1}),
    ("iebn", {}, {"gate_weight": 0, "gate_bias": -1, "weight": 1}),
    ("ubn", {}, {"center_weight": 0, "gate_weight": 0, "gate_bias": 1, "score": 1}),
    ("ubn", {}, {"running_mean": 0, "running_var": 1}),
    ("ubn", {"preset": "paper"}, {"score": 0, "running_mean": 0, "running_var": 0}),
    ("ubn", {"preset": "authors"}, {"score": 1, "running_var": 1}),
    ("ubn", {"preset": "paper", "score_init": 0.5, "var_init": 2.0}, {"score": 0.5}),
    ("ubn", {"preset": "paper", "score_init": 0.5, "var_init": 2.0}, {"running_var": 2}),
    ("bgn", {"groups": 4}, {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1}),
    ("gbgn", {"groups": 4}, {"running_mean": 0, "running_second_moment": 1}),
    ("bcn", {"groups": 4}, {"weight": 1, "bias": 0, "group_weight": 1, "group_bias": 0}),
    ("sn", {}, {"mean_weight": 1, "var_weight": 1, "running_mean": 0, "running_var": 1}),
    ("sn", {"var_init": 0.0}, {"running_var": 0}),
    ("ssn", {}, {"mean_weight": 1, "var_weight": 1, "radius": 0}),
    ("batch_renorm", {}, {"running_mean": 0, "running_std": 1, "num_batches_tracked": 0}),
    ("bnet", {"init": "zero"}, {"weight": 0, "bias": 0}),
]


@pytest.mark.parametrize(("name", "options", "start"), STARTS, ids=[str(s[0]) for s in STARTS])
def test_where_a_layer_starts(name: str, options: dict[str, Any], start: dict[str, float]) -> None:
    state = make(name, 8, **options).state_dict()
    for key, value in start.items():
        torch.testing.assert_close(state[key], torch.full_like(state[key], value), msg=key)


# ------------------------------------------------------------------ revisiting-bn, rbn, iebn, bnet


@pytest.mark.parametrize(("name", "scale"), [("rbn", 0.7311), ("iebn", 0.2689)])
def test_the_gates_start_at_these_scales(name: str, scale: float) -> None:
    x = noise(8, 4, 3, 3)
    ratio = make(name, 4)(x) / make("bn", 4)(x)
    torch.testing.assert_close(ratio, torch.full_like(x, scale), rtol=0, atol=5e-5)


def test_the_gradient_of_bn_is_the_corrected_formula_and_not_equation_19() -> None:
    """The printed equation lacks the factor x̂ of the sample and has a wrong sign."""
    layer = make("bn", 1)
    with torch.no_grad():
        layer.weight.fill_(1.3)
    x, g = noise(16, 1).requires_grad_(), noise(16, 1)
    (found,) = torch.autograd.grad(layer(x), x, g)
    std = torch.sqrt(x.var(correction=0) + 1e-5).detach()
    xhat = ((x - x.mean()) / std).detach()
    correct = 1.3 / std * (g - g.mean() - xhat * (g * xhat).mean())
    printed = 1.3 / std * (g - (g * (1 - xhat)).mean())
    torch.testing.assert_close(found, correct, rtol=1e-12, atol=1e-12)
    assert (found - printed).abs().max() > 0.1


@pytest.mark.parametrize(
    ("start", "loss", "digits"), [(0.01, 0.066, 3), (0.05, 0.0029, 4), (0.1, 0.0007, 4)]
)
def test_eps_shrinks_a_bn_that_follows_small_scales(start: float, loss: float, digits: int) -> None:
    """Kaiming fan-in makes the input variance 2 · 0.3408 · g²: beside it 1e-5 counts."""
    x = noise(64, 1, 8, 8)
    x = (x - x.mean()) / x.std(correction=0) * math.sqrt(2 * 0.3408) * start
    assert round(1 - make("bn", 1)(x).std(correction=0).item(), digits) == loss


def test_the_input_norm_starts_at_058_of_the_scale_and_its_shift_is_fixed() -> None:
    layer = make("input_norm", 3, scale_init=0.1)
    torch.testing.assert_close(layer.weight.detach(), torch.full((3,), 0.058, dtype=torch.float64))
    assert not layer.bias.requires_grad
    assert not layer.bias.any()
    # the constant behind the literal: the deviation of a rectified unit normal
    assert math.sqrt(0.5 - 1 / (2 * math.pi)) == pytest.approx(0.5838, abs=5e-5)


def test_a_scale_below_one_survives_loops_over_batch_norms() -> None:
    """torchvision resets every nn.BatchNorm2d to a scale of one."""
    layer = make("bn", 4, scale_init=0.1)
    assert not isinstance(layer, nn.modules.batchnorm._NormBase)
    torch.testing.assert_close(layer.weight.detach(), torch.full((4,), 0.1, dtype=torch.float64))


def test_bias_in_forms_a1_and_a2_learns_slower_by_the_scale() -> None:
    x = noise(8, 2, 3, 3)
    slopes = {}
    for form in ("standard", "a1", "a2"):
        layer = make("bn", 2, form=form, scale_init=0.1)
        layer(x).sum().backward()
        slopes[form] = layer.bias.grad
    torch.testing.assert_close(slopes["a1"], 0.1 * slopes["standard"])
    torch.testing.assert_close(slopes["a2"], 0.1 * slopes["standard"])


def test_the_generic_start_of_a_depthwise_kernel_has_this_deviation() -> None:
    """Kaiming, fan-out, 256 channels: 0.0295, estimated here from 2304 numbers."""
    kernel = make("bnet", 256, init="fan_out").weight.detach()
    five_sigma = 5 / math.sqrt(2 * kernel.numel())
    assert kernel.std().item() == pytest.approx(0.0295, rel=five_sigma)


@pytest.mark.parametrize(("name", "option"), [("bnet", "init"), ("ubn", "affine_init")])
def test_the_torch_start_of_a_depthwise_kernel_is_bounded_by_one_third(
    name: str, option: str
) -> None:
    layer = make(name, 64, **{option: "torch"})
    for values in (layer.weight.detach(), layer.bias.detach()):
        assert 0.25 < values.abs().max().item() <= 1 / 3


# ------------------------------------------------------------------ ubn


def alike(similarity: float, samples: int = 16) -> Tensor:
    """Samples of which every two have the given cosine: a shared direction and one of their own."""
    x = torch.zeros(samples, 8 * 4 * 4, dtype=torch.float64)
    x[:, 0] = math.sqrt(similarity)
    x[:, 1 : samples + 1] = math.sqrt(1 - similarity) * torch.eye(samples)
    return x.view(samples, 8, 4, 4)


@pytest.mark.parametrize(
    ("similarity", "frozen_at", "left"),
    [(0.0, 19, 0.15), (0.05, 22, 0.11), (0.10, 28, 0.06), (0.14, 43, 0.01)],
)
def test_ubn_freezes_at_this_iteration(similarity: float, frozen_at: int, left: float) -> None:
    """One iteration later than its last update, when so much of its start is left."""
    layer, x = make("ubn", 8, tau=0.15, score_decay=0.9, centering=False), alike(similarity)
    moved = []
    with torch.no_grad():
        layer.running_mean.fill_(1.0)
    for _ in range(frozen_at + 5):
        before = layer.running_mean.clone()
        layer(x)
        moved.append(not torch.equal(before, layer.running_mean))
    assert moved.index(False) + 1 == frozen_at
    assert sum(moved) == frozen_at - 1
    mean = x.mean((0, 2, 3))
    share = (layer.running_mean - mean) / (1 - mean)
    torch.testing.assert_close(share, torch.full_like(share, left), rtol=0, atol=5e-3)


def test_ubn_with_the_literal_starts_and_the_pair_average_multiplies_by_316() -> None:
    plain = {"centering": False, "scaling": False, "affine": False}
    layer = make("ubn", 8, score_init=0.0, var_init=0.0, score_norm="pairs", **plain)
    x = noise(16, 8, 4, 4)
    torch.testing.assert_close(layer(x), x * 316.2277660168379)


def test_ubn_read_literally_as_a_whole_hides_that() -> None:
    """Dividing by the batch instead of the pairs makes the score large at once."""
    layer = make("ubn", 8, preset="paper")
    layer(noise(64, 8, 4, 4) + 1.0)
    assert layer.score.item() > 0.15


def test_ubn_score_by_batch_is_larger_by_the_other_samples() -> None:
    """0.080 becomes 10.2 at 128 samples."""
    x, scores = alike(0.08, samples=100), {}
    for norm in ("pairs", "batch"):
        layer = make("ubn", 8, score_norm=norm, max_samples=None, score_decay=0.0)
        layer(x)
        scores[norm] = layer.score.item()
    assert scores["pairs"] == pytest.approx(0.08)
    assert scores["batch"] == pytest.approx(99 * 0.08)
    assert round(127 * 0.08, 1) == 10.2


@pytest.mark.parametrize("zeros", [0, 1, 3, 6], ids=lambda k: f"{k}_zero_rows")
def test_ubn_score_equals_the_average_of_pairwise_cosines(zeros: int) -> None:
    layer, x = make("ubn", 8, score_decay=0.0), noise(6, 8, 4, 4) + 0.3
    x[:zeros] = 0
    layer(x)
    assert layer.score.item() == pytest.approx(condensation(x.numpy(), "pairs"), abs=1e-12)
    if zeros == 6:
        assert layer.score.item() == pytest.approx(-1 / 5)


def test_ubn_looks_at_the_first_16_samples() -> None:
    layer, x = make("ubn", 8, score_decay=0.0), noise(20, 8, 4, 4)
    layer(x)
    first = layer.score.clone()
    layer(torch.cat([x[:16], 100 * torch.ones_like(x[16:])]))
    torch.testing.assert_close(layer.score, first)


def test_ubn_has_13_parameters_a_channel() -> None:
    assert sum(p.numel() for p in make("ubn", 8).parameters()) == 13 * 8


def test_ubn_gate_before_and_after_the_kernel_differ_by_the_bias_alone() -> None:
    after, before = make("ubn", 8), make("ubn", 8, gate="before")
    with torch.no_grad():
        after.gate_weight.copy_(noise(8))
    before.load_state_dict(after.state_dict())
    x = noise(6, 8, 4, 4)
    xhat = make("bn", 8, affine=False)(x)
    s = torch.sigmoid(after.gate_weight * xhat.mean((2, 3)) + 1)
    expected = ((1 - s) * after.bias)[..., None, None].expand_as(x)
    torch.testing.assert_close(before(x) - after(x), expected, rtol=1e-10, atol=1e-10)


def test_ubn_score_moves_in_eval_mode_only_as_the_authors_let_it() -> None:
    x = noise(6, 8, 4, 4)
    ours, authors = make("ubn", 8).eval(), make("ubn", 8, preset="authors").eval()
    for layer in (ours, authors):
        layer(x)
    assert ours.score.item() == 1.0
    assert authors.score.item() < 1.0


# ------------------------------------------------------------------ ws-bcn


def test_micro_bcn_overshoots_in_its_first_step() -> None:
    """The second moment is taken about the old mean, 0: about 9 + 5² instead of 9."""
    layer = make("bcn", 2, groups=1, micro=True, update_rate=1.0)
    x = 5 + 3 * noise(16, 2, 4, 4)
    layer(x)
    torch.testing.assert_close(layer.running_var, x.square().mean((0, 2, 3)))
    assert (layer.running_var > 3 * x.var((0, 2, 3))).all()
    layer(x)  # now about the right mean
    torch.testing.assert_close(layer.running_var, x.var((0, 2, 3), correction=0))


def test_micro_bcn_refuses_to_train_without_a_rate() -> None:
    """The released class starts at a rate of 0, which nothing sets: its estimates never move."""
    with pytest.raises(NormkitError, match="follow_learning_rate"):
        make("bcn", 8, groups=2, micro=True)(noise(2, 8, 3, 3))


def test_micro_bcn_follows_the_learning_rate_of_each_step() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), normkit.make("bcn", 8, groups=2, micro=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    normkit.follow_learning_rate(model, optimizer)
    mean = torch.zeros(8)
    for _ in range(3):
        x = torch.randn(2, 3, 4, 4)
        seen = model[0](x).mean((0, 2, 3)).detach()
        mean = mean + optimizer.param_groups[0]["lr"] * (seen - mean)
        model(x).square().mean().backward()
        torch.testing.assert_close(model[1].running_mean, mean)
        optimizer.step()
        scheduler.step()


def test_micro_bcn_by_step_takes_the_average_of_the_forwards_about_the_old_mean() -> None:
    layer = make("bcn", 8, groups=2, micro=True, update_rate=0.25, update_every="step")
    with torch.no_grad():
        layer.running_mean.fill_(0.5)
    batches = [noise(2, 8, 3, 3) + k for k in range(3)]
    for x in batches:
        layer(x)
    layer.commit()
    mean = torch.stack([x.mean((0, 2, 3)) for x in batches]).mean(0)
    square = torch.stack([(x - 0.5).square().mean((0, 2, 3)) for x in batches]).mean(0)
    torch.testing.assert_close(layer.running_mean, 0.75 * 0.5 + 0.25 * mean)
    torch.testing.assert_close(layer.running_var, 0.75 + 0.25 * square)


def test_micro_bcn_clips_its_rate() -> None:
    layer = make("bcn", 8, groups=2, micro=True, update_rate=7.0)
    x = noise(4, 8, 3, 3)
    layer(x)
    torch.testing.assert_close(layer.running_mean, x.mean((0, 2, 3)))


def test_bcn_scales_per_group_and_refuses_groups_that_do_not_divide() -> None:
    assert make("bcn", 64).group_weight.shape == (32,)
    with pytest.raises(NormkitError, match="divisible"):
        make("bcn", 24, groups=32)


# ------------------------------------------------------------------ bgn, gbgn, sn, gw


def test_sn_unbiased_inflates_the_variance_of_2x2_maps_by_a_quarter() -> None:
    """By mean(var of a map) / 3 exactly, which for independent pixels is a quarter of the whole."""
    x = noise(64, 16, 2, 2)
    running = {}
    for unbiased in (False, True):
        layer = make("sn", 16, unbiased=unbiased, momentum=1.0)
        layer(x)
        running[unbiased] = layer.running_var
    of_a_map = x.var((2, 3), correction=0).mean(0)
    torch.testing.assert_close(running[True] - running[False], of_a_map / 3)
    five_sigma = 5 * math.sqrt(2 / x.numel())
    assert (running[True] / running[False]).mean().item() == pytest.approx(1.25, abs=five_sigma)


def test_gbgn_eval_variance_contains_how_the_means_moved() -> None:
    layer = make("gbgn", 4, groups=4, momentum=None)
    batches = [noise(6, 4, 3, 3) + shift for shift in (-2.0, 0.0, 2.0)]
    for x in batches:
        layer(x)
    var = layer.running_second_moment - layer.running_mean.square()
    within = torch.stack([x.var((0, 2, 3), correction=0) for x in batches]).mean(0)
    assert (var > within + 1).all()
    everything = torch.cat(batches)
    torch.testing.assert_close(var, everything.var((0, 2, 3), correction=0))
    expected = nn.functional.batch_norm(everything, layer.running_mean, var)
    torch.testing.assert_close(layer.eval()(everything), expected)


def test_bgn_with_more_groups_than_channels_depends_on_the_position() -> None:
    """Two strips a channel: an upper half that is brighter comes out as bright as the lower."""
    x = noise(8, 4, 4, 4)
    x[:, :, :2] += 10
    strips, whole = make("bgn", 4, groups=8)(x), make("bgn", 4, groups=4)(x)
    upper, lower = strips[:, :, :2].mean((0, 2, 3)), strips[:, :, 2:].mean((0, 2, 3))
    torch.testing.assert_close(upper, lower, rtol=0, atol=1e-12)
    assert (whole[:, :, :2].mean((0, 2, 3)) - whole[:, :, 2:].mean((0, 2, 3)) > 1).all()


def test_bgn_groups_are_neighbouring_channels_and_not_every_gth() -> None:
    x = noise(4, 4, 3, 3) * torch.tensor([1.0, 1.0, 50.0, 50.0]).view(-1, 1, 1)
    y = make("bgn", 4, groups=2)(x)
    for pair in (y[:, :2], y[:, 2:]):
        assert pair.std(correction=0).item() == pytest.approx(1.0, rel=1e-4)


def test_gw_is_far_from_white_after_five_iterations_of_a_spread_spectrum() -> None:
    """Groups that should all have variance 1 differ a thousandfold: judge it by its formula."""
    x = noise(1, 64, 16, 16) * torch.linspace(0.1, 10, 64, dtype=torch.float64).view(-1, 1, 1)
    y = make("gw", 64, groups=64, affine=False)(x)[0].flatten(1)
    left = y.var(1, correction=0)
    assert left.max() > 1000 * left.min()
    exact = make("gw", 64, groups=64, affine=False, method="eigh", eps=1e-12)(x)[0].flatten(1)
    torch.testing.assert_close(exact.var(1, correction=0), torch.ones(64, dtype=torch.float64))


def test_pn_of_a_single_channel_is_refused() -> None:
    with pytest.raises(NormkitError):
        make("pn", 1, unbiased=True)(noise(2, 1, 3, 3))


def test_pn_gives_the_moments_of_each_pixel() -> None:
    layer, x = make("pn", 8), noise(2, 8, 3, 3)
    y, mean, std = layer.with_moments(x)
    torch.testing.assert_close(mean, x.mean(1, keepdim=True))
    torch.testing.assert_close(std, torch.sqrt(x.var(1, keepdim=True, correction=0) + 1e-5))
    torch.testing.assert_close(y * std + mean, x)


def test_pn_moments_carry_a_gradient_for_the_shortcut() -> None:
    layer, x = make("pn", 8), noise(2, 8, 3, 3).requires_grad_()
    _, mean, std = layer.with_moments(x)
    (slope,) = torch.autograd.grad((mean + 0 * std).sum(), x)
    torch.testing.assert_close(slope, torch.full_like(slope, 1 / 8))


@pytest.mark.parametrize("radius", [0.0, 0.3, 0.4082, 0.5, 0.7, 0.8])
def test_sparsestmax_is_the_nearest_allowed_point_of_the_simplex(radius: float) -> None:
    """Against a search on a grid of the triangle: no grid point is allowed and nearer."""
    a, b = np.meshgrid(np.linspace(0, 1, 201), np.linspace(0, 1, 201))
    grid = np.stack([a, b, 1 - a - b], -1).reshape(-1, 3)
    grid = grid[grid[:, 2] >= 0]
    grid = grid[np.linalg.norm(grid - 1 / 3, axis=1) >= radius]
    layer = make("ssn", 4)
    layer.set_radius(radius)
    for seed in range(40):
        z = np.random.default_rng(seed).normal(size=3) * 0.7
        nearest = np.linalg.norm(grid - z, axis=1).min()
        known = sparsestmax(z, radius)
        assert known.min() >= -1e-12
        assert known.sum() == pytest.approx(1)
        assert np.linalg.norm(known - 1 / 3) >= radius - 1e-12
        assert np.linalg.norm(known - z) <= nearest + 1e-12
        with torch.no_grad():
            layer.mean_weight.copy_(torch.from_numpy(z))
        found = layer.mixture(layer.mean_weight).detach().numpy()
        np.testing.assert_allclose(found, known, rtol=0, atol=1e-7)


def test_equal_weights_stay_in_the_middle_of_the_simplex() -> None:
    """Three thirds in float32 differ from 1/3 by rounding, which was taken for a direction: one
    that may leave the simplex on all sides. The output was NaN from the fourth batch on."""
    layer = SSN(8, anneal_steps=4)
    for _ in range(6):
        assert layer(torch.randn(4, 8, 3, 3)).isfinite().all()
    for radius in (0.1, 0.5, 0.7, 0.8):
        layer = SSN(8)
        layer.set_radius(radius)
        assert torch.equal(layer.mixture(layer.mean_weight), torch.full((3,), 1 / 3))
        assert layer.eval()(torch.randn(4, 8, 3, 3)).isfinite().all()
        layer.train()(torch.randn(4, 8, 3, 3)).square().sum().backward()
        assert layer.mean_weight.grad.isfinite().all()
