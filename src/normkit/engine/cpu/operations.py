"""What torch's operations on tables are as instructions of a tape: for each, who writes it down.

A handler does the operation as well, for what follows asks its result for sizes and strides. What
is put together from other operations stands in ``APART``, before torch's own list of such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normkit.engine.coefficients import Untraceable

aten = torch.ops.aten
Handler = Callable[..., Any]  # of a recorder, the operation and what it is called with
HANDLERS: dict[Any, Handler] = {}

EMPTY = {aten.empty.memory_format} | {
    getattr(aten, name).default
    for name in ("empty_like", "new_empty", "empty_strided", "new_empty_strided")
}
FROM_PYTHON = {aten.lift_fresh.default, aten.lift_fresh_copy.default}  # its numbers
LITERALS = FROM_PYTHON | {  # no table's values decide
    getattr(aten, name).default
    for kind in ("zeros", "ones", "full")
    for name in (f"{kind}_like", f"new_{kind}")
}
ELEMENTWISE = {  # by how many tables or numbers they are of; in-place forms too
    1: "abs exp expm1 floor log log1p logical_not neg reciprocal rsqrt sgn sigmoid sign sqrt tanh",
    2: "__and__ __or__ bitwise_and bitwise_or div eq ge gt le logical_and logical_or lt maximum "
    "minimum mul ne",
    3: "lerp where",
}
NAMES = {  # where the instruction has another one
    "logical_not": "not",
    "sgn": "sign",
    **{f"{kind}_{name}": name for kind in ("bitwise", "logical") for name in ("and", "or")},
    **{f"__{name}__": name for name in ("and", "or")},
}
COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")
ROUNDINGS = {torch.float32: "float", torch.bfloat16: "bfloat16"}
ON_FLAGS = ("__and__", "__or__", "bitwise_and", "bitwise_or", "bitwise_not")


def handles(*operations: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(operations, handler))
        return handler

    return register


def forms(name: str) -> list[Any]:
    """An operation of tables and numbers, what writes into its first one, and what torch takes
    others apart into."""
    spaces = (aten, name), (aten, f"{name}_"), (torch.ops.prims, name)
    packets = [getattr(space, n) for space, n in spaces if hasattr(space, n)]
    kinds = {"default", "self", "Tensor", "Scalar", "Tensor_Tensor", "Tensor_Scalar"}
    return [getattr(packet, o) for packet in packets for o in packet.overloads() if o in kinds]


def elementwise(name: str, count: int) -> Handler:
    def handler(recorder: Any, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs or len(args) != count:
            raise Untraceable(f"no loop does {func.name()} with {kwargs or args[count:]}")
        result: Tensor = func(*args)
        if name in ON_FLAGS and result.dtype != torch.bool:
            raise Untraceable(f"no loop does {func.name()} of bits")
        if name == "div" and not result.is_floating_point():
            raise Untraceable("no loop does div of integers")
        if name in COMPARISONS:
            args = _as_compared(recorder, *args)
        return recorder.write(NAMES.get(name, name), result, *args)

    return handler


def _as_compared(recorder: Any, *values: Any) -> tuple[Any, ...]:
    """In the type in which torch compares: 0.3 is less than the float that is next to it."""
    kind = torch.result_type(*values)
    if kind not in ROUNDINGS:
        return values
    return tuple(
        recorder.write(ROUNDINGS[kind], torch.empty_like(v, dtype=kind), v)
        if isinstance(v, Tensor)
        else torch.tensor(v, dtype=kind).item()
        for v in values
    )


for _count, _names in ELEMENTWISE.items():
    for _name in _names.split():
        handles(*forms(_name))(elementwise(_name, _count))


@handles(*forms("bitwise_not"))
def _bitwise_not(recorder: Any, func: Any, flags: Tensor) -> Tensor:
    return elementwise("bitwise_not" if flags.dtype != torch.bool else "not", 1)(
        recorder, func, flags
    )


@handles(*forms("add"), *forms("sub"))
def _add(recorder: Any, func: Any, a: Any, b: Any, *, alpha: float = 1) -> Tensor:
    adds = func.name().split("::")[1].startswith("add")
    result: Tensor = func(a, b) if alpha == 1 else func(a, b, alpha=alpha)
    if alpha != 1:
        return recorder.write("addcmul", result, a, b, alpha if adds else -alpha)
    if result.dtype == torch.bool:
        return recorder.write("or", result, a, b)
    return recorder.write("add" if adds else "sub", result, a, b)


@handles(*forms("rsub"))
def _rsub(recorder: Any, func: Any, a: Any, b: Any, alpha: float = 1) -> Tensor:
    result: Tensor = func(a, b, alpha=alpha)
    return recorder.write("addcmul", result, b, a, -alpha)


@handles(*forms("addcmul"))
def _addcmul(recorder: Any, func: Any, a: Any, b: Any, c: Any, *, value: float = 1) -> Tensor:
    if value != 1:
        raise Untraceable("no loop does addcmul with a value")
    result: Tensor = func(a, b, c)
    return recorder.write("addcmul", result, a, b, c)


@handles(aten.pow.Tensor_Scalar, aten.pow_.Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _pow(recorder: Any, func: Any, a: Any, b: Any) -> Tensor:
    result: Tensor = func(a, b)
    quick = {1: "copy", 2: "mul", 3: "cube", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    name = quick.get(b, "pow") if not isinstance(b, Tensor) else "pow"
    if name == "pow" and not result.is_floating_point():
        raise Untraceable("no loop does pow of integers")
    given = {"pow": (a, b), "mul": (a, a)}.get(name, (a,))
    return recorder.write(name, result, *given)


@handles(*forms("clamp"), *forms("clamp_min"), *forms("clamp_max"))
def _clamp(recorder: Any, func: Any, a: Tensor, *bounds: Any, **named: Any) -> Tensor:
    result: Tensor = func(a, *bounds, **named)
    kind = func.name().removeprefix("aten::").split(".")[0].rstrip("_")
    lowest = None if kind == "clamp_max" else named.get("min", bounds[0] if bounds else None)
    highest = named.get("max", bounds[-1] if len(bounds) > 1 or kind == "clamp_max" else None)
    if lowest is not None:
        recorder.write("maximum", result, a, lowest)
    if highest is not None:
        recorder.write("minimum", result, a if lowest is None else result, highest)
    return result


@handles(aten.clone.default, aten._to_copy.default, aten.copy_.default)
@handles(aten.fill_.Scalar, aten.fill_.Tensor)
def _copy(recorder: Any, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Of integers, flags and doubles into each other; a float has its own rounding, and range."""
    result: Tensor = func(*args, **kwargs)
    value = args[1] if len(args) > 1 else args[0]
    kind = value.dtype if isinstance(value, Tensor) else torch.float64
    if result.dtype == torch.bool and kind != torch.bool:
        return recorder.write("ne", result, value, 0.0)
    name = "copy"
    if kind.is_floating_point and not result.is_floating_point():
        name = "whole"
    elif result.dtype == torch.bfloat16 and kind != torch.bfloat16:
        name = "bfloat16"
    elif result.dtype == torch.float32 and kind not in (torch.float32, torch.bfloat16):
        name = "float"
    return recorder.write(name, result, value)


