"""Coefficients of switchable normalization: mixtures of statistics, two small kernels each way.

With m, v the moments of a sample and channel, M, V their pool over the channels of a sample, μ, s
that over the samples, and shares p and q that are softmaxes of learned weights:

    mean = p₀m + p₁M + p₂μ,   var = q₀v + q₁V + q₂s,   r = 1/√(var + ε),   a = γr,   b = β − mean·a

A sample's pool needs all channels, a channel's all samples: first kernels that own samples, then
kernels that own channels. One tensor holds what is made: the map (2, N, C), the moments (2, N, C),
μ and s (2, C), M and V (2, N).
"""

from __future__ import annotations

import triton
import triton.language as tl

from normkit.engine import triton_stages as stages


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
    p0, p1, p2 = shares(logits, PARTS)
    found = p0 * own + p1 * of_sample
    if PARTS == 3:
        found += p2 * of_batch
    return found


@triton.jit
def mix_samples_kernel(parts, made, rows, C, positions, splits, span, unbias, WIDTH: tl.constexpr):
    """Moments of every channel of one sample, and their pool."""
    sample, size = tl.program_id(0), rows * C
    tables = made + 2 * size
    pools = made + 4 * size + 2 * C
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, C, WIDTH):
        channel = start + tl.arange(0, WIDTH)
        mask = channel < C
        at = sample * C + channel
        mean, var = stages.merged_moments(parts, at, mask, size, positions, splits, span)
        tl.store(tables + at, mean, mask=mask)
        tl.store(tables + size + at, var * unbias, mask=mask)
        total += mean
    tl.debug_barrier()  # the tables are read again by other threads
    middle = tl.sum(total, 0) / C
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
    total = tl.zeros((ROWS, channel.shape[0]), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * C + channel[None, :]
        total += tl.load(tables + at, mask=mask, other=0.0)
    middle = tl.sum(total, 0)[None, :] / rows
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
    tables, statistics = made + 2 * size, made + 4 * size
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
        b = -mean * a
        if AFFINE:
            b += stages.of_channel(bias, channel, inside, 0.0)
        tl.store(made + at, a, mask=mask)
        tl.store(made + size + at, b, mask=mask)
    if REMEMBER:
        stages.remember(
            arrivals, statistics, given_mean, given_var, batches, nonfinite, statistics, C,
            momentum, correction, False, 256,
        )  # fmt: skip
