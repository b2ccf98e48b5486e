"""bnet and ubn as a whole: statistics, gate and a depthwise 3 × 3 convolution without tensors in
between. Three launches forward, three backward, and two small sums for the kernel's gradient."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.core.fusion import Fusion, kept_dense, lie_dense
from normkit.core.moments import Moments
from normkit.engine import plain
from normkit.engine import triton_backend as passes
from normkit.engine import triton_depthwise as kernels
from normkit.engine.epilogue import AffineMap
from normkit.engine.family import ChannelLayout, Family
from normkit.engine.fused import FAMILIES
from normkit.engine.launch import Launch

CHANNELS = 64  # a line of memory in bfloat16
PROGRAMS = 2048  # enough to fill a large machine
ELEMENTS = 512  # of a tile: four a thread, for the accumulators fill the registers
WARPS = 4


def serves(x: Tensor, kernel: Tensor) -> bool:
    """Whether these kernels can do it: maps of two axes, 3 × 3, samples below 2³¹ values."""
    return x.dim() == 4 and kernel.shape[2:] == (3, 3) and x[0].numel() < 2**31


def fused_depthwise(
    x: Tensor, fusion: Fusion, kernel: Tensor, bias: Tensor | None, layout: ChannelLayout
) -> tuple[Tensor, Tensor, int] | None:
    """Σ_t kernel[t]·z[p + t] + s·bias, z the map of the fusion and s its gates, or 1; and the
    tables that were made, with where in them the statistics of the batch begin. None if its
    tensors have gaps."""
    family = FAMILIES[type(fusion)]
    parameters = family.parameters(fusion)
    if not (lie_dense(kernel, bias, *parameters) and kept_dense(fusion)):
        return None
    return _FusedDepthwise.apply(x, kernel, bias, fusion, layout, family, *parameters)


class _FusedDepthwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        fusion: Fusion,
        layout: ChannelLayout,
        family: Family,
        *parameters: Tensor | None,
    ) -> Any:
        parts = passes.moment_parts(x, layout)
        tables, period, statistics, gates = family.made(x, parts, fusion, layout)
        y = layout.like(x)
        start = _forward(_sizes(x, layout, period), bias is not None, gates is not None)
        start(layout.aligned(x), tables, kernel, bias, gates, y)
        ctx.save_for_backward(x, kernel, bias, tables, gates, *parameters)
        ctx.given = fusion, layout, family, period
        ctx.mark_non_differentiable(tables)
        ctx.set_materialize_grads(False)
        return y, tables, statistics

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        x, kernel, bias, tables, gates, *parameters = ctx.saved_tensors
        fusion, layout, family, period = ctx.given
        if grad is None:
            return (None,) * (6 + len(parameters))
        if torch.is_grad_enabled():
            return _again(ctx, grad, tables, [x, kernel, bias, *parameters])
        n, c = x.shape[:2]
        start, splits = _sums(_sizes(x, layout, period))
        parts, taps = passes.table(x, 2 * splits * n * c), passes.table(x, 10 * splits * n * c)
        dy, x = layout.aligned(grad), layout.aligned(x)
        start(dy, x, tables, kernel, parts, taps)
        by_sample = taps.view(10, splits, n, c)
        dkernel = by_sample[:9].sum((1, 2)).t().reshape(kernel.shape)
        total = by_sample[9].sum(0)  # Σ dy, (N, C)
        dgates = None
        if gates is not None and bias is not None:
            dbias, dgates = (total * gates).sum(0), total * bias
        else:
            dbias = total.sum(0)
        whole = splits * n // layout.rows  # a table of one row counts samples as parts
        found = passes.Parts(parts, whole, 0)
        extra, dparameters = family.gradients(x, found, fusion, layout, tables, dgates)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = layout.like(x)
            _gradient(_sizes(x, layout, period))(dy, x, tables, kernel, extra, dx)
        wanted = [
            None if p is None or d is None or not need else d.to(p.dtype)
            for p, d, need in zip(
                (kernel, bias, *parameters),
                (dkernel, dbias, *dparameters),
                (*ctx.needs_input_grad[1:3], *ctx.needs_input_grad[6:]),
                strict=True,
            )
        ]
        return dx, *wanted[:2], None, None, None, *wanted[2:]


def _again(
    ctx: Any, grad: Tensor, tables: Tensor, given: list[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The backward of a backward: through the plain expression, which autograd differentiates."""
    x, kernel, bias, *parameters = given
    assert x is not None and kernel is not None
    fusion, layout, family, _ = ctx.given
    moments = Moments(*plain.moments(x, layout), layout.count)
    map, gates = family.expression(fusion, moments, tuple(parameters), tables)
    scale, shift = (t.expand(layout.rows, layout.columns) for t in map)
    z = plain.affine(x, AffineMap(scale, shift, None, "none"), layout)
    y = F.conv2d(z, kernel.to(z.dtype), padding=1, groups=x.shape[1])
    if bias is not None:
        kept = gates is not None and getattr(fusion, "keeps_gates", False)
        added = gates * bias if kept else bias
        y = y + added.to(y.dtype).reshape(-1, x.shape[1], 1, 1)
    needs = (*ctx.needs_input_grad[:3], *ctx.needs_input_grad[6:])
    inputs = [t for t, need in zip(given, needs, strict=True) if need and t is not None]
    flowing = iter(torch.autograd.grad(y, inputs, grad, create_graph=True, allow_unused=True))
    back = [
        next(flowing) if need and t is not None else None
        for t, need in zip(given, needs, strict=True)
    ]
    return *back[:3], None, None, None, *back[3:]


