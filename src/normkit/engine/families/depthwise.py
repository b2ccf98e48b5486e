"""bnet and ubn as a whole: statistics, gate and a depthwise 3 × 3 convolution without tensors in
between. Three launches forward, four backward, one of them for the sums of the kernel's gradient.

With z = a·(x − c) inside the map and 0 around it, k the kernel, and s the gate (or 1):

    y[p] = act(Σ_t k[t]·z[p + t] + s·bias + residual[p])
    g[q] = Σ_t k[t]·dy[q − t]        dk[t] = Σ_q z[q]·dy[q − t]
    dx = a·g + constant + slope·(x − c)

Neither z nor g is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.core.fusion import Depthwise, Fusion
from normkit.core.statistics import Repetition
from normkit.engine import plain, remaking
from normkit.engine.activations import NUMBERS
from normkit.engine.dispatch import looked_into_backward
from normkit.engine.epilogue import before
from normkit.engine.families.depthwise_kernels import (
    depthwise_gradient_kernel,
    depthwise_kernel,
    depthwise_sums_kernel,
    totals_kernel,
)
from normkit.engine.families.family import ChannelLayout, FamilyTables
from normkit.engine.families.fused import FAMILIES
from normkit.engine.replay.record import RecordedStep, Recording
from normkit.engine.triton import passes
from normkit.engine.triton.launch import Launch

CHANNELS = 64  # a line of memory in bfloat16
PROGRAMS = 1024  # enough to fill a large machine
TILE = 256  # strips times channels: two a thread, for a strip fills the registers
ROWS = 128  # of parts that are summed at once


def fused_depthwise(
    x: Tensor,
    description: Depthwise,
    residual: Tensor | None,
    act: str,
    layout: ChannelLayout,
    repetition: Repetition,
    record: RecordedStep | None = None,
) -> tuple[Tensor, Tensor, int]:
    """act(Σ_t kernel[t]·z[p + t] + s·bias + residual), z the map of the norm and s its gates, or 1;
    and the tables that were made, with where in them the statistics of the batch begin. The
    activation is one whose result tells its gradient: y is kept in place of what went into it."""
    norm, kernel, bias = description
    if torch.is_grad_enabled():
        source = repetition, record
        given = norm, act, layout, source, *norm.parameters
        return _FusedDepthwise.apply(x, residual, kernel, bias, *given)
    recording = None
    if record is not None:
        recording = Recording(record.inputs(x, residual, (kernel, bias, *norm.parameters)))
    with recording or nullcontext():
        made = FAMILIES[type(norm)].coefficients(x, passes.moment_parts(x, layout), norm, layout)
        y = _maker(x, made, description, residual is not None, act, layout)(x, residual)
    if recording is not None and record is not None:
        record.forward_alone(recording, x, y, nothing_learned=False)
    return y, made.tables, made.statistics


def _maker(
    x: Tensor,
    made: FamilyTables,
    description: Depthwise,
    with_residual: bool,
    act: str,
    layout: ChannelLayout,
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The last launch of the forward, of x and a residual."""
    _, kernel, bias = description
    tables, period, _, gates = made
    has = bias is not None, gates is not None, with_residual
    start = _forward(_sizes(x, layout, period), *has, NUMBERS[act])

    def make(x: Tensor, residual: Tensor | None) -> Tensor:
        y = passes.like(layout, x)
        residual = None if residual is None else layout.aligned(residual)
        start(layout.aligned(x), tables, kernel, bias, gates, residual, y)
        return y

    return make


