"""Operators that hold Triton kernels, for graphs that torch.compile makes.

normkit::fused          a whole layer, epilogue included: a box of known sizes to a compiler,
                        best where a residual or an activation is given
normkit::coefficients   the tables of the map alone. For a compiler this is a reduction of x to
                        a small tensor; what touches the whole tensor elementwise it sees, and
                        fuses with whatever stands beside it
normkit::moments        the moments of cells, for layers whose coefficients are expressions
normkit::remember       lets the statistics that an operator computed enter the running ones
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from normkit.core.layout import Batch, Channels
from normkit.core.recomputation import is_recomputation
from normkit.engine import plain
from normkit.engine.compile import records
from normkit.engine.compile.records import KIND, SLOTS, TAGS
from normkit.errors import OptionError


def _register(name: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    torch.library.impl(name, ("cpu", "cuda"), real)
    torch.library.register_fake(name, fake)


# ---------------------------------------------------------------- normkit::fused


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


def _fused_forward(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """The output, and the tables: see the families for what is in them."""
    _, families = on_triton("normkit::fused", x)
    *kind, activation = rest[7:]
    fusion = records.gathered(x, rest[:5], rest[5:7], *kind)
    layout = records.layout_of(x, kind[1])
    y, made = families.forward(x, fusion, residual, activation, layout)
    return y, records.written(made.tables, fusion, made.statistics, x.shape[1])


def _fused_forward_fake(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    size = records.sizes(x, *rest[7:9]).tables
    return torch.empty_like(x), x.new_empty(size, dtype=torch.float32)


def _fused_backward(
    grad: Tensor, x: Tensor, residual: Tensor | None, tables: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, the gradient of the residual, and what holds those of the parameters."""
    _, families = on_triton("normkit::fused_backward", x)
    parameters, (*kind, act, needs_x, needs_residual) = rest[:5], rest[5:]
    fusion = records.outlined(x, tables, parameters, *kind)
    layout = records.layout_of(x, kind[1])
    period = records.sizes(x, *kind[:2]).period
    made = families.FamilyTables(tables, period, 0, None)
    dx, dr, found = families.backward(
        layout.aligned(grad),
        x,
        fusion,
        residual,
        act,
        layout,
        made,
        None,
        (needs_x, needs_residual),
    )
    dx, dr = (x.new_empty(0) if each is None else each for each in (dx, dr))
    return dx, dr, records.whole_storage(found, parameters, x, kind[0])


