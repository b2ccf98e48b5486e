"""bnet and ubn as a whole: statistics, gate and a depthwise 3 × 3 convolution without tensors in
between. Three launches forward, four backward, one of them for the sums of the kernel's gradient.

With z = a·(x − c) + b inside the map and 0 around it, k the kernel, and s the gate (or 1):

    y[p] = Σ_t k[t]·z[p + t] + s·bias
    g[q] = Σ_t k[t]·dy[q − t]        dk[t] = Σ_q z[q]·dy[q − t]
    dx = a·g + constant + slope·(x − c)

Neither z nor g is ever stored. A program owns COLUMNS × CHANNELS of one sample and slides down the
rows: each row is read once (three times, shifted, but then from the cache), and what it gives to
the three rows it touches is carried along in two accumulators. The row after is loaded before the
current one is worked on. Offsets into a sample are 32-bit, those of samples 64-bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from normkit.core.fusion import Depthwise, Fusion
from normkit.core.moments import Moments
from normkit.core.statistics import Repetition
from normkit.engine import plain
from normkit.engine.dispatch import looked_into_backward
from normkit.engine.epilogue import AffineMap
from normkit.engine.families.family import ChannelLayout, Family
from normkit.engine.families.fused import FAMILIES
from normkit.engine.replay.record import RecordedStep, Recording
from normkit.engine.triton import passes
from normkit.engine.triton.launch import Launch

CHANNELS = 64  # a line of memory in bfloat16
PROGRAMS = 2048  # enough to fill a large machine
ELEMENTS = 512  # of a tile: four a thread, for the accumulators fill the registers
WARPS = 4


def fused_depthwise(
    x: Tensor,
    description: Depthwise,
    layout: ChannelLayout,
    repetition: Repetition,
    record: RecordedStep | None = None,
) -> tuple[Tensor, Tensor, int]:
    """Σ_t kernel[t]·z[p + t] + s·bias, z the map of the norm and s its gates, or 1; and the tables
    that were made, with where in them the statistics of the batch begin."""
    norm, kernel, bias = description
    source = FAMILIES[type(norm)], repetition, record
    return _FusedDepthwise.apply(x, kernel, bias, norm, layout, source, *norm.parameters)


class _FusedDepthwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        fusion: Fusion,
        layout: ChannelLayout,
        source: tuple[Family, Repetition, RecordedStep | None],
        *parameters: Tensor | None,
    ) -> Any:
        family, ctx.repetition, record = source
        recording = None
        if record is not None:
            recording = Recording(record.inputs(x, None, (kernel, bias, *parameters)))
        with recording or nullcontext():
            parts = passes.moment_parts(x, layout)
            tables, period, statistics, gates = family.coefficients(x, parts, fusion, layout)
            y = passes.like(layout, x)
            start = _forward(_sizes(x, layout, period), bias is not None, gates is not None)
            start(layout.aligned(x), tables, kernel, bias, gates, y)
        if recording is not None and record is not None:
            record = record.with_forward(recording, y, tables)
        ctx.record = record
        ctx.save_for_backward(x, kernel, bias, tables, gates, *parameters)
        ctx.given = fusion, layout, family, period
        ctx.mark_non_differentiable(tables)
        ctx.set_materialize_grads(False)
        return y, tables, statistics

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        x, kernel, bias, tables, gates, *parameters = ctx.saved_tensors
        fusion, layout, _family, _period = ctx.given
        if grad is None:
            return (None,) * (6 + len(parameters))
        if looked_into_backward(grad):
            return _again(
                torch.is_grad_enabled(), ctx, grad, tables, [x, kernel, bias, *parameters]
            )
        record, recording = ctx.record, None
        grad = layout.aligned(grad)
        given = kernel, bias, *parameters
        if record is not None:
            own = [p for p in given if p is not None]
            recording = Recording([x, None, *own, tables, grad])
            recording.same((None, None, *fusion.parameters), given)
        with recording or nullcontext():
            dx, found = _gradients(ctx, grad, x, kernel, bias, tables, gates)
        if recording is not None:
            there = [d for d, p in zip(found, given, strict=True) if p is not None]
            record.finish(recording, x, grad, dx, None, there, _looked_into(ctx, record))
        needs = *ctx.needs_input_grad[1:3], *ctx.needs_input_grad[6:]
        wanted = [
            None if p is None or d is None or not need else d.to(p.dtype)
            for p, d, need in zip(given, found, needs, strict=True)
        ]
        return dx, *wanted[:2], None, None, None, *wanted[2:]


def _gradients(
    ctx: Any,
    dy: Tensor,
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    tables: Tensor,
    gates: Tensor | None,
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """dx, and the gradients of kernel, bias and the norm's parameters."""
    fusion, layout, family, period = ctx.given
    n, c = x.shape[:2]
    start, splits = _sums(_sizes(x, layout, period))
    parts, taps = passes.table(x, 2 * splits * n * c), passes.table(x, 10 * splits * n * c)
    x = layout.aligned(x)
    start(dy, x, tables, kernel, parts, taps)
    gated = gates is not None and bias is not None
    made = passes.table(x, (10 + n) * c if gated else 10 * c)
    _totals(n, c, splits, gated)(taps, gates if gated else None, bias if gated else None, made)
    dgates = made[10 * c :].view(n, c) if gated else None
    whole = splits * n // layout.rows  # a table of one row counts samples as parts
    found = passes.Parts(parts, whole, 0)
    extra, dparameters = family.gradients(x, found, fusion, layout, tables, dgates)
    dx = None
    if ctx.needs_input_grad[0]:
        dx = passes.like(layout, x)
        _gradient(_sizes(x, layout, period))(dy, x, tables, kernel, extra, dx)
    return dx, (made[: 9 * c].view(kernel.shape), made[9 * c : 10 * c], *dparameters)