@handles(aten.zero_.default)
def _zero(recorder: Any, func: Any, table: Tensor) -> Tensor:
    return recorder.write("copy", func(table), 0.0)


# ---------------------------------------------------------------- over axes

Axes = Sequence[int] | int | None


def _over(
    recorder: Any, name: str, start: float, result: Tensor, table: Tensor, axes: Axes
) -> None:
    """What is left of axes, added up for example; of no axes, all of them."""
    recorder.write("copy", result, start)
    given = [axes] if isinstance(axes, int) else axes
    recorder.reduce(name, result, table, given)


def _same_kind(func: Any, result: Tensor, table: Tensor) -> None:
    """Torch adds up what it has rounded to the type that was asked for."""
    if not result.is_floating_point() and (table.is_floating_point() or result.dtype == torch.bool):
        raise Untraceable(f"no loop does {func.name()} of {table.dtype} in {result.dtype}")


@handles(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
def _sum(
    recorder: Any, func: Any, table: Tensor, axes: Axes = None, *args: Any, **kw: Any
) -> Tensor:
    given = () if func in (aten.sum.default, aten.mean.default) else (axes,)
    result: Tensor = func(table, *given, *args, **kw)
    _same_kind(func, result, table)
    _over(recorder, "sum", 0.0, result, table, axes)
    if func in (aten.mean.default, aten.mean.dim):
        recorder.write("div", result, result, table.numel() / max(result.numel(), 1))
    return result


@handles(*(getattr(aten, n).default for n in ("amax", "amin", "max", "min", "all", "any")))
@handles(aten.all.dim, aten.any.dim, aten.all.dims, aten.any.dims)
def _extreme(recorder: Any, func: Any, table: Tensor, axes: Axes = None, *args: Any) -> Tensor:
    given = () if axes is None else (axes,)
    result: Tensor = func(table, *given, *args)
    name = func.name().removeprefix("aten::").split(".")[0]
    if name in ("all", "any"):
        if axes is not None and not isinstance(axes, int) and not axes:  # of each by itself
            return recorder.write("ne", result, table, 0.0)
        if table.dtype != torch.bool:
            with recorder:
                table = table != 0
        start, highest = float(name == "all"), name == "any"
    else:
        highest = name.endswith("max")
        start = -math.inf if highest else math.inf
    _over(recorder, "highest" if highest else "lowest", start, result, table, axes)
    return result


@handles(aten.cat.default)
def _cat(recorder: Any, func: Any, tables: Sequence[Tensor], axis: int = 0) -> Tensor:
    result: Tensor = func(tables, axis)
    at = 0
    for table in tables:
        if table.numel():
            recorder.write("copy", result.narrow(axis, at, table.shape[axis]), table)
            at += table.shape[axis]
    return result


@handles(aten.flip.default)
def _flip(recorder: Any, func: Any, table: Tensor, axes: Sequence[int]) -> Tensor:
    result: Tensor = func(table, axes)
    recorder.write_flipped(result, table, [axis % table.dim() for axis in axes])
    return result


# ---------------------------------------------------------------- whole rows


@handles(aten.cumsum.default)
def _cumsum(recorder: Any, func: Any, table: Tensor, axis: int, **kwargs: Any) -> Tensor:
    result: Tensor = func(table, axis, **kwargs)
    _same_kind(func, result, table)
    recorder.along("cumsum", axis, table.shape, result, table)
    return result


@handles(aten.argmax.default)
def _argmax(
    recorder: Any, func: Any, table: Tensor, axis: int | None = None, keepdim: bool = False
) -> Tensor:
    if axis is None:
        raise Untraceable("no loop does argmax over all axes")
    result: Tensor = func(table, axis, True)
    recorder.along("argmax", axis, table.shape, result, table)
    return result if keepdim else result.squeeze(axis)


@handles(aten.sort.default)
def _sort(recorder: Any, func: Any, table: Tensor, axis: int = -1, down: bool = False) -> Any:
    values, places = func(table, axis, down)
    name = "sort_down" if down else "sort"
    recorder.along(name, axis, table.shape, values, places, table, made=2)
    return values, places


@handles(aten.sort.stable)
def _stable(recorder: Any, func: Any, table: Tensor, *, dim: int = -1, **kwargs: Any) -> Any:
    return _sort(recorder, aten.sort.default, table, dim, kwargs.get("descending", False))


@handles(aten.gather.default)
def _gather(recorder: Any, func: Any, table: Tensor, axis: int, index: Tensor, **_: Any) -> Tensor:
    result: Tensor = func(table, axis, index)
    recorder.along("gather", axis, index.shape, result, index, table, other=table.shape[axis])
    return result


@handles(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
@handles(aten.scatter_.src, aten.scatter_.value, aten.scatter_add_.default)
def _scatter(
    recorder: Any, func: Any, table: Tensor, axis: int, index: Tensor, source: Any
) -> Tensor:
    result: Tensor = func(table, axis, index, source)
    if result is not table:
        recorder.write("copy", result, table)
    name = "scatter_add" if "scatter_add" in func.name() else "scatter"
    recorder.along(name, axis, index.shape, result, index, source, other=table.shape[axis])
    return result


# ---------------------------------------------------------------- of other operations


def _spread_index(table: Tensor, axis: int, index: Tensor) -> Tensor:
    size = list(table.shape)
    size[axis] = index.numel()
    return index.view([-1 if d == axis % table.dim() else 1 for d in range(table.dim())]).expand(
        size
    )


def _index_add(
    table: Tensor, axis: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Tensor:
    return table.scatter_add(axis, _spread_index(source, axis, index), alpha * source)


def _from_start(index: Tensor, size: int) -> Tensor:
    """Places that were counted from the end if they were less than 0."""
    return torch.where(index < 0, index + size, index)


def _index(table: Tensor, places: Sequence[Tensor | None]) -> Tensor:
    chosen = [(d, p) for d, p in enumerate(places) if p is not None]
    if len(chosen) != 1 or chosen[0][1].dim() != 1 or chosen[0][1].dtype != torch.int64:
        raise Untraceable("no loop does such an index")
    axis, index = chosen[0]
    return table.index_select(axis, _from_start(index, table.shape[axis]))


def _index_put(
    table: Tensor, places: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    chosen = [(d, p) for d, p in enumerate(places) if p is not None]
    if len(chosen) != 1 or chosen[0][1].dim() != 1 or not accumulate:
        raise Untraceable("no loop does such an index")
    (axis, index), size = chosen[0], list(table.shape)
    size[axis] = index.numel()
    return table.index_add(axis, _from_start(index, table.shape[axis]), values.expand(size))


def _highest(table: Tensor, axis: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    places = table.argmax(axis, keepdim=True)
    values = table.gather(axis, places)
    return (values, places) if keepdim else (values.squeeze(axis), places.squeeze(axis))


def _chosen_gradient(
    grad: Tensor, axis: int, index: Tensor, size: Sequence[int], keepdim: bool
) -> Tensor:
    if not keepdim and size:
        grad, index = grad.unsqueeze(axis), index.unsqueeze(axis)
    return grad.new_zeros(size).scatter(axis, index, grad)


def _var(
    table: Tensor, axes: Axes = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    over = list(range(table.dim())) if axes is None else [axes] if isinstance(axes, int) else axes
    over = list(over)
    middle = table.mean(over, keepdim=True)
    square = (table - middle).square().sum(over, keepdim=keepdim)
    rest = table.numel() // middle.numel() - (1 if correction is None else correction)
    return square / max(rest, 0)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[0] * b.numel() > 1 << 16:
        raise Untraceable("no loop does products of large matrices")
    return (a.unsqueeze(2) * b).sum(1)


APART: dict[Any, Callable[..., Any]] = {
    aten.stack.default: lambda tables, axis=0: torch.cat(
        [t.unsqueeze(axis % (t.dim() + 1)) for t in tables], axis
    ),
    aten.index_select.default: lambda table, axis, index: table.gather(
        axis, _spread_index(table, axis, index)
    ),
    aten.index_add.default: _index_add,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.max.dim: _highest,
    aten.value_selecting_reduction_backward.default: _chosen_gradient,
    aten.var.correction: _var,
    aten.std.correction: lambda *args, **kwargs: _var(*args, **kwargs).sqrt(),
    aten.mm.default: _mm,
    aten.square.default: lambda table: table * table,
    aten.nan_to_num.default: lambda *args, **kwargs: _nan_to_num(*args, **kwargs),
    aten.slice_scatter.default: lambda table, part, *where: _with_part(table, "slice", part, where),
    aten.select_scatter.default: lambda table, part, *where: _with_part(
        table, "select", part, where
    ),
}


def _nan_to_num(
    table: Tensor, nan: float | None = None, most: float | None = None, least: float | None = None
) -> Tensor:
    if most is None or least is None:
        raise Untraceable("nan_to_num without bounds puts in those of another type")
    table = torch.where(table.isnan(), nan or 0.0, table)
    table = torch.where(table == math.inf, most, table)
    return torch.where(table == -math.inf, least, table)


def _with_part(table: Tensor, view: str, part: Tensor, where: Sequence[int]) -> Tensor:
    whole = table.clone()
    getattr(aten, view)(whole, *where).copy_(part)
    return whole
