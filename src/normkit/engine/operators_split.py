"""normkit::coefficients: the tables of the map alone; the map itself stays an expression.

For a compiler this is a reduction of x to a small tensor, and back again. What touches the whole
tensor elementwise, y = a·x + b and dx = a·g + constant + slope·x, it sees, and fuses with whatever
stands beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.layout import Batch, Channels
from normkit.engine import plain
from normkit.engine.operators_ready import on_triton
from normkit.engine.operators_records import (
    CONSTANTS,
    KIND,
    SLOTS,
    TAGS,
    cut,
    gathered,
    layout_of,
    outlined,
    sizes,
    whole_storage,
    written,
)
from normkit.engine.operators_whole import gradient_size, made_fake

torch.library.define(
    "normkit::coefficients",
    f"(Tensor x, {SLOTS}, {CONSTANTS}, {KIND}) -> (Tensor, Tensor)",
    tags=TAGS,
)
torch.library.define(
    "normkit::coefficients_backward",
    f"(Tensor grad_tables, Tensor? grad_gates, Tensor x, Tensor tables, {SLOTS}, {KIND})"
    " -> (Tensor, Tensor)",
    tags=TAGS,
)


def _forward(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    passes, families = on_triton("normkit::coefficients", x)
    fusion = gathered(x, rest[:5], rest[5:8], *rest[8:])
    layout = layout_of(x, rest[9])
    made = families[type(fusion)].made(x, passes.moment_parts(x, layout), fusion, layout)
    gates = made.tables.new_empty(0) if made.gates is None else made.gates.clone()
    return written(made.tables, fusion, made.statistics, x.shape[1]), gates


def _forward_fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return made_fake(x, rest[8], rest[9])


def _backward(
    grad_tables: Tensor, grad_gates: Tensor | None, x: Tensor, tables: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """``grad_tables`` begins with the gradients of scale and shift. Gives what begins with constant
    and slope of dx; and the gradients of the parameters where they are not at its end."""
    passes, families = on_triton("normkit::coefficients_backward", x)
    parameters, (family, options, numbers) = rest[:5], rest[5:]
    fusion = outlined(x, tables, parameters, family, options, numbers)
    # the sums over all samples are there already if the samples share a map
    layout = Batch.of(x) if family == "pool-batch" else layout_of(x, options)
    parts = passes.Parts(grad_tables.contiguous(), 1, layout.count)
    out, found = families[type(fusion)].gradients(x, parts, fusion, layout, tables, grad_gates)
    if family == "pool-sample":
        return out, whole_storage(found, parameters, x)
    return out, x.new_empty(0, dtype=torch.float32)


def _backward_fake(
    grad_tables: Tensor, grad_gates: Tensor | None, x: Tensor, tables: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    parameters, (family, options, _) = rest[:5], rest[5:]
    out = x.new_empty(sizes(family, options, *x.shape[:2]).gradients, dtype=torch.float32)
    apart = gradient_size(x, parameters, family, options) if family == "pool-sample" else 0
    return out, x.new_empty(apart, dtype=torch.float32)


# ---------------------------------------------------------------- the gradient


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, *rest = inputs
    tables, gates = output
    ctx.record = rest[8:]
    ctx.save_for_backward(x, tables, *rest[:5])
    if not rest[9][4]:
        ctx.mark_non_differentiable(gates)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad_tables: Tensor | None, grad_gates: Tensor | None) -> Any:
    x, tables, *parameters = ctx.saved_tensors
    family, options, numbers = ctx.record
    needs = ctx.needs_input_grad
    if grad_tables is None:
        grad_tables = torch.zeros_like(tables)
    out, apart = torch.ops.normkit.coefficients_backward(
        grad_tables, grad_gates, x, tables, *parameters, family, options, numbers
    )
    found = apart if family == "pool-sample" else out
    period = sizes(family, options, *x.shape[:2]).period
    wanted = cut(found, family, tuple(parameters), needs[1:6], period, x.shape[1])
    dx = None
    if needs[0]:
        layout = Batch(x) if options[0] else Channels(x)
        constant, slope = (
            t.view(-1, x.shape[1]).expand(layout.rows, x.shape[1])
            for t in (out[:period], out[period : 2 * period])
        )
        dx = plain.moments_gradient(x, constant, slope, layout)
    return dx, *wanted, *(None,) * 6


for name, real, fake in (
    ("normkit::coefficients", _forward, _forward_fake),
    ("normkit::coefficients_backward", _backward, _backward_fake),
):
    torch.library.impl(name, ("cpu", "cuda"), real)
    torch.library.register_fake(name, fake)
torch.library.register_autograd("normkit::coefficients", _gradient, setup_context=_setup)
