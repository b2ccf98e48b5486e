"""Every layer gives its known answer: output and buffers, in both modes, all layouts, options."""

from __future__ import annotations

import itertools
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import normkit
from cases import noted
from known_answers import ANSWERS, CASES, SHAPES, Case

GRID = [
    pytest.param(name, case, id=f"{name}-{case.name}")
    for name, cases in CASES.items()
    for case in cases
]
MODES = ("train", "eval")


def draw(name: str, case: Case, layout: str, mode: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """A layer away from its start, and an input whose samples and channels differ."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {case.name} {layout}".encode()))
    shape = (case.samples, *SHAPES[layout][1:])
    layer = normkit.make(name, shape[1], dtype=dtype, **case.options).train(mode == "train")

    def uniform(like: torch.Tensor, low: float, high: float) -> torch.Tensor:
        numbers = torch.rand(like.shape, generator=generator, dtype=torch.float64)
        return (low + (high - low) * numbers).to(like.dtype)

    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if key.endswith("_gates") or not parameter.requires_grad:
                continue  # the sign of a gate is set by the case; input_norm's shift stays zero
            scale = key in ("weight", "inner_weight", "group_weight") and parameter.dim() == 1
            parameter.copy_(uniform(parameter, 0.5, 1.5) if scale else uniform(parameter, -1, 1))
        for key, buffer in layer.named_buffers():
            if key in ("weight", "running_var", "running_std"):
                buffer.copy_(uniform(buffer, 0.5, 1.5))
            elif key in ("bias", "running_mean"):
                buffer.copy_(uniform(buffer, -0.5, 0.5))
            elif key == "running_second_moment":
                buffer.copy_(uniform(buffer, 0.75, 1.75))  # above the square of any such mean
            elif key == "num_batches_tracked":
                buffer.fill_(6)  # the next batch weighs 1/7, which no float32 holds
        for key, value in case.state.items():
            layer.state_dict()[key].copy_(torch.tensor(value, dtype=torch.float64))
    side = [1] * (len(shape) - 2)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = x * (0.5 + torch.rand(shape[1], generator=generator, dtype=torch.float64)).view(-1, *side)
    x = x + torch.randn(shape[1], generator=generator, dtype=torch.float64).view(-1, *side)
    x = x + torch.randn(shape[0], generator=generator, dtype=torch.float64).view(-1, 1, *side)
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    return layer, x.to(dtype)


def arrays(layer: nn.Module) -> dict[str, np.ndarray]:
    """Parameters and persistent buffers as float64 (counters as integers)."""
    return {
        key: value.double().numpy().copy() if value.is_floating_point() else value.numpy().copy()
        for key, value in layer.state_dict().items()
    }


def answer(name: str, case: Case, layer: nn.Module, x: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    before = arrays(layer)
    found = ANSWERS[name](x.double().numpy(), before, case.options, layer.training)
    assert set(found.buffers) <= set(before), "the answer names a buffer the layer does not have"
    return found.y, {**before, **found.buffers}


@pytest.mark.parametrize(("name", "case"), GRID)
def test_known_answer(name: str, case: Case) -> None:
    for layout, mode in itertools.product(case.layouts, MODES):
        with noted(layout, mode):
            check_float64(name, case, layout, mode)
    for mode in MODES:  # rounding does not know of axes: one layout
        with noted("float32", mode):
            check_float32(name, case, case.layouts[0], mode)


def check_float64(name: str, case: Case, layout: str, mode: str) -> None:
    layer, x = draw(name, case, layout, mode, torch.float64)
    kept = x.clone()
    y, buffers = answer(name, case, layer, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = layer(x)
    np.testing.assert_allclose(result.detach().numpy(), y, rtol=1e-10, atol=1e-10)
    after = arrays(layer)
    for key, expected in buffers.items():
        np.testing.assert_allclose(after[key], expected, rtol=1e-10, atol=1e-10, err_msg=key)
    assert torch.equal(x, kept), "the input was changed"
    assert result.stride() == x.stride(), "the memory format was changed"


SIZES = ((4, 4), (3, 4), (2, 3), (4, 1), (2, 2), (1, 3))  # of images in a padded batch of 4 × 4


@pytest.mark.parametrize("name", list(CASES))
def test_with_a_mask(name: str) -> None:
    """Images of several sizes in one padded batch: the answer of arrays that hide the padding,
    whose means and variances NumPy takes over the rest."""
    few = CASES[name][:: max(1, len(CASES[name]) // 4)]  # masked arrays are slow
    for number, case in enumerate(few):
        for layout, mode in [("contiguous", "train"), ("channels_last", "eval")][
            : 1 + (not number)
        ]:
            if layout not in case.layouts:
                continue
            layer, x = draw(name, case, layout, mode, torch.float64)
            if layer.masks_refused() or len(x) != len(SIZES):
                continue
            mask = torch.zeros(len(x), 1, *x.shape[2:], dtype=torch.bool)
            for sample, (height, width) in enumerate(SIZES):
                mask[sample, :, :height, :width] = True
            hidden = ~mask.expand_as(x).numpy()
            before = arrays(layer)
            values = np.ma.array(x.numpy(), mask=hidden)
            found = ANSWERS[name](values, before, case.options, layer.training)
            with noted(case.name, layout):
                result = layer(x.masked_fill(~mask, torch.nan), mask=mask)
                y = np.where(hidden, 0, np.ma.filled(found.y, 0))
                np.testing.assert_allclose(result.detach().numpy(), y, rtol=1e-10, atol=1e-10)
                after = arrays(layer)
                for key, expected in {**before, **found.buffers}.items():
                    np.testing.assert_allclose(after[key], expected, rtol=1e-10, atol=1e-10)


def check_float32(name: str, case: Case, layout: str, mode: str) -> None:
    """Errs by no more than a sum of so many numbers may: one rounding for each of them.

    The numbers of a test are of size one, so the bound is relative to |y| + 1. Both sides start
    from the same float32 values; only the arithmetic differs.
    """
    layer, x = draw(name, case, layout, mode, torch.float32)
    y, buffers = answer(name, case, layer, x)
    result = layer(x)
    assert result.dtype == torch.float32
    roundings = x.numel() * torch.finfo(torch.float32).eps
    np.testing.assert_allclose(result.detach().numpy(), y, rtol=roundings, atol=roundings)
    after = arrays(layer)
    for key, expected in buffers.items():
        np.testing.assert_allclose(
            after[key], expected, rtol=roundings, atol=roundings, err_msg=key
        )


def test_every_activation_layer_has_answers_and_cases() -> None:
    layers = set(normkit.names(kind="activation"))
    assert set(ANSWERS) == layers
    assert {name for name, cases in CASES.items() if cases} == layers


@pytest.mark.parametrize(
    ("name", "options", "oracle"),
    [
        ("bn", {}, nn.BatchNorm2d(8)),
        ("gn", {"groups": 4}, nn.GroupNorm(4, 8)),
        ("ln", {}, nn.GroupNorm(1, 8)),
        ("in", {}, nn.InstanceNorm2d(8, affine=True)),
    ],
    ids=["bn", "gn", "ln", "in"],
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_answers_agree_with_torch_nn(
    name: str, options: dict[str, Any], oracle: nn.Module, mode: str
) -> None:
    """Where torch.nn has the layer, it checks the checker."""
    _, x = draw(name, Case("oracle", options), "contiguous", mode, torch.float64)
    oracle = oracle.double().train(mode == "train")
    before = arrays(oracle)
    found = ANSWERS[name](x.numpy(), before, options, oracle.training)
    expected = oracle(x).detach().numpy()
    np.testing.assert_allclose(found.y, expected, rtol=1e-12, atol=1e-12)
    for key, value in {**before, **found.buffers}.items():
        np.testing.assert_allclose(value, arrays(oracle)[key], rtol=1e-12, atol=1e-12)
