"""Weight standardization, one program a filter: with c = w − mean(w) and E = Σc²,

out = c / std,   std = √(E/count + eps), or √(E/count) + eps (OUTSIDE)
dw = (g − mean(g)) / std − c·Σ(g·c) / (std²·count·√(E/count + eps, or + 0))
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _deviation(weight, row, entry, mask, size, count, eps, OUTSIDE: tl.constexpr):
    """c, what it is divided by, and the root that has a derivative."""
    value = tl.load(weight + row * size + entry, mask=mask, other=0.0).to(tl.float32)
    apart = tl.where(mask, value - tl.sum(value, 0) / size, 0.0)
    square = tl.sum(apart * apart, 0) / count
    if OUTSIDE:
        root = tl.sqrt(square)
        return apart, root + eps, root
    root = tl.sqrt(square + eps)
    return apart, root, root


@triton.jit
def filters_kernel(
    weight, out, size, count, eps, OUTSIDE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, WIDTH)
    mask = entry < size
    apart, std, _ = _deviation(weight, row, entry, mask, size, count, eps, OUTSIDE)
    tl.store(out + row * size + entry, (apart / std).to(out.dtype.element_ty), mask=mask)


@triton.jit
def filters_gradient_kernel(
    grad, weight, out, size, count, eps, OUTSIDE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, WIDTH)
    mask = entry < size
    apart, std, root = _deviation(weight, row, entry, mask, size, count, eps, OUTSIDE)
    g = tl.load(grad + row * size + entry, mask=mask, other=0.0).to(tl.float32)
    along = tl.sum(g * apart, 0) / (std * std * count * root)
    dw = (g - tl.sum(g, 0) / size) / std - apart * along
    tl.store(out + row * size + entry, dw.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _long_deviation(flat, begin, size, count, eps, OUTSIDE: tl.constexpr, WIDTH: tl.constexpr):
    """The mean of a filter of any length, what it is divided by, and the root."""
    entry = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, size, WIDTH):
        mask = start + entry < size
        total += tl.load(flat + begin + start + entry, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / size
    square = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, size, WIDTH):
        mask = start + entry < size
        value = tl.load(flat + begin + start + entry, mask=mask, other=0.0).to(tl.float32)
        square += tl.where(mask, (value - mean) * (value - mean), 0.0)
    variance = tl.sum(square, 0) / count
    if OUTSIDE:
        root = tl.sqrt(variance)
        return mean, root + eps, root
    root = tl.sqrt(variance + eps)
    return mean, root, root


@triton.jit
def all_filters_kernel(
    flat, out, begins, sizes, less, eps, OUTSIDE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The filters of many convolutions, one after the other in memory: one program each."""
    row = tl.program_id(0)
    begin, size = tl.load(begins + row), tl.load(sizes + row)
    entry = tl.arange(0, WIDTH)
    mean, std, _ = _long_deviation(flat, begin, size, size - less, eps, OUTSIDE, WIDTH)
    for start in range(0, size, WIDTH):
        mask = start + entry < size
        value = tl.load(flat + begin + start + entry, mask=mask, other=0.0).to(tl.float32)
        at = out + begin + start + entry
        tl.store(at, ((value - mean) / std).to(out.dtype.element_ty), mask=mask)


@triton.jit
def all_filters_gradient_kernel(
    grad, flat, out, begins, sizes, less, eps, OUTSIDE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    begin, size = tl.load(begins + row), tl.load(sizes + row)
    entry = tl.arange(0, WIDTH)
    mean, std, root = _long_deviation(flat, begin, size, size - less, eps, OUTSIDE, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    along = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, size, WIDTH):
        mask = start + entry < size
        value = tl.load(flat + begin + start + entry, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + begin + start + entry, mask=mask, other=0.0).to(tl.float32)
        total += g
        along += g * (value - mean)
    middle = tl.sum(total, 0) / size
    slope = tl.sum(along, 0) / (std * std * (size - less) * root)
    for start in range(0, size, WIDTH):
        mask = start + entry < size
        value = tl.load(flat + begin + start + entry, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + begin + start + entry, mask=mask, other=0.0).to(tl.float32)
        dw = (g - middle) / std - (value - mean) * slope
        tl.store(out + begin + start + entry, dw.to(out.dtype.element_ty), mask=mask)
