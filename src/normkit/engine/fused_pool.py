"""Standardizations (bn, bgn, batch_renorm, gn, ln, in) on Triton: the launches of coefficients."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from normkit.core.fusion import Pool
from normkit.core.moments import Coefficients, Moments, spread
from normkit.engine import triton_backend as passes
from normkit.engine import triton_coefficients as kernels
from normkit.engine.family import ChannelLayout, Made
from normkit.engine.launch import Launch

NO_RAMPS = (1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0)


def parameters(fusion: Pool) -> tuple[Tensor | None, ...]:
    return fusion.weight, fusion.bias


def made(x: Tensor, parts: passes.Parts, fusion: Pool, layout: ChannelLayout) -> Made:
    channels, groups, memory, ramps = x.shape[1], fusion.groups, fusion.memory, fusion.ramps
    samples = layout.rows if fusion.kind == "sample" else 1
    period = samples * channels
    kept = 0 if ramps is None else 2 * channels
    tables = passes.table(x, 2 * period + 2 * samples * groups + kept)
    start = _map(
        samples,
        (layout.rows, channels, groups, layout.count, parts.splits, parts.span),
        fusion.eps,
        (0.0, 1.0) if memory is None else memory[5:],
        NO_RAMPS if ramps is None else ramps[:7],
        (fusion.weight is not None, memory is not None, ramps is not None),
    )
    start(
        parts.tables,
        fusion.weight,
        fusion.bias,
        tables,
        *((None,) * 5 if memory is None else memory[:5]),
        *((None,) * 5 if ramps is None else ramps[7:]),
    )
    return Made(tables, period, 2 * period, None)


@lru_cache(maxsize=4096)
def _map(samples: int, sizes: Any, eps: float, memory: Any, ramps: Any, flags: Any) -> Launch:
    rows, channels, groups, _, splits, _ = sizes
    members = splits * rows // samples
    blocks, tile = _tile(members, channels, groups, samples)
    numbers = *sizes, members, eps, *memory, *ramps
    return Launch(kernels.pool_map_kernel, (blocks, samples), numbers, (*flags, *tile))


def gradients(
    x: Tensor,
    parts: passes.Parts,
    fusion: Pool,
    layout: ChannelLayout,
    tables: Tensor,
    grad_gates: Tensor | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    channels = x.shape[1]
    samples = layout.rows if fusion.kind == "sample" else 1
    out = passes.table(x, 4 * samples * channels)
    start = _gradient(
        samples,
        (layout.rows, channels, fusion.groups, layout.count, parts.splits),
        fusion.eps,
        (fusion.weight is not None, fusion.ramps is not None),
    )
    start(parts.tables, fusion.weight, tables, out)
    if fusion.weight is None:
        return out, (None, None)
    if samples == 1:
        return out, (out[2 * channels : 3 * channels], out[3 * channels :])
    dweight, dbias = out.view(4, samples, channels)[2:].sum(1).unbind()
    return out, (dweight, dbias)


@lru_cache(maxsize=4096)
def _gradient(samples: int, sizes: Any, eps: float, flags: Any) -> Launch:
    rows, channels, groups, _, splits = sizes
    members = splits * rows // samples
    blocks, tile = _tile(members, channels, groups, samples)
    numbers = *sizes, members, eps
    return Launch(kernels.pool_gradient_kernel, (blocks, samples), numbers, (*flags, *tile))


def _tile(members: int, channels: int, groups: int, samples: int) -> tuple[int, tuple[int, ...]]:
    """How many programs for all groups, and D, DEPTH, GROUPS, WIDE.

    A pool of the whole batch is deep: 8 columns each, so that many programs share the work. Those
    of samples are shallow, and there are as many programs as samples anyway.
    """
    deep = channels // groups
    wide = passes.power_of_two(deep)
    columns = 8 if samples == 1 else max(8, 1024 // passes.power_of_two(members))
    many = max(1, min(columns // wide, passes.power_of_two(groups)))
    depth = max(1, min(2048 // (many * wide), passes.power_of_two(members), 256))
    return -(-groups // many), (deep, depth, many, wide)


def expression(
    fusion: Pool,
    moments: Moments,
    parameters: tuple[Tensor | None, ...],
    tables: Tensor,
) -> tuple[Coefficients, Tensor | None]:
    rows, columns = moments.mean.shape
    wide = columns // fusion.groups
    samples = None if fusion.kind == "batch" else 1
    map = moments.pooled(samples=samples, channels=wide).standardizing(fusion.eps)
    map = Coefficients(*(spread(t, samples=rows, groups_of=wide) for t in map))
    if fusion.ramps is not None:
        map = map.then(*tables[-2 * columns :].view(2, columns))
    return map.then(*parameters), None
