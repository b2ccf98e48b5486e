"""A layer's own coefficients as programs for a CPU, for whatever stands in no family.

A small table costs torch microseconds an operation, and a step has hundreds of them. So the two
functions of ``engine/coefficients`` are called once on tables of this size while a ``Recorder``
listens to torch's operations, and what it has heard becomes a tape: instructions on strided tables
of double, which ``tape.cpp`` goes through in some tens of nanoseconds each. Views cost nothing, for
an operand is a place in memory with strides. Layers of one kind and size share their tapes.

Where an operation is none that loops do, or a value decides what is done, coefficients stay torch's
operations, and ``nk.why`` says which one it was.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.core.fusion import Traced
from normkit.core.layout import Layout
from normkit.core.messages import first_line
from normkit.core.statistics import LayerState
from normkit.engine.coefficients import TableFunctions, Untraceable, kind_of
from normkit.engine.cpu.passes import serves
from normkit.engine.cpu.recorder import Instruction, Operand, Recorder, Unread

# as tape.cpp enumerates them
OPERATIONS = (
    *("load", "store", "left_out"),
    *(
        "copy",
        "float",
        "bfloat16",
        "whole",
        "neg",
        "abs",
        "sign",
        "sqrt",
        "rsqrt",
        "cube",
        "reciprocal",
    ),
    *("exp", "expm1", "log", "log1p", "tanh", "sigmoid", "floor", "not"),
    *("sum", "highest", "lowest"),
    *("add", "sub", "mul", "div", "maximum", "minimum", "pow", "eq", "ne", "lt", "le", "gt", "ge"),
    *("and", "or", "where", "addcmul", "lerp"),
    *("cumsum", "argmax", "sort", "sort_down", "gather", "scatter", "scatter_add"),
)
CODES = {name: code for code, name in enumerate(OPERATIONS)}
ROWS = OPERATIONS.index("cumsum")  # from here on a whole row at a time
DIMS = 6  # of an instruction
WATCHED = "someone watches torch's operations"
SCRATCH, CONSTANT = -1, -2  # in place of a tensor of the call
SHORT = 8  # entries of an axis
MOST_TENSORS = 32  # of a call
TYPES = torch.float64, torch.float32, torch.bfloat16, torch.int64
MOST_TAPES = 64  # that a layer asks for: sizes and options that always change are not worth one
MOST_PLANS = 1024  # of all layers

_plans: dict[Any, TapePlan | str] = {}
_lock = threading.RLock()


class TapePlan(NamedTuple):
    """Both tapes of one kind of layer, for tables of one size."""

    functions: TableFunctions
    buffers: list[str]  # that it may read and change
    types: list[tuple[torch.Size, torch.dtype]]  # of parameters and these
    forward: list[float]  # of moments, tables, parameters, buffers
    changed: list[str]  # buffers that it changes
    backward: list[float]  # of sums, tables, parameters, what dx needs, gradients of parameters

    def size(self) -> int:
        """Entries of the table that the forward makes."""
        return self.functions.begin + self.functions.kept()

    def tensors(self, layer: Any) -> list[Tensor]:
        own, kept = layer._parameters, layer._buffers
        named = [own[name] for name in self.functions.parameters]
        return named + [kept[name] for name in self.buffers]


def describe(layer: Any, x: Tensor, state: LayerState) -> Traced | None:
    """The description of a layer by its tapes; None if it has none."""
    plan = _find(layer, x, state)
    if isinstance(plan, str):
        return None
    own, kept = layer._parameters, layer._buffers
    parameters = tuple([own[name] for name in plan.functions.parameters])
    return Traced(parameters, plan, {name: kept[name] for name in plan.buffers})


def obstacle(layer: Any, x: Tensor, state: LayerState) -> str:
    """Why there is none, for ``nk.why``."""
    plan = _find(layer, x, state)
    return plan if isinstance(plan, str) else ""


def _find(layer: Any, x: Tensor, state: LayerState) -> TapePlan | str:
    if layer.exchange is not None or state.processes is not None:
        return "someone shares its moments"
    if torch.is_anomaly_enabled() or torch._C._len_torch_dispatch_stack():
        return WATCHED
    layout = layer.cells(x)
    if unserved := serves(x, layout):
        return unserved
    size = layout.rows, layout.columns, layout.count, type(layout), state.training
    known = layer.__dict__.setdefault("_traced", {})
    plan: TapePlan | str | None = known.get(size)
    if plan is None:
        plan = known[size] = _shared(layer, layout, state, size)
    if isinstance(plan, TapePlan):
        if any(state.statistics[name] is not layer._buffers[name] for name in plan.buffers):
            return "its statistics are copies, of a forward that is repeated"
        tensors = plan.tensors(layer)
        if [(t.shape, t.dtype) for t in tensors] != plan.types:
            return "its tensors are not those that it had"
        if not all(t.is_contiguous() for t in tensors):
            return "its parameters or statistics have gaps in memory"
    return plan


def _shared(layer: Any, layout: Layout, state: LayerState, size: Any) -> TapePlan | str:
    try:
        key = *kind_of(layer, state), size
    except Untraceable as why:
        return str(why)
    with _lock:
        if key in _plans:
            return _plans[key]
        asked = layer.__dict__.get("_tapes", 0)
        if asked >= MOST_TAPES:
            return f"it has had {MOST_TAPES} sizes and options already"
        layer.__dict__["_tapes"] = asked + 1
        try:
            plan: TapePlan | str = _recorded(layer, layout, state)
        except Untraceable as why:
            plan = str(why)
        except Exception as error:  # of this layer, now: another one may do better
            return f"its coefficients could not be written down ({first_line(error):.200})"
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[key] = plan
        return plan


def _recorded(layer: Any, layout: Layout, state: LayerState) -> TapePlan:
    # the first forward is what counts: a repeated one changes no statistics, and has no tape
    state = LayerState(state.training, state.statistics)
    functions = TableFunctions(layer, layout, state, torch.float64)
    functions.watch = Unread
    tensors = functions.tensors(layer, state)
    own = len(functions.parameters)
    with ExitStack() as aside:
        # neither the modes that are in force here nor somebody's hooks for saved tensors
        aside.enter_context(torch.inference_mode(False))
        aside.enter_context(torch.no_grad())
        aside.enter_context(torch.autocast("cpu", enabled=False))
        aside.enter_context(torch.device("cpu"))
        aside.enter_context(torch.random.fork_rng(devices=[]))
        aside.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
        stand_ins = [t.detach().clone() for t in tensors]
        moments = torch.ones(2, *functions.size, dtype=torch.float64)
        functions.read_statistics(moments.unbind(), stand_ins, layout.count)
        buffers = {
            name: t
            for name, t in zip(functions.buffers, stand_ins[own:], strict=True)
            if t.dtype in TYPES
        }
        forward, changed, backward, told = _programs(functions, stand_ins, buffers, layout.count)
        for factor, value in ((-2.5, 1e-3), (1.25, 1e3)) if told else ():
            others = [factor * t + 0.125 if t.is_floating_point() else t.clone() for t in tensors]
            other = {n: others[own + functions.buffers.index(n)] for n in buffers}
            again = _programs(functions, others, other, layout.count, value)
            if repr(again[:3]) != repr((forward, changed, backward)):
                raise Untraceable("it looks at a value")
    functions.let_go()  # layers of one kind share a plan
    if 3 + 2 * own + len(buffers) > MOST_TENSORS:
        raise Untraceable(f"it has {own} parameters and {len(buffers)} statistics")
    types = [(t.shape, t.dtype) for t in (*stand_ins[:own], *buffers.values())]
    return TapePlan(functions, list(buffers), types, forward, changed, backward)


def _programs(
    functions: TableFunctions,
    stand_ins: Sequence[Tensor],
    buffers: dict[str, Tensor],
    count: Any,
    value: float = 1.0,
) -> tuple[list[float], list[str], list[float], bool]:
    """Forward, which buffers it changes, backward, and whether Python told a number: that would be
    another one for other stand-ins, and another ``value`` in the tables that come from a batch, if
    it was found in them."""
    own, both = len(functions.parameters), (Recorder(), Recorder())
    forward, changed = _forward(both[0], functions, stand_ins, buffers, count, value)
    backward = _backward(both[1], functions, stand_ins[:own], stand_ins[own:], count, value)
    return forward, changed, backward, any(recorder.told_numbers for recorder in both)


def _forward(
    recorder: Recorder,
    functions: TableFunctions,
    stand_ins: Sequence[Tensor],
    buffers: dict[str, Tensor],
    count: Any,
    value: float,
) -> tuple[list[float], list[str]]:
    own = stand_ins[: len(functions.parameters)]
    moments = torch.full((2 * functions.period,), value, dtype=torch.float64)
    recorder.given(moments, 0)
    for base, tensor in enumerate((*own, *buffers.values()), 2):
        recorder.given(tensor, base)
    with recorder:  # tables are what they were before new statistics are written
        _, finite = functions.forward(lambda p: recorder.leaves(1, p), count, moments, *stand_ins)
    if finite is not None:
        recorder.left_out(finite)
    changed = [name for name, tensor in buffers.items() if recorder.writes_to(tensor)]
    return assembled(recorder), changed


def _backward(
    recorder: Recorder,
    functions: TableFunctions,
    own: Sequence[Tensor],
    absent: Sequence[Tensor],
    count: Any,
    value: float,
) -> list[float]:
    after = 2 + len(own)
    sums, tables = (
        torch.full((size,), value, dtype=torch.float64)
        for size in (2 * functions.period, functions.begin + functions.kept())
    )
    for base, tensor in enumerate((sums, tables, *own)):
        recorder.given(tensor, base)
    with recorder:
        found = functions.backward(absent, count, sums, tables, *own)
    recorder.leaves(after, found[:2])
    gradients = iter(found[2:])
    for base, name in enumerate(functions.parameters, after + 1):
        if name not in functions.unused:
            recorder.leaves(base, [next(gradients)], own[base - after - 1].dtype)
    return assembled(recorder)


# ---------------------------------------------------------------- numbers for tape.cpp


def assembled(recorder: Recorder) -> list[float]:
    """Constants, how much scratch it takes, how many instructions there are, and these.

    Load and store: a place in scratch, a tensor, entries. Left out: a place. The others: how many
    axes, their sizes, how many operands, of each its base, offset and strides, and a number more
    for those that take whole rows.
    """
    kept = recorder.outputs | {storage for storage, _ in recorder.stores()}
    needed = _needed(recorder, kept)
    last = {o.storage: i for i, step in enumerate(needed) for o in step.operands}
    scratch = _Scratch(recorder)
    numbers: list[float] = []
    count = 0
    for storage, base in recorder.loads:
        if storage in last or storage in kept:
            numbers += [CODES["load"], scratch.place(storage), base, recorder.sizes[storage]]
            count += 1
    for i, step in enumerate(needed):
        numbers += _encoded(step, scratch)
        count += 1
        for storage in {o.storage for o in step.operands}:
            if last[storage] == i and storage not in kept:
                scratch.free(storage)
    for storage, base in recorder.stores():
        numbers += [CODES["store"], scratch.place(storage), base, recorder.sizes[storage]]
        count += 1
    constants = recorder.constants
    return [float(len(constants)), *constants, float(scratch.size), float(count), *numbers]


def _needed(recorder: Recorder, kept: set[int]) -> list[Instruction]:
    """Without instructions on which nothing that is kept depends."""
    wanted = set(kept)
    needed = []
    for step in reversed(recorder.instructions):
        if step.name == "left_out" or any(o.storage in wanted for o in step.operands[: step.made]):
            wanted.update(o.storage for o in step.operands)
            needed.append(step)
    return needed[::-1]


class _Scratch:
    """Which memory a storage has while it is needed."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.size = 0
        self.places: dict[int, int] = {}
        self.unused: dict[int, list[int]] = {}  # by size

    def place(self, storage: int) -> int:
        if storage not in self.places:
            size = -(-self.recorder.sizes[storage] // 8) * 8  # whole lines of a cache
            unused = self.unused.get(size)
            if unused:
                self.places[storage] = unused.pop()
            else:
                self.places[storage], self.size = self.size, self.size + size
        return self.places[storage]

    def free(self, storage: int) -> None:
        if storage in self.places:
            size = -(-self.recorder.sizes[storage] // 8) * 8
            self.unused.setdefault(size, []).append(self.places[storage])

    def operand(self, operand: Operand) -> tuple[int, int]:
        region = self.recorder.regions[operand.storage]
        if region is None:
            return SCRATCH, self.place(operand.storage) + operand.offset
        return region.base, region.offset + operand.offset


def _encoded(step: Instruction, scratch: _Scratch) -> list[float]:
    if step.name == "left_out":
        return [CODES[step.name], scratch.operand(step.operands[0])[1]]
    rows = CODES[step.name] >= ROWS
    read = 1 if step.name in ("sum", "highest", "lowest") else 0  # whose memory is gone through
    size, strides = _merged(step.size, [o.strides for o in step.operands], rows, read)
    if len(size) > DIMS:
        raise Untraceable(f"it has tables of {len(size)} axes")
    numbers: list[float] = [CODES[step.name], len(size), *size, len(step.operands)]
    for operand, own in zip(step.operands, strides, strict=True):
        numbers += [*scratch.operand(operand), *own]
    return [*numbers, step.other] if rows else numbers


def _merged(
    size: Sequence[int], strides: Sequence[Sequence[int]], rows: bool, read: int
) -> tuple[list[int], list[list[int]]]:
    """Axes of one left out, and those that lie one behind the other in all operands as one; in the
    order of one operand's memory, but the last axis stays where whole ``rows`` are taken."""
    axes = [(n, *(own[d] for own in strides)) for d, n in enumerate(size)]
    last = axes.pop() if rows else None
    axes = [axis for axis in axes if axis[0] != 1]
    axes.sort(key=lambda axis: -abs(axis[1 + read]))
    merged: list[tuple[int, ...]] = []
    for axis in axes:
        if merged and all(
            outer == step * axis[0] for outer, step in zip(merged[-1][1:], axis[1:], strict=True)
        ):
            axis = merged.pop()[0] * axis[0], *axis[1:]
        merged.append(axis)
    if last is not None:
        merged.append(last)
    elif merged and merged[-1][0] < SHORT:  # better a long way in steps than many short ones
        merged.append(merged.pop(max(range(len(merged)), key=lambda d: merged[d][0])))
    merged = merged or [(1, *(0 for _ in strides))]
    return [axis[0] for axis in merged], [list(own) for own in zip(*merged, strict=True)][1:]