class _FusedDepthwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        kernel: Tensor,
        bias: Tensor | None,
        fusion: Fusion,
        act: str,
        layout: ChannelLayout,
        source: tuple[Repetition, RecordedStep | None],
        *parameters: Tensor | None,
    ) -> Any:
        family = FAMILIES[type(fusion)]
        ctx.repetition, record = source
        recording = None
        if record is not None:
            recording = Recording(record.inputs(x, residual, (kernel, bias, *parameters)))
        with recording or nullcontext():
            made = family.coefficients(x, passes.moment_parts(x, layout), fusion, layout)
            own = Depthwise(fusion, kernel, bias)
            make = _maker(x, made, own, residual is not None, act, layout)
            y = make(x, residual)
        tables, period, statistics, gates = made
        remaking.offer(y, x, residual, make)
        keeps_y = act != "none"
        if recording is not None and record is not None:
            if any(ctx.needs_input_grad):
                record = record.with_forward(recording, y, tables, keeps_y)
            else:
                record.forward_alone(recording, x, y, nothing_learned=True)
        ctx.record = record
        kept = y if keeps_y else None
        ctx.save_for_backward(x, kept, kernel, bias, tables, gates, *parameters)
        ctx.given = fusion, act, layout, family, period
        ctx.mark_non_differentiable(tables)
        ctx.set_materialize_grads(False)
        return y, tables, statistics

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        x, y, kernel, bias, tables, gates, *parameters = ctx.saved_tensors
        fusion, _, layout, *_ = ctx.given
        if grad is None:
            return (None,) * (8 + len(parameters))
        given = kernel, bias, *parameters
        if looked_into_backward(grad):
            return _again(ctx, grad, y, tables, [x, None, *given])
        record, recording = ctx.record, None
        grad = layout.aligned(grad)
        if record is not None:
            own = [p for p in given if p is not None]
            recording = Recording([x, y, *own, tables, grad])
            recording.same((None, None, *fusion.parameters), given)
        with recording or nullcontext():
            dx, dr, found = _gradients(ctx, grad, x, y, kernel, bias, tables, gates)
        if recording is not None:
            there = [d for d, p in zip(found, given, strict=True) if p is not None]
            record.finish(recording, x, grad, dx, dr, there, _looked_into(ctx, record))
            ctx.record = None  # a graph that is kept comes here again
        needs = *ctx.needs_input_grad[2:4], *ctx.needs_input_grad[8:]
        wanted = [
            None if p is None or d is None or not need else d.to(p.dtype)
            for p, d, need in zip(given, found, needs, strict=True)
        ]
        return dx, dr, *wanted[:2], None, None, None, None, *wanted[2:]


