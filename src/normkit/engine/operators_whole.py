"""normkit::fused: a whole layer as one operator, epilogue included; three launches each way.

A compiler sees a box with known sizes. Best where a residual or an activation is given, since the
box does them in the passes it makes anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.engine import operators_records as records
from normkit.engine.operators_ready import on_triton
from normkit.engine.operators_records import KIND, SLOTS, TAGS

torch.library.define(
    "normkit::fused",
    f"(Tensor x, Tensor? residual, {SLOTS}, Tensor? mean, Tensor? second, {KIND}, str activation)"
    " -> (Tensor, Tensor)",
    tags=TAGS,
)
torch.library.define(
    "normkit::fused_backward",
    f"(Tensor grad, Tensor x, Tensor? residual, Tensor tables, {SLOTS}, {KIND}, str activation,"
    " bool needs_x, bool needs_residual) -> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)


def _forward(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """The output, and the tables: see the families for what is in them."""
    passes, families = on_triton("normkit::fused", x)
    *kind, activation = rest[7:]
    fusion = records.gathered(x, rest[:5], rest[5:7], *kind)
    layout = records.layout_of(x, kind[1])
    parts = passes.moment_parts(x, layout)
    tables, period, begin, _ = families[type(fusion)].made(x, parts, fusion, layout)
    y = passes.apply_map(x, tables, period, residual, activation, layout)
    return y, records.written(tables, fusion, begin, x.shape[1])


def _forward_fake(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    size = records.sizes(x, *rest[7:9]).tables
    return torch.empty_like(x), x.new_empty(size, dtype=torch.float32)


def _backward(
    grad: Tensor, x: Tensor, residual: Tensor | None, tables: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, the gradient of the residual, and what holds those of the parameters."""
    passes, families = on_triton("normkit::fused_backward", x)
    parameters, (*kind, act, needs_x, needs_residual) = rest[:5], rest[5:]
    fusion = records.outlined(x, tables, parameters, *kind)
    layout = records.layout_of(x, kind[1])
    period = records.sizes(x, *kind[:2]).period
    parts, dr = passes.sum_parts(grad, x, tables, period, residual, act, layout, needs_residual)
    extra, found = families[type(fusion)].gradients(x, parts, fusion, layout, tables, None)
    dx = x.new_empty(0)
    if needs_x:
        dx = passes.apply_gradient(grad, x, tables, period, residual, act, extra, layout)
    found = records.whole_storage(found, parameters, x)
    return dx, x.new_empty(0) if dr is None else dr, found


def _backward_fake(
    grad: Tensor, x: Tensor, residual: Tensor | None, tables: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    parameters, (*kind, _, needs_x, needs_residual) = rest[:5], rest[5:]
    dx, dr = (torch.empty_like(x) if need else x.new_empty(0) for need in (needs_x, needs_residual))
    size = records.gradient_size(x, parameters, *kind[:2])
    return dx, dr, x.new_empty(size, dtype=torch.float32)


# ---------------------------------------------------------------- the gradient


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, *rest = inputs
    ctx.kind = rest[7:]
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.save_for_backward(x, residual if rest[-1] != "none" else None, output[1], *rest[:5])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: Tensor | None, _: None) -> Any:
    if grad is None:
        return (None,) * 13
    x, residual, tables, *parameters = ctx.saved_tensors
    *kind, act = ctx.kind
    needs = ctx.needs_input_grad
    through = needs[1] and act != "none"  # otherwise the residual's gradient is the output's
    dx, dr, found = torch.ops.normkit.fused_backward(
        grad, x, residual, tables, *parameters, *kind, act, needs[0], through
    )
    sizes = records.sizes(x, *kind[:2])
    wanted = records.cut(found, kind[0], tuple(parameters), needs[2:7], sizes, x.shape[1])
    if needs[1]:
        dr = (dr if through else grad).to(ctx.residual_dtype)
    return dx if needs[0] else None, dr if needs[1] else None, *wanted, *(None,) * 6


for _name, _real, _fake in (
    ("normkit::fused", _forward, _forward_fake),
    ("normkit::fused_backward", _backward, _backward_fake),
):
    torch.library.impl(_name, ("cpu", "cuda"), _real)
    torch.library.register_fake(_name, _fake)
torch.library.register_autograd("normkit::fused", _gradient, setup_context=_setup)
