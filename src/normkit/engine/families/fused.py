"""A whole layer with its coefficients in one kernel each way: the autograd function.

Three launches forward (moments, coefficients, map), three backward (sums, coefficients, dx). What
is peculiar to a family stands in its file: pool, gate, channel, mix; traced is that of
layers without one. Where a program can hold all values that share statistics (held), it is one
launch each way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from normkit.core.fusion import Channel, Fusion, Gate, Mix, Pool, Traced
from normkit.core.statistics import Repetition
from normkit.engine import plain, remaking
from normkit.engine.dispatch import looked_into_backward
from normkit.engine.families import channel, gate, held, mix, pool, traced
from normkit.engine.families.family import ChannelLayout, Family, FamilyTables
from normkit.engine.replay.record import RecordedStep, Recording
from normkit.engine.triton import passes

FAMILIES: dict[type, Family] = {
    Pool: pool,
    Gate: gate,
    Channel: channel,
    Mix: mix,
    Traced: traced,
}


def fused(
    x: Tensor,
    fusion: Fusion,
    residual: Tensor | None,
    act: str,
    layout: ChannelLayout,
    repetition: Repetition | None = None,
    record: RecordedStep | None = None,
) -> tuple[Tensor, Tensor, int, Tensor | None]:
    """The layer's output; the tables that were made and where in them the statistics of the batch
    begin, which carry no gradient; and the gates if they are kept. Only with a ``repetition`` can
    its gradient be differentiated once more. A ``record`` is told what a step launches.
    """
    if torch.is_grad_enabled():
        source = FAMILIES[type(fusion)], repetition, record
        return _Fused.apply(x, residual, fusion, act, layout, source, *fusion.parameters)
    recording = None
    if record is not None:
        recording = Recording(record.inputs(x, residual, fusion.parameters))
    with recording or nullcontext():
        y, (tables, _, statistics, gates) = forward(x, fusion, residual, act, layout)
    if recording is not None and record is not None and gates is None:
        record.forward_alone(recording, x, y, nothing_learned=False)
    return y, tables, statistics, gates


def forward(
    x: Tensor, fusion: Fusion, residual: Tensor | None, act: str, layout: ChannelLayout
) -> tuple[Tensor, FamilyTables]:
    """The launches of a forward: the output, and what backward and statistics need of it."""
    programs = held.holding(x, fusion, layout)
    if programs is not None and isinstance(fusion, Pool):
        return held.forward(x, fusion, residual, act, layout, programs)
    parts = passes.moment_parts(x, layout)
    made = FAMILIES[type(fusion)].coefficients(x, parts, fusion, layout)
    y = passes.apply_map(x, made.tables, made.period, residual, act, layout, reduced=True)
    return y, made


def backward(
    grad: Tensor,
    x: Tensor,
    fusion: Fusion,
    residual: Tensor | None,
    act: str,
    layout: ChannelLayout,
    made: FamilyTables,
    grad_gates: Tensor | None,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
    """The launches of a backward: dx and the residual's gradient where they are needed, and those
    of the parameters."""
    programs = held.holding(x, fusion, layout) if needs[0] else None
    if programs is not None and programs.backward and isinstance(fusion, Pool):
        return held.backward(
            grad, x, fusion, residual, act, layout, programs, made.tables, needs[1]
        )
    tables, period = made.tables, made.period
    parts, dr = passes.sum_parts(grad, x, tables, period, residual, act, layout, needs[1])
    extra, found = FAMILIES[type(fusion)].gradients(x, parts, fusion, layout, tables, grad_gates)
    dx = None
    if needs[0]:
        dx = passes.apply_gradient(
            grad, x, tables, period, residual, act, extra, layout, reduced=True
        )
    return dx, dr, found


class _Fused(torch.autograd.Function):
    """The same numbers as the generic path gives; here without tables in between."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        fusion: Fusion,
        act: str,
        layout: ChannelLayout,
        source: tuple[Family, Repetition | None, RecordedStep | None],
        *parameters: Tensor | None,
    ) -> Any:
        family, ctx.repetition, record = source
        recording = None
        if record is not None:
            recording = Recording(record.inputs(x, residual, parameters))
        with recording or nullcontext():
            y, (tables, period, statistics, gates) = forward(x, fusion, residual, act, layout)
        remaking.offer(
            y, x, residual, lambda x, r: passes.apply_map(x, tables, period, r, act, layout)
        )
        ctx.save_for_backward(x, residual if act != "none" else None, tables, *parameters)
        ctx.given = fusion, act, layout, family, period
        if recording is not None and record is not None:
            remake: list[Recording | None] = []
            if held.holding(x, fusion, layout) is not None:
                remake.append(None)
                if remaking.active():
                    with Recording([x, residual, tables]) as remake[0]:
                        passes.apply_map(x, tables, period, residual, act, layout)
            if gates is not None:
                record = None
            elif any(ctx.needs_input_grad):
                record = record.with_forward(recording, y, tables, remake=remake)
            else:
                record.forward_alone(recording, x, y, nothing_learned=True)
        ctx.record = record
        ctx.mark_non_differentiable(tables)
        ctx.set_materialize_grads(False)
        return y, tables, statistics, gates

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, _, _, grad_gates = grads
        x, residual, tables, *parameters = ctx.saved_tensors
        fusion, act, layout, _, period = ctx.given
        if grad is None:
            grad = torch.zeros_like(x)
        if looked_into_backward(grad):
            return _again(ctx, grad, grad_gates, tables, [x, residual, *parameters])
        needs, record, recording = ctx.needs_input_grad, ctx.record, None
        grad = layout.aligned(grad)
        if record is not None:
            own = [p for p in parameters if p is not None]
            recording = Recording([x, residual, *own, tables, grad])
            recording.same(fusion.parameters, parameters)
        made = FamilyTables(tables, period, 0, None)
        with recording or nullcontext():
            dx, dr, found = backward(
                grad, x, fusion, residual, act, layout, made, grad_gates, needs[:2]
            )
        if recording is not None:
            there = [d for d, p in zip(found, parameters, strict=True) if p is not None]
            record.finish(recording, x, grad, dx, dr, there, _looked_into(ctx, record))
            ctx.record = None  # a graph that is kept comes here again
        wanted = [
            None if p is None or not need or d is None else d if d.dtype == p.dtype else d.to(p)
            for d, p, need in zip(found, parameters, needs[6:], strict=True)
        ]
        return dx, dr, None, None, None, None, *wanted


