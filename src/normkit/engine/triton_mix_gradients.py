"""Gradients of switchable normalization: from the sums da = Σ g·x and db = Σ g of each cell.

    U = −γr·db is the gradient of mean,   W = −½γr³·(da − mean·db) that of var
    dv = q₀W + q₁ΣcW/C + q₂ΣnW/N
    dm = p₀U + p₁ΣcU/C + p₂ΣnU/N + 2q₁(m − M)·ΣcW/C + 2q₂(m − μ)·ΣnW/N

and each share's gradient is ΣU or ΣW times what it is the share of.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normkit.engine import triton_stages as stages
from normkit.engine.triton_mix import mixed, shares


@triton.jit
def of_mixture(
    da, db, m, v, big_m, big_v, middle, spread, mean_weight, var_weight, eps, PARTS: tl.constexpr
):
    """r, r·(da − mean·db), and U and W without their factor γ."""
    mean = mixed(mean_weight, m, big_m, middle, PARTS)
    r = 1.0 / tl.sqrt(mixed(var_weight, v, big_v, spread, PARTS) + eps)
    about = (da - mean * db) * r
    return about, -r * db, -0.5 * r * r * about


@triton.jit
def mix_samples_gradient_kernel(
    parts, made, weight, mean_weight, var_weight, out, rows, C, splits, eps,
    PARTS: tl.constexpr, AFFINE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sums over the channels of one sample, (6, N): of U, U·m, U·μ, W, W·v and W·s. They stand at
    the end of ``out``, which is that of mix_gradient_kernel."""
    sample, size = tl.program_id(0), rows * C
    tables, statistics = made + 2 * size, made + 4 * size
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
        _, du, dw = of_mixture(
            da, db, m, v, big_m, big_v, middle, spread, mean_weight, var_weight, eps, PARTS
        )
        if AFFINE:
            gamma = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
            du, dw = du * gamma, dw * gamma
        du, dw = tl.where(mask, du, 0.0), tl.where(mask, dw, 0.0)
        u += du
        um += du * m
        umiddle += du * middle
        w += dw
        wv += dw * v
        wspread += dw * spread
    tl.store(sums + sample, tl.sum(u, 0))
    tl.store(sums + rows + sample, tl.sum(um, 0))
    tl.store(sums + 2 * rows + sample, tl.sum(umiddle, 0))
    tl.store(sums + 3 * rows + sample, tl.sum(w, 0))
    tl.store(sums + 4 * rows + sample, tl.sum(wv, 0))
    tl.store(sums + 5 * rows + sample, tl.sum(wspread, 0))


@triton.jit
def logits_gradient(sums, pool, logits, out, rows, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Of the weights behind three shares: through the softmax."""
    zero = tl.zeros((WIDTH,), tl.float32)
    own, of_sample, of_batch = zero, zero, zero
    for start in range(0, rows, WIDTH):
        row = start + tl.arange(0, WIDTH)
        mask = row < rows
        big = tl.load(pool + row, mask=mask, other=0.0)
        of_sample += big * tl.load(sums + row, mask=mask, other=0.0)
        own += tl.load(sums + rows + row, mask=mask, other=0.0)
        of_batch += tl.load(sums + 2 * rows + row, mask=mask, other=0.0)
    first, second, third = tl.sum(own, 0), tl.sum(of_sample, 0), tl.sum(of_batch, 0)
    p0, p1, p2 = shares(logits, PARTS)
    middle = p0 * first + p1 * second + p2 * third
    tl.store(out, p0 * (first - middle))
    tl.store(out + 1, p1 * (second - middle))
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
    tables, statistics = made + 2 * size, made + 4 * size
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
        about, du, dw = of_mixture(
            da, db, m, v, big_m, big_v, middle, spread, mean_weight, var_weight, eps, PARTS
        )
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
        _, du, dw = of_mixture(
            da, db, m, v, big_m, big_v, middle, spread, mean_weight, var_weight, eps, PARTS
        )
        dbig_m = p1 * tl.load(sums + row, mask=row < rows, other=0.0) / C
        dbig_v = q1 * tl.load(sums + 3 * rows + row, mask=row < rows, other=0.0) / C
        dm = p0 * gamma * du + dbig_m + dmiddle
        dm += 2.0 * (dbig_v * (m - big_m) + dspread * (m - middle))
        slope = 2.0 * (q0 * gamma * dw + dbig_v + dspread) * unbias / positions
        tl.store(out + at, dm / positions - m * slope, mask=mask)
        tl.store(out + size + at, slope, mask=mask)
    if tl.program_id(0) == 0:
        logits_gradient(sums, pools, mean_weight, logits, rows, PARTS, 256)
        logits_gradient(sums + 3 * rows, pools + rows, var_weight, logits + 3, rows, PARTS, 256)
