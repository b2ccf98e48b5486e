"""Maps that look at each value alone: one launch forward; backward one, and a small one that adds
up the parts of the parameters' gradients.

    given statistics   x̂ = (x − mean) / √(var + eps)
    a squash           x̂ = tanh(alpha · x)

and then y = activation(weight · x̂ + bias + residual). With g the gradient before the activation:

    dweight = Σ g·x̂,  dbias = Σ g,  dx = g·weight·dx̂/dx,  dalpha = Σ g·weight·x·(1 − x̂²)

Statistics may change before the backward. So the forward of given ones writes down what it has
used, (4, C): scale, shift, center and 1/√(var + eps); the first three are a map as the passes know
it. Where nothing is learned and no activation follows, that is all that backward needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.core.fusion import Fixed, Squash
from normkit.engine import plain, remaking
from normkit.engine.activations import NUMBERS
from normkit.engine.dispatch import looked_into_backward
from normkit.engine.epilogue import AffineMap
from normkit.engine.families.family import ChannelLayout
from normkit.engine.families.pointwise_kernels import (
    flat_pointwise_gradient_kernel,
    flat_pointwise_kernel,
    pointwise_gradient_kernel,
    pointwise_kernel,
    pointwise_total_kernel,
)
from normkit.engine.replay.record import RecordedStep, Recording
from normkit.engine.triton import passes
from normkit.engine.triton.forms import FLAT_WARPS, power_of_two, reduction_of, sweep_of
from normkit.engine.triton.launch import Launch

UNROLL = 4  # tiles of x, and as many of dy, that a program of the backward asks for at once
LONG = 4096  # parts of dalpha that are read at once

Parameters = Sequence[Tensor | None]  # weight, bias, alpha


class PointwiseMap(NamedTuple):
    """What is computed, beside tensors."""

    fixed: bool  # given statistics; else a squash
    eps: float
    groups: int
    act: str
    layout: ChannelLayout


def pointwise(
    x: Tensor,
    description: Fixed | Squash,
    residual: Tensor | None,
    act: str,
    layout: ChannelLayout,
    record: RecordedStep | None = None,
) -> Tensor:
    """activation(weight · x̂ + bias + residual). A ``record`` is told what a step launches."""
    statistics: tuple[Tensor | None, ...] = (None, None)
    alpha = None
    if isinstance(description, Fixed):
        eps, groups, *statistics = description[:4]  # type: ignore[assignment]
        map = PointwiseMap(True, eps, groups, act, layout)
    else:
        alpha = description.alpha
        map = PointwiseMap(False, 0.0, 1, act, layout)
    weight, bias = description.weight, description.bias
    if torch.is_grad_enabled():
        made: Tensor = _Pointwise.apply(x, residual, weight, bias, alpha, statistics, map, record)
        return made
    recording = None
    if record is not None:
        recording = Recording(record.inputs(x, residual, (weight, bias, alpha)))
    with recording or nullcontext():
        y = write_map(x, residual, (weight, bias, alpha), statistics, map, None)
    if recording is not None and record is not None:
        record.forward_alone(recording, x, y, nothing_learned=False)
    return y


class _Pointwise(torch.autograd.Function):
    """Keeps x only where its values are needed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        alpha: Tensor | None,
        statistics: Parameters,
        map: PointwiseMap,
        record: RecordedStep | None,
    ) -> Any:
        parameters = weight, bias, alpha
        needs = ctx.needs_input_grad[:5]
        fixed, wanted = map.fixed, any(needs)
        recording = None
        if record is not None:
            recording = Recording(record.inputs(x, residual, parameters))
        with recording or nullcontext():
            kept = fixed and (wanted or remaking.active())
            tables = passes.table(x, 4 * x.shape[1]) if kept else None
            y = write_map(x, residual, parameters, statistics, map, tables)
        if tables is not None or not fixed:
            remaking.offer(y, x, residual, _maker(parameters, map, tables))
        ctx.map, ctx.record = map, None
        if recording is not None and record is not None:
            if wanted:
                held = alpha if tables is None else tables
                assert held is not None
                ctx.record = record.with_forward(recording, y, held)
                ctx.own = record.owns(parameters)
            else:
                record.forward_alone(recording, x, y, nothing_learned=True)
        recomputes = map.act != "none"
        # what is not learned may change, and of given statistics is in the tables
        saved = [
            p if need or not fixed else None for p, need in zip(parameters, needs[2:], strict=True)
        ]
        ctx.save_for_backward(
            x if recomputes or any(needs[2:]) or not fixed else None,
            residual if recomputes else None,
            tables,
            *saved,
        )
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, residual, tables, *parameters = ctx.saved_tensors
        map, needs, record = ctx.map, ctx.needs_input_grad[:5], ctx.record
        if looked_into_backward(grad):
            given = [x, residual, *parameters]
            back = _again(map, tables, given, grad, needs)
            return *back, None, None, None
        grad = map.layout.aligned(grad)
        recording = None
        if record is not None:
            own = [p for p, mine in zip(parameters, ctx.own, strict=True) if mine]
            held = parameters[2] if tables is None else tables
            recording = Recording([x, residual, *own, held, grad])
        with recording or nullcontext():
            dx, dr, found = write_gradients(grad, x, residual, tables, parameters, map, needs)
        like = dx if x is None else x
        if recording is not None and like is not None:
            mine = [d for d, mine in zip(found, ctx.own, strict=True) if mine]
            again = _looked_into(map, ctx.own)
            record.finish(
                *(recording, like, grad, dx, dr, mine, again),
                keeps_x=x is not None,
                learned=any(needs[2:]),
            )
            ctx.record = None  # a graph that is kept comes here again
        wanted = [
            None if d is None or p is None or not need else d.view(p.shape).to(p.dtype)
            for d, p, need in zip(found, parameters, needs[2:], strict=True)
        ]
        return dx, dr, *wanted, None, None, None


