"""A whole step of a layer on a CPU: which loops of C++ it is made of.

A step is a plan as ``engine/replay`` knows it, but written here instead of recorded: its tensors
have slots, inputs first, and a launch is a loop of C++ (``kernels.h``) with slots and numbers. It
is written once a shape, format, type and mode of a layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normkit.core.fusion import Fixed, Pool, Traced
from normkit.core.precision import statistics_dtype
from normkit.engine.cpu import convolved
from normkit.engine.cpu.families import FAMILIES, GATES, NOTHING, Slot
from normkit.engine.cpu.looked_into import looked_into, looked_into_frozen
from normkit.engine.cpu.passes import ACTIVATIONS, DTYPES, extent

X, RESIDUAL, FIRST = 0, 1, 2  # slots
THE_GRADIENT = -2  # in place of a slot: the incoming one itself


class Program:
    """Tables to allocate and loops to go through, in the form that C++ takes."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.allocations: list[tuple[bool, int, torch.dtype]] = []
        self.launches: list[dict[str, Any]] = []

    def table(self, size: int, dtype: torch.dtype = torch.float64) -> int:
        self.allocations.append((False, size, dtype))
        return self.inputs + len(self.allocations) - 1

    def like_x(self) -> int:
        self.allocations.append((True, 0, torch.float32))
        return self.inputs + len(self.allocations) - 1

    def call(self, loop: str, slots: Sequence[Any], numbers: Sequence[float]) -> None:
        """A slot may be a pair: with how many entries to skip."""
        places = [slot if isinstance(slot, tuple) else (slot, 0) for slot in slots]
        given = {"loop": loop, "slots": places, "numbers": [float(n) for n in numbers]}
        self.launches.append(given)

    def given(self) -> dict[str, Any]:
        return {"allocations": self.allocations, "launches": self.launches}


def written(
    layer: Any, x: Tensor, residual: Tensor | None, activation: str, description: Any, layout: Any
) -> dict[str, Any] | None:
    """The plan of a step like this one; None if no loops do it, or not with the layer's own
    tensors alone, which C++ finds by name."""
    if activation not in ACTIVATIONS or (residual is not None and residual.dtype != x.dtype):
        return None
    fusion, after = convolved.apart(description)
    used = {id(t) for t in _tensors(description)}
    own = {name: p for name, p in layer._parameters.items() if id(p) in used}
    kept = {name: b for name, b in layer._buffers.items() if id(b) in used}
    fixed, learned = isinstance(fusion, Fixed), any(p.requires_grad for p in own.values())
    serves = _serves(layer, fixed, learned)
    if serves == 0 and not torch.is_grad_enabled():
        return None
    if torch.is_grad_enabled() and any(b.requires_grad for b in kept.values()):
        return None  # to which no step has a gradient
    tensors = [*own.values(), *kept.values()]
    places = {id(t): FIRST + i for i, t in enumerate(tensors)}
    if len(places) < len(tensors) or not used <= places.keys():
        return None  # a tensor under two names, or one of somebody else
    if not isinstance(fusion, Traced) and not _fits(fusion, layout.columns):
        return None
    if not convolved.fits(after, layout.columns):
        return None
    if not all(p.dtype in DTYPES for p in own.values()):
        return None
    types = set()

    def slot(tensor: Tensor | None) -> int:
        if tensor is None:
            return NOTHING
        types.add(tensor.dtype)
        return places[id(tensor)]

    family = FAMILIES[type(fusion)](fusion, layout, slot)
    if not types <= {*DTYPES, torch.int64}:
        return None  # as of statistics that were loaded in half precision
    rows, row, period = layout.rows, layout.columns, family.period
    step = 0 if period == row else row  # from the map of a sample to the next one's
    passes, sizes = convolved.passes(x, layout) if after else ("", extent(layout))
    numbers = [*sizes, step, step, step, ACTIVATIONS[activation]]
    kernel = [slot(p) for p in after]  # and bias
    keeps_gates = getattr(fusion, "keeps_gates", False)
    inside = rows * row if after and keeps_gates else 0  # gates that nobody else is told

    forward = Program(FIRST + len(places))
    y, gates = forward.like_x(), NOTHING
    tables = forward.table(family.tables + inside)
    given: list[Any] = [tables, *family.map[0]]
    if family.moments:
        moments = forward.table(2 * rows * row)
        forward.call("moments", [X, moments], extent(layout))
        if family.score is not None:
            score, rest = family.score
            forward.call("score", [X, moments, score], [rows, row, layout.count, *rest])
        given = [moments, *given]
    if keeps_gates and not inside:
        gates = forward.table(rows * row, statistics_dtype(x.dtype))
    used_gates = (tables, family.tables) if inside else gates
    given = [used_gates if slot == GATES else slot for slot in given]
    forward.call(f"{family.name}_map", given, family.map[1])
    map = [(tables, i * period) for i in range(3)]
    further = [*kernel, used_gates] if after else []
    forward.call(f"{passes}map", [X, RESIDUAL, y, *map, *further], numbers)

    tables_again, grad = FIRST + len(own), FIRST + len(own) + 1
    backward = Program(grad + (1 if gates == NOTHING else 2))
    map = [(tables_again, i * period) for i in range(3)]
    needs_residual = residual is not None and residual.requires_grad
    before = backward.like_x() if needs_residual and activation != "none" else NOTHING
    frozen = fixed and not learned and not after  # then there is less to do
    keeps_x = not frozen or activation != "none"
    gradients = {id(p): NOTHING for p in (None, *own.values())}
    gradients |= {id(p): backward.table(p.numel(), p.dtype) for p in after if p is not None}
    dgates = backward.table(inside) if inside else grad + 1
    further, extra = [], NOTHING
    if after:
        used_gates = (tables_again, family.tables) if inside else NOTHING
        further = [*kernel, used_gates, *(gradients[id(p)] for p in after)]
        further.append(dgates if inside else NOTHING)
    if not frozen or before != NOTHING:
        sums = backward.table(2 * rows * row)
        backward.call(f"{passes}sums", [grad, X, RESIDUAL, before, *map, sums, *further], numbers)
    if not frozen:
        extra = backward.table(2 * period)
        for p in fusion.parameters:
            if p is not None and all(p is not other for other in family.unused):
                gradients[id(p)] = backward.table(p.numel(), p.dtype)
        found = [gradients[id(p)] for p in fusion.parameters]
        between = [dgates if slot == GATES else slot for slot in family.gradient[0]]
        given = [sums, tables_again, *between, extra, *found]
        backward.call(f"{family.name}_gradient", given, family.gradient[1])
    dx = NOTHING
    if x.requires_grad:
        dx = backward.like_x()
        given = [grad, X if keeps_x else grad, RESIDUAL, dx, *map, NOTHING, NOTHING]
        if family.moments:
            given[-2:] = [extra, (extra, period)]
        backward.call(f"{passes}input_gradient", [*given, *kernel[:1]], [*numbers, step])
    return {
        "parameters": list(own),
        "buffers": list(kept),
        "tensors": [*own.values(), *kept.values()],
        "training": layer.training,
        "activation": activation,
        "needs_x": x.requires_grad,
        "needs_residual": needs_residual,
        "residual": None if residual is None else residual.new_empty(0),
        "forward": forward.given(),
        "backward": backward.given(),
        "y": y,
        "tables": tables,
        "keeps_y": bool(after) and activation != "none",  # in the residual's place
        "dx": dx,
        "dresidual": THE_GRADIENT if needs_residual and before == NOTHING else before,
        "gradients": [(gradients[id(p)], 0, p.numel()) for p in own.values()],
        "keeps_x": keeps_x,
        **({"learned": learned} if fixed else {}),
        "again": looked_into_frozen(activation, layout)
        if frozen
        else looked_into(layer, list(own), fusion, family, activation, layout, after),
        "report": _reporter(layer),
        "gates": gates,
        "rows": rows,
        "serves": serves,
        "writes": _written_to(fusion, slot),
    }


