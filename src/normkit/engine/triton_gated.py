"""Coefficients of gated batch norms (rbn, iebn, the first part of ubn) in one kernel each way.

With m the mean of a sample, μ and σ of the pool of x' = x + w_c·m, ŝ = 1/√(σ² + ε):

    s = sigmoid(w_v·p + w_b),   p = ŝ(m' − μ) or m        k = γ·s·ŝ
    a = k,   b = k·(w_c·m − μ) + β

The statistics are those of the batch, given ones, or either as the score says (SOURCE 0, 1, 2).
"""

from __future__ import annotations

import triton
import triton.language as tl

from normkit.engine import triton_stages as stages


@triton.jit
def gate_of(m, middle, scale, factor, gate_weight, gate_bias, channel, inside, GATE: tl.constexpr):
    """The gate of each sample and channel, and what it looks at: x̂ (1), x (2) or nothing (0)."""
    p = m * 0.0
    if GATE == 1:
        p = (m * factor - middle) * scale
    if GATE == 2:
        p = m
    z = p * 0.0 + stages.of_channel(gate_bias, channel, inside, 0.0)
    if GATE != 0:
        z += p * stages.of_channel(gate_weight, channel, inside, 0.0)
    return tl.sigmoid(z), p


@triton.jit
def gate_map_kernel(
    parts, made, center, gate_weight, gate_bias, weight, bias, given_mean, given_var, score,
    batches, nonfinite, arrivals,
    rows, C, positions, splits, span, eps, tau, momentum, correction,
    SOURCE: tl.constexpr, CENTER: tl.constexpr, GATE: tl.constexpr, AFFINE: tl.constexpr,
    KEEP: tl.constexpr, REMEMBER: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Makes one tensor: the map (2, N, C), the moments (2, N, C), the statistics (4, C) of the
    batch and those used, the gates (N, C) if kept, and 1 or 0: whether the batch was used. Updates
    the running statistics, if they are to be remembered."""
    channel, inside = stages.own_channels(C, 1, COLS, 1)
    size = rows * C
    map, tables, statistics, gates = made, made + 2 * size, made + 4 * size, made + 4 * size + 4 * C
    chosen = gates + size * KEEP
    middle, var = stages.pool_samples(
        parts, tables, center, channel, inside, rows, C, positions, splits, span, CENTER, ROWS
    )
    own = channel[None, :]
    known = inside[None, :]
    tl.store(statistics + own, middle, mask=known)
    tl.store(statistics + C + own, var, mask=known)
    if SOURCE != 0:
        old_middle = stages.of_channel(given_mean, channel, inside, 0.0)
        old_var = stages.of_channel(given_var, channel, inside, 1.0)
        if SOURCE == 2:
            condensed = tl.load(score) > tau
            old_middle = tl.where(condensed, middle, old_middle)
            old_var = tl.where(condensed, var, old_var)
            tl.store(chosen, condensed.to(tl.float32))
        middle, var = old_middle, old_var
    tl.store(statistics + 2 * C + own, middle, mask=known)
    tl.store(statistics + 3 * C + own, var, mask=known)
    scale = 1.0 / tl.sqrt(var + eps)
    w = stages.of_channel(center, channel, inside, 0.0) if CENTER else 0.0
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & known
        at = row[:, None] * C + own
        m = tl.load(tables + at, mask=mask, other=0.0)
        s, _ = gate_of(m, middle, scale, 1.0 + w, gate_weight, gate_bias, channel, inside, GATE)
        a = s * scale
        if AFFINE:
            a = a * stages.of_channel(weight, channel, inside, 0.0)
        b = a * (w * m - middle)
        if AFFINE:
            b += stages.of_channel(bias, channel, inside, 0.0)
        tl.store(map + at, a, mask=mask)
        tl.store(map + size + at, b, mask=mask)
        if KEEP:
            tl.store(gates + at, s, mask=mask)
    if REMEMBER:
        stages.remember(
            arrivals, statistics, given_mean, given_var, batches, nonfinite, chosen, C,
            momentum, correction, SOURCE == 2, 256,
        )  # fmt: skip


@triton.jit
def gate_gradient_kernel(
    parts, made, center, gate_weight, gate_bias, weight, dgates, out,
    rows, C, positions, splits, eps,
    SOURCE: tl.constexpr, CENTER: tl.constexpr, GATE: tl.constexpr, AFFINE: tl.constexpr,
    KEEP: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """From the parts of Σ g·x and Σ g, and the gradients of the gates if GATED: constant and slope
    of dx (2, N, C), and gradients (5, C) of weight, bias, gate_weight, gate_bias, center_weight."""
    channel, inside = stages.own_channels(C, 1, COLS, 1)
    size = rows * C
    tables, statistics = made + 2 * size, made + 4 * size
    extra, grads = out, out + 2 * size
    own = channel[None, :]
    known = inside[None, :]
    middle = stages.of_channel(statistics + 2 * C, channel, inside, 0.0)
    scale = 1.0 / tl.sqrt(stages.of_channel(statistics + 3 * C, channel, inside, 1.0) + eps)
    w = stages.of_channel(center, channel, inside, 0.0) if CENTER else 0.0
    gamma = scale * 0.0 + 1.0
    if AFFINE:
        gamma = stages.of_channel(weight, channel, inside, 0.0)
    v = scale * 0.0
    if GATE != 0:
        v = stages.of_channel(gate_weight, channel, inside, 0.0)
    zero = tl.zeros((ROWS, COLS), tl.float32)
    by_bias, by_weight, by_middle = zero, zero, zero
    by_z, by_zp, by_p, by_pa, by_m = zero, zero, zero, zero, zero
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & known
        at = row[:, None] * C + own
        m = tl.load(tables + at, mask=mask, other=0.0)
        da, db = stages.summed(parts, at, mask, size, splits)
        s, p = gate_of(m, middle, scale, 1.0 + w, gate_weight, gate_bias, channel, inside, GATE)
        dk = da + (w * m - middle) * db
        ds = dk * gamma * scale
        if GATED:
            ds += tl.load(dgates + at, mask=mask, other=0.0)
        dz = tl.where(mask, ds * s * (1.0 - s), 0.0)
        by_bias += db
        by_weight += dk * s
        by_middle += gamma * s * scale * db
        by_z += dz
        if CENTER:
            by_m += m
        if GATE != 0:
            by_zp += dz * p
        if GATE == 1:
            by_p += dz * v
            by_pa += dz * v * (m * (1.0 + w) - middle)
    dweight = tl.sum(by_weight, 0)[None, :]
    tl.store(grads + own, dweight * scale, mask=known)
    tl.store(grads + C + own, tl.sum(by_bias, 0)[None, :], mask=known)
    tl.store(grads + 2 * C + own, tl.sum(by_zp, 0)[None, :], mask=known)
    tl.store(grads + 3 * C + own, tl.sum(by_z, 0)[None, :], mask=known)
    dscale = gamma * dweight + tl.sum(by_pa, 0)[None, :]
    dmiddle = -tl.sum(by_middle, 0)[None, :] - scale * tl.sum(by_p, 0)[None, :]
    pooled = 1.0 / rows  # how much of the statistics' gradient reaches each sample
    if SOURCE == 1:
        pooled = 0.0
    if SOURCE == 2:
        pooled = tl.load(statistics + 4 * C + size * KEEP) / rows
    dvar = -0.5 * scale * scale * scale * dscale * pooled
    dmiddle = dmiddle * pooled
    # where the statistics are the batch's, the factors of m sum to zero: about the mean of m, for
    # otherwise it would cancel
    about = tl.sum(by_m, 0)[None, :] * pooled
    by_center = zero
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & known
        at = row[:, None] * C + own
        m = tl.load(tables + at, mask=mask, other=0.0)
        da, db = stages.summed(parts, at, mask, size, splits)
        s, p = gate_of(m, middle, scale, 1.0 + w, gate_weight, gate_bias, channel, inside, GATE)
        ds = (da + (w * m - middle) * db) * gamma * scale
        if GATED:
            ds += tl.load(dgates + at, mask=mask, other=0.0)
        dp = ds * s * (1.0 - s) * v
        inner = 2.0 * dvar * (m * (1.0 + w) - middle) + dmiddle  # gradient of m' = (1 + w)·m
        if GATE == 1:
            inner += dp * scale
        added = gamma * s * scale * db  # of what is added to x
        dm = (1.0 + w) * inner + w * added
        if GATE == 2:
            dm += dp
        if CENTER:
            by_center += tl.where(mask, (m - about) * (inner + added), 0.0)
        slope = 2.0 * dvar / positions + m * 0.0
        tl.store(extra + at, dm / positions - m * slope, mask=mask)
        tl.store(extra + size + at, slope, mask=mask)
    tl.store(grads + 4 * C + own, tl.sum(by_center, 0)[None, :], mask=known)
