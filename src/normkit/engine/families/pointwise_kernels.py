"""The kernels of maps that look at each value alone: what they compute stands in pointwise.py.

How they see a tensor is as in triton/kernels.py and, for short rows, flat.py; so is the order in
which they go through memory. ``C`` is the number of channels, of which ``deep`` share statistics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from normkit.engine.triton.activations import activate, before
from normkit.engine.triton.flat import both, entry_of, pieces_of_rows, run_of
from normkit.engine.triton.kernels import _folded, _inside, _own_tile, _read, _tile
from normkit.engine.triton.stages import release, wait


@triton.jit
def squash(z):
    """tanh(z), and its slope 1 − tanh(z)². Near zero an exponential has lost the digits: there it
    is a polynomial, fitted at Chebyshev's points to (tanh(z)/z − 1)/z² as a function of z²."""
    e = tl.exp(-2.0 * tl.abs(z))
    r = 1.0 / (1.0 + e)
    far = (1.0 - e) * r
    far = tl.where(z < 0, -far, far)
    s = z * z
    near = 0.02111622 - 0.00627639 * s
    near = -0.3333333 + s * (0.13332924 + s * (-0.05387514 + s * near))
    near = z + z * s * near
    return tl.where(tl.abs(z) < 0.6, near, far), 4.0 * e * r * r


