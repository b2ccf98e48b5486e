"""Plain standardizations on Triton: three launches forward and, for a batch, three backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.layout import Batch, Channels
from normkit.core.moments import Moments, spread
from normkit.core.pool import Pool
from normkit.engine import plain
from normkit.engine import triton_backend as passes
from normkit.engine import triton_coefficients as kernels
from normkit.engine.epilogue import AffineMap
from normkit.engine.launch import launch

ChannelLayout = Batch | Channels


def standardize(
    x: Tensor,
    pool: Pool,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    act: str,
    layout: ChannelLayout,
) -> tuple[Tensor, Tensor]:
    """The whole layer, and mean and variance of its pools, (2, pools), which carry no gradient."""
    return _Standardize.apply(x, weight, bias, residual, pool, act, layout)


class _Standardize(torch.autograd.Function):
    """The same numbers as the generic path gives; here without tables in between."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        pool: Pool,
        act: str,
        layout: ChannelLayout,
    ) -> Any:
        parts = passes.moment_parts(x, layout)
        map, statistics = _map(x, parts, pool, weight, bias, layout)
        y = passes.apply_map(x, map, residual, act, layout)
        kept = residual if act != "none" else None
        ctx.save_for_backward(x, weight, bias, kept, map, statistics)
        ctx.pool, ctx.act, ctx.layout = pool, act, layout
        ctx.mark_non_differentiable(statistics)
        return y, statistics

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        x, weight, bias, residual, map, statistics = ctx.saved_tensors
        pool, act, layout = ctx.pool, ctx.act, ctx.layout
        needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():
            return (*_again(ctx, grad, x, weight, bias, residual), None, None, None)
        parts, dr = passes.sum_parts(grad, x, map, residual, act, layout, needs_residual)
        extra, dweight, dbias = _gradients(x, parts, pool, weight, map, statistics, layout)
        dx = None
        if needs_x:
            dx = passes.apply_gradient(grad, x, map, residual, act, extra, layout)
        return (
            dx,
            dweight.to(weight.dtype) if needs_weight else None,
            dbias.to(bias.dtype) if needs_bias else None,
            dr,
            None,
            None,
            None,
        )


def _map(
    x: Tensor,
    parts: passes.Parts,
    pool: Pool,
    weight: Tensor | None,
    bias: Tensor | None,
    layout: ChannelLayout,
) -> tuple[Tensor, Tensor]:
    """One launch: the map, and the statistics (2, pools) it was made of."""
    channels, rows = x.shape[1], layout.rows
    tables, splits, span = parts
    gamma, beta = (tables if t is None else t for t in (weight, bias))
    if pool.kind == "batch":
        found = torch.empty((4, channels), dtype=torch.float32, device=x.device)
        launch(
            kernels.batch_map_kernel,
            (-(-channels // 8),),
            tables,
            gamma,
            beta,
            found,
            rows,
            channels,
            layout.count,
            splits,
            span,
            rows * layout.count,
            pool.eps,
            AFFINE=weight is not None,
            **_batch_options(rows * splits),
        )
        return found[:2], found[2:]
    map = torch.empty((2, rows * channels), dtype=torch.float32, device=x.device)
    statistics = torch.empty((2, rows * pool.groups), dtype=torch.float32, device=x.device)
    options = _sample_options(channels, pool.groups)
    launch(
        kernels.sample_map_kernel,
        (-(-pool.groups // options["GROUPS"]), rows),
        tables,
        gamma,
        beta,
        map,
        statistics,
        channels,
        pool.groups,
        layout.count,
        splits,
        span,
        pool.eps,
        AFFINE=weight is not None,
        **options,
    )
    return map, statistics


def _gradients(
    x: Tensor,
    parts: passes.Parts,
    pool: Pool,
    weight: Tensor | None,
    map: Tensor,
    statistics: Tensor,
    layout: ChannelLayout,
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch: constant and slope of dx, and the gradients of weight and bias."""
    channels, rows = x.shape[1], layout.rows
    tables, splits, _ = parts
    gamma = tables if weight is None else weight
    if pool.kind == "batch":
        out = torch.empty((4, channels), dtype=torch.float32, device=x.device)
        launch(
            kernels.batch_gradient_kernel,
            (-(-channels // 8),),
            tables,
            gamma,
            statistics,
            out,
            rows,
            channels,
            splits,
            rows * layout.count,
            pool.eps,
            AFFINE=weight is not None,
            **_batch_options(rows * splits),
        )
        extra, dweight, dbias = out.split((2, 1, 1))
        return extra, dweight[0], dbias[0]
    out = torch.empty((4, rows * channels), dtype=torch.float32, device=x.device)
    options = _sample_options(channels, pool.groups)
    launch(
        kernels.sample_gradient_kernel,
        (-(-pool.groups // options["GROUPS"]), rows),
        tables,
        gamma,
        statistics,
        out,
        channels,
        pool.groups,
        layout.count,
        splits,
        pool.eps,
        AFFINE=weight is not None,
        **options,
    )
    dweight, dbias = out[2:].view(2, rows, channels).sum(1)
    return out[:2], dweight, dbias


def _batch_options(rows: int) -> dict[str, int]:
    return {"DEPTH": min(256, passes.power_of_two(rows)), "WIDTH": 8, "num_warps": 4}


def _sample_options(channels: int, groups: int) -> dict[str, int]:
    depth = channels // groups
    wide = passes.power_of_two(depth)
    many = max(1, min(passes.power_of_two(groups), 1024 // wide))
    return {"D": depth, "WIDE": wide, "GROUPS": many, "num_warps": 4}


def _again(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Any
) -> tuple[Tensor | None, ...]:
    """The backward of a backward: through the plain expression, which autograd differentiates."""
    pool, layout = ctx.pool, ctx.layout
    found = Moments(*plain.moments(x, layout), layout.count)
    if pool.kind == "batch":
        map = found.pooled(samples=None).standardizing(pool.eps)
    else:
        wide = x.shape[1] // pool.groups
        pooled = found.pooled(channels=wide).standardizing(pool.eps)
        map = type(pooled)(*(spread(t, samples=layout.rows, groups_of=wide) for t in pooled))
    size = (layout.rows, layout.columns)
    scale, shift = (t.expand(size) for t in map.then(weight, bias))
    y = plain.affine(x, AffineMap(scale, shift, residual, ctx.act), layout)
    wanted = [x, weight, bias, residual]
    inputs = [t for t, needed in zip(wanted, ctx.needs_input_grad[:4], strict=True) if needed]
    if residual is None and ctx.needs_input_grad[3]:
        inputs = [t for t in inputs if t is not None]
    found_grads = iter(torch.autograd.grad(y, inputs, grad, create_graph=True))
    return tuple(
        (grad if i == 3 and residual is None else next(found_grads)) if needed else None
        for i, needed in enumerate(ctx.needs_input_grad[:4])
    )


def remember(
    statistics: Tensor,
    running: tuple[Tensor, Tensor],
    counters: tuple[Tensor, Tensor],
    weight: float,
    correction: float,
) -> None:
    """One launch: the running statistics and both counters, whole or not at all."""
    size = statistics.shape[1]
    launch(
        kernels.remember_kernel,
        (1,),
        statistics,
        *running,
        *counters,
        size,
        weight,
        correction,
        WIDTH=1024,
    )
