"""A whole step of a layer on a CPU: which loops of C++ it is made of, for each family.

A step is a plan as ``engine/replay`` knows it, but written here instead of recorded: its tensors
have slots, inputs first, and a launch is a loop of C++ (``kernels.h``) with slots and numbers. It
is written once a shape, format, type and mode of a layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.core.fusion import Channel, Fixed, Fusion, Gate, Memory, Mix, Pool, Traced
from normkit.core.moments import Moments
from normkit.core.precision import statistics_dtype
from normkit.core.statistics import LayerState, Repetition, Seen
from normkit.engine import plain
from normkit.engine.cpu import convolved
from normkit.engine.cpu.passes import ACTIVATIONS, DTYPES, extent
from normkit.engine.epilogue import AffineMap

X, RESIDUAL, FIRST = 0, 1, 2  # slots
NOTHING = -1
THE_GRADIENT = -2  # in place of a slot: the incoming one itself
GATES = -3  # the second result, and in a backward its gradient
LOOKS_AT = {"nothing": 0, "normalized": 1, "input": 2}
Slot = Callable[[Tensor | None], int]


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


class FamilyLoops(NamedTuple):
    """What is peculiar to a family: its two loops, and what they leave in the tables."""

    name: str
    tables: int  # entries: the map first, scale, shift and center, ``period`` each
    period: int
    map: tuple[Sequence[int], Sequence[float]]  # slots after moments and tables; numbers
    gradient: tuple[Sequence[int], Sequence[float]]  # slots between tables and extra; numbers
    seen: Callable[[Tensor], Seen]  # what the map was made of beside the batch
    moments: bool = True  # whether it needs them
    score: tuple[int, Sequence[float]] | None = None  # a slot, and numbers: see Condensation
    unused: Sequence[Tensor] = ()  # parameters that get no gradient


def written(
    layer: Any, x: Tensor, residual: Tensor | None, activation: str, description: Any, layout: Any
) -> dict[str, Any] | None:
    """The plan of a step like this one; None if no loops do it, or not with the layer's own
    tensors alone, which C++ finds by name."""
    if activation not in ACTIVATIONS or (residual is not None and residual.dtype != x.dtype):
        return None
    fusion, after = convolved.apart(description)
    serves = _serves(layer, fusion)
    if serves == 0 and not torch.is_grad_enabled():
        return None
    used = {id(t) for t in _tensors(description)}
    own = {name: p for name, p in layer._parameters.items() if id(p) in used}
    kept = {name: b for name, b in layer._buffers.items() if id(b) in used}
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
    sums, extra = backward.table(2 * rows * row), backward.table(2 * period)
    map = [(tables_again, i * period) for i in range(3)]
    needs_residual = residual is not None and residual.requires_grad
    before = backward.like_x() if needs_residual and activation != "none" else NOTHING
    gradients = {id(p): NOTHING for p in (None, *family.unused)}
    for p in fusion.parameters:
        if p is not None and id(p) not in gradients:
            gradients[id(p)] = backward.table(p.numel(), p.dtype)
    found = [gradients[id(p)] for p in fusion.parameters]
    gradients |= {id(p): backward.table(p.numel(), p.dtype) for p in after if p is not None}
    dgates = backward.table(inside) if inside else grad + 1
    if after:
        used_gates = (tables_again, family.tables) if inside else NOTHING
        further = [*kernel, used_gates, *(gradients[id(p)] for p in after)]
        further.append(dgates if inside else NOTHING)
    backward.call(f"{passes}sums", [grad, X, RESIDUAL, before, *map, sums, *further], numbers)
    between = [dgates if slot == GATES else slot for slot in family.gradient[0]]
    given = [sums, tables_again, *between, extra, *found]
    backward.call(f"{family.name}_gradient", given, family.gradient[1])
    dx = NOTHING
    if x.requires_grad:
        dx = backward.like_x()
        given = [grad, X, RESIDUAL, dx, *map, NOTHING, NOTHING]
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
        "again": _looked_into(layer, list(own), fusion, family, activation, layout, after),
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


def _serves(layer: Any, fusion: Fusion) -> int:
    """Forwards with gradients (0), also such without (1), or those alone (2)."""
    if isinstance(fusion, Fixed):  # there are other passes where nothing is learned
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


def _looked_into(
    layer: Any,
    names: list[str],
    fusion: Fusion,
    family: FamilyLoops,
    act: str,
    layout: Any,
    after: Sequence[Tensor | None],
) -> Callable[..., Any]:
    """The backward of a step where someone looks into it: the layer computes its map again, on
    tables, and autograd differentiates. It must not keep the layer alive, which keeps this."""
    own, training, size = weakref.ref(layer), layer.training, (layout.rows, layout.columns)
    eps = getattr(layer, "eps", None)
    given = [layer._parameters[name] for name in names]
    order = [i for q in fusion.parameters for i, p in enumerate(given) if p is q]
    many, seen, gated = family.tables, family.seen, getattr(fusion, "keeps_gates", False)
    convolve = convolved.Again(given, after, gated, act) if after else None
    follows = act if convolve is None else "none"
    del given, fusion, family, after

    def again(
        x: Tensor,
        residual: Tensor | None,
        parameters: Sequence[Tensor],
        tables: Tensor,
        grad: Tensor,
        needs: Sequence[bool],
        grad_gates: Tensor | None = None,
    ) -> list[Tensor | None]:
        kept, further = own(), torch.is_grad_enabled()
        if kept is None:
            raise RuntimeError(
                "The layer of this graph is gone, and its gradient cannot be differentiated "
                "without it. Try to keep the model until the last backward."
            )
        if getattr(kept, "eps", eps) != eps:
            raise RuntimeError(
                f"The eps of {type(kept).__name__} was {eps:g} in this forward and is {kept.eps:g} "
                "now, and its gradient is computed by the layer once more. Try to change it after "
                "the backward."
            )
        with torch.enable_grad():
            if convolve is not None:  # in place of the residual it has its result
                grad, residual = convolve.before(grad, residual), None
            inputs = plain.aliases([x, residual, *parameters])
            x, residual, *parameters = inputs  # type: ignore[assignment]
            moments = Moments(*plain.moments(x, layout), layout.count)
            state = LayerState(training, dict(kept._buffers), True)
            repeated = Repetition(kept, state, dict(zip(names, parameters, strict=True)))
            used = [parameters[i] for i in order]
            result = repeated.result(
                moments, used, used, seen(tables[:many].to(moments.mean.dtype))
            )
            scale, shift, center = result.map.each(lambda t: t.expand(size))
            y = plain.affine(x, AffineMap(scale, shift, center, residual, follows), layout)
            if convolve is not None:
                y = convolve.after(y, parameters, result.gate)
            outputs, outer = [y], [grad]
            if result.gate is not None and grad_gates is not None:
                outputs, outer = [y, result.gate.expand(size)], [grad, grad_gates]
            back = plain.gradients_of(outputs, inputs, needs, outer, further)
        if needs[1] and residual is None:  # it was not kept, for nothing follows the sum
            back[1] = grad
        return back

    return again


# ---------------------------------------------------------------- families


def _memory(memory: Memory | None, slot: Slot) -> tuple[list[int], list[float]]:
    """Slots and numbers of running statistics; without batches to count nothing is written."""
    if memory is None:
        return [NOTHING] * 4, [0.0, 1.0]
    tensors = memory.mean, memory.second, memory.batches, memory.nonfinite
    return [slot(t) for t in tensors], [memory.weight, memory.correction]


def _statistics(fusion: Any, slot: Slot) -> list[int]:
    """Those that replace the batch's, or are about to take them up."""
    given = fusion.given
    if given is None and fusion.memory is not None:
        given = fusion.memory.mean, fusion.memory.second
    return [NOTHING] * 2 if given is None else [slot(t) for t in given]