def _fused_backward_fake(
    grad: Tensor, x: Tensor, residual: Tensor | None, tables: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    parameters, (*kind, _, needs_x, needs_residual) = rest[:5], rest[5:]
    dx, dr = (torch.empty_like(x) if need else x.new_empty(0) for need in (needs_x, needs_residual))
    size = records.gradient_size(x, parameters, *kind[:2])
    return dx, dr, x.new_empty(size, dtype=torch.float32)


def _fused_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, *rest = inputs
    ctx.kind = rest[7:]
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.save_for_backward(x, residual if rest[-1] != "none" else None, output[1], *rest[:5])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _fused_gradient(ctx: Any, grad: Tensor | None, _: None) -> Any:
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


_register("normkit::fused", _fused_forward, _fused_forward_fake)
_register("normkit::fused_backward", _fused_backward, _fused_backward_fake)
torch.library.register_autograd("normkit::fused", _fused_gradient, setup_context=_fused_setup)


# ---------------------------------------------------------------- normkit::coefficients


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


def _coefficients_forward(x: Tensor, *rest: Any) -> Tensor:
    """The tables: first scale and shift, then what the family keeps."""
    passes, families = on_triton("normkit::coefficients", x)
    fusion = records.gathered(x, rest[:5], rest[5:7], *rest[7:])
    layout = records.layout_of(x, rest[8])
    parts = passes.moment_parts(x, layout)
    made = families.FAMILIES[type(fusion)].coefficients(x, parts, fusion, layout)
    return records.written(made.tables, fusion, made.statistics, x.shape[1])


def _coefficients_forward_fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(records.sizes(x, *rest[7:9]).tables, dtype=torch.float32)


def _coefficients_backward(
    grad: Tensor, x: Tensor, tables: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """From the gradients of the tables, of which only those of scale and shift count: what begins
    with constant and slope of dx; and what holds the gradients of the parameters, if not that."""
    passes, families = on_triton("normkit::coefficients_backward", x)
    parameters, kind = rest[:5], rest[5:]
    fusion = records.outlined(x, tables, parameters, *kind)
    # where the samples share a map, its gradient is a sum over them already
    layout = Batch.of(x) if kind[0] == "pool-batch" else records.layout_of(x, kind[1])
    parts = passes.Parts(grad.contiguous(), 1, layout.count)
    out, found = families.FAMILIES[type(fusion)].gradients(x, parts, fusion, layout, tables, None)
    if kind[0] == "pool-sample":
        return out, records.whole_storage(found, parameters, x, kind[0])
    return out, x.new_empty(0, dtype=torch.float32)


def _coefficients_backward_fake(
    grad: Tensor, x: Tensor, tables: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    parameters, (family, options, _) = rest[:5], rest[5:]
    apart = family == "pool-sample"
    found = records.gradient_size(x, parameters, family, options) if apart else 0
    both = records.sizes(x, family, options).gradients, found
    out, held = (x.new_empty(size, dtype=torch.float32) for size in both)
    return out, held


def _coefficients_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *rest = inputs
    ctx.kind = rest[7:]
    ctx.save_for_backward(x, output, *rest[:5])


def _coefficients_gradient(ctx: Any, grad: Tensor) -> Any:
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
        constant, slope = cut_tables(out, sizes.period, layout, 2)
        center = cut_tables(tables, sizes.period, layout, 3)[2]
        dx = plain.moments_gradient(x, constant, slope, center, layout)
    return dx, *wanted, *(None,) * 5


def cut_tables(tables: Tensor, period: Any, layout: Batch | Channels, count: int) -> list[Tensor]:
    """The first tables of a tensor, whole: one row, if there is only one, for all samples."""
    size = layout.rows, layout.columns
    parts = (tables[i * period : (i + 1) * period] for i in range(count))
    return [part.view(-1, layout.columns).expand(size) for part in parts]


_register("normkit::coefficients", _coefficients_forward, _coefficients_forward_fake)
_register("normkit::coefficients_backward", _coefficients_backward, _coefficients_backward_fake)
torch.library.register_autograd(
    "normkit::coefficients", _coefficients_gradient, setup_context=_coefficients_setup
)


# ---------------------------------------------------------------- normkit::moments


torch.library.define("normkit::moments", "(Tensor x, bool whole, int strips) -> Tensor", tags=TAGS)


def _moments_forward(x: Tensor, whole: bool, strips: int) -> Tensor:
    """Mean and variance of each cell: (2, rows, columns)."""
    passes, _ = on_triton("normkit::moments", x)
    layout = Batch.of(x) if whole else Channels.of(x, strips)
    return torch.stack(passes.moments(x, layout))


def _moments_forward_fake(x: Tensor, whole: bool, strips: int) -> Tensor:
    size = (2, 1, x.shape[1]) if whole else (2, x.shape[0], x.shape[1] * strips)
    return x.new_empty(size, dtype=torch.float32)


def _moments_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.whole, ctx.strips = inputs
    ctx.save_for_backward(x, output)


def _moments_gradient(ctx: Any, grad: Tensor) -> Any:
    x, found = ctx.saved_tensors
    layout = Batch(x) if ctx.whole else Channels(x, ctx.strips)
    grad_mean, grad_var = grad / layout.count
    slope = 2 * grad_var
    return plain.moments_gradient(x, grad_mean, slope, found[0], layout), None, None


_register("normkit::moments", _moments_forward, _moments_forward_fake)
torch.library.register_autograd("normkit::moments", _moments_gradient, setup_context=_moments_setup)


# ---------------------------------------------------------------- normkit::remember


torch.library.define(
    "normkit::remember",
    "(Tensor tables, Tensor(a!) mean, Tensor(b!) second, Tensor(c!) batches, Tensor(d!) nonfinite,"
    " Tensor(e!) arrivals, SymInt begin, SymInt values, int less, float weight) -> ()",
    tags=TAGS,
)


def _remember(
    tables: Tensor, mean: Tensor, second: Tensor, batches: Tensor, nonfinite: Tensor,
    arrivals: Tensor, begin: int, values: int, less: int, weight: float,
) -> None:  # fmt: skip
    """Whole, or not at all if one is not finite; which of both is counted.

    The second statistic is multiplied by values / (values − less). A graph that checkpointing
    repeats in the backward has counted its batch.
    """
    on_triton("normkit::remember", tables)
    if is_recomputation():
        return
    start = _launch((begin, mean.shape[0], weight, values / max(values - less, 1)))
    start(tables, mean, second, batches, nonfinite, arrivals)


@lru_cache(maxsize=4096)
def _launch(numbers: Any) -> Any:
    from normkit.engine.triton.launch import Launch  # needs Triton, which is here
    from normkit.engine.triton.stages import remember_kernel

    return Launch(remember_kernel, (1,), numbers, (256,))


_register("normkit::remember", _remember, lambda *given: None)


# ---------------------------------------------------------------- Triton


def on_triton(operator: str, x: Tensor) -> tuple[Any, Any]:
    """The passes, and what makes whole layers of them, on Triton."""
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise OptionError(
            f"{operator} expects a tensor on cuda, got one on {x.device.type}: its kernels need a "
            "GPU or, for tests, Triton's interpreter. Try use_backend('torch') before compiling."
        )
    try:
        passes = importlib.import_module("normkit.engine.triton.passes")
        return passes, importlib.import_module("normkit.engine.families.fused")
    except ImportError as error:
        raise OptionError(
            f"{operator} needs Triton, which cannot be imported ({error}). "
            "Try use_backend('torch') before compiling."
        ) from error
