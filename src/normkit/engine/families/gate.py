"""Gated batch norms: rbn, iebn, the first part of ubn.

With m the mean of a sample, μ and σ of the pool of x' = x + w_c·m, ŝ = 1/√(σ² + ε):

    s = sigmoid(w_v·p + w_b),   p = ŝ(m' − μ) or m        k = γ·s·ŝ
    a = k,   b = β,   c = μ − w_c·m

The statistics are those of the batch, given ones, or either as the score says (SOURCE 0, 1, 2).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from normkit.core.fusion import Gate
from normkit.core.statistics import Seen
from normkit.engine.families.condensation import update_score
from normkit.engine.families.family import ChannelLayout, FamilyTables
from normkit.engine.triton import passes, stages
from normkit.engine.triton.launch import Launch

LOOKS_AT = {"nothing": 0, "normalized": 1, "input": 2}
COLUMNS = 8
FEW = 16  # parts of a cell, of which the score's weights are summed


def coefficients(
    x: Tensor, parts: passes.Parts, fusion: Gate, layout: ChannelLayout
) -> FamilyTables:
    channels, rows = x.shape[1], layout.rows
    scored = fusion.condensation is not None and fusion.score is not None
    held = stages.rows_at_once(rows, parts.splits, COLUMNS)
    if held is None or (scored and parts.splits > FEW):
        parts = passes.merged(x, parts, layout, sums=True)
    if fusion.condensation is not None and fusion.score is not None:
        update_score(x, parts, layout, fusion.score, fusion.condensation)
    memory, given = fusion.memory, fusion.given
    if given is None and memory is not None:
        given = memory.mean, memory.second
    size = rows * channels
    tables = passes.table(x, (6 if fusion.keeps_gates else 5) * size + 4 * channels + 1)
    start = _map(
        (rows, channels, layout.count, parts.splits, parts.span),
        (fusion.eps, fusion.tau),
        (0.0, 1.0) if memory is None else memory[5:],
        (*_flags(fusion), stages.at_once(memory, channels)),
    )
    start(
        parts.tables,
        tables,
        fusion.center,
        fusion.gate_weight,
        fusion.gate_bias,
        fusion.weight,
        fusion.bias,
        *((None, None) if given is None else given),
        fusion.score,
        *((None,) * 3 if memory is None else memory[2:5]),
    )
    gates = None
    if fusion.keeps_gates:
        gates = tables.as_strided((rows, channels), (channels, 1), 5 * size + 4 * channels)
    return FamilyTables(tables, size, 5 * size, gates)


@lru_cache(maxsize=4096)
def _map(sizes: Any, numbers: Any, memory: Any, flags: Any) -> Launch:
    grid, tile, warps = _tile(sizes[0], sizes[1], sizes[3])
    numbers = *sizes, *numbers, *memory
    return Launch(gate_map_kernel, grid, numbers, (*flags, *tile), warps)


def gradients(
    x: Tensor,
    parts: passes.Parts,
    fusion: Gate,
    layout: ChannelLayout,
    tables: Tensor,
    grad_gates: Tensor | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    channels, rows = x.shape[1], layout.rows
    if stages.rows_at_once(rows, parts.splits, COLUMNS) is None:
        parts = passes.summed(parts)
    size = rows * channels
    out = passes.table(x, 2 * size + 5 * channels)
    start = _gradient(
        (rows, channels, layout.count, parts.splits),
        fusion.eps,
        (*_flags(fusion), grad_gates is not None),
    )
    start(
        parts.tables,
        tables,
        fusion.center,
        fusion.gate_weight,
        fusion.gate_bias,
        fusion.weight,
        None if grad_gates is None else grad_gates.contiguous(),
        out,
    )
    return out, out[2 * size :].view(5, channels).unbind()


@lru_cache(maxsize=4096)
def _gradient(sizes: Any, eps: float, flags: Any) -> Launch:
    grid, tile, warps = _tile(sizes[0], sizes[1], sizes[3])
    constants = *flags, *tile
    return Launch(gate_gradient_kernel, grid, (*sizes, eps), constants, warps)


def _tile(rows: int, channels: int, splits: int) -> tuple[tuple[int], tuple[int, ...], int]:
    """The grid; ROWS, SPLITS, COLS; warps."""
    held = stages.rows_at_once(rows, splits, COLUMNS)
    assert held is not None
    warps = stages.warps_for(held[0] * held[1] * COLUMNS)
    return (-(-channels // COLUMNS),), (*held, COLUMNS), warps


def _flags(fusion: Gate) -> tuple[int, ...]:
    """SOURCE, CENTER, GATE, AFFINE, KEEP."""
    source = 0 if fusion.given is None else 1 if fusion.score is None else 2
    gate = 0 if fusion.gate_weight is None else LOOKS_AT[fusion.looks_at]
    affine = fusion.weight is not None
    return source, fusion.center is not None, gate, affine, fusion.keeps_gates


def seen(fusion: Gate, tables: Tensor, rows: int, channels: int) -> Seen:
    if fusion.given is None:
        return Seen()
    begin = 5 * rows * channels + 2 * channels
    mean, var = tables[begin : begin + 2 * channels].view(2, channels)
    statistics = {"running_mean": mean, "running_var": var}
    if fusion.score is None:
        return Seen(statistics, fixed=True)
    # only on which side of the threshold it was
    statistics["score"] = torch.where(tables[-1:] > 0, torch.inf, -torch.inf)
    return Seen(statistics)


# ---------------------------------------------------------------- kernels


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
    KEEP: tl.constexpr, REMEMBER: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    COLS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Makes one tensor: the map (3, N, C), the moments (2, N, C), the statistics (4, C) of the
    batch and those used, the gates (N, C) if kept, and 1 or 0: whether the batch was used. Updates
    the running statistics, if they are to be remembered."""
    channel, inside = stages.own_channels(C, 1, COLS, 1)
    size = rows * C
    map, tables, statistics, gates = made, made + 3 * size, made + 5 * size, made + 5 * size + 4 * C
    chosen = gates + size * KEEP
    stages.release(OVERLAP)
    stages.wait(OVERLAP)
    middle, var = stages.pool_samples(
        parts, tables, center, channel, inside, rows, C, positions, splits, span,
        CENTER, ROWS, SPLITS,
    )  # fmt: skip
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
        b = m * 0.0
        if AFFINE:
            b += stages.of_channel(bias, channel, inside, 0.0)
        tl.store(map + at, a, mask=mask)
        tl.store(map + size + at, b, mask=mask)
        tl.store(map + 2 * size + at, middle - w * m, mask=mask)
        if KEEP:
            tl.store(gates + at, s, mask=mask)
    if REMEMBER:
        stages.remember(
            arrivals, statistics, given_mean, given_var, batches, nonfinite, chosen, C,
            momentum, correction, SOURCE == 2, REMEMBER,
        )  # fmt: skip


