"""Switchable normalization: mixtures of statistics, two small kernels each way.

With m, v the moments of a sample and channel, M, V their pool over the channels of a sample, μ, s
that over the samples, and shares p and q that are softmaxes of learned weights:

    mean = p₀m + p₁M + p₂μ,   var = q₀v + q₁V + q₂s,   r = 1/√(var + ε)
    a = γr,   b = β,   c = mean

A sample's pool needs all channels, a channel's all samples: first kernels that own samples, then
kernels that own channels. One tensor holds what is made: the map (3, N, C), the moments (2, N, C),
μ and s (2, C), M and V (2, N).

Backward, from the sums da = Σ g·(x − mean) and db = Σ g of each cell,

    U = −γr·db is the gradient of mean,   W = −½γr³·da that of var
    dv = q₀W + q₁ΣcW/C + q₂ΣnW/N
    dm = p₀U + p₁ΣcU/C + p₂ΣnU/N + 2q₁(m − M)·ΣcW/C + 2q₂(m − μ)·ΣnW/N

and each share's gradient is ΣU or ΣW times what it is the share of, less M or V: what all shares
have in common does not change a softmax, but its digits would hide the rest.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from normkit.core.fusion import Mix
from normkit.core.statistics import Seen
from normkit.engine.families.family import ChannelLayout, FamilyTables
from normkit.engine.families.gate import COLUMNS
from normkit.engine.triton import passes, stages
from normkit.engine.triton.launch import Launch

FEW = 16  # parts of a cell: these kernels merge so many by themselves
WIDTH = 1024  # channels of a sample at once
HIGH = 128  # samples of a channel at once


def coefficients(
    x: Tensor, parts: passes.Parts, fusion: Mix, layout: ChannelLayout
) -> FamilyTables:
    if parts.splits > FEW:
        parts = passes.merged(x, parts, layout, sums=True)
    channels, rows = x.shape[1], layout.rows
    memory, given = fusion.memory, fusion.given
    tables = passes.table(x, (5 * channels + 2) * rows + 2 * channels)
    samples, map = _map(
        (rows, channels, layout.count, parts.splits, parts.span),
        (fusion.unbias, fusion.eps),
        (0.0, 1.0) if memory is None else memory[5:],
        (*_flags(fusion), memory is not None),
    )
    samples(parts.tables, tables)
    if given is None and memory is not None:
        given = memory.mean, memory.second
    map(
        tables,
        *fusion.parameters,
        *((None, None) if given is None else given),
        *((None,) * 3 if memory is None else memory[2:5]),
    )
    return FamilyTables(tables, rows * channels, 5 * rows * channels, None)


@lru_cache(maxsize=4096)
def _map(sizes: Any, numbers: Any, memory: Any, flags: Any) -> tuple[Launch, Launch]:
    rows, channels = sizes[:2]
    unbias, eps = numbers
    width = min(passes.power_of_two(channels), WIDTH)
    samples = Launch(mix_samples_kernel, (rows,), (*sizes, unbias), (width,))
    numbers, (grid, tile) = (rows, channels, eps, *memory), _tile(rows, channels)
    return samples, Launch(mix_map_kernel, grid, numbers, (*flags, *tile))


def gradients(
    x: Tensor,
    parts: passes.Parts,
    fusion: Mix,
    layout: ChannelLayout,
    tables: Tensor,
    grad_gates: Tensor | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    if parts.splits > FEW:
        parts = passes.summed(parts)
    channels, rows = x.shape[1], layout.rows
    begin = 2 * rows * channels
    logits = begin + 2 * channels
    out = passes.table(x, logits + 6 + 6 * rows)
    samples, gradient = _gradient(
        (rows, channels, layout.count, parts.splits), (fusion.eps, fusion.unbias), _flags(fusion)
    )
    given = fusion.weight, fusion.mean_weight, fusion.var_weight
    samples(parts.tables, tables, *given, out)
    gradient(parts.tables, tables, *given, out)
    dweight, dbias = out[begin:logits].view(2, channels).unbind()
    dmean, dvar = out[logits : logits + 6].view(2, 3)[:, : fusion.mean_weight.shape[0]].unbind()
    return out, (dweight, dbias, dmean, dvar)


@lru_cache(maxsize=4096)
def _gradient(sizes: Any, numbers: Any, flags: Any) -> tuple[Launch, Launch]:
    rows, channels, _, splits = sizes
    eps, _ = numbers
    parts, _, affine = flags
    width = min(passes.power_of_two(channels), WIDTH)
    samples = Launch(
        mix_samples_gradient_kernel,
        (rows,),
        (rows, channels, splits, eps),
        (parts, affine, width),
    )
    grid, tile = _tile(rows, channels)
    kernel = mix_gradient_kernel
    return samples, Launch(kernel, grid, (*sizes, *numbers), (*flags, *tile))


def _flags(fusion: Mix) -> tuple[int, ...]:
    """PARTS, GIVEN, AFFINE."""
    return fusion.mean_weight.shape[0], fusion.given is not None, fusion.weight is not None


def _tile(rows: int, channels: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The grid of kernels that own channels; ROWS and COLS."""
    return (-(-channels // COLUMNS),), (min(passes.power_of_two(rows), HIGH), COLUMNS)


def seen(fusion: Mix, tables: Tensor, rows: int, channels: int) -> Seen:
    if fusion.given is None:
        return Seen()
    begin = 5 * rows * channels
    mean, var = tables[begin : begin + 2 * channels].view(2, channels)
    return Seen({"running_mean": mean, "running_var": var}, fixed=True)


# ---------------------------------------------------------------- kernels


@triton.jit
def shares(logits, PARTS: tl.constexpr):
    """softmax(logits); without a batch part its share is 0."""
    first, second = tl.load(logits).to(tl.float32), tl.load(logits + 1).to(tl.float32)
    top = tl.maximum(first, second)
    third = top
    if PARTS == 3:
        third = tl.load(logits + 2).to(tl.float32)
        top = tl.maximum(top, third)
    first, second, third = tl.exp(first - top), tl.exp(second - top), tl.exp(third - top)
    if PARTS == 2:
        third = third * 0.0
    total = first + second + third
    return first / total, second / total, third / total


@triton.jit
def mixed(logits, own, of_sample, of_batch, PARTS: tl.constexpr):
    """About the sample's part: that shares sum to one is then true to the last digit."""
    p0, _, p2 = shares(logits, PARTS)
    total = of_sample + p0 * (own - of_sample)
    if PARTS == 3:
        total += p2 * (of_batch - of_sample)
    return total


@triton.jit
def mix_samples_kernel(parts, made, rows, C, positions, splits, span, unbias, WIDTH: tl.constexpr):
    """Moments of every channel of one sample, and their pool."""
    sample, size = tl.program_id(0), rows * C
    tables = made + 3 * size
    pools = made + 5 * size + 2 * C
    near = tl.load(parts + sample * C)
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, C, WIDTH):
        channel = start + tl.arange(0, WIDTH)
        mask = channel < C
        at = sample * C + channel
        mean, var = stages.merged_moments(parts, at, mask, size, positions, splits, span)
        tl.store(tables + at, mean, mask=mask)
        tl.store(tables + size + at, var * unbias, mask=mask)
        total += tl.where(mask, mean - near, 0.0)
    tl.debug_barrier()  # the tables are read again by other threads
    middle = near + tl.sum(total, 0) / C
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, C, WIDTH):
        channel = start + tl.arange(0, WIDTH)
        mask = channel < C
        at = sample * C + channel
        apart = tl.load(tables + at, mask=mask, other=0.0) - middle
        var = tl.load(tables + size + at, mask=mask, other=0.0)
        total += tl.where(mask, var + apart * apart, 0.0)
    tl.store(pools + sample, middle)
    tl.store(pools + rows + sample, tl.sum(total, 0) / C)


