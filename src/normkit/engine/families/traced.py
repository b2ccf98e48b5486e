"""Layers of no family: their own coefficients, traced and compiled. See engine/tracing."""

from __future__ import annotations

from torch import Tensor

from normkit.core.fusion import Traced
from normkit.core.statistics import Seen
from normkit.engine.families.family import ChannelLayout, FamilyTables
from normkit.engine.triton import passes
from normkit.engine.triton.passes import Parts


def coefficients(x: Tensor, parts: Parts, fusion: Traced, layout: ChannelLayout) -> FamilyTables:
    plan = fusion.plan
    moments = passes.merged(x, parts, layout, sums=False).tables
    buffers = [fusion.statistics[name] for name in plan.buffers]
    tables = plan.forward(moments, layout.count, fusion.parameters, buffers)
    return FamilyTables(tables, plan.period, 0, None)


def gradients(
    x: Tensor,
    parts: Parts,
    fusion: Traced,
    layout: ChannelLayout,
    tables: Tensor,
    grad_gates: Tensor | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    plan = fusion.plan
    sums = passes.summed(parts).tables
    out = plan.backward(sums, tables, layout.count, fusion.parameters)
    at = 2 * plan.period
    found: list[Tensor | None] = []
    for name, parameter in zip(plan.parameters, fusion.parameters, strict=True):
        if name in plan.functions.unused:
            found.append(None)
            continue
        size = parameter.numel()
        found.append(out[at : at + size].view(parameter.shape))
        at += size
    return out, tuple(found)


def seen(fusion: Traced, tables: Tensor, rows: int, channels: int) -> Seen:
    return Seen(fusion.plan.functions.statistics(tables))
