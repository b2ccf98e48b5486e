"""The kernels of families/depthwise.py, which has the formulas.

A map is cut into strips of STRIP columns. A program owns LANES strips, of one sample or of several,
times CHANNELS, and slides down ``high`` rows. A thread has whole strips: it reads STRIP + 2 columns
of a row once, and what they give to the three rows that they touch is carried along in two
accumulators for each column. The row after is loaded before the current one is worked on. Tiles are
(LANES, CHANNELS) in channels_last (LAST), else (CHANNELS, LANES), so that neighbours in memory are
neighbours in a tile. Offsets into a sample are 32-bit, those of samples 64-bit.
"""
# ruff: noqa: RUF005 : Triton adds tuples, it does not unpack them
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from normkit.engine.triton.activations import activate, before

SIZES = ["N", "H", "W", "high", "strips"]  # a kernel for each would be no faster


@triton.jit
def _own(
    N, H, W, C, high, strips, LAST: tl.constexpr, STRIP: tl.constexpr, LANES: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sample, first column and channel of each entry of the tile, as sides of it; where it begins
    in memory; the rows of this program."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    lane = tl.expand_dims(lane, 1 if LAST else 0)
    channel = tl.expand_dims(channel, 0 if LAST else 1)
    sample = lane // strips
    column = lane % strips * STRIP
    inside = channel + column * C if LAST else channel * (H * W) + column
    begin = tl.cast(sample, tl.int64) * C * H * W + inside
    first = tl.program_id(2) * high
    return sample, column, channel, begin, first, tl.minimum(first + high, H)


@triton.jit
def _there(N, W, C, sample, column, channel, FULL: tl.constexpr, STRIP: tl.constexpr):
    """Which of the columns from one before to one after a strip are on the map; FULL if all of a
    strip are."""
    own = (sample < N) & (channel < C)
    found = (own & (column > 0), own)
    for j in tl.static_range(1, STRIP + 1):
        inside = own
        if not FULL or j == STRIP:
            inside = own & (column + j < W)
        found = found + (inside,)
    return found


@triton.jit
def _line(t, apart, there, wanted, BEGIN: tl.constexpr, END: tl.constexpr):
    """Columns BEGIN … END − 1 of a row, counted from one before the strip; 0 where is none."""
    found = ()
    for j in tl.static_range(BEGIN, END):
        found = found + (tl.load(t + (j - 1) * apart, mask=there[j] & wanted, other=0.0),)
    return found


@triton.jit
def _less(line, center, there, FULL: tl.constexpr, BEGIN: tl.constexpr, END: tl.constexpr):
    """x − c, and 0 where there is no x."""
    found = ()
    for j in tl.static_range(BEGIN, END):
        own = center
        if not FULL or (BEGIN == 0 and (j == 0 or j == END - 1)):
            own = tl.where(there[j], center, 0.0)
        found = found + (line[j - BEGIN].to(tl.float32) - own,)
    return found


@triton.jit
def _taps(weight, channel, C, factor, TURNED: tl.constexpr):
    """The nine taps times a factor; TURNED by half a circle, as gradients go through them."""
    found = ()
    for tap in tl.static_range(9):
        place = weight + channel * 9 + (8 - tap if TURNED else tap)
        found = found + (tl.load(place, mask=channel < C, other=0.0).to(tl.float32) * factor,)
    return found


@triton.jit
def _slide(above, here, line, k, start, STRIP: tl.constexpr):
    """The sums of the row above, which this line completes, and what is carried along."""
    out, up, new = (), (), ()
    for m in tl.static_range(STRIP):
        left, middle = line[m].to(tl.float32), line[m + 1].to(tl.float32)
        right = line[m + 2].to(tl.float32)
        out = out + (above[m] + k[6] * left + k[7] * middle + k[8] * right,)
        up = up + (here[m] + k[3] * left + k[4] * middle + k[5] * right,)
        new = new + (start + k[0] * left + k[1] * middle + k[2] * right,)
    return out, up, new


@triton.jit
def _same(value, STRIP: tl.constexpr):
    found = ()
    for _ in tl.static_range(STRIP):
        found = found + (value,)
    return found


@triton.jit
def _store(t, values, apart, there, wanted, STRIP: tl.constexpr):
    for m in tl.static_range(STRIP):
        mask = there[m + 1] & wanted
        tl.store(t + m * apart, values[m].to(t.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def depthwise_kernel(
    x, map, weight, bias, gates, residual, y, N, H, W, C, period, high, strips,
    BIAS: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr,
    LAST: tl.constexpr, FULL: tl.constexpr, STRIP: tl.constexpr, LANES: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """y: one read of x and of the residual, one write."""
    sample, column, channel, begin, first, last = _own(
        N, H, W, C, high, strips, LAST, STRIP, LANES, CHANNELS
    )
    there = _there(N, W, C, sample, column, channel, FULL, STRIP)
    apart = C if LAST else 1
    down = W * apart
    known, own = there[1], column * 0  # which makes a tensor of a condition
    entry = (sample * C + channel) % period
    a = tl.load(map + entry, mask=known, other=0.0)
    c = tl.load(map + 2 * period + entry, mask=known, other=0.0)
    k = _taps(weight, channel, C, a, False)
    shift = a * 0.0
    if BIAS:
        shift += tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)
    if GATED:
        shift *= tl.load(gates + sample * C + channel, mask=known, other=0.0)
    above, here = _same(shift, STRIP), _same(shift, STRIP)
    top, bottom = tl.maximum(first - 1, 0), tl.minimum(last + 1, H)
    x += begin
    y += begin
    residual += begin
    line = _line(x + top * down, apart, there, own < H, 0, STRIP + 2)
    added = line
    if RESIDUAL:  # of the row above; any at first, for that is not stored
        added = _line(residual + top * down, apart, there, own < H, 1, STRIP + 1)
    for row in range(top, bottom):
        after = _line(x + (row + 1) * down, apart, there, own + row + 1 < bottom, 0, STRIP + 2)
        z = _less(line, c, there, FULL, 0, STRIP + 2)
        out, above, here = _slide(above, here, z, k, shift, STRIP)
        out = _followed(out, added, RESIDUAL, ACT, STRIP)
        _store(y + (row - 1) * down, out, apart, there, own + row > first, STRIP)
        if RESIDUAL:
            added = _line(residual + row * down, apart, there, own + row < last, 1, STRIP + 1)
        line = after
    out = _followed(above, added, RESIDUAL, ACT, STRIP)
    _store(y + (last - 1) * down, out, apart, there, own + last == H, STRIP)


@triton.jit
def _followed(values, residual, RESIDUAL: tl.constexpr, ACT: tl.constexpr, STRIP: tl.constexpr):
    found = ()
    for m in tl.static_range(STRIP):
        value = values[m]
        if RESIDUAL:
            value += residual[m].to(tl.float32)
        found = found + (activate(value, ACT),)
    return found


@triton.jit(do_not_specialize=SIZES)
def depthwise_gradient_kernel(
    dy, x, map, weight, extra, dx, N, H, W, C, period, high, strips,
    LAST: tl.constexpr, FULL: tl.constexpr,
    STRIP: tl.constexpr, LANES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dx: one read of dy and x, one write."""
    sample, column, channel, begin, first, last = _own(
        N, H, W, C, high, strips, LAST, STRIP, LANES, CHANNELS
    )
    there = _there(N, W, C, sample, column, channel, FULL, STRIP)
    apart = C if LAST else 1
    down = W * apart
    known, own = there[1], column * 0  # which makes a tensor of a condition
    entry = (sample * C + channel) % period
    a = tl.load(map + entry, mask=known, other=0.0)
    c = tl.load(map + 2 * period + entry, mask=known, other=0.0)
    constant = tl.load(extra + entry, mask=known, other=0.0)
    slope = tl.load(extra + period + entry, mask=known, other=0.0)
    k = _taps(weight, channel, C, a, True)
    above, here = _same(constant, STRIP), _same(constant, STRIP)
    top, bottom = tl.maximum(first - 1, 0), tl.minimum(last + 1, H)
    x += begin
    dy += begin
    dx += begin
    line = _line(dy + top * down, apart, there, own < H, 0, STRIP + 2)
    value = _line(x + top * down, apart, there, own < H, 1, STRIP + 1)  # any: it is not stored
    for row in range(top, bottom):
        after = _line(dy + (row + 1) * down, apart, there, own + row + 1 < bottom, 0, STRIP + 2)
        later = _line(x + row * down, apart, there, own + row < last, 1, STRIP + 1)
        g, above, here = _slide(above, here, line, k, constant, STRIP)
        out = _added(g, value, c, slope, STRIP)
        _store(dx + (row - 1) * down, out, apart, there, own + row > first, STRIP)
        line, value = after, later
    out = _added(above, value, c, slope, STRIP)
    _store(dx + (last - 1) * down, out, apart, there, own + last == H, STRIP)


@triton.jit
def _added(g, value, c, slope, STRIP: tl.constexpr):
    found = ()
    for m in tl.static_range(STRIP):
        found = found + (g[m] + (value[m].to(tl.float32) - c) * slope,)
    return found


@triton.jit(do_not_specialize=SIZES)
def depthwise_sums_kernel(
    dy, x, map, weight, y, kept, parts, taps, N, H, W, C, period, high, strips,
    END: tl.constexpr, ACT: tl.constexpr, LAST: tl.constexpr, FULL: tl.constexpr,
    STRIP: tl.constexpr, LANES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Σ g·(x − c), Σ g and Σ dy of each strip into parts (3, splits, N, C), and dk into taps
    (9, programs, C): one read of dy and x. With ACT dy came to an activation, whose result y is
    read as well, and the gradient before it is written to ``kept``.

    g itself is not needed. With d[t] = Σ_q (x − c)[q]·dy[q − t], Σ g·(x − c) = Σ_t k[t]·d[t]; and
    Σ g = Σ_p dy[p]·K[p], K the sum of those taps that find a place at p: all but at the border. END
    is where in its strip the last column of the map stands.
    """
    sample, column, channel, begin, first, last = _own(
        N, H, W, C, high, strips, LAST, STRIP, LANES, CHANNELS
    )
    there = _there(N, W, C, sample, column, channel, FULL, STRIP)
    apart = C if LAST else 1
    down = W * apart
    known, own = there[1], column * 0  # which makes a tensor of a condition
    entry = (sample * C + channel) % period
    c = tl.load(map + 2 * period + entry, mask=known, other=0.0)
    x += begin
    dy += begin
    y += begin
    kept += begin
    zero = c * 0.0
    d, total = _same(zero, 9), _same(zero, STRIP)
    near = tl.where(first > 0, c, 0.0)
    line = _line(x + (first - 1) * down, apart, there, own + first > 0, 1, STRIP + 1)
    above = _less(line, near, there, FULL, 1, STRIP + 1)
    line = _line(x + first * down, apart, there, own < H, 1, STRIP + 1)
    here = _less(line, c, there, FULL, 1, STRIP + 1)
    line = _line(x + (first + 1) * down, apart, there, own + first + 1 < H, 1, STRIP + 1)
    grad = _line(dy + first * down, apart, there, own < H, 0, STRIP + 2)
    seen = grad
    if ACT != 0:
        seen = _line(y + first * down, apart, there, own < H, 0, STRIP + 2)
    for row in range(first, last):
        after = _line(dy + (row + 1) * down, apart, there, own + row + 1 < last, 0, STRIP + 2)
        shown = after
        if ACT != 0:
            shown = _line(y + (row + 1) * down, apart, there, own + row + 1 < last, 0, STRIP + 2)
        later = _line(x + (row + 2) * down, apart, there, own + row + 2 < H, 1, STRIP + 1)
        near = tl.where(row + 1 < H, c, 0.0)
        below = _less(line, near, there, FULL, 1, STRIP + 1)
        g = _before(grad, seen, ACT, STRIP + 2)
        if ACT != 0:
            _store(kept + row * down, g[1 : STRIP + 1], apart, there, own < H, STRIP)
        d, total = _correlated(d, total, above, here, below, g, STRIP)
        above, here, line, grad, seen = here, below, later, after, shown
    k = _taps(weight, channel, C, 1.0, False)
    a = tl.load(map + entry, mask=known, other=0.0)
    down = (H - 1) * down
    upper = _line(dy, apart, there, own + first == 0, 1, STRIP + 1)
    lower = _line(dy + down, apart, there, own + last == H, 1, STRIP + 1)
    if ACT != 0:
        seen = _line(y, apart, there, own + first == 0, 1, STRIP + 1)
        upper = _before(upper, seen, ACT, STRIP)
        seen = _line(y + down, apart, there, own + last == H, 1, STRIP + 1)
        lower = _before(lower, seen, ACT, STRIP)
    begins, ends = column == 0, column + STRIP >= W
    whole, left, right = _borders(total, begins, ends, END, STRIP)
    db = (k[3] + k[4] + k[5]) * whole - k[3] * left - k[5] * right
    less, less_left, less_right = _borders(upper, begins, ends, END, STRIP)
    db += (k[0] + k[1] + k[2]) * (whole - less)
    db -= k[0] * (left - less_left) + k[2] * (right - less_right)
    less, less_left, less_right = _borders(lower, begins, ends, END, STRIP)
    db += (k[6] + k[7] + k[8]) * (whole - less)
    db -= k[6] * (left - less_left) + k[8] * (right - less_right)
    da = zero
    for t in tl.static_range(9):
        da += k[t] * d[t]
    split = tl.program_id(2) * strips + column // STRIP
    out = (tl.cast(split, tl.int64) * N + sample) * C + channel
    table = tl.cast(tl.num_programs(2), tl.int64) * strips * N * C
    tl.store(parts + out, da, mask=known)
    tl.store(parts + table + out, db, mask=known)
    tl.store(parts + 2 * table + out, whole, mask=known)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    table = tl.cast(tl.num_programs(0), tl.int64) * tl.num_programs(2) * C
    out = (tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * C + channel
    for t in tl.static_range(9):
        found = tl.sum(a * d[t], 0 if LAST else 1)  # a is 0 where there is no strip
        tl.store(taps + t * table + out, found, mask=channel < C)


@triton.jit
def _before(grad, y, ACT: tl.constexpr, COUNT: tl.constexpr):
    """The gradient before an activation, by its result: in float32."""
    found = ()
    for j in tl.static_range(COUNT):
        g = grad[j].to(tl.float32)
        if ACT != 0:
            g = before(g, y[j].to(tl.float32), ACT)
        found = found + (g,)
    return found


@triton.jit
def _correlated(d, total, above, here, below, grad, STRIP: tl.constexpr):
    """d[t] + Σ x[q]·dy[q − t] of one row of dy and the three of x that it meets; Σ dy."""
    d0, d1, d2, d3, d4, d5, d6, d7, d8 = d
    found = ()
    for m in tl.static_range(STRIP):
        left, middle, right = grad[m], grad[m + 1], grad[m + 2]
        d0 += above[m] * right
        d1 += above[m] * middle
        d2 += above[m] * left
        d3 += here[m] * right
        d4 += here[m] * middle
        d5 += here[m] * left
        d6 += below[m] * right
        d7 += below[m] * middle
        d8 += below[m] * left
        found = found + (total[m] + middle,)
    return (d0, d1, d2, d3, d4, d5, d6, d7, d8), found


@triton.jit
def _borders(values, begins, ends, END: tl.constexpr, STRIP: tl.constexpr):
    """The sum of a strip's columns, that of the map's first column, and that of its last."""
    whole = values[0].to(tl.float32)
    for m in tl.static_range(1, STRIP):
        whole += values[m].to(tl.float32)
    left = tl.where(begins, values[0].to(tl.float32), 0.0)
    right = tl.where(ends, values[END].to(tl.float32), 0.0)
    return whole, left, right


@triton.jit(do_not_specialize=["N", "splits", "programs"])
def totals_kernel(
    parts, taps, gates, bias, out, N, C, splits, programs,
    GATED: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Of what strips and programs have summed: the gradients of the kernel (C, 9) and the bias (C);
    with GATED then Σ g·(x − c) and Σ g of each sample (2, N, C), and the gradients of the gates
    (N, C). The second axis of programs: taps, bias, then runs of ROWS / DEPTH samples."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < C
    job = tl.program_id(1)
    size = tl.cast(N, tl.int64) * C
    dy = parts + 2 * splits * size
    lane = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    if job < 9:
        for start in range(0, programs, ROWS):
            row = (job * programs + start + lane).to(tl.int64)
            mask = (start + lane < programs)[:, None] & known[None, :]
            total += tl.load(taps + row[:, None] * C + channel[None, :], mask=mask, other=0.0)
        tl.store(out + channel * 9 + job, tl.sum(total, 0), mask=known)
    elif job == 9:
        for start in range(0, splits * N, ROWS):
            row = start + lane
            mask = (row < splits * N)[:, None] & known[None, :]
            at = row.to(tl.int64)[:, None] * C + channel[None, :]
            value = tl.load(dy + at, mask=mask, other=0.0)
            if GATED:
                own = gates + (row % N)[:, None] * C + channel[None, :]
                value *= tl.load(own, mask=mask, other=0.0)
            total += value
        tl.store(out + 9 * C + channel, tl.sum(total, 0), mask=known)
    else:
        MANY: tl.constexpr = ROWS // DEPTH
        sample = (job - 10) * MANY + tl.arange(0, MANY)
        own = (job - 10) * MANY + lane % MANY
        da = tl.zeros((ROWS, CHANNELS), tl.float32)
        db = tl.zeros((ROWS, CHANNELS), tl.float32)
        for start in range(0, splits, DEPTH):
            split = start + lane // MANY
            mask = ((split < splits) & (own < N))[:, None] & known[None, :]
            at = (split.to(tl.int64) * N + own)[:, None] * C + channel[None, :]
            da += tl.load(parts + at, mask=mask, other=0.0)
            db += tl.load(parts + splits * size + at, mask=mask, other=0.0)
            total += tl.load(dy + at, mask=mask, other=0.0)
        shift = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[None, :]
        mask = (sample < N)[:, None] & known[None, :]
        at = sample.to(tl.int64)[:, None] * C + channel[None, :]
        found = out + 10 * C
        tl.store(found + at, _over(da, DEPTH, MANY, CHANNELS), mask=mask)
        tl.store(found + size + at, _over(db, DEPTH, MANY, CHANNELS), mask=mask)
        tl.store(found + 2 * size + at, _over(total, DEPTH, MANY, CHANNELS) * shift, mask=mask)


@triton.jit
def _over(table, DEPTH: tl.constexpr, MANY: tl.constexpr, CHANNELS: tl.constexpr):
    """The sum over parts of each sample."""
    return tl.sum(tl.reshape(table, (DEPTH, MANY, CHANNELS)), 0)
