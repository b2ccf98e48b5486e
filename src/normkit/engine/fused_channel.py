"""Batch-channel normalization on Triton: the launches of coefficients."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from normkit.core.fusion import Channel
from normkit.core.moments import Coefficients, Moments, spread
from normkit.engine import triton_backend as passes
from normkit.engine import triton_channels as kernels
from normkit.engine.family import ChannelLayout, Made
from normkit.engine.fused_gate import COLUMNS, FEW
from normkit.engine.launch import Launch


def parameters(fusion: Channel) -> tuple[Tensor | None, ...]:
    return fusion.weight, fusion.bias, fusion.group_weight, fusion.group_bias


def made(x: Tensor, parts: passes.Parts, fusion: Channel, layout: ChannelLayout) -> Made:
    if parts.splits > FEW:
        parts = passes.merged(x, parts, layout, sums=True)
    channels, rows = x.shape[1], layout.rows
    tables = passes.table(x, 4 * rows * channels + 4 * channels)
    memory, given = fusion.memory, fusion.given
    if given is None and memory is not None:
        given = memory.mean, memory.second
    micro = memory is not None and fusion.rate is not None
    # with micro batches every channel must be in the statistics before the map
    turns = ((True, False), (False, True)) if micro else ((memory is not None, True),)
    for remember, map in turns:
        source, affine, own = _flags(fusion)
        start = _map(
            (rows, channels, fusion.groups, layout.count, parts.splits, parts.span),
            fusion.eps,
            (0.0, 1.0) if memory is None else memory[5:],
            (source, micro, affine, own, remember, map),
        )
        start(
            parts.tables,
            tables,
            *parameters(fusion),
            *((None, None) if given is None else given),
            *((None,) * 3 if memory is None else memory[2:5]),
            fusion.rate,
        )
    return Made(tables, rows * channels, 4 * rows * channels, None)


@lru_cache(maxsize=4096)
def _map(sizes: Any, eps: float, memory: Any, flags: Any) -> Launch:
    blocks, tile = _tile(*sizes[:3])
    return Launch(kernels.channel_map_kernel, (blocks,), (*sizes, eps, *memory), (*flags, *tile))


def gradients(
    x: Tensor,
    parts: passes.Parts,
    fusion: Channel,
    layout: ChannelLayout,
    tables: Tensor,
    grad_gates: Tensor | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    if parts.splits > FEW:
        parts = passes.summed(parts)
    channels, rows = x.shape[1], layout.rows
    out = passes.table(x, 2 * rows * channels + 4 * channels)
    start = _gradient(
        (rows, channels, fusion.groups, layout.count, parts.splits), fusion.eps, _flags(fusion)
    )
    start(parts.tables, tables, fusion.weight, fusion.bias, fusion.group_weight, out)
    dweight, dbias, *own = out[2 * rows * channels :].view(4, channels).unbind()
    if fusion.group_weight is not None and fusion.group_weight.shape[0] < channels:
        own = [d[: fusion.groups] for d in own]
    return out, (dweight, dbias, *own)


@lru_cache(maxsize=4096)
def _gradient(sizes: Any, eps: float, flags: Any) -> Launch:
    blocks, tile = _tile(*sizes[:3])
    return Launch(kernels.channel_gradient_kernel, (blocks,), (*sizes, eps), (*flags, *tile))


def _flags(fusion: Channel) -> tuple[int, ...]:
    """SOURCE, AFFINE, OWN."""
    own = 0
    if fusion.group_weight is not None:
        own = 1 if fusion.group_weight.shape[0] == fusion.groups else 2
    constant = fusion.given is not None or fusion.rate is not None
    return int(constant), fusion.weight is not None, own


def _tile(rows: int, channels: int, groups: int) -> tuple[int, tuple[int, ...]]:
    """How many programs for all groups, and D, ROWS, GROUPS, WIDE."""
    deep = channels // groups
    wide = passes.power_of_two(deep)
    many = max(1, COLUMNS // wide)
    high = max(1, min(passes.power_of_two(rows), 2048 // (many * wide), 128))
    return -(-groups // many), (deep, high, many, wide)


def expression(
    fusion: Channel,
    moments: Moments,
    parameters: tuple[Tensor | None, ...],
    tables: Tensor,
) -> tuple[Coefficients, Tensor | None]:
    weight, bias, *own = parameters
    rows, channels = moments.mean.shape
    statistics = moments.pooled(samples=None)
    if _flags(fusion)[0]:
        mean, var = tables[-2 * channels :].view(2, 1, channels)
        statistics = Moments(mean, var, 1)
    first = statistics.standardizing(fusion.eps).then(weight, bias)
    wide = channels // fusion.groups
    pooled = moments.after(first).pooled(channels=wide).standardizing(fusion.eps)
    second = Coefficients(*(spread(t, samples=rows, groups_of=wide) for t in pooled))
    if own[0] is not None and own[1] is not None:
        repeats = channels // own[0].shape[0]
        second = second.then(*(t.repeat_interleave(repeats) for t in own if t is not None))
    return first.then(*second), None
