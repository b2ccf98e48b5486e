"""Each measure against its formula, written again in NumPy and float64, or against autograd."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from normkit.core.moments import Moments
from normkit.diagnosis import measures
from normkit.errors import NormkitError

Array = NDArray[np.float64]
CLOSE = 1e-12  # float64, sums of a few thousand terms


def numbers(x: Tensor) -> Array:
    return x.detach().numpy().astype(np.float64)


def channel_statistics(x: Array) -> tuple[Array, Array]:
    axes = (0, *range(2, x.ndim))
    return x.mean(axes), x.var(axes)


# ---------------------------------------------------------------- estimation shift


def test_esm_is_the_distance_of_means_and_of_standard_deviations() -> None:
    mean, var, true_mean, true_var = (torch.rand(7, dtype=torch.float64) + 0.1 for _ in range(4))
    found = measures.esm((mean, var), (true_mean, true_var))
    a, b, c, d = map(numbers, (mean, var, true_mean, true_var))
    assert float(found.mean) == pytest.approx(math.sqrt(((a - c) ** 2).sum()), rel=CLOSE)
    expected = math.sqrt(((np.sqrt(b) - np.sqrt(d)) ** 2).sum())
    assert float(found.std) == pytest.approx(expected, rel=CLOSE)


def test_esm_is_zero_for_exact_statistics() -> None:
    x = torch.randn(6, 5, 4, dtype=torch.float64) * 3 + 1
    mean, var = map(torch.from_numpy, channel_statistics(numbers(x)))
    each = Moments(x.mean(2), x.var(2, correction=0), 4)  # of each sample: has to be pooled
    found = measures.esm((mean, var), each)
    assert float(found.mean) < CLOSE
    assert float(found.std) < CLOSE


def test_esm_does_not_depend_on_eps_and_grows_with_the_width() -> None:
    one = measures.esm((torch.zeros(1), torch.ones(1)), (torch.ones(1), 4 * torch.ones(1)))
    many = measures.esm((torch.zeros(9), torch.ones(9)), (torch.ones(9), 4 * torch.ones(9)))
    assert (float(one.mean), float(one.std)) == (1.0, 1.0)
    assert (float(many.mean), float(many.std)) == (3.0, 3.0)


def test_output_error_is_the_mean_square_over_the_data() -> None:
    x, eps = torch.randn(400, 3, dtype=torch.float64) * 2 + 5, 1e-3
    mean, var = torch.tensor([4.0, 6.0, 5.0]), torch.tensor([1.0, 9.0, 4.0])
    data = numbers(x)
    true_mean, true_var = channel_statistics(data)
    wrong = (data - numbers(mean)) / np.sqrt(numbers(var) + eps)
    right = (data - true_mean) / np.sqrt(true_var + eps)
    expected = ((wrong - right) ** 2).mean(0)
    true = torch.from_numpy(true_mean), torch.from_numpy(true_var)
    found = measures.output_error((mean, var), true, eps)
    np.testing.assert_allclose(numbers(found), expected, rtol=1e-10)
    assert float(measures.output_error(true, true, eps).abs().max()) == 0.0


def test_esm_refuses_statistics_of_another_layer() -> None:
    with pytest.raises(NormkitError, match="one entry a channel"):
        measures.esm((torch.zeros(3), torch.ones(3)), (torch.zeros(4), torch.ones(4)))


# ---------------------------------------------------------------- condensation


def cosines(x: Array) -> Array:
    flat = x.reshape(len(x), -1)
    found = np.zeros((len(x), len(x)))
    for i, j in itertools.product(range(len(x)), repeat=2):
        length = np.linalg.norm(flat[i]) * np.linalg.norm(flat[j])
        found[i, j] = flat[i] @ flat[j] / length if length else 0.0
    return found


@pytest.mark.parametrize("zero", [False, True], ids=["", "with a sample of zeros"])
def test_condensation_is_the_mean_cosine_over_pairs(zero: bool) -> None:
    x = torch.randn(6, 3, 4, 4, dtype=torch.float64) + 0.5
    if zero:
        x[2] = 0
    expected = cosines(numbers(x))
    pairs = [expected[i, j] for i, j in itertools.permutations(range(6), 2)]
    found = float(measures.condensation(x))
    # a sample of zeros: the fast formula takes n from Σ u·u, and 0 instead of 1 for that sample
    missing = 1 / (6 * 5) if zero else 0.0
    assert found == pytest.approx(np.mean(pairs) - missing, abs=CLOSE)
    np.testing.assert_allclose(numbers(measures.condensation_matrix(x)), expected, atol=CLOSE)


def test_condensation_of_equal_opposite_and_single_samples() -> None:
    one = torch.randn(1, 8)
    assert float(measures.condensation(one.repeat(5, 1))) == pytest.approx(1.0, abs=1e-6)
    assert float(measures.condensation(torch.cat([one, -one]))) == pytest.approx(-1.0, abs=1e-6)
    assert float(measures.condensation(one)) == 1.0


def test_condensation_looks_at_the_first_samples() -> None:
    x = torch.randn(9, 5)
    assert torch.equal(measures.condensation(x, 4), measures.condensation(x[:4]))
    assert measures.condensation_matrix(x, 4).shape == (4, 4)


def test_condensation_is_not_narrowed_by_autocast() -> None:
    x = torch.randn(8, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, matrix = measures.condensation(x), measures.condensation_matrix(x)
    assert torch.equal(found, measures.condensation(x))
    assert torch.equal(matrix, measures.condensation_matrix(x))


def test_condensation_refuses_an_empty_batch() -> None:
    with pytest.raises(NormkitError, match="N ≥ 1"):
        measures.condensation(torch.zeros(0, 3))


# ---------------------------------------------------------------- channels of a group


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_stat_diff_is_equation_35(groups: int) -> None:
    mean, var = torch.randn(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64) + 0.1
    m, s = numbers(mean).reshape(groups, -1), np.sqrt(numbers(var)).reshape(groups, -1)
    expected = np.sqrt((m**2).mean(1) - m.mean(1) ** 2) / s.mean(1)
    found = numbers(measures.stat_diff(mean, var, groups))
    np.testing.assert_allclose(found, expected, atol=1e-7)  # the paper's form cancels
    assert groups < 6 or (found == 0).all()


def test_stat_diff_does_not_cancel_and_has_no_zero_over_zero() -> None:
    far = torch.tensor([1e8 - 1, 1e8 + 1], dtype=torch.float64)
    assert float(measures.stat_diff(far, torch.ones(2))) == pytest.approx(1.0, rel=1e-12)
    assert float(measures.stat_diff(torch.zeros(2), torch.zeros(2))) == 0.0


def test_under_represented_channels_are_weak_or_off() -> None:
    mean = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -4.0, 4.0])
    std = torch.tensor([1.0, 1.0, 1.0, 0.01, 1.0, 1.0, 1.0, 1.0])
    # group 1: three channels of 1 and a weak one; group 2: one lies 4 of its stds below the rest
    found = measures.under_represented(mean, std**2, groups=2)
    assert found.tolist() == [False, False, False, True, False, False, True, False]
    alike = measures.under_represented(torch.zeros(8), torch.ones(8), groups=2)
    assert not alike.any()


def test_under_represented_agrees_with_data_that_is_standardized() -> None:
    """A channel is off if a ReLU after the group norm lets nothing of it pass."""
    torch.manual_seed(0)
    x = torch.randn(50, 4, 10, dtype=torch.float64)
    x[:, 2] = x[:, 2] * 0.2 - 3
    out = torch.nn.functional.group_norm(x, 1, eps=0.0)
    off = out.amax((0, 2)) < 0
    weak = out.std((0, 2)) < 0.1
    mean, var = channel_statistics(numbers(x))
    found = measures.under_represented(torch.from_numpy(mean), torch.from_numpy(var))
    assert found.tolist() == (off | weak).tolist() == [False, False, True, False]


def test_groups_have_to_divide_the_channels() -> None:
    with pytest.raises(NormkitError, match="divisible"):
        measures.stat_diff(torch.zeros(6), torch.ones(6), groups=4)


# ---------------------------------------------------------------- scale


def test_gradient_factor_is_what_backward_multiplies_with() -> None:
    """dL/dx = factor · (g − mean g − x̂ · mean(g·x̂)), semantics 3.1."""
    x = torch.randn(12, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([0.5, -2.0, 1.5], dtype=torch.float64)
    y = torch.nn.functional.batch_norm(x, None, None, weight, None, True, 0.1, 1e-3)
    g = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, g)
    data, grad = numbers(x), numbers(g)
    mean, var = channel_statistics(data)
    shape = (1, 3, 1)
    hat = (data - mean.reshape(shape)) / np.sqrt(var.reshape(shape) + 1e-3)
    rest = grad - grad.mean((0, 2), keepdims=True)
    rest -= hat * (grad * hat).mean((0, 2), keepdims=True)
    factor = numbers(measures.gradient_factor(weight, torch.from_numpy(var), 1e-3))
    np.testing.assert_allclose(numbers(dx), factor.reshape(shape) * rest, atol=1e-12)
    np.testing.assert_allclose(factor, numbers(weight) / np.sqrt(var + 1e-3), rtol=CLOSE)


def test_gradient_factor_without_weight() -> None:
    assert measures.gradient_factor(None, torch.tensor([3.0]), 1.0).tolist() == [0.5]


def test_drift() -> None:
    found = measures.drift(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 0.0]))
    assert float(found.rms) == pytest.approx(math.sqrt(8), rel=CLOSE)
    assert float(found.largest) == 4.0
    with pytest.raises(NormkitError):
        measures.drift(torch.zeros(2), torch.zeros(3))


# ---------------------------------------------------------------- activity


def test_share_beyond_counts_both_sides_and_what_is_no_number() -> None:
    x = torch.tensor([0.0, 6.0, -6.0, 6.1, -7.0, math.nan, math.inf, 1.0])
    assert float(measures.share_beyond(x)) == 4 / 8
    assert float(measures.share_beyond(x, 0.5)) == 7 / 8


def test_share_beyond_of_normal_numbers() -> None:
    x = torch.randn(200_000, dtype=torch.float64)
    exact = math.erfc(2 / math.sqrt(2))  # P(|x| > 2)
    deviation = math.sqrt(exact * (1 - exact) / len(x))
    assert abs(float(measures.share_beyond(x, 2)) - exact) < 5 * deviation


@pytest.mark.parametrize("axis", [1, -1])
def test_dead_channels_are_those_a_relu_never_lets_pass(axis: int) -> None:
    x = torch.randn(5, 4, 6)
    x[:, 1] = -x[:, 1].abs() - 1
    x[:, 3] = 0
    x = x.movedim(1, axis)
    expected = [False, True, False, True]
    assert measures.dead_channels(x.relu(), axis).tolist() == expected
    assert measures.dead_channels(x, axis).tolist() == expected


def test_saturated_channels_are_at_the_bounds() -> None:
    y = torch.sigmoid(torch.tensor([[9.0, -9.0, 0.0, 9.0], [9.0, 9.0, 1.0, 0.0]]))
    bounds = measures.ActivityBounds(0.0, 1.0)
    assert measures.saturated_channels(y, bounds).tolist() == [True, True, False, False]
    half = measures.saturated_channels(y, bounds, share=0.5)
    assert half.tolist() == [True, True, False, True]
    relu = measures.ActivityBounds(0.0, None)
    assert not measures.saturated_channels(torch.zeros(2, 4), relu).any()


def test_activity_refuses_an_empty_tensor() -> None:
    with pytest.raises(NormkitError):
        measures.dead_channels(torch.zeros(0, 3))


# ---------------------------------------------------------------- gates


def test_gate_saturation() -> None:
    gates = torch.tensor([[0.01, 0.05, 0.5], [0.951, 0.95, 0.99]])
    assert float(measures.gate_saturation(gates)) == 3 / 6
    assert float(measures.gate_saturation(gates, 0.0)) == 0.0
    with pytest.raises(NormkitError):
        measures.gate_saturation(gates, 0.5)


def test_frozen_share_counts_scores_that_are_not_above_tau() -> None:
    assert measures.frozen_share([0.1, 0.15, 0.2, math.nan], 0.15) == 3 / 4
    assert measures.frozen_share(torch.tensor([0.1, 0.3]), [0.05, 0.4]) == 1 / 2
    assert measures.frozen_share([], 0.15) == 0.0
    with pytest.raises(NormkitError):
        measures.frozen_share([0.1], [0.1, 0.2])


# ---------------------------------------------------------------- weight standardization


def test_gradient_parts_add_up_and_the_last_is_what_reaches_the_weight() -> None:
    weight = torch.randn(4, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    flat = weight.flatten(1)
    centred = flat - flat.mean(1, keepdim=True)
    std = centred.square().mean(1, keepdim=True).sqrt()
    standardized = centred / std
    g = torch.randn_like(standardized)
    (reaches,) = torch.autograd.grad(standardized, weight, g)
    a, b, c = map(numbers, measures.ws_gradient_decomposition(weight, g.reshape(weight.shape)))
    hat, grad, inputs = numbers(standardized), numbers(g), 12
    np.testing.assert_allclose(a, (hat * grad).sum(1) ** 2 / inputs, rtol=CLOSE)
    np.testing.assert_allclose(b, grad.sum(1) ** 2 / inputs, rtol=CLOSE)
    left = numbers(std)[:, 0] ** 2 * (numbers(reaches).reshape(4, -1) ** 2).sum(1)
    np.testing.assert_allclose(c, left, rtol=1e-10)
    np.testing.assert_allclose(a + b + c, (grad**2).sum(1), rtol=CLOSE)


def test_gradient_parts_of_equal_weights_still_add_up() -> None:
    weight, g = torch.ones(2, 5), torch.randn(2, 5, dtype=torch.float64)
    a, b, c = measures.ws_gradient_decomposition(weight.double(), g)
    assert a.tolist() == [0.0, 0.0]
    torch.testing.assert_close(a + b + c, g.square().sum(1))


def test_gradient_parts_need_a_gradient_of_the_weight() -> None:
    with pytest.raises(NormkitError, match="same shape"):
        measures.ws_gradient_decomposition(torch.zeros(2, 3), torch.zeros(3, 2))
