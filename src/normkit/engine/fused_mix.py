"""Switchable normalization on Triton: the launches of coefficients, two each way."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from normkit.core.fusion import Mix
from normkit.core.moments import Coefficients, Moments
from normkit.engine import triton_backend as passes
from normkit.engine import triton_mix, triton_mix_gradients
from normkit.engine.family import ChannelLayout, Made
from normkit.engine.fused_gate import COLUMNS, FEW
from normkit.engine.launch import Launch

WIDTH = 1024  # channels of a sample at once
HIGH = 128  # samples of a channel at once


def parameters(fusion: Mix) -> tuple[Tensor | None, ...]:
    return fusion.weight, fusion.bias, fusion.mean_weight, fusion.var_weight


def made(x: Tensor, parts: passes.Parts, fusion: Mix, layout: ChannelLayout) -> Made:
    if parts.splits > FEW:
        parts = passes.merged(x, parts, layout, sums=True)
    channels, rows = x.shape[1], layout.rows
    memory, given = fusion.memory, fusion.given
    tables = passes.table(x, (4 * channels + 2) * rows + 2 * channels)
    samples, map = _map(
        (rows, channels, layout.count, parts.splits, parts.span),
        (fusion.unbias, fusion.eps),
        (0.0, 1.0) if memory is None else memory[5:],
        (*_flags(fusion), memory is not None),
    )
    samples(parts.tables, tables)
    if given is None and memory is not None:
        given = memory.mean, memory.second
    map(
        tables,
        *parameters(fusion),
        *((None, None) if given is None else given),
        *((None,) * 3 if memory is None else memory[2:5]),
    )
    return Made(tables, rows * channels, 4 * rows * channels, None)


@lru_cache(maxsize=4096)
def _map(sizes: Any, numbers: Any, memory: Any, flags: Any) -> tuple[Launch, Launch]:
    rows, channels = sizes[:2]
    unbias, eps = numbers
    width = min(passes.power_of_two(channels), WIDTH)
    samples = Launch(triton_mix.mix_samples_kernel, (rows,), (*sizes, unbias), (width,))
    numbers, (grid, tile) = (rows, channels, eps, *memory), _tile(rows, channels)
    return samples, Launch(triton_mix.mix_map_kernel, grid, numbers, (*flags, *tile))


def gradients(
    x: Tensor,
    parts: passes.Parts,
    fusion: Mix,
    layout: ChannelLayout,
    tables: Tensor,
    grad_gates: Tensor | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    if parts.splits > FEW:
        parts = passes.summed(parts)
    channels, rows = x.shape[1], layout.rows
    begin = 2 * rows * channels
    logits = begin + 2 * channels
    out = passes.table(x, logits + 6 + 6 * rows)
    samples, gradient = _gradient(
        (rows, channels, layout.count, parts.splits), (fusion.eps, fusion.unbias), _flags(fusion)
    )
    given = fusion.weight, fusion.mean_weight, fusion.var_weight
    samples(parts.tables, tables, *given, out)
    gradient(parts.tables, tables, *given, out)
    dweight, dbias = out[begin:logits].view(2, channels).unbind()
    dmean, dvar = out[logits : logits + 6].view(2, 3)[:, : fusion.mean_weight.shape[0]].unbind()
    return out, (dweight, dbias, dmean, dvar)


@lru_cache(maxsize=4096)
def _gradient(sizes: Any, numbers: Any, flags: Any) -> tuple[Launch, Launch]:
    rows, channels, _, splits = sizes
    eps, _ = numbers
    parts, _, affine = flags
    width = min(passes.power_of_two(channels), WIDTH)
    samples = Launch(
        triton_mix_gradients.mix_samples_gradient_kernel,
        (rows,),
        (rows, channels, splits, eps),
        (parts, affine, width),
    )
    grid, tile = _tile(rows, channels)
    kernel = triton_mix_gradients.mix_gradient_kernel
    return samples, Launch(kernel, grid, (*sizes, *numbers), (*flags, *tile))


def _flags(fusion: Mix) -> tuple[int, ...]:
    """PARTS, GIVEN, AFFINE."""
    return fusion.mean_weight.shape[0], fusion.given is not None, fusion.weight is not None


def _tile(rows: int, channels: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The grid of kernels that own channels; ROWS and COLS."""
    return (-(-channels // COLUMNS),), (min(passes.power_of_two(rows), HIGH), COLUMNS)


def expression(
    fusion: Mix,
    moments: Moments,
    parameters: tuple[Tensor | None, ...],
    tables: Tensor,
) -> tuple[Coefficients, Tensor | None]:
    weight, bias, mean_weight, var_weight = parameters
    assert mean_weight is not None and var_weight is not None
    rows, channels = moments.mean.shape
    own = Moments(moments.mean, moments.var * fusion.unbias, moments.count)
    statistics = [own, own.pooled(channels=channels), own.pooled(samples=None)]
    if fusion.given is not None:
        begin = 4 * rows * channels
        mean, var = tables[begin : begin + 2 * channels].view(2, 1, channels)
        statistics[2] = Moments(mean, var, 1)
    # two shares, if there is no batch part
    shares = torch.softmax(mean_weight.float(), 0), torch.softmax(var_weight.float(), 0)
    each = tuple(zip(shares[0], statistics, strict=False))
    mean = torch.stack([(share * part.mean).expand_as(own.mean) for share, part in each]).sum(0)
    each = tuple(zip(shares[1], statistics, strict=False))
    var = torch.stack([(share * part.var).expand_as(own.var) for share, part in each]).sum(0)
    return Moments(mean, var, 1).standardizing(fusion.eps).then(weight, bias), None