def _pool(fusion: Pool, layout: Any, slot: Slot) -> FamilyLoops:
    rows, channels, ramps = layout.rows, layout.columns, fusion.ramps
    samples = rows if fusion.kind == "sample" else 1
    memory, numbers = _memory(fusion.memory, slot)
    renorm = [NOTHING] * 3
    if ramps is not None:
        renorm = [slot(ramps.mean), slot(ramps.std), slot(ramps.seen)]
        numbers += ramps[:6]
    rest = fusion.groups, fusion.kind == "sample", fusion.eps, ramps is not None

    def seen(tables: Tensor) -> Seen:
        r, d = tables[-2 * channels :].view(2, 1, channels)
        return Seen(observed={"correction": (r, d)})

    kept = 2 * samples * fusion.groups + (0 if ramps is None else 2 * channels)
    weight, bias = slot(fusion.weight), slot(fusion.bias)
    return FamilyLoops(
        "pool",
        3 * samples * channels + kept,
        samples * channels,
        ([weight, bias, *memory, *renorm], [rows, channels, *rest, *numbers]),
        ([weight], [rows, channels, layout.count, *rest]),
        (lambda _: Seen()) if ramps is None else seen,
    )


def _fixed(fusion: Fixed, layout: Any, slot: Slot) -> FamilyLoops:
    channels = layout.columns
    given = [slot(t) for t in (fusion.mean, fusion.var, fusion.weight, fusion.bias)]

    groups, eps = fusion.groups, fusion.eps

    def seen(tables: Tensor) -> Seen:
        center, inverse = tables[2 * channels :].view(2, groups, -1)[:, :, 0]
        statistics = {"running_mean": center, "running_var": inverse**-2 - eps}
        return Seen(statistics, fixed=True)

    return FamilyLoops(
        "fixed",
        4 * channels,
        channels,
        (given, [channels, groups, eps]),
        ([], [layout.rows, channels]),
        seen,
        moments=False,
    )


