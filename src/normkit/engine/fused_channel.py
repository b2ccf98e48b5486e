"""Batch-channel normalization on Triton: the launches of coefficients."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from normkit.core.fusion import Channel
from normkit.core.moments import Coefficients, Moments, spread
from normkit.engine import triton_backend as passes
from normkit.engine import triton_channels as kernels
from normkit.engine.family import ChannelLayout, Mapped
from normkit.engine.launch import launch


def parameters(fusion: Channel) -> tuple[Tensor | None, ...]:
    return fusion.weight, fusion.bias, fusion.group_weight, fusion.group_bias


def mapped(x: Tensor, parts: passes.Parts, fusion: Channel, layout: ChannelLayout) -> Mapped:
    channels, rows = x.shape[1], layout.rows
    made = passes.table(x, 4, rows, channels)
    statistics = passes.table(x, 4 * channels)
    memory, given = fusion.memory, fusion.given
    if given is None and memory is not None:
        given = memory.mean, memory.second
    source, affine, own = _flags(fusion)

    def start(micro: bool, remember: bool, map: bool) -> None:
        many, sizes = _sizes(rows, channels, fusion.groups)
        launch(
            kernels.channel_map_kernel,
            (-(-fusion.groups // many),),
            (
                parts.tables,
                made,
                *parameters(fusion),
                *((None, None) if given is None else given),
                statistics,
                made[2:],
                *((None,) * 3 if memory is None else memory[2:5]),
                fusion.rate,
            ),
            (
                *(rows, channels, fusion.groups, layout.count, parts.splits, parts.span),
                fusion.eps,
                *((0.0, 1.0) if memory is None else memory[5:]),
            ),
            (source, micro, affine, own, remember, map, *sizes),
        )

    if memory is not None and fusion.rate is not None:
        start(micro=True, remember=True, map=False)  # every channel must be in before the map
        start(micro=True, remember=False, map=True)
    else:
        start(micro=False, remember=memory is not None, map=True)
    return Mapped(made[2:].view(2, -1), statistics, None, (made,))


def gradients(
    x: Tensor,
    parts: passes.Parts,
    fusion: Channel,
    layout: ChannelLayout,
    found: Mapped,
    grad_gates: Tensor | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    channels, rows = x.shape[1], layout.rows
    extra = passes.table(x, 2, rows * channels)
    grads = passes.table(x, 4, channels)
    many, sizes = _sizes(rows, channels, fusion.groups)
    launch(
        kernels.channel_gradient_kernel,
        (-(-fusion.groups // many),),
        (
            parts.tables,
            found.kept[0],
            found.statistics,
            fusion.weight,
            fusion.bias,
            fusion.group_weight,
            extra,
            grads,
        ),
        (rows, channels, fusion.groups, layout.count, parts.splits, fusion.eps),
        (*_flags(fusion), *sizes),
    )
    dweight, dbias, *own = grads.unbind()
    if fusion.group_weight is not None:
        own = [d[: fusion.group_weight.shape[0]] for d in own]
    return extra, (dweight, dbias, *own)


def expression(
    fusion: Channel,
    moments: Moments,
    parameters: tuple[Tensor | None, ...],
    found: Mapped,
) -> tuple[Coefficients, Tensor | None]:
    weight, bias, *own = parameters
    rows, channels = moments.mean.shape
    statistics = moments.pooled(samples=None)
    if _flags(fusion)[0]:
        mean, var = found.statistics[2 * channels :].view(2, 1, channels)
        statistics = Moments(mean, var, 1)
    first = statistics.standardizing(fusion.eps).then(weight, bias)
    wide = channels // fusion.groups
    pooled = moments.after(first).pooled(channels=wide).standardizing(fusion.eps)
    second = Coefficients(*(spread(t, samples=rows, groups_of=wide) for t in pooled))
    if own[0] is not None and own[1] is not None:
        repeats = channels // own[0].shape[0]
        second = second.then(*(t.repeat_interleave(repeats) for t in own if t is not None))
    return first.then(*second), None


def _flags(fusion: Channel) -> tuple[int, ...]:
    """SOURCE, AFFINE, OWN."""
    own: Any = 0
    if fusion.group_weight is not None:
        own = 1 if fusion.group_weight.shape[0] == fusion.groups else 2
    constant = fusion.given is not None or fusion.rate is not None
    return int(constant), fusion.weight is not None, own


@lru_cache(maxsize=1024)
def _sizes(rows: int, channels: int, groups: int) -> tuple[int, tuple[int, ...]]:
    """Groups a program, and D, ROWS, GROUPS, WIDE."""
    deep = channels // groups
    wide = passes.power_of_two(deep)
    many = max(1, 8 // wide)
    high = max(1, min(passes.power_of_two(rows), 2048 // (many * wide), 128))
    return many, (deep, high, many, wide)