def _maker(parameters: Parameters, map: PointwiseMap, tables: Tensor | None) -> remaking.Make:
    """How the output is made again."""

    def make(x: Tensor, residual: Tensor | None) -> Tensor:
        if tables is None:
            return write_map(x, residual, parameters, (None, None), map, None)
        return passes.apply_map(x, tables, x.shape[1], residual, map.act, map.layout)

    return make


def _looked_into(map: PointwiseMap, own: Sequence[bool]) -> Callable[..., Any]:
    """The backward of a replayed step where someone looks into it."""

    def again(
        x: Tensor | None,
        residual: Tensor | None,
        parameters: Sequence[Tensor],
        tables: Tensor,
        grad: Tensor,
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        saved, wanted = iter(parameters), iter(needs[2:])
        given = [next(saved) if mine else None for mine in own]
        flags = [needs[0], needs[1], *(mine and next(wanted) for mine in own)]
        made = tables if map.fixed else None
        back = _again(map, made, [x, residual, *given], grad, flags)
        return [*back[:2], *(d for d, mine in zip(back[2:], own, strict=True) if mine)]

    return again


def _again(
    map: PointwiseMap,
    tables: Tensor | None,
    given: list[Tensor | None],
    grad: Tensor,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Where someone looks into a backward: through the plain expression."""
    layout, act = map.layout, map.act
    if given[0] is None:  # its values have no effect
        zeros = torch.zeros(layout.shape, dtype=grad.dtype, device=grad.device)
        given = [zeros.requires_grad_(), *given[1:]]

    def outputs(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        alpha: Tensor | None,
    ) -> list[Tensor]:
        if tables is None:
            assert alpha is not None
            return [plain.squashed(x, alpha, weight, bias, residual, act)]
        scale, shift, center, inverse = tables.view(4, 1, -1).expand(4, layout.rows, -1)
        if weight is not None:
            scale = inverse * weight.to(inverse.dtype)
        if bias is not None:
            shift = bias.to(inverse.dtype).expand(layout.rows, -1)
        return [plain.affine(x, AffineMap(scale, shift, center, residual, act), layout)]

    return plain.gradients_again(outputs, given, needs, grad)


# ---------------------------------------------------------------- launches


def write_map(
    x: Tensor,
    residual: Tensor | None,
    parameters: Parameters,
    statistics: Parameters,
    map: PointwiseMap,
    tables: Tensor | None,
) -> Tensor:
    """y; with ``tables``, what was made of the statistics is written there."""
    (weight, bias, alpha), layout = parameters, map.layout
    y = passes.like(layout, x)
    flags = not map.fixed, weight is not None, map.act, residual is not None, tables is not None
    start = _map(
        layout.extent, passes._multiprocessors(x.device), x.shape[1], map.groups, map.eps, flags
    )
    rest = None if residual is None else layout.aligned(residual)
    start(layout.aligned(x), *statistics, weight, bias, alpha, rest, y, tables)
    return y


@lru_cache(maxsize=4096)
def _map(
    extent: tuple[int, ...],
    multiprocessors: int,
    channels: int,
    groups: int,
    eps: float,
    flags: tuple[bool, bool, str, bool, bool],
) -> Launch:
    form = passes.form_of(extent)
    squash, affine, act, residual, keep = flags
    constants: tuple[int, ...] = squash, affine, NUMBERS[act], residual, keep
    deep = channels // groups
    if form.flat:
        grid = (form.cells // form.flat[1],)
        constants = *constants, *form.flat
        return Launch(flat_pointwise_kernel, grid, (channels, deep, eps), constants, FLAT_WARPS)
    sweep = sweep_of(form, multiprocessors)
    numbers = form.turns, form.cells, channels, deep, *sweep[:3], eps
    return Launch(pointwise_kernel, (sweep.tiles,), numbers, (*constants, sweep.wave, *form.tile))


def write_gradients(
    grad: Tensor,
    x: Tensor | None,
    residual: Tensor | None,
    tables: Tensor | None,
    parameters: Parameters,
    map: PointwiseMap,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """dx, the residual's gradient and those of the parameters, flat float32."""
    (weight, bias, alpha), layout, act = parameters, map.layout, map.act
    channels, sums = layout.shape[1], any(needs[2:])
    plain_residual = needs[1] and act == "none"
    keep = passes.like(layout, grad) if needs[1] and not plain_residual else None
    dr = grad if plain_residual else keep
    if tables is not None and not sums and keep is None:
        dx = None
        if needs[0]:
            own = grad if x is None else x
            dx = passes.apply_gradient(grad, own, tables, channels, residual, act, None, layout)
        return dx, dr, [None] * 3
    assert x is not None
    dx = passes.like(layout, x) if needs[0] else None
    affine = tables is not None or weight is not None
    flags = tables is None, affine, act, residual is not None, keep is not None, needs[0], sums
    size = layout.rows * channels
    start, splits, programs = _gradient(
        layout.extent, passes._multiprocessors(x.device), x.element_size(), channels, flags
    )
    parts = passes.table(x, 2 * splits * size) if sums and affine else None
    parts_of_alpha = passes.table(x, programs) if sums and tables is None else None
    rest = None if residual is None else layout.aligned(residual)
    given = tables, weight, bias, alpha, rest, keep, dx, parts, parts_of_alpha
    start(grad, layout.aligned(x), *given)
    found: list[Tensor | None] = [None] * 3
    if sums:
        squash = tables is None
        made = passes.table(x, (2 * channels if affine else 0) + int(squash))
        total = _total(splits * layout.rows, channels, programs, affine, squash)
        total(parts if affine else parts_of_alpha, parts_of_alpha, made)
        if affine:
            found[:2] = made[:channels], made[channels : 2 * channels]
        if squash:
            found[2] = made[-1:]
    return dx, dr, found


@lru_cache(maxsize=4096)
def _gradient(
    extent: tuple[int, ...],
    multiprocessors: int,
    bytes: int,
    channels: int,
    flags: tuple[bool, bool, str, bool, bool, bool, bool],
) -> tuple[Launch, int, int]:
    """The launch, into how many parts a cell is cut, and how many programs there are."""
    form = passes.form_of(extent)
    squash, affine, act, *rest = flags
    constants: tuple[int, ...] = squash, affine, NUMBERS[act], *rest
    if form.flat:
        programs = form.cells // form.flat[1]
        constants = *constants, *form.flat
        start = Launch(
            flat_pointwise_gradient_kernel, (programs,), (channels,), constants, FLAT_WARPS
        )
        return start, 1, programs
    reduction = reduction_of(form, multiprocessors)
    reduction = reduction._replace(unroll=min(reduction.unroll, UNROLL))
    grid = reduction.grid(form)
    numbers = form.turns, form.cells, reduction.span, channels
    constants = *constants, *reduction.tile(form, bytes)
    start = Launch(pointwise_gradient_kernel, grid, numbers, constants)
    return start, reduction.splits, grid[0] * grid[1] * grid[2]


@lru_cache(maxsize=4096)
def _total(rows: int, channels: int, programs: int, affine: bool, squash: bool) -> Launch:
    depth = min(power_of_two(rows), 32)
    width = max(8, min(power_of_two(channels), 1024 // depth))
    blocks = -(-channels // width) if affine else 1
    grid = blocks, (2 if affine else 0) + int(squash)
    numbers = rows, channels, programs
    constants = affine, squash, depth, width, min(power_of_two(programs), LONG)
    return Launch(pointwise_total_kernel, grid, numbers, constants)
