"""Memory formats and number types: same numbers, same format out, no hidden copies."""

from __future__ import annotations

import copy

import pytest
import torch

from cases import build, every, inputs, label, within

SIZES = ((), (5,), (4, 3), (3, 2, 4))


def fits(case, size):
    name, options = case
    if name in ("bnet", "ubn") and options.get("affine_conv", True):
        return len(size) in (0, 2)
    if name in ("in", "ibn"):
        return len(size) > 0
    if name == "gw" and size == () and "groups" not in options:
        return False  # one value a group
    return not (size == () and options.get("groups", 0) > 8)  # bgn: more groups than values


@within(size=SIZES, training=(True, False))
@pytest.mark.parametrize("case", every(), ids=label)
def test_any_rank_and_format(case, size, training):
    """channels_last in, channels_last out, and the numbers of the contiguous run."""
    if not fits(case, size):
        with pytest.raises(ValueError, match=r"expects|has"):
            build(case).train(training)(inputs(6, size))
        return
    layer = build(case).train(training)
    twin = copy.deepcopy(layer)
    x = inputs(6, size)
    last = x.movedim(1, -1).contiguous().movedim(-1, 1) if size else x
    a, b = x.clone().requires_grad_(), last.clone().requires_grad_()
    y, z = layer(a), twin(b)
    assert z.stride() == last.stride()
    assert y.stride() == x.stride()
    torch.testing.assert_close(y, z)
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    (z * weight).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    assert b.grad.stride() == last.stride()
    for mine, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    for mine, other in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("case", every(), ids=label)
def test_strided_input(case):
    """A slice of a larger tensor is neither format; it is normalized all the same."""
    layer = build(case)
    twin = copy.deepcopy(layer)
    wide = inputs(6, (8, 4))
    x = wide[:, :, ::2]
    torch.testing.assert_close(layer(x), twin(x.contiguous()))


@within(dtype=(torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("case", every(), ids=label)
def test_narrow_types(case, dtype):
    """Statistics in float32: the error is that of rounding input and output once.

    Against the same layer in float64 on the same (rounded) input. The bound is 8 roundings of
    the output's type at the output's largest magnitude; gw gets its condition number on top.
    """
    wide = build(case)
    narrow = copy.deepcopy(wide).float()  # parameters stay float32, as under mixed precision
    narrow.load_state_dict(wide.state_dict())
    x = inputs(6, (4, 4), dtype=torch.float64).to(dtype)
    y = narrow(x)
    expected = wide(x.double())
    assert y.dtype == dtype
    slack = 100 if case[0] == "gw" else 8
    bound = slack * max(torch.finfo(dtype).eps, 8 * torch.finfo(torch.float32).eps)
    error = (y.double() - expected).abs().max()
    assert error <= bound * expected.abs().max()


@within(dtype=(torch.bfloat16, torch.float16))
@pytest.mark.parametrize("case", every(), ids=label)
def test_autocast(case, dtype):
    """Under autocast the layer takes the convolution's narrow output and finite gradients flow."""
    layer = build(case, torch.float32)
    conv = torch.nn.Conv2d(3, 8, 3, padding=1)
    x = torch.randn(6, 3, 4, 4)
    with torch.autocast("cpu", dtype):
        y = layer(conv(x), activation="relu")
    assert y.dtype == dtype
    y.float().square().mean().backward()
    assert torch.isfinite(conv.weight.grad).all()
    for key, buffer in layer.named_buffers():
        if buffer.is_floating_point():
            assert buffer.dtype == torch.float32, key
            assert torch.isfinite(buffer).all() or key == "rate", key


@within(dtype=(torch.bfloat16, torch.float16))
@pytest.mark.parametrize("case", every(), ids=label)
def test_statistics_stay_wide(case, dtype):
    """model.half() narrows parameters, never statistics: in float16 they would stop moving."""
    layer = build(case, torch.float32)
    kept = {key: b.clone() for key, b in layer.named_buffers()}
    layer.to(dtype)
    for key, parameter in layer.named_parameters():
        assert parameter.dtype == dtype, key
    for key, buffer in layer.named_buffers():
        assert torch.equal(buffer, kept[key]) or key == "rate", key
    assert layer(inputs(6, dtype=dtype)).dtype == dtype
