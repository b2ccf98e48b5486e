"""Standardizations (bn, bgn, batch_renorm, gn, ln, in) on Triton: the launches of coefficients."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from normkit.core.fusion import Pool
from normkit.core.moments import Coefficients, Moments, spread
from normkit.engine import triton_backend as passes
from normkit.engine import triton_coefficients as kernels
from normkit.engine.family import ChannelLayout, Mapped
from normkit.engine.launch import launch

NO_RAMPS = (1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0)


def parameters(fusion: Pool) -> tuple[Tensor | None, ...]:
    return fusion.weight, fusion.bias


def mapped(x: Tensor, parts: passes.Parts, fusion: Pool, layout: ChannelLayout) -> Mapped:
    if fusion.kind == "batch":
        return _batch(x, parts, fusion, layout)
    channels, rows, groups = x.shape[1], layout.rows, fusion.groups
    tables, splits, span = parts
    made = passes.table(x, 2 * rows * (channels + groups))
    map, statistics = made.split((2 * rows * channels, 2 * rows * groups))
    many, sizes = _sample_sizes(channels, groups)
    launch(
        kernels.sample_map_kernel,
        (-(-groups // many), rows),
        (tables, fusion.weight, fusion.bias, map, statistics),
        (channels, groups, layout.count, splits, span, fusion.eps),
        (fusion.weight is not None, *sizes),
    )
    return Mapped(map.view(2, -1), statistics.view(2, -1), None, ())


def _batch(x: Tensor, parts: passes.Parts, fusion: Pool, layout: ChannelLayout) -> Mapped:
    channels, rows, groups = x.shape[1], layout.rows, fusion.groups
    tables, splits, span = parts
    memory, ramps = fusion.memory, fusion.ramps
    kept = 2 if ramps is not None else 0
    made = passes.table(x, 2 * channels + 2 * groups + kept * channels)
    map, statistics = made[: 2 * channels], made[2 * channels :]
    many, sizes = _batch_sizes(rows * splits, channels, groups)
    launch(
        kernels.batch_map_kernel,
        (-(-groups // many),),
        (
            tables,
            fusion.weight,
            fusion.bias,
            map,
            statistics,
            *((None,) * 5 if memory is None else memory[:5]),
            *((None,) * 5 if ramps is None else ramps[7:]),
        ),
        (
            *(rows, channels, groups, layout.count, splits, span, fusion.eps),
            *((0.0, 1.0) if memory is None else memory[5:]),
            *(NO_RAMPS if ramps is None else ramps[:7]),
        ),
        (fusion.weight is not None, memory is not None, ramps is not None, *sizes),
    )
    return Mapped(map.view(2, -1), statistics, None, ())


def gradients(
    x: Tensor,
    parts: passes.Parts,
    fusion: Pool,
    layout: ChannelLayout,
    found: Mapped,
    grad_gates: Tensor | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    channels, rows, groups = x.shape[1], layout.rows, fusion.groups
    tables, splits, _ = parts
    if fusion.kind == "batch":
        out = passes.table(x, 4, channels)
        many, sizes = _batch_sizes(rows * splits, channels, groups)
        launch(
            kernels.batch_gradient_kernel,
            (-(-groups // many),),
            (tables, fusion.weight, found.statistics, out),
            (rows, channels, groups, layout.count, splits, fusion.eps),
            (fusion.weight is not None, fusion.ramps is not None, *sizes),
        )
        extra, dweight, dbias = out.split((2, 1, 1))
        return extra, (dweight[0], dbias[0])
    out = passes.table(x, 4, rows * channels)
    many, sizes = _sample_sizes(channels, groups)
    launch(
        kernels.sample_gradient_kernel,
        (-(-groups // many), rows),
        (tables, fusion.weight, found.statistics, out),
        (channels, groups, layout.count, splits, fusion.eps),
        (fusion.weight is not None, *sizes),
    )
    if fusion.weight is None:
        return out[:2], (None, None)
    dweight, dbias = out[2:].view(2, rows, channels).sum(1).unbind()
    return out[:2], (dweight, dbias)


def expression(
    fusion: Pool,
    moments: Moments,
    parameters: tuple[Tensor | None, ...],
    found: Mapped,
) -> tuple[Coefficients, Tensor | None]:
    rows, columns = moments.mean.shape
    wide = columns // fusion.groups
    samples = None if fusion.kind == "batch" else 1
    map = moments.pooled(samples=samples, channels=wide).standardizing(fusion.eps)
    map = Coefficients(*(spread(t, samples=rows, groups_of=wide) for t in map))
    if fusion.ramps is not None:
        map = map.then(*found.statistics[2 * columns :].view(2, columns))
    return map.then(*parameters), None


@lru_cache(maxsize=1024)
def _batch_sizes(rows: int, channels: int, groups: int) -> tuple[int, tuple[int, ...]]:
    """Groups a program, and D, DEPTH, GROUPS, WIDE."""
    deep = channels // groups
    wide = passes.power_of_two(deep)
    many = max(1, 8 // wide)
    depth = max(1, min(2048 // (many * wide), passes.power_of_two(rows), 256))
    return many, (deep, depth, many, wide)


@lru_cache(maxsize=1024)
def _sample_sizes(channels: int, groups: int) -> tuple[int, tuple[int, ...]]:
    """Groups a program, and D, GROUPS, WIDE."""
    deep = channels // groups
    wide = passes.power_of_two(deep)
    many = max(1, min(passes.power_of_two(groups), 1024 // wide))
    return many, (deep, many, wide)
