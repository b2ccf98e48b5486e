"""Gated batch norms (rbn, iebn, the first part of ubn) on Triton: the launches of coefficients."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from normkit.core.fusion import Gate
from normkit.core.moments import Coefficients, Moments
from normkit.engine import triton_backend as passes
from normkit.engine import triton_gated as kernels
from normkit.engine.condensation import update_score
from normkit.engine.family import ChannelLayout, Made
from normkit.engine.launch import Launch

LOOKS_AT = {"nothing": 0, "normalized": 1, "input": 2}
FEW = 16  # parts of a cell: a kernel that goes through samples may merge so many by itself
COLUMNS = 8


def parameters(fusion: Gate) -> tuple[Tensor | None, ...]:
    return fusion.weight, fusion.bias, fusion.gate_weight, fusion.gate_bias, fusion.center


def made(x: Tensor, parts: passes.Parts, fusion: Gate, layout: ChannelLayout) -> Made:
    if fusion.condensation is not None and fusion.score is not None:
        update_score(x, parts, layout, fusion.score, fusion.condensation)
    if parts.splits > FEW:
        parts = passes.merged(x, parts, layout, sums=True)
    channels, rows = x.shape[1], layout.rows
    memory, given = fusion.memory, fusion.given
    if given is None and memory is not None:
        given = memory.mean, memory.second
    size = rows * channels
    tables = passes.table(x, (5 if fusion.keeps_gates else 4) * size + 4 * channels + 1)
    start = _map(
        (rows, channels, layout.count, parts.splits, parts.span),
        (fusion.eps, fusion.tau),
        (0.0, 1.0) if memory is None else memory[5:],
        (*_flags(fusion), memory is not None),
    )
    start(
        parts.tables,
        tables,
        fusion.center,
        fusion.gate_weight,
        fusion.gate_bias,
        fusion.weight,
        fusion.bias,
        *((None, None) if given is None else given),
        fusion.score,
        *((None,) * 3 if memory is None else memory[2:5]),
    )
    gates = None
    if fusion.keeps_gates:
        gates = tables.as_strided((rows, channels), (channels, 1), 4 * size + 4 * channels)
    return Made(tables, size, 4 * size, gates)


@lru_cache(maxsize=4096)
def _map(sizes: Any, numbers: Any, memory: Any, flags: Any) -> Launch:
    rows, channels = sizes[:2]
    constants = *flags, min(passes.power_of_two(rows), 128), COLUMNS
    grid = (-(-channels // COLUMNS),)
    return Launch(kernels.gate_map_kernel, grid, (*sizes, *numbers, *memory), constants)


def gradients(
    x: Tensor,
    parts: passes.Parts,
    fusion: Gate,
    layout: ChannelLayout,
    tables: Tensor,
    grad_gates: Tensor | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    if parts.splits > FEW:
        parts = passes.summed(parts)
    channels, rows = x.shape[1], layout.rows
    size = rows * channels
    out = passes.table(x, 2 * size + 5 * channels)
    start = _gradient(
        (rows, channels, layout.count, parts.splits),
        fusion.eps,
        (*_flags(fusion), grad_gates is not None),
    )
    start(
        parts.tables,
        tables,
        fusion.center,
        fusion.gate_weight,
        fusion.gate_bias,
        fusion.weight,
        None if grad_gates is None else grad_gates.contiguous(),
        out,
    )
    return out, out[2 * size :].view(5, channels).unbind()


@lru_cache(maxsize=4096)
def _gradient(sizes: Any, eps: float, flags: Any) -> Launch:
    rows, channels = sizes[:2]
    constants = *flags, min(passes.power_of_two(rows), 128), COLUMNS
    grid = (-(-channels // COLUMNS),)
    return Launch(kernels.gate_gradient_kernel, grid, (*sizes, eps), constants)


def _flags(fusion: Gate) -> tuple[int, ...]:
    """SOURCE, CENTER, GATE, AFFINE, KEEP."""
    source = 0 if fusion.given is None else 1 if fusion.score is None else 2
    gate = 0 if fusion.gate_weight is None else LOOKS_AT[fusion.looks_at]
    affine = fusion.weight is not None
    return source, fusion.center is not None, gate, affine, fusion.keeps_gates


def expression(
    fusion: Gate,
    moments: Moments,
    parameters: tuple[Tensor | None, ...],
    tables: Tensor,
) -> tuple[Coefficients, Tensor | None]:
    weight, bias, gate_weight, gate_bias, center = parameters
    assert gate_bias is not None
    added = moments.mean * 0 if center is None else center * moments.mean
    calibrated = Moments(moments.mean + added, moments.var, moments.count)
    statistics = calibrated.pooled(samples=None)
    if fusion.given is not None:
        rows, channels = moments.mean.shape
        begin = 4 * rows * channels + 2 * channels
        used = tables[begin : begin + 2 * channels].view(2, 1, channels)
        batch = tables[-1] > 0 if fusion.score is not None else torch.zeros_like(tables[-1]) > 0
        mean, var = (
            torch.where(batch, of_batch, constant)
            for of_batch, constant in zip((statistics.mean, statistics.var), used, strict=True)
        )
        statistics = Moments(mean, var, 1)
    standardized = statistics.standardizing(fusion.eps)
    z = gate_bias.float()
    if gate_weight is not None:
        seen = moments.mean
        if fusion.looks_at == "normalized":
            seen = standardized.of(calibrated.mean)
        z = gate_weight * seen + gate_bias
    s = torch.sigmoid(z).expand_as(moments.mean)
    return standardized.after_adding(added).then(s, None).then(weight, bias), s