@triton.jit
def pooled(tables, channel, inside, rows, C, ROWS: tl.constexpr):
    """The pool of all samples of tables (2, N, C), (1, COLS)."""
    near = stages.of_channel(tables, channel, inside, 0.0)
    total = tl.zeros((ROWS, channel.shape[0]), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * C + channel[None, :]
        total += tl.where(mask, tl.load(tables + at, mask=mask, other=0.0) - near, 0.0)
    middle = near + tl.sum(total, 0)[None, :] / rows
    total = tl.zeros((ROWS, channel.shape[0]), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * C + channel[None, :]
        apart = tl.load(tables + at, mask=mask, other=0.0) - middle
        var = tl.load(tables + rows * C + at, mask=mask, other=0.0)
        total += tl.where(mask, var + apart * apart, 0.0)
    return middle, tl.sum(total, 0)[None, :] / rows


@triton.jit
def mix_map_kernel(
    made, weight, bias, mean_weight, var_weight, given_mean, given_var,
    batches, nonfinite, arrivals, rows, C, eps, momentum, correction,
    PARTS: tl.constexpr, GIVEN: tl.constexpr, AFFINE: tl.constexpr, REMEMBER: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The batch's pool, or what is given in its place, and the map; remembers the former."""
    channel, inside = stages.own_channels(C, 1, COLS, 1)
    size = rows * C
    tables, statistics = made + 3 * size, made + 5 * size
    pools = statistics + 2 * C
    own, known = channel[None, :], inside[None, :]
    middle, spread = tl.zeros((1, COLS), tl.float32), tl.zeros((1, COLS), tl.float32)
    if PARTS == 3:
        if GIVEN:
            middle = stages.of_channel(given_mean, channel, inside, 0.0)
            spread = stages.of_channel(given_var, channel, inside, 1.0)
        else:
            middle, spread = pooled(tables, channel, inside, rows, C, ROWS)
        tl.store(statistics + own, middle, mask=known)
        tl.store(statistics + C + own, spread, mask=known)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & known
        at = row * C + own
        m = tl.load(tables + at, mask=mask, other=0.0)
        v = tl.load(tables + size + at, mask=mask, other=0.0)
        of_sample = tl.load(pools + row, mask=row < rows, other=0.0)
        mean = mixed(mean_weight, m, of_sample, middle, PARTS)
        of_sample = tl.load(pools + rows + row, mask=row < rows, other=0.0)
        var = mixed(var_weight, v, of_sample, spread, PARTS)
        a = 1.0 / tl.sqrt(var + eps)
        if AFFINE:
            a = a * stages.of_channel(weight, channel, inside, 0.0)
        b = mean * 0.0
        if AFFINE:
            b += stages.of_channel(bias, channel, inside, 0.0)
        tl.store(made + at, a, mask=mask)
        tl.store(made + size + at, b, mask=mask)
        tl.store(made + 2 * size + at, mean, mask=mask)
    if REMEMBER:
        stages.remember(
            arrivals, statistics, given_mean, given_var, batches, nonfinite, statistics, C,
            momentum, correction, False, 256,
        )  # fmt: skip


@triton.jit
def of_mixture(da, db, v, big_v, spread, var_weight, eps, PARTS: tl.constexpr):
    """r·da, and U and W without their factor γ."""
    r = 1.0 / tl.sqrt(mixed(var_weight, v, big_v, spread, PARTS) + eps)
    about = da * r
    return about, -r * db, -0.5 * r * r * about


@triton.jit
def mix_samples_gradient_kernel(
    parts, made, weight, mean_weight, var_weight, out, rows, C, splits, eps,
    PARTS: tl.constexpr, AFFINE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sums over the channels of one sample, (6, N): of U and W, each alone and times what it
    changes less the sample's: m − M and μ − M, v − V and s − V. They stand at
    the end of ``out``, which is that of mix_gradient_kernel."""
    sample, size = tl.program_id(0), rows * C
    tables, statistics = made + 3 * size, made + 5 * size
    pools, sums = statistics + 2 * C, out + 2 * size + 2 * C + 6
    big_m, big_v = tl.load(pools + sample), tl.load(pools + rows + sample)
    zero = tl.zeros((WIDTH,), tl.float32)
    u, um, umiddle, w, wv, wspread = zero, zero, zero, zero, zero, zero
    for start in range(0, C, WIDTH):
        channel = start + tl.arange(0, WIDTH)
        mask = channel < C
        at = sample * C + channel
        m = tl.load(tables + at, mask=mask, other=0.0)
        v = tl.load(tables + size + at, mask=mask, other=1.0)
        middle, spread = zero, zero
        if PARTS == 3:
            middle = tl.load(statistics + channel, mask=mask, other=0.0)
            spread = tl.load(statistics + C + channel, mask=mask, other=1.0)
        da, db = stages.summed(parts, at, mask, size, splits)
        _, du, dw = of_mixture(da, db, v, big_v, spread, var_weight, eps, PARTS)
        if AFFINE:
            gamma = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
            du, dw = du * gamma, dw * gamma
        du, dw = tl.where(mask, du, 0.0), tl.where(mask, dw, 0.0)
        u += du
        um += du * (m - big_m)
        umiddle += du * (middle - big_m)
        w += dw
        wv += dw * (v - big_v)
        wspread += dw * (spread - big_v)
    tl.store(sums + sample, tl.sum(u, 0))
    tl.store(sums + rows + sample, tl.sum(um, 0))
    tl.store(sums + 2 * rows + sample, tl.sum(umiddle, 0))
    tl.store(sums + 3 * rows + sample, tl.sum(w, 0))
    tl.store(sums + 4 * rows + sample, tl.sum(wv, 0))
    tl.store(sums + 5 * rows + sample, tl.sum(wspread, 0))


@triton.jit
def logits_gradient(sums, logits, out, rows, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Of the weights behind three shares: through the softmax."""
    zero = tl.zeros((WIDTH,), tl.float32)
    own, of_batch = zero, zero
    for start in range(0, rows, WIDTH):
        row = start + tl.arange(0, WIDTH)
        mask = row < rows
        own += tl.load(sums + rows + row, mask=mask, other=0.0)
        of_batch += tl.load(sums + 2 * rows + row, mask=mask, other=0.0)
    first, third = tl.sum(own, 0), tl.sum(of_batch, 0)
    p0, p1, p2 = shares(logits, PARTS)
    middle = p0 * first + p2 * third
    tl.store(out, p0 * (first - middle))
    tl.store(out + 1, -p1 * middle)
    if PARTS == 3:
        tl.store(out + 2, p2 * (third - middle))


@triton.jit
def mix_gradient_kernel(
    parts, made, weight, mean_weight, var_weight, out,
    rows, C, positions, splits, eps, unbias,
    PARTS: tl.constexpr, GIVEN: tl.constexpr, AFFINE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Constant and slope of dx (2, N, C), and the gradients of weight and bias (2, C) and of both
    mixtures (2, 3); behind them in ``out`` are the sums (6, N) of the other kernel."""
    channel, inside = stages.own_channels(C, 1, COLS, 1)
    size = rows * C
    tables, statistics = made + 3 * size, made + 5 * size
    pools, grads = statistics + 2 * C, out + 2 * size
    logits, sums = grads + 2 * C, grads + 2 * C + 6
    own, known = channel[None, :], inside[None, :]
    middle, spread = tl.zeros((1, COLS), tl.float32), tl.zeros((1, COLS), tl.float32)
    if PARTS == 3:
        middle = stages.of_channel(statistics, channel, inside, 0.0)
        spread = stages.of_channel(statistics + C, channel, inside, 1.0)
    gamma = middle * 0.0 + 1.0
    if AFFINE:
        gamma = stages.of_channel(weight, channel, inside, 0.0)
    zero = tl.zeros((ROWS, COLS), tl.float32)
    by_weight, by_bias, by_mean, by_var = zero, zero, zero, zero
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & known
        at = row * C + own
        m = tl.load(tables + at, mask=mask, other=0.0)
        v = tl.load(tables + size + at, mask=mask, other=1.0)
        big_m = tl.load(pools + row, mask=row < rows, other=0.0)
        big_v = tl.load(pools + rows + row, mask=row < rows, other=1.0)
        da, db = stages.summed(parts, at, mask, size, splits)
        about, du, dw = of_mixture(da, db, v, big_v, spread, var_weight, eps, PARTS)
        by_weight += tl.where(mask, about, 0.0)
        by_bias += db
        by_mean += tl.where(mask, du, 0.0)
        by_var += tl.where(mask, dw, 0.0)
    tl.store(grads + own, tl.sum(by_weight, 0)[None, :], mask=known)
    tl.store(grads + C + own, tl.sum(by_bias, 0)[None, :], mask=known)
    p0, p1, p2 = shares(mean_weight, PARTS)
    q0, q1, q2 = shares(var_weight, PARTS)
    dmiddle = p2 * gamma * tl.sum(by_mean, 0)[None, :] / rows
    dspread = q2 * gamma * tl.sum(by_var, 0)[None, :] / rows
    if GIVEN:
        dmiddle, dspread = dmiddle * 0.0, dspread * 0.0
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & known
        at = row * C + own
        m = tl.load(tables + at, mask=mask, other=0.0)
        v = tl.load(tables + size + at, mask=mask, other=1.0)
        big_m = tl.load(pools + row, mask=row < rows, other=0.0)
        big_v = tl.load(pools + rows + row, mask=row < rows, other=1.0)
        da, db = stages.summed(parts, at, mask, size, splits)
        _, du, dw = of_mixture(da, db, v, big_v, spread, var_weight, eps, PARTS)
        dbig_m = p1 * tl.load(sums + row, mask=row < rows, other=0.0) / C
        dbig_v = q1 * tl.load(sums + 3 * rows + row, mask=row < rows, other=0.0) / C
        dm = p0 * gamma * du + dbig_m + dmiddle
        dm += 2.0 * (dbig_v * (m - big_m) + dspread * (m - middle))
        slope = 2.0 * (q0 * gamma * dw + dbig_v + dspread) * unbias / positions
        apart = m - tl.load(made + 2 * size + at, mask=mask, other=0.0)
        tl.store(out + at, dm / positions - apart * slope, mask=mask)
        tl.store(out + size + at, slope, mask=mask)
    if tl.program_id(0) == 0:
        logits_gradient(sums, mean_weight, logits, rows, PARTS, 256)
        logits_gradient(sums + 3 * rows, var_weight, logits + 3, rows, PARTS, 256)
