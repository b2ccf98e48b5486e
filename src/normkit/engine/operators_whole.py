"""normkit::fused: a whole layer as one operator, epilogue included; three launches each way.

A compiler sees a box with known sizes. Best where a residual or an activation is given, since the
box does them in the passes it makes anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.engine.operators_ready import on_triton
from normkit.engine.operators_records import (
    CONSTANTS,
    KIND,
    SLOTS,
    TAGS,
    Slots,
    cut,
    gathered,
    layout_of,
    outlined,
    sizes,
    whole_storage,
    written,
)

torch.library.define(
    "normkit::fused",
    f"(Tensor x, Tensor? residual, {SLOTS}, {CONSTANTS}, {KIND}, str activation)"
    " -> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)
torch.library.define(
    "normkit::fused_backward",
    f"(Tensor grad, Tensor? grad_gates, Tensor x, Tensor? residual, Tensor tables, {SLOTS}, {KIND},"
    " str activation, bool needs_x, bool needs_residual) -> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)


def _forward(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    passes, families = on_triton("normkit::fused", x)
    parameters, constants, (family, options, numbers, activation) = rest[:5], rest[5:8], rest[8:]
    fusion = gathered(x, parameters, constants, family, options, numbers)
    layout = layout_of(x, options)
    parts = passes.moment_parts(x, layout)
    tables, period, begin, gates = families[type(fusion)].made(x, parts, fusion, layout)
    y = passes.apply_map(x, tables, period, residual, activation, layout)
    gates = tables.new_empty(0) if gates is None else gates.clone()
    return y, written(tables, fusion, begin, x.shape[1]), gates


def _forward_fake(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), *made_fake(x, rest[8], rest[9])


def made_fake(x: Tensor, family: str, options: list[int]) -> tuple[Tensor, Tensor]:
    """Tables and gates as the families make them."""
    samples, channels = x.shape[:2]
    tables = x.new_empty(sizes(family, options, samples, channels).tables, dtype=torch.float32)
    gates = (samples, channels) if options[4] else (0,)
    return tables, x.new_empty(gates, dtype=torch.float32)


def _backward(
    grad: Tensor, grad_gates: Tensor | None, x: Tensor, residual: Tensor | None, tables: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    passes, families = on_triton("normkit::fused_backward", x)
    parameters, (family, options, numbers, act, needs_x, needs_residual) = rest[:5], rest[5:]
    fusion = outlined(x, tables, parameters, family, options, numbers)
    layout = layout_of(x, options)
    period = sizes(family, options, *x.shape[:2]).period
    parts, dr = passes.sum_parts(grad, x, tables, period, residual, act, layout, needs_residual)
    extra, found = families[type(fusion)].gradients(x, parts, fusion, layout, tables, grad_gates)
    dx = None
    if needs_x:
        dx = passes.apply_gradient(grad, x, tables, period, residual, act, extra, layout)
    return (
        x.new_empty(0) if dx is None else dx,
        x.new_empty(0) if dr is None else dr,
        whole_storage(found, parameters, x),
    )


def _backward_fake(
    grad: Tensor, grad_gates: Tensor | None, x: Tensor, residual: Tensor | None, tables: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    parameters, (family, options, _, _, needs_x, needs_residual) = rest[:5], rest[5:]
    dx = torch.empty_like(x) if needs_x else x.new_empty(0)
    dr = torch.empty_like(x) if needs_residual else x.new_empty(0)
    return dx, dr, x.new_empty(gradient_size(x, parameters, family, options), dtype=torch.float32)


def gradient_size(x: Tensor, parameters: Slots, family: str, options: list[int]) -> Any:
    """How long the tensor is at whose end the gradients of parameters stand."""
    if all(parameter is None for parameter in parameters):
        return 0
    if family == "pool-sample":  # a sum over the samples
        return 2 * x.shape[1]
    return sizes(family, options, *x.shape[:2]).gradients


# ---------------------------------------------------------------- the gradient


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, *rest = inputs
    _, tables, gates = output
    ctx.record = rest[8:]
    act = rest[11]
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.save_for_backward(x, residual if act != "none" else None, tables, *rest[:5])
    ctx.mark_non_differentiable(*((tables,) if rest[9][4] else (tables, gates)))
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: Tensor | None, _: Any, grad_gates: Tensor | None) -> Any:
    x, residual, tables, *parameters = ctx.saved_tensors
    family, options, numbers, act = ctx.record
    needs = ctx.needs_input_grad
    if grad is None:
        grad = torch.zeros_like(x)
    through = needs[1] and act != "none"
    dx, dr, found = torch.ops.normkit.fused_backward(
        grad, grad_gates, x, residual, tables, *parameters, family, options, numbers, act,
        needs[0], through,
    )  # fmt: skip
    period = sizes(family, options, *x.shape[:2]).period
    wanted = cut(found, family, tuple(parameters), needs[2:7], period, x.shape[1])
    if needs[1]:
        dr = (dr if through else grad).to(ctx.residual_dtype)
    return dx if needs[0] else None, dr if needs[1] else None, *wanted, *(None,) * 7


for name, real, fake in (
    ("normkit::fused", _forward, _forward_fake),
    ("normkit::fused_backward", _backward, _backward_fake),
):
    torch.library.impl(name, ("cpu", "cuda"), real)
    torch.library.register_fake(name, fake)
torch.library.register_autograd("normkit::fused", _gradient, setup_context=_setup)