def _gate(fusion: Gate, layout: Any, slot: Slot) -> FamilyLoops:
    rows, channels = layout.rows, layout.columns
    size = rows * channels
    memory, numbers = _memory(fusion.memory, slot)
    source = 0 if fusion.given is None else 1 if fusion.score is None else 2
    looks_at = 0 if fusion.gate_weight is None else LOOKS_AT[fusion.looks_at]
    gate = [slot(fusion.center), slot(fusion.gate_weight), slot(fusion.gate_bias)]
    weight, bias = slot(fusion.weight), slot(fusion.bias)
    flags, gates = (source, looks_at), GATES if fusion.keeps_gates else NOTHING
    given = [*gate, weight, bias, *_statistics(fusion, slot), slot(fusion.score), gates, *memory]
    score = None
    if fusion.condensation is not None:
        score = slot(fusion.score), fusion.condensation[:3]

    def seen(tables: Tensor) -> Seen:
        begin = 5 * size + 2 * channels
        mean, var = tables[begin : begin + 2 * channels].view(2, channels)
        statistics = {"running_mean": mean, "running_var": var}
        if source == 1:
            return Seen(statistics, fixed=True)
        # only on which side of the threshold it was
        statistics["score"] = torch.where(tables[-1:] > 0, torch.inf, -torch.inf)
        return Seen(statistics)

    return FamilyLoops(
        "gate",
        5 * size + 4 * channels + 1,
        size,
        (given, [rows, channels, fusion.eps, fusion.tau, *flags, *numbers]),
        ([*gate, weight, gates], [rows, channels, layout.count, fusion.eps, *flags]),
        (lambda _: Seen()) if source == 0 else seen,
        score=score,
    )


def _channel(fusion: Channel, layout: Any, slot: Slot) -> FamilyLoops:
    rows, channels = layout.rows, layout.columns
    size = rows * channels
    memory, numbers = _memory(fusion.memory, slot)
    own = fusion.group_weight
    of_group = own is not None and own.shape[0] == fusion.groups
    constant = fusion.given is not None or fusion.rate is not None
    rest = fusion.groups, fusion.eps, constant, of_group
    weight, bias, group_weight, group_bias = (slot(p) for p in fusion.parameters)
    affine = [weight, bias, group_weight, group_bias]

    def seen(tables: Tensor) -> Seen:
        mean, var = tables[-2 * channels :].view(2, channels)
        return Seen({"running_mean": mean, "running_var": var}, fixed=True)

    statistics = [*_statistics(fusion, slot), slot(fusion.rate)]
    return FamilyLoops(
        "channel",
        5 * size + 4 * channels,
        size,
        ([*affine, *statistics, *memory], [rows, channels, *rest, *numbers]),
        ([weight, bias, group_weight], [rows, channels, layout.count, *rest]),
        seen if constant else (lambda _: Seen()),
    )


def _mix(fusion: Mix, layout: Any, slot: Slot) -> FamilyLoops:
    rows, channels = layout.rows, layout.columns
    size = rows * channels
    memory, numbers = _memory(fusion.memory, slot)
    fixed = fusion.given is not None
    rest = fusion.eps, fusion.unbias, fusion.mean_weight.shape[0], fixed
    weight, bias, mean_weight, var_weight = (slot(p) for p in fusion.parameters)
    given = [weight, bias, mean_weight, var_weight, *_statistics(fusion, slot), *memory]

    def seen(tables: Tensor) -> Seen:
        mean, var = tables[5 * size : 5 * size + 2 * channels].view(2, channels)
        return Seen({"running_mean": mean, "running_var": var}, fixed=True)

    return FamilyLoops(
        "mix",
        5 * size + 2 * rows + 2 * channels,
        size,
        (given, [rows, channels, *rest, *numbers]),
        ([weight, mean_weight, var_weight], [rows, channels, layout.count, *rest]),
        seen if fixed else (lambda _: Seen()),
    )


def _traced(fusion: Traced, layout: Any, slot: Slot) -> FamilyLoops:
    plan = fusion.plan
    own = [slot(p) for p in fusion.parameters]
    kept = [slot(b) for b in fusion.statistics.values()]

    def seen(tables: Tensor) -> Seen:
        return Seen(plan.functions.statistics(tables))

    named = zip(plan.functions.parameters, fusion.parameters, strict=True)
    return FamilyLoops(
        "tape",
        plan.size(),
        plan.functions.period,
        ([*own, *kept], plan.forward),
        (own, plan.backward),
        seen,
        unused=[p for name, p in named if name in plan.functions.unused],
    )


FAMILIES: dict[type, Callable[[Any, Any, Slot], FamilyLoops]] = {
    Pool: _pool,
    Fixed: _fixed,
    Gate: _gate,
    Channel: _channel,
    Mix: _mix,
    Traced: _traced,
}