def _sizes(x: Tensor, layout: ChannelLayout, period: int) -> tuple[int, ...]:
    n, c, h, w = x.shape
    return n, c, h, w, period, layout.channels_last


def _cut(
    sizes: tuple[int, ...], programs: int, elements: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The grid; the rows of a program and how many programs stand abreast; LAST, COLUMNS, CHANNELS.

    Rows are cut only where there would be too few programs: each cut reads two rows twice.
    """
    n, c, h, w, _, last = sizes
    if last:
        channels = min(passes.power_of_two(c), CHANNELS)
        columns = min(passes.power_of_two(w), elements // channels)
    else:
        columns = min(passes.power_of_two(w), 64)
        channels = min(passes.power_of_two(c), elements // columns)
    blocks, abreast = -(-c // channels), -(-w // columns)
    cuts = max(1, min(h // 8, programs // max(1, n * blocks * abreast)))
    high = -(-h // cuts)
    return (-(-h // high) * abreast, blocks, n), (high, abreast), (last, columns, channels)


@lru_cache(maxsize=4096)
def _forward(sizes: tuple[int, ...], bias: bool, gated: bool) -> Launch:
    _, c, h, w, period, _ = sizes
    grid, rows, tile = _cut(sizes, PROGRAMS, ELEMENTS)
    numbers = h, w, c, period, *rows
    return Launch(kernels.depthwise_kernel, grid, numbers, (bias, gated, *tile), WARPS)


@lru_cache(maxsize=4096)
def _sums(sizes: tuple[int, ...]) -> tuple[Launch, int]:
    _, c, h, w, period, _ = sizes
    grid, rows, tile = _cut(sizes, PROGRAMS, ELEMENTS)
    numbers = h, w, c, period, *rows
    return Launch(kernels.depthwise_sums_kernel, grid, numbers, tile, WARPS), grid[0]


@lru_cache(maxsize=4096)
def _gradient(sizes: tuple[int, ...]) -> Launch:
    _, c, h, w, period, _ = sizes
    grid, rows, tile = _cut(sizes, PROGRAMS, ELEMENTS)
    numbers = h, w, c, period, *rows
    return Launch(kernels.depthwise_gradient_kernel, grid, numbers, tile, WARPS)