def _fits(fusion: Any, channels: int) -> bool:
    """Whether tensors have the sizes that loops go through: a user may have put others there, and
    torch then says what is wrong with them, or spreads them."""
    groups = getattr(fusion, "groups", channels)
    shared = groups if isinstance(fusion, Pool | Fixed) else channels  # statistics

    def has(size: int, *tensors: Tensor | None) -> bool:
        return all(t is None or t.numel() == size for t in tensors)

    def named(*names: str) -> list[Tensor | None]:
        return [getattr(fusion, name, None) for name in names]

    memory, ramps = fusion.memory, getattr(fusion, "ramps", None)
    mixed, own = named("mean_weight", "var_weight"), named("group_weight", "group_bias")
    return (
        has(channels, *named("weight", "bias", "center", "gate_weight", "gate_bias"))
        and has(shared, *named("mean", "var"), *(getattr(fusion, "given", None) or ()))
        and has(1, *named("score", "rate"))
        and (memory is None or has(shared, memory.mean, memory.second))
        and (memory is None or has(1, memory.batches, memory.nonfinite))
        and (ramps is None or (has(shared, ramps.mean, ramps.std) and has(1, ramps.seen)))
        and (has(groups, *own) or has(channels, *own))
        and (mixed[0] is None or has(2, *mixed) or has(3, *mixed))
    )


def _serves(layer: Any, fixed: bool, learned: bool) -> int:
    """Forwards with gradients (0), also such without (1), or those alone (2)."""
    if fixed and learned:  # a backward has other passes where nothing is
        return 0 if torch.is_grad_enabled() else 2
    return 0 if layer.training and layer.map_reads_state() else 1


def _written_to(fusion: Any, slot: Slot) -> list[int]:
    """Slots of what a step changes, for autograd to know that it is another value now."""
    if isinstance(fusion, Traced):
        return [slot(fusion.statistics[name]) for name in fusion.plan.changed]
    memory, condensation = fusion.memory, getattr(fusion, "condensation", None)
    changed = [] if memory is None else list(memory[:4])
    return [slot(t) for t in (*changed, *([] if condensation is None else [fusion.score]))]


def _tensors(part: Any) -> list[Tensor]:
    """All that a description names."""
    if isinstance(part, Tensor):
        return [part]
    part = tuple(part.values()) if isinstance(part, dict) else part
    return [t for each in part for t in _tensors(each)] if isinstance(part, tuple) else []


def _reporter(layer: Any) -> Callable[[], None]:
    """Warns of a batch that was left out of the running statistics."""
    own = weakref.ref(layer)

    def report() -> None:
        kept = own()
        if kept is not None:
            kept.report()

    return report