@triton.jit
def of_channels(table, channel, inside):
    return tl.load(table + channel, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def of_rows(table, channel, next, own):
    """For each value of a run of short rows."""
    return both(own, of_channels(table, channel, True), of_channels(table, next, True))


@triton.jit
def fixed_tables(
    mean, var, weight, bias, channel, inside, deep, eps, AFFINE: tl.constexpr
):  # fmt: skip
    """Scale, shift, center and 1/√(var + eps) of channels."""
    c = of_channels(mean, channel // deep, inside)
    inverse = 1.0 / tl.sqrt(of_channels(var, channel // deep, inside) + eps)
    a = inverse
    b = tl.zeros(c.shape, tl.float32)
    if AFFINE:
        a = inverse * of_channels(weight, channel, inside)
        b = of_channels(bias, channel, inside)
    return a, b, c, inverse


@triton.jit
def keep_tables(made, channel, own, C, a, b, c, inverse):
    tl.store(made + channel, a, mask=own)
    tl.store(made + C + channel, b, mask=own)
    tl.store(made + 2 * C + channel, c, mask=own)
    tl.store(made + 3 * C + channel, inverse, mask=own)


@triton.jit
def pointwise_kernel(
    x, mean, var, weight, bias, alpha, residual, y, made,
    turns, K, C, deep, splits, depth, programs, eps,
    SQUASH: tl.constexpr, AFFINE: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr,
    KEEP: tl.constexpr, WAVE: tl.constexpr,
    V: tl.constexpr, ROWS: tl.constexpr, POSITIONS: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """One read of x (and residual), one write."""
    M = turns * V
    block, tile, turn = _own_tile(K, splits, depth, programs, WAVE, CELLS)
    cell = tile * CELLS + tl.arange(0, CELLS)
    position = turn * POSITIONS + tl.arange(0, POSITIONS)
    mask = (position < M)[:, None] & (cell < K)[None, :]
    at = _tile(block, cell, position, M, K, ROWS)
    channel = cell % C
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if SQUASH:
        value, _slope = squash(value * tl.load(alpha).to(tl.float32))
        if AFFINE:
            a = of_channels(weight, channel, cell < K)
            b = of_channels(bias, channel, cell < K)
            value = value * a[None, :] + b[None, :]
    else:
        a, b, c, inverse = fixed_tables(
            mean, var, weight, bias, channel, cell < K, deep, eps, AFFINE
        )
        value = (value - c[None, :]) * a[None, :] + b[None, :]
        if KEEP:  # by the first sample's programs
            own = cell < tl.where(block + turn == 0, C, 0)
            keep_tables(made, channel, own, C, a, b, c, inverse)
    if RESIDUAL:
        value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    value = activate(value, ACT)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def flat_pointwise_kernel(
    x, mean, var, weight, bias, alpha, residual, y, made, C, deep, eps,
    SQUASH: tl.constexpr, AFFINE: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr,
    KEEP: tl.constexpr,
    M: tl.constexpr, CELLS: tl.constexpr, VECTORS: tl.constexpr, SPAN: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """The same for short rows."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    at, mask, row, own = run_of(program, M, CELLS, VECTORS, SPAN)
    channel = entry_of(program, row, C, CELLS)
    next = entry_of(program, row + 1, C, CELLS)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if SQUASH:
        value, _slope = squash(value * tl.load(alpha).to(tl.float32))
        if AFFINE:
            value *= of_rows(weight, channel, next, own)
            value += of_rows(bias, channel, next, own)
    else:
        a, b, c, _inverse = fixed_tables(mean, var, weight, bias, channel, True, deep, eps, AFFINE)
        a2, b2, c2, _inverse = fixed_tables(mean, var, weight, bias, next, True, deep, eps, AFFINE)
        value = (value - both(own, c, c2)) * both(own, a, a2) + both(own, b, b2)
        if KEEP:
            cell = program * CELLS + tl.arange(0, CELLS)
            first = cell < C  # sample
            a, b, c, inverse = fixed_tables(mean, var, weight, bias, cell, first, deep, eps, AFFINE)
            keep_tables(made, cell, first, C, a, b, c, inverse)
    if RESIDUAL:
        value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, activate(value, ACT).to(y.dtype.element_ty), mask=mask)


@triton.jit
def pointwise_gradient_kernel(
    dy, x, map, weight, bias, alpha, residual, kept, dx, parts, parts_of_alpha,
    turns, K, span, C,
    SQUASH: tl.constexpr, AFFINE: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr,
    KEEP: tl.constexpr, DX: tl.constexpr, SUMS: tl.constexpr,
    V: tl.constexpr, ROWS: tl.constexpr, POSITIONS: tl.constexpr, CELLS: tl.constexpr,
    UNROLL: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dx, g where a residual needs it, and parts of Σ g·x̂ and Σ g, (2, splits, B, K), and of
    dalpha, one a program: one read of dy and x, one write."""
    M = turns * V
    split, block = tl.program_id(1), tl.program_id(2)
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    first = split * span
    last = tl.minimum(first + span, M)
    channel = cell % C
    inside = cell < K
    if SQUASH:
        factor = tl.load(alpha).to(tl.float32)
        a = tl.full((CELLS,), 1.0, tl.float32)
        b = tl.zeros((CELLS,), tl.float32)
        if AFFINE:
            a = of_channels(weight, channel, inside)
            b = of_channels(bias, channel, inside)
    else:
        a = of_channels(map, channel, inside)
        b = of_channels(map + C, channel, inside)
        c = of_channels(map + 2 * C, channel, inside)
        inverse = of_channels(map + 3 * C, channel, inside)
    by_weight = tl.zeros((POSITIONS, CELLS), tl.float32)
    by_bias = tl.zeros((POSITIONS, CELLS), tl.float32)
    by_alpha = tl.zeros((POSITIONS, CELLS), tl.float32)
    for start in range(first, last, POSITIONS * UNROLL):
        position = start + tl.arange(0, POSITIONS * UNROLL)
        mask = _inside(position, last, cell, K, WHOLE)
        at = _tile(block, cell, position, M, K, ROWS)
        value = _read(x + at, mask, EVEN)
        g = _read(dy + at, mask, EVEN)
        if SQUASH:
            hat, slope = squash(value * factor)
        else:
            hat = value - c[None, :]
        if ACT != 0:
            pre = hat * a[None, :] + b[None, :]
            if RESIDUAL:
                pre += _read(residual + at, mask, EVEN)
            g = before(g, pre, ACT)
            if KEEP:
                tl.store(kept + at, g.to(kept.dtype.element_ty), mask=mask)
        if SUMS and AFFINE:
            by_weight += _folded(g * hat, UNROLL)
            by_bias += _folded(g, UNROLL)
        if SQUASH:
            out = g * a[None, :] * slope
            if SUMS:
                by_alpha += _folded(out * value, UNROLL)
            out = out * factor
        else:
            out = g * a[None, :]
        if DX:
            tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
    if SUMS and AFFINE:
        out = (split * tl.num_programs(2) + block).to(tl.int64) * K + cell
        second = (tl.num_programs(1) * tl.num_programs(2)).to(tl.int64) * K
        dweight = tl.sum(by_weight, 0)
        if not SQUASH:
            dweight = dweight * inverse
        tl.store(parts + out, dweight, mask=inside)
        tl.store(parts + second + out, tl.sum(by_bias, 0), mask=inside)
    if SUMS and SQUASH:
        program = (block * tl.num_programs(1) + split) * tl.num_programs(0) + tl.program_id(0)
        tl.store(parts_of_alpha + program, tl.sum(tl.sum(by_alpha, 0), 0))


@triton.jit
def flat_pointwise_gradient_kernel(
    dy, x, map, weight, bias, alpha, residual, kept, dx, parts, parts_of_alpha, C,
    SQUASH: tl.constexpr, AFFINE: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr,
    KEEP: tl.constexpr, DX: tl.constexpr, SUMS: tl.constexpr,
    M: tl.constexpr, CELLS: tl.constexpr, VECTORS: tl.constexpr, SPAN: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """The same for short rows; a row is one part."""
    program = tl.program_id(0)
    at, mask, row, own = run_of(program, M, CELLS, VECTORS, SPAN)
    channel = entry_of(program, row, C, CELLS)
    next = entry_of(program, row + 1, C, CELLS)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    if SQUASH:
        factor = tl.load(alpha).to(tl.float32)
        hat, slope = squash(value * factor)
        a = tl.full((VECTORS, SPAN), 1.0, tl.float32)
        b = tl.zeros((VECTORS, SPAN), tl.float32)
        if AFFINE:
            a = of_rows(weight, channel, next, own)
            b = of_rows(bias, channel, next, own)
    else:
        a = of_rows(map, channel, next, own)
        b = of_rows(map + C, channel, next, own)
        hat = value - of_rows(map + 2 * C, channel, next, own)
    if ACT != 0:
        pre = hat * a + b
        if RESIDUAL:
            pre += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        g = before(g, pre, ACT)
        if KEEP:
            tl.store(kept + at, g.to(kept.dtype.element_ty), mask=mask)
    cell = program * CELLS + tl.arange(0, CELLS)
    if SUMS and AFFINE:
        along = pieces_of_rows(tl.where(mask, g * hat, 0.0), own, M, CELLS, PIECES)
        dweight = tl.sum(along, 1)
        if not SQUASH:
            entry = entry_of(program, tl.arange(0, CELLS), C, CELLS)
            dweight = dweight * tl.load(map + 3 * C + entry)
        alone = pieces_of_rows(tl.where(mask, g, 0.0), own, M, CELLS, PIECES)
        tl.store(parts + cell, dweight)
        tl.store(parts + tl.num_programs(0) * CELLS + cell, tl.sum(alone, 1))
    out = g * a
    if SQUASH:
        out = out * slope
        if SUMS:
            along = tl.where(mask, out * value, 0.0)
            tl.store(parts_of_alpha + program, tl.sum(tl.sum(along, 1), 0))
        out = out * factor
    if DX:
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def pointwise_total_kernel(
    parts, parts_of_alpha, out, rows, size, programs,
    AFFINE: tl.constexpr, SQUASH: tl.constexpr,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, LONG: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sums over the rows of two tables (rows, size), one a program id of the second axis; and with
    SQUASH, after them, that of all parts of dalpha."""
    outer = tl.program_id(1)
    release(OVERLAP)
    wait(OVERLAP)
    if AFFINE:  # noqa: SIM102 : one is known to the compiler, the other to the program
        if outer < 2:
            entry = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
            total = tl.zeros((DEPTH, WIDTH), tl.float32)
            for start in range(0, rows, DEPTH):
                row = start + tl.arange(0, DEPTH)
                mask = (row < rows)[:, None] & (entry < size)[None, :]
                at = (outer.to(tl.int64) * rows + row.to(tl.int64))[:, None] * size
                total += tl.load(parts + at + entry[None, :], mask=mask, other=0.0)
            tl.store(out + outer * size + entry, tl.sum(total, 0), mask=entry < size)
    if SQUASH:  # noqa: SIM102
        if (outer == tl.num_programs(1) - 1) & (tl.program_id(0) == 0):
            many = tl.zeros((LONG,), tl.float32)
            for start in range(0, programs, LONG):
                one = start + tl.arange(0, LONG)
                many += tl.load(parts_of_alpha + one, mask=one < programs, other=0.0)
            place = 2 * size if AFFINE else 0
            tl.store(out + place, tl.sum(many, 0))
