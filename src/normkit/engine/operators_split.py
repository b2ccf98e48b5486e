"""normkit::coefficients: the tables of the map alone; the map itself stays an expression.

For a compiler this is a reduction of x to a small tensor, and back again. What touches the whole
tensor elementwise, y = a·x + b and dx = a·g + constant + slope·x, it sees, and fuses with whatever
stands beside it; so are the two sums of backward, which take in an activation's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.layout import Batch, Channels
from normkit.engine import operators_records as records
from normkit.engine import plain
from normkit.engine.operators_ready import on_triton
from normkit.engine.operators_records import KIND, SLOTS, TAGS

torch.library.define(
    "normkit::coefficients",
    f"(Tensor x, {SLOTS}, Tensor? mean, Tensor? second, {KIND}) -> Tensor",
    tags=TAGS,
)
torch.library.define(
    "normkit::coefficients_backward",
    f"(Tensor grad, Tensor x, Tensor tables, {SLOTS}, {KIND}) -> (Tensor, Tensor)",
    tags=TAGS,
)


def _forward(x: Tensor, *rest: Any) -> Tensor:
    """The tables: first scale and shift, then what the family keeps."""
    passes, families = on_triton("normkit::coefficients", x)
    fusion = records.gathered(x, rest[:5], rest[5:7], *rest[7:])
    layout = records.layout_of(x, rest[8])
    made = families[type(fusion)].made(x, passes.moment_parts(x, layout), fusion, layout)
    return records.written(made.tables, fusion, made.statistics, x.shape[1])


def _forward_fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(records.sizes(x, *rest[7:9]).tables, dtype=torch.float32)


def _backward(grad: Tensor, x: Tensor, tables: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """From the gradients of the tables, of which only those of scale and shift count: what begins
    with constant and slope of dx; and what holds the gradients of the parameters, if not that."""
    passes, families = on_triton("normkit::coefficients_backward", x)
    parameters, kind = rest[:5], rest[5:]
    fusion = records.outlined(x, tables, parameters, *kind)
    # where the samples share a map, its gradient is a sum over them already
    layout = Batch.of(x) if kind[0] == "pool-batch" else records.layout_of(x, kind[1])
    parts = passes.Parts(grad.contiguous(), 1, layout.count)
    out, found = families[type(fusion)].gradients(x, parts, fusion, layout, tables, None)
    if kind[0] == "pool-sample":
        return out, records.whole_storage(found, parameters, x)
    return out, x.new_empty(0, dtype=torch.float32)


def _backward_fake(grad: Tensor, x: Tensor, tables: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    parameters, (family, options, _) = rest[:5], rest[5:]
    apart = family == "pool-sample"
    found = records.gradient_size(x, parameters, family, options) if apart else 0
    both = records.sizes(x, family, options).gradients, found
    out, held = (x.new_empty(size, dtype=torch.float32) for size in both)
    return out, held


# ---------------------------------------------------------------- the gradient


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *rest = inputs
    ctx.kind = rest[7:]
    ctx.save_for_backward(x, output, *rest[:5])


def _gradient(ctx: Any, grad: Tensor) -> Any:
    x, tables, *parameters = ctx.saved_tensors
    family, options, eps = ctx.kind
    needs, channels = ctx.needs_input_grad, x.shape[1]
    out, apart = torch.ops.normkit.coefficients_backward(
        grad, x, tables, *parameters, family, options, eps
    )
    found = apart if family == "pool-sample" else out
    sizes = records.sizes(x, family, options)
    wanted = records.cut(found, family, tuple(parameters), needs[1:6], sizes, channels)
    dx = None
    if needs[0]:
        layout = Batch(x) if options[0] else Channels(x)
        constant, slope = halves(out, sizes.period, layout)
        dx = plain.moments_gradient(x, constant, slope, layout)
    return dx, *wanted, *(None,) * 5


def halves(tables: Tensor, period: Any, layout: Batch | Channels) -> tuple[Tensor, Tensor]:
    """The first two tables of a tensor, whole: one row, if there is only one, for all samples."""
    size = layout.rows, layout.columns
    first, second = tables[:period], tables[period : 2 * period]
    return (
        first.view(-1, layout.columns).expand(size),
        second.view(-1, layout.columns).expand(size),
    )


for _name, _real, _fake in (
    ("normkit::coefficients", _forward, _forward_fake),
    ("normkit::coefficients_backward", _backward, _backward_fake),
):
    torch.library.impl(_name, ("cpu", "cuda"), _real)
    torch.library.register_fake(_name, _fake)
torch.library.register_autograd("normkit::coefficients", _gradient, setup_context=_setup)
