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