def _looked_into(ctx: Any, record: RecordedStep) -> Callable[..., Any]:
    """The backward of a replayed step where someone looks into it: the same, made of what is
    left of the step. It must not keep the layer alive, which keeps this."""
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
        saved, wanted = iter(parameters), iter(needs[2:])
        own = [None if p is None else next(saved) for p in fusion.parameters]
        flags = [p is not None and next(wanted) for p in fusion.parameters]
        like = SimpleNamespace(
            given=given,
            repetition=record.repetition(),
            needs_input_grad=(needs[0], needs[1], False, False, False, False, *flags),
        )
        back = _again(like, grad, None, tables, [x, residual, *own])
        found = zip(back[6:], fusion.parameters, strict=True)
        return [back[0], back[1], *(d for d, p in found if p is not None)]

    return again


def _again(
    ctx: Any,
    grad: Tensor,
    grad_gates: Tensor | None,
    tables: Tensor,
    given: list[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Where someone looks into a backward: the layer computes its map again."""
    fusion, act, layout, family, _ = ctx.given
    seen = family.seen(fusion, tables, layout.rows, layout.columns)

    def outputs(x: Tensor, residual: Tensor | None, *own: Tensor | None) -> list[Tensor]:
        result = partial(ctx.repetition.result, given=fusion.parameters, saved=own, seen=seen)
        return plain.repeated(x, residual, act, layout, result)

    needs = [*ctx.needs_input_grad[:2], *ctx.needs_input_grad[6:]]
    back = plain.gradients_again(outputs, given, needs, grad, grad_gates)
    return back[0], back[1], None, None, None, None, *back[2:]