def _gradients(
    ctx: Any,
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    kernel: Tensor,
    bias: Tensor | None,
    tables: Tensor,
    gates: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
    """dx, the residual's gradient, and those of kernel, bias and the norm's parameters."""
    fusion, act, layout, family, period = ctx.given
    n, c = x.shape[:2]
    size, sizes = n * c, _sizes(x, layout, period)
    cut = _cut(sizes, act != "none")
    splits = cut.splits
    parts = passes.table(x, 3 * splits * size)
    taps = passes.table(x, 9 * cut.programs * c)
    x = layout.aligned(x)
    g = dy
    if y is not None:
        y, g = layout.aligned(y), passes.like(layout, x)
    _sums(sizes, act)(dy, x, tables, kernel, y, None if y is None else g, parts, taps)
    gated = gates is not None and bias is not None
    made = passes.table(x, 10 * c + (3 * size if gated else 0))
    _totals(sizes, act, gated)(parts, taps, gates if gated else None, bias if gated else None, made)
    dgates = None
    found, whole = parts[: 2 * splits * size], splits
    if gated:
        dgates = made[10 * c + 2 * size :].view(n, c)
        found, whole = made[10 * c : 10 * c + 2 * size], 1
    whole = whole * n // layout.rows  # a table of one row counts samples as parts
    sums = passes.Parts(found, whole, 0)
    extra, dparameters = family.gradients(x, sums, fusion, layout, tables, dgates)
    dx = None
    if ctx.needs_input_grad[0]:
        dx = passes.like(layout, x)
        _gradient(sizes)(g, x, tables, kernel, extra, dx)
    dr = g if ctx.needs_input_grad[1] else None
    return dx, dr, (made[: 9 * c].view(kernel.shape), made[9 * c : 10 * c], *dparameters)


def _looked_into(ctx: Any, record: RecordedStep) -> Callable[..., Any]:
    """The backward of a replayed step where someone looks into it."""
    given = ctx.given
    fusion = given[0]

    def again(
        x: Tensor,
        y: Tensor | None,
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
            needs_input_grad=(*needs[:2], *flags[:2], False, False, False, False, *flags[2:]),
        )
        back = _again(like, grad, y, tables, [x, None, *own])
        found = zip((*back[2:4], *back[8:]), there, strict=True)
        return [*back[:2], *(d for d, p in found if p)]

    return again


def _again(
    ctx: Any,
    grad: Tensor,
    kept: Tensor | None,
    tables: Tensor,
    given: list[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Where someone looks into a backward: the layer computes its map again. ``kept`` is the result
    of an activation, if there was one."""
    fusion, act, layout, family, _ = ctx.given
    if kept is not None:
        grad = before(grad, kept.detach(), act)
    seen = family.seen(fusion, tables, layout.rows, layout.columns)

    def outputs(
        x: Tensor, _: Tensor | None, kernel: Tensor, bias: Tensor | None, *own: Tensor | None
    ) -> list[Tensor]:
        result = partial(ctx.repetition.result, given=fusion.parameters, saved=own, seen=seen)
        z, *gates = plain.repeated(x, None, "none", layout, result)
        y = F.conv2d(z, kernel.to(z.dtype), padding=1, groups=x.shape[1])
        if bias is not None:
            gated = gates and getattr(fusion, "keeps_gates", False)
            added = gates[0] * bias if gated else bias
            y = y + added.to(y.dtype).reshape(-1, x.shape[1], 1, 1)
        return [y]

    needs = *ctx.needs_input_grad[:4], *ctx.needs_input_grad[8:]
    back = plain.gradients_again(outputs, given, needs, grad)
    return *back[:4], None, None, None, None, *back[4:]


def _sizes(x: Tensor, layout: ChannelLayout, period: int) -> tuple[int, ...]:
    n, c, h, w = x.shape
    return n, h, w, c, period, layout.channels_last


class _Cut(NamedTuple):
    """How programs share a tensor."""

    strips: int  # of a map
    rows: int  # that a program slides down
    grid: tuple[int, int, int]
    tile: tuple[int, ...]  # LAST, FULL, STRIP, LANES, CHANNELS
    warps: int

    @property
    def splits(self) -> int:
        """Into how many parts a map is cut."""
        return self.strips * self.grid[2]

    @property
    def programs(self) -> int:
        """How many there are for the same channels."""
        return self.grid[0] * self.grid[2]


@lru_cache(maxsize=4096)
def _cut(sizes: tuple[int, ...], writes: bool) -> _Cut:
    """Rows are cut only where there would be too few programs, for each cut reads two rows twice;
    then programs are small. In contiguous memory, what ``writes`` has narrow strips: threads side
    by side must write nearly side by side."""
    *_, w, _, _, last = sizes
    strip = 7 if w % 7 == 0 else 8 if w % 8 == 0 else 4  # more spill a thread's registers
    if not last:
        return _shared(sizes, 2 if writes else strip, TILE // 2)
    whole = _shared(sizes, strip, TILE)
    return whole if whole.grid[2] == 1 else _shared(sizes, strip, TILE // 2)


def _shared(sizes: tuple[int, ...], strip: int, tile: int) -> _Cut:
    n, h, w, c, _, last = sizes
    strips = -(-w // strip)
    lanes = min(passes.power_of_two(n * strips), 32)
    channels = min(passes.power_of_two(c), tile // lanes)
    if last:
        channels = min(passes.power_of_two(c), CHANNELS)
        lanes = min(passes.power_of_two(n * strips), tile // channels)
    abreast, blocks = -(-n * strips // lanes), -(-c // channels)
    high = -(-h // max(1, min(h // 8, PROGRAMS // (abreast * blocks))))
    grid = abreast, blocks, -(-h // high)
    return _Cut(strips, high, grid, (last, w % strip == 0, strip, lanes, channels), tile // 64)


def _launch(kernel: Any, sizes: tuple[int, ...], cut: _Cut, constants: tuple[int, ...]) -> Launch:
    numbers = *sizes[:5], cut.rows, cut.strips
    return Launch(kernel, cut.grid, numbers, (*constants, *cut.tile), cut.warps)


@lru_cache(maxsize=4096)
def _forward(sizes: tuple[int, ...], bias: bool, gated: bool, residual: bool, act: int) -> Launch:
    return _launch(depthwise_kernel, sizes, _cut(sizes, True), (bias, gated, residual, act))


@lru_cache(maxsize=4096)
def _sums(sizes: tuple[int, ...], act: str) -> Launch:
    cut = _cut(sizes, act != "none")
    end = (sizes[2] - 1) % cut.tile[2]
    return _launch(depthwise_sums_kernel, sizes, cut, (end, NUMBERS[act]))


@lru_cache(maxsize=4096)
def _gradient(sizes: tuple[int, ...]) -> Launch:
    return _launch(depthwise_gradient_kernel, sizes, _cut(sizes, True), ())


@lru_cache(maxsize=4096)
def _totals(sizes: tuple[int, ...], act: str, gated: bool) -> Launch:
    n, _, _, c, *_ = sizes
    cut = _cut(sizes, act != "none")
    depth = min(passes.power_of_two(cut.splits), ROWS)
    runs = -(-n // (ROWS // depth)) if gated else 0
    numbers = n, c, cut.splits, cut.programs
    return Launch(totals_kernel, (-(-c // 16), 10 + runs), numbers, (gated, depth, ROWS, 16))
