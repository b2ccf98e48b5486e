"""Gated batch norms (rbn, iebn, the first part of ubn) on Triton: the launches of coefficients."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from normkit.core.fusion import Gate
from normkit.core.moments import Coefficients, Moments
from normkit.engine import triton_backend as passes
from normkit.engine import triton_gated as kernels
from normkit.engine.family import ChannelLayout, Mapped
from normkit.engine.launch import launch

LOOKS_AT = {"nothing": 0, "normalized": 1, "input": 2}


def parameters(fusion: Gate) -> tuple[Tensor | None, ...]:
    return fusion.weight, fusion.bias, fusion.gate_weight, fusion.gate_bias, fusion.center


def mapped(x: Tensor, parts: passes.Parts, fusion: Gate, layout: ChannelLayout) -> Mapped:
    channels, rows = x.shape[1], layout.rows
    tables, splits, span = parts
    memory, given = fusion.memory, fusion.given
    if given is None and memory is not None:
        given = memory.mean, memory.second
    made = passes.table(x, 5 if fusion.keeps_gates else 4, rows, channels)
    statistics = passes.table(x, 4 * channels + 1)
    map = made[2:4]
    gates = made[4] if fusion.keeps_gates else None
    columns, sizes = _sizes(rows, channels)
    launch(
        kernels.gate_map_kernel,
        (-(-channels // columns),),
        (
            tables,
            made,
            fusion.center,
            fusion.gate_weight,
            fusion.gate_bias,
            fusion.weight,
            fusion.bias,
            *((None, None) if given is None else given),
            fusion.score,
            statistics,
            map,
            gates,
            *((None,) * 3 if memory is None else memory[2:5]),
        ),
        (
            *(rows, channels, layout.count, splits, span, fusion.eps, fusion.tau),
            *((0.0, 1.0) if memory is None else memory[5:]),
        ),
        (*_flags(fusion), memory is not None, *sizes),
    )
    return Mapped(map.view(2, -1), statistics, gates, (made,))


def gradients(
    x: Tensor,
    parts: passes.Parts,
    fusion: Gate,
    layout: ChannelLayout,
    found: Mapped,
    grad_gates: Tensor | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    channels, rows = x.shape[1], layout.rows
    tables, splits, _ = parts
    extra = passes.table(x, 2, rows * channels)
    grads = passes.table(x, 5, channels)
    columns, sizes = _sizes(rows, channels)
    flags = _flags(fusion)
    launch(
        kernels.gate_gradient_kernel,
        (-(-channels // columns),),
        (
            tables,
            found.kept[0],
            found.statistics,
            fusion.center,
            fusion.gate_weight,
            fusion.gate_bias,
            fusion.weight,
            None if grad_gates is None else grad_gates.contiguous(),
            extra,
            grads,
        ),
        (rows, channels, layout.count, splits, fusion.eps),
        (*flags[:-1], grad_gates is not None, *sizes),
    )
    return extra, grads.unbind()


def expression(
    fusion: Gate,
    moments: Moments,
    parameters: tuple[Tensor | None, ...],
    found: Mapped,
) -> tuple[Coefficients, Tensor | None]:
    weight, bias, gate_weight, gate_bias, center = parameters
    assert gate_bias is not None
    added = moments.mean * 0 if center is None else center * moments.mean
    calibrated = Moments(moments.mean + added, moments.var, moments.count)
    statistics = calibrated.pooled(samples=None)
    if fusion.given is not None:
        channels = moments.mean.shape[1]
        used = found.statistics[2 * channels : 4 * channels].view(2, 1, channels)
        batch = torch.zeros((), dtype=torch.bool, device=used.device)
        if fusion.score is not None:
            batch = found.statistics[4 * channels] > 0
        mean, var = (
            torch.where(batch, of_batch, constant)
            for of_batch, constant in zip((statistics.mean, statistics.var), used, strict=True)
        )
        statistics = Moments(mean, var, 1)
    standardized = statistics.standardizing(fusion.eps)
    z = gate_bias
    if gate_weight is not None:
        seen = moments.mean
        if fusion.looks_at == "normalized":
            seen = standardized.of(calibrated.mean)
        z = gate_weight * seen + gate_bias
    s = torch.sigmoid(z).expand_as(moments.mean)
    return standardized.after_adding(added).then(s, None).then(weight, bias), s


def _flags(fusion: Gate) -> tuple[int, ...]:
    """SOURCE, CENTER, GATE, AFFINE, KEEP."""
    source = 0 if fusion.given is None else 1 if fusion.score is None else 2
    gate = 0 if fusion.gate_weight is None else LOOKS_AT[fusion.looks_at]
    affine = fusion.weight is not None
    return source, fusion.center is not None, gate, affine, fusion.keeps_gates


@lru_cache(maxsize=1024)
def _sizes(rows: int, channels: int) -> tuple[int, tuple[int, ...]]:
    """Columns a program, and ROWS, COLS."""
    columns = 8
    return columns, (min(passes.power_of_two(rows), 128), columns)