@triton.jit
def gate_gradient_kernel(
    parts, made, center, gate_weight, gate_bias, weight, dgates, out,
    rows, C, positions, splits, eps,
    SOURCE: tl.constexpr, CENTER: tl.constexpr, GATE: tl.constexpr, AFFINE: tl.constexpr,
    KEEP: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    COLS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """From the parts of Σ g·(x − c) and Σ g, and the gradients of the gates if GATED: constant and
    slope of dx (2, N, C), and gradients (5, C) of weight, bias, gate_weight, gate_bias and
    center_weight."""
    channel, inside = stages.own_channels(C, 1, COLS, 1)
    size = rows * C
    tables, statistics = made + 3 * size, made + 5 * size
    extra, grads = out, out + 2 * size
    own = channel[None, :]
    known = inside[None, :]
    stages.release(OVERLAP)
    stages.wait(OVERLAP)
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
        da, db = stages.summed_at_once(parts, at, mask, size, splits, SPLITS)
        s, p = gate_of(m, middle, scale, 1.0 + w, gate_weight, gate_bias, channel, inside, GATE)
        ds = da * gamma * scale
        if GATED:
            ds += tl.load(dgates + at, mask=mask, other=0.0)
        dz = tl.where(mask, ds * s * (1.0 - s), 0.0)
        by_bias += db
        by_weight += da * s
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
        da, db = stages.summed_at_once(parts, at, mask, size, splits, SPLITS)
        s, p = gate_of(m, middle, scale, 1.0 + w, gate_weight, gate_bias, channel, inside, GATE)
        ds = da * gamma * scale
        if GATED:
            ds += tl.load(dgates + at, mask=mask, other=0.0)
        dp = ds * s * (1.0 - s) * v
        apart = m * (1.0 + w) - middle  # also m − c
        inner = 2.0 * dvar * apart + dmiddle  # gradient of m' = (1 + w)·m
        if GATE == 1:
            inner += dp * scale
        added = gamma * s * scale * db  # of what is added to x
        dm = (1.0 + w) * inner + w * added
        if GATE == 2:
            dm += dp
        if CENTER:
            by_center += tl.where(mask, (m - about) * (inner + added), 0.0)
        slope = 2.0 * dvar / positions + m * 0.0
        tl.store(extra + at, dm / positions - apart * slope, mask=mask)
        tl.store(extra + size + at, slope, mask=mask)
    tl.store(grads + 4 * C + own, tl.sum(by_center, 0)[None, :], mask=known)
