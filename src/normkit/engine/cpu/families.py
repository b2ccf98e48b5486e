"""What loops in C++ take for the coefficients of each family: slots and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.core.fusion import Channel, Fixed, Gate, Memory, Mix, Pool, Traced
from normkit.core.statistics import Seen

NOTHING = -1  # in place of a slot
GATES = -3  # the second result, and in a backward its gradient
LOOKS_AT = {"nothing": 0, "normalized": 1, "input": 2}
Slot = Callable[[Tensor | None], int]


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