def _looked_into(ctx: Any, record: RecordedStep) -> Callable[..., Any]:
    """The backward of a replayed step where someone looks into it."""
    given = ctx.given
    fusion = given[0]

    def again(
        x: Tensor,
        residual: Tensor | None,
        parameters: Sequence[Tensor],
        tables: Tensor,
        grad: Tensor,
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        there = (True, record.has("bias"), *(p is not None for p in fusion.parameters))
        saved, wanted = iter(parameters), iter(needs[2:])
        own = [next(saved) if p else None for p in there]
        flags = [p and next(wanted) for p in there]
        like = SimpleNamespace(
            given=given,
            repetition=record.repetition(),
            needs_input_grad=(needs[0], *flags[:2], False, False, False, *flags[2:]),
        )
        back = _again(torch.is_grad_enabled(), like, grad, tables, [x, *own])
        found = zip((*back[1:3], *back[6:]), there, strict=True)
        return [back[0], None, *(d for d, p in found if p)]

    return again


@torch.enable_grad()
def _again(
    further: bool, ctx: Any, grad: Tensor, tables: Tensor, given: list[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Where someone looks into a backward: the layer computes its map again, and autograd
    differentiates, ``further`` if there will be another backward."""
    x, kernel, bias, *parameters = given
    assert x is not None and kernel is not None
    fusion, layout, family, _ = ctx.given
    moments = Moments(*plain.moments(x, layout), layout.count)
    size = (layout.rows, layout.columns)
    seen = family.seen(fusion, tables, *size)
    result = ctx.repetition.result(moments, fusion.parameters, parameters, seen)
    z = plain.affine(x, AffineMap(*result.map.each(lambda t: t.expand(size))), layout)
    y = F.conv2d(z, kernel.to(z.dtype), padding=1, groups=x.shape[1])
    if bias is not None:
        kept = result.gate is not None and getattr(fusion, "keeps_gates", False)
        added = result.gate.expand(size) * bias if kept else bias
        y = y + added.to(y.dtype).reshape(-1, x.shape[1], 1, 1)
    needs = (*ctx.needs_input_grad[:3], *ctx.needs_input_grad[6:])
    inputs = [t for t, need in zip(given, needs, strict=True) if need and t is not None]
    flowing = iter(torch.autograd.grad(y, inputs, grad, create_graph=further, allow_unused=True))
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
    return Launch(depthwise_kernel, grid, numbers, (bias, gated, *tile), WARPS)


@lru_cache(maxsize=4096)
def _sums(sizes: tuple[int, ...]) -> tuple[Launch, int]:
    _, c, h, w, period, _ = sizes
    grid, rows, tile = _cut(sizes, PROGRAMS, ELEMENTS)
    numbers = h, w, c, period, *rows
    return Launch(depthwise_sums_kernel, grid, numbers, tile, WARPS), grid[0]


@lru_cache(maxsize=4096)
def _totals(n: int, c: int, splits: int, gated: bool) -> Launch:
    rows = min(passes.power_of_two(n * splits), 64)
    return Launch(totals_kernel, (-(-c // 16),), (n, c, splits), (gated, rows, 16))


@lru_cache(maxsize=4096)
def _gradient(sizes: tuple[int, ...]) -> Launch:
    _, c, h, w, period, _ = sizes
    grid, rows, tile = _cut(sizes, PROGRAMS, ELEMENTS)
    numbers = h, w, c, period, *rows
    return Launch(depthwise_gradient_kernel, grid, numbers, tile, WARPS)


# ---------------------------------------------------------------- kernels


@triton.jit
def _there(row, column, first, last, W):
    """Which columns of a row are on the map, if the row is one of first … last − 1."""
    rows = row + column * 0
    return (column >= 0) & (column < W) & (rows >= first) & (rows < last)


@triton.jit
def _place(row, column, channel, H, W, C, LAST: tl.constexpr):
    """Offsets (COLUMNS, CHANNELS) into a sample, channels_last (LAST) or contiguous."""
    p = row * W + column
    if LAST:
        return p[:, None] * C + channel[None, :]
    return channel[None, :] * (H * W) + p[:, None]


@triton.jit
def _row(t, row, column, channel, known, first, last, H, W, C, LAST: tl.constexpr):
    """One row of a map, with 0 where there is none."""
    mask = _there(row, column, first, last, W)[:, None] & known[None, :]
    return tl.load(t + _place(row, column, channel, H, W, C, LAST), mask=mask, other=0.0)


@triton.jit
def _store(t, value, row, column, channel, known, first, last, H, W, C, LAST: tl.constexpr):
    mask = _there(row, column, first, last, W)[:, None] & known[None, :]
    at = _place(row, column, channel, H, W, C, LAST)
    tl.store(t + at, value.to(t.dtype.element_ty), mask=mask)


@triton.jit
def _mapped(value, a, b, c, row, column, first, last, W):
    """z: the map, but 0 where there is no value to map."""
    there = _there(row, column, first, last, W)
    return tl.where(there[:, None], (value.to(tl.float32) - c) * a + b, 0.0)


@triton.jit
def _tap(weight, channel, known, tap: tl.constexpr):
    return tl.load(weight + channel * 9 + tap, mask=known, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _taps(weight, channel, known):
    return (
        _tap(weight, channel, known, 0),
        _tap(weight, channel, known, 1),
        _tap(weight, channel, known, 2),
        _tap(weight, channel, known, 3),
        _tap(weight, channel, known, 4),
        _tap(weight, channel, known, 5),
        _tap(weight, channel, known, 6),
        _tap(weight, channel, known, 7),
        _tap(weight, channel, known, 8),
    )


@triton.jit
def totals_kernel(
    taps, gates, bias, out, N, C, splits,
    GATED: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """From the parts (10, splits, N, C) of what each tap and dy have summed: the gradients of the
    kernel (C, 9) and the bias (C), and with GATED those of the gates (N, C)."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = (channel < C)[None, :]
    rows = N * splits
    size = tl.cast(rows, tl.int64) * C
    for tap in tl.static_range(9):
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        for start in range(0, rows, ROWS):
            row = start + tl.arange(0, ROWS)
            at = row.to(tl.int64)[:, None] * C + channel[None, :]
            mask = (row < rows)[:, None] & known
            total += tl.load(taps + tap * size + at, mask=mask, other=0.0)
        tl.store(out + channel * 9 + tap, tl.sum(total, 0), mask=channel < C)
    shift = tl.zeros((1, CHANNELS), tl.float32)
    if GATED:
        shift = tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(0, N, ROWS):
        sample = start + tl.arange(0, ROWS)
        mask = (sample < N)[:, None] & known
        own = sample.to(tl.int64)[:, None] * C + channel[None, :]
        value = tl.zeros((ROWS, CHANNELS), tl.float32)
        for split in range(splits):
            at = tl.cast(split * N, tl.int64) * C + own
            value += tl.load(taps + 9 * size + at, mask=mask, other=0.0)
        if GATED:
            tl.store(out + 10 * C + own, value * shift, mask=mask)
            value = value * tl.load(gates + own, mask=mask, other=0.0)
        total += value
    tl.store(out + 9 * C + channel, tl.sum(total, 0), mask=channel < C)


@triton.jit
def depthwise_kernel(
    x, map, weight, bias, gates, y, H, W, C, period, high, wide,
    BIAS: tl.constexpr, GATED: tl.constexpr, LAST: tl.constexpr,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """y: one read of x, one write. A program does ``high`` rows; ``wide`` of them stand abreast."""
    sample = tl.program_id(2)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < C
    column = tl.program_id(0) % wide * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0) // wide * high
    last = tl.minimum(first + high, H)
    entry = (sample * C + channel) % period
    a = tl.load(map + entry, mask=known, other=0.0)[None, :]
    b = tl.load(map + period + entry, mask=known, other=0.0)[None, :]
    c = tl.load(map + 2 * period + entry, mask=known, other=0.0)[None, :]
    start = sample.to(tl.int64) * C * H * W
    x += start
    y += start
    k0, k1, k2, k3, k4, k5, k6, k7, k8 = _taps(weight, channel, known)
    shift = a * 0.0
    if BIAS:
        shift += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    if GATED:
        shift = shift * tl.load(gates + sample * C + channel, mask=known, other=0.0)[None, :]
    above = tl.zeros((COLUMNS, CHANNELS), tl.float32)  # of the row above: all but its last part
    here = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    left = _row(x, first - 1, column - 1, channel, known, 0, H, H, W, C, LAST)
    middle = _row(x, first - 1, column, channel, known, 0, H, H, W, C, LAST)
    right = _row(x, first - 1, column + 1, channel, known, 0, H, H, W, C, LAST)
    for row in range(first - 1, last + 1):
        next_left = _row(x, row + 1, column - 1, channel, known, 0, H, H, W, C, LAST)
        next_middle = _row(x, row + 1, column, channel, known, 0, H, H, W, C, LAST)
        next_right = _row(x, row + 1, column + 1, channel, known, 0, H, H, W, C, LAST)
        lz = _mapped(left, a, b, c, row, column - 1, 0, H, W)
        mz = _mapped(middle, a, b, c, row, column, 0, H, W)
        rz = _mapped(right, a, b, c, row, column + 1, 0, H, W)
        out = above + k6 * lz + k7 * mz + k8 * rz + shift
        _store(y, out, row - 1, column, channel, known, first, last, H, W, C, LAST)
        above = here + k3 * lz + k4 * mz + k5 * rz
        here = k0 * lz + k1 * mz + k2 * rz
        left, middle, right = next_left, next_middle, next_right


@triton.jit
def depthwise_sums_kernel(
    dy, x, map, weight, parts, taps, H, W, C, period, high, wide,
    LAST: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Σ g·(x − c) and Σ g into parts (2, splits, N, C); dk and Σ dy into taps (10, splits, N, C):
    one read of dy and x."""
    split, sample = tl.program_id(0), tl.program_id(2)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < C
    column = split % wide * COLUMNS + tl.arange(0, COLUMNS)
    first = split // wide * high
    last = tl.minimum(first + high, H)
    entry = (sample * C + channel) % period
    a = tl.load(map + entry, mask=known, other=0.0)[None, :]
    b = tl.load(map + period + entry, mask=known, other=0.0)[None, :]
    c = tl.load(map + 2 * period + entry, mask=known, other=0.0)[None, :]
    start = sample.to(tl.int64) * C * H * W
    x += start
    dy += start
    k0, k1, k2, k3, k4, k5, k6, k7, k8 = _taps(weight, channel, known)
    zero = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    above, here, da, db, total = zero, zero, zero, zero, zero
    d0, d1, d2, d3, d4, d5, d6, d7, d8 = zero, zero, zero, zero, zero, zero, zero, zero, zero
    left = _row(dy, first - 1, column - 1, channel, known, 0, H, H, W, C, LAST)
    middle = _row(dy, first - 1, column, channel, known, 0, H, H, W, C, LAST)
    right = _row(dy, first - 1, column + 1, channel, known, 0, H, H, W, C, LAST)
    x0 = _row(x, first - 2, column, channel, known, first, last, H, W, C, LAST)  # one row up
    x1 = _row(x, first - 1, column, channel, known, first, last, H, W, C, LAST)
    x2 = _row(x, first, column, channel, known, first, last, H, W, C, LAST)  # one row down
    for row in range(first - 1, last + 1):
        next_left = _row(dy, row + 1, column - 1, channel, known, 0, H, H, W, C, LAST)
        next_middle = _row(dy, row + 1, column, channel, known, 0, H, H, W, C, LAST)
        next_right = _row(dy, row + 1, column + 1, channel, known, 0, H, H, W, C, LAST)
        next_x = _row(x, row + 2, column, channel, known, first, last, H, W, C, LAST)
        lt, mt, rt = left.to(tl.float32), middle.to(tl.float32), right.to(tl.float32)
        # the kernel turned around: tap t sees dy at q − t
        inside = _there(row - 1, column, first, last, W)
        g = tl.where(inside[:, None], above + k2 * lt + k1 * mt + k0 * rt, 0.0)  # of the row above
        da += g * (x0.to(tl.float32) - c)
        db += g
        above = here + k5 * lt + k4 * mt + k3 * rt
        here = k8 * lt + k7 * mt + k6 * rt
        z = _mapped(x0, a, b, c, row - 1, column, first, last, W)
        d0 += z * rt
        d1 += z * mt
        d2 += z * lt
        z = _mapped(x1, a, b, c, row, column, first, last, W)
        d3 += z * rt
        d4 += z * mt
        d5 += z * lt
        z = _mapped(x2, a, b, c, row + 1, column, first, last, W)
        d6 += z * rt
        d7 += z * mt
        d8 += z * lt
        total += tl.where(_there(row, column, first, last, W)[:, None], mt, 0.0)
        left, middle, right = next_left, next_middle, next_right
        x0, x1, x2 = x1, x2, next_x
    out = (split * tl.num_programs(2) + sample).to(tl.int64) * C + channel
    table = (tl.num_programs(0) * tl.num_programs(2)).to(tl.int64) * C
    tl.store(parts + out, tl.sum(da, 0), mask=known)
    tl.store(parts + table + out, tl.sum(db, 0), mask=known)
    tl.store(taps + out, tl.sum(d0, 0), mask=known)
    tl.store(taps + table + out, tl.sum(d1, 0), mask=known)
    tl.store(taps + 2 * table + out, tl.sum(d2, 0), mask=known)
    tl.store(taps + 3 * table + out, tl.sum(d3, 0), mask=known)
    tl.store(taps + 4 * table + out, tl.sum(d4, 0), mask=known)
    tl.store(taps + 5 * table + out, tl.sum(d5, 0), mask=known)
    tl.store(taps + 6 * table + out, tl.sum(d6, 0), mask=known)
    tl.store(taps + 7 * table + out, tl.sum(d7, 0), mask=known)
    tl.store(taps + 8 * table + out, tl.sum(d8, 0), mask=known)
    tl.store(taps + 9 * table + out, tl.sum(total, 0), mask=known)


@triton.jit
def depthwise_gradient_kernel(
    dy, x, map, weight, extra, dx, H, W, C, period, high, wide,
    LAST: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dx: one read of dy and x, one write."""
    sample = tl.program_id(2)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < C
    column = tl.program_id(0) % wide * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0) // wide * high
    last = tl.minimum(first + high, H)
    entry = (sample * C + channel) % period
    a = tl.load(map + entry, mask=known, other=0.0)[None, :]
    c = tl.load(map + 2 * period + entry, mask=known, other=0.0)[None, :]
    constant = tl.load(extra + entry, mask=known, other=0.0)[None, :]
    slope = tl.load(extra + period + entry, mask=known, other=0.0)[None, :]
    start = sample.to(tl.int64) * C * H * W
    x += start
    dy += start
    dx += start
    k0, k1, k2, k3, k4, k5, k6, k7, k8 = _taps(weight, channel, known)
    above = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    here = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    left = _row(dy, first - 1, column - 1, channel, known, 0, H, H, W, C, LAST)
    middle = _row(dy, first - 1, column, channel, known, 0, H, H, W, C, LAST)
    right = _row(dy, first - 1, column + 1, channel, known, 0, H, H, W, C, LAST)
    value = _row(x, first - 2, column, channel, known, first, last, H, W, C, LAST)
    for row in range(first - 1, last + 1):
        next_left = _row(dy, row + 1, column - 1, channel, known, 0, H, H, W, C, LAST)
        next_middle = _row(dy, row + 1, column, channel, known, 0, H, H, W, C, LAST)
        next_right = _row(dy, row + 1, column + 1, channel, known, 0, H, H, W, C, LAST)
        next_value = _row(x, row, column, channel, known, first, last, H, W, C, LAST)
        lt, mt, rt = left.to(tl.float32), middle.to(tl.float32), right.to(tl.float32)
        g = above + k2 * lt + k1 * mt + k0 * rt  # of the row above
        out = g * a + constant + (value.to(tl.float32) - c) * slope
        _store(dx, out, row - 1, column, channel, known, first, last, H, W, C, LAST)
        above = here + k5 * lt + k4 * mt + k3 * rt
        here = k8 * lt + k7 * mt + k6 * rt
        left, middle, right, value = next_left, next_middle, next_right, next_value
