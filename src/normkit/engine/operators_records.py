"""A description of coefficients as the arguments of an operator, and back.

An operator takes tensors, numbers and strings, no records. So every description is spread over
the same slots: five parameters, which get gradients; three tensors that are constants; a few
whole numbers and a few others. What changes a buffer is not among them: see operators_memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.core.fusion import Channel, Fusion, Gate, Memory, Mix, Pool, Ramps
from normkit.core.layout import Batch, Channels

FAMILIES = ("pool-sample", "pool-batch", "gate", "channel", "mix")
LOOKS_AT = ("nothing", "normalized", "input")

# of the schemas: the slots, in the order of Record
SLOTS = ", ".join(f"Tensor? {name}" for name in ("weight", "bias", "third", "fourth", "fifth"))
CONSTANTS = ", ".join(f"Tensor? {name}" for name in ("mean", "second", "signal"))
KIND = "str family, int[] options, float[] numbers"
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

Slots = tuple[Tensor | None, ...]


class Options(NamedTuple):
    """The whole numbers of a record."""

    whole: int  # whether a cell is a channel of the whole batch
    groups: int
    source: int  # of statistics: the batch (0), constants (1), or something that is kept (2)
    looks_at: int  # of gates
    keeps: int  # whether the gates are wanted
    less: int  # variances are times L/(L − less), L the positions

    @classmethod
    def of(cls, fusion: Fusion, whole: bool) -> Options:
        if isinstance(fusion, Pool):
            return cls(int(whole), fusion.groups, 0 if fusion.ramps is None else 2, 0, 0, 0)
        source = 0 if fusion.given is None else 1
        if isinstance(fusion, Channel):
            source = source if fusion.rate is None else 2
            return cls(int(whole), fusion.groups, source, 0, 0, 0)
        if isinstance(fusion, Mix):
            # a factor of the size: as a number it would tie a graph to this one
            return cls(int(whole), 1, source, 0, 0, int(fusion.unbias != 1.0))
        looks_at = LOOKS_AT.index(fusion.looks_at)
        source = 2 if source and fusion.score is not None else source
        return cls(int(whole), 1, source, looks_at, int(fusion.keeps_gates), 0)


class Record(NamedTuple):
    """The arguments of an operator, less x."""

    parameters: Slots  # five
    constants: Slots  # three
    family: str
    options: list[int]
    numbers: list[float]


def family_of(fusion: Fusion) -> str:
    if isinstance(fusion, Pool):
        return "pool-sample" if fusion.kind == "sample" else "pool-batch"
    if isinstance(fusion, Mix):
        return "mix"
    return "gate" if isinstance(fusion, Gate) else "channel"


def spread(fusion: Fusion, whole: bool) -> Record:
    """The record of a description."""
    options = list(Options.of(fusion, whole))
    family = family_of(fusion)
    if isinstance(fusion, Pool):
        parameters: Slots = fusion.weight, fusion.bias, None, None, None
        ramps = fusion.ramps
        if ramps is None:
            return Record(parameters, (None, None, None), family, options, [fusion.eps])
        seen = ramps.mean, ramps.std, ramps.seen
        return Record(parameters, seen, family, options, [fusion.eps, *ramps[:7]])
    mean, second = (None, None) if fusion.given is None else fusion.given
    if isinstance(fusion, Gate):
        parameters = (
            fusion.weight,
            fusion.bias,
            fusion.gate_weight,
            fusion.gate_bias,
            fusion.center,
        )
        constants = mean, second, fusion.score
        return Record(parameters, constants, family, options, [fusion.eps, fusion.tau])
    if isinstance(fusion, Mix):
        parameters = fusion.weight, fusion.bias, fusion.mean_weight, fusion.var_weight, None
        return Record(parameters, (mean, second, None), family, options, [fusion.eps])
    parameters = fusion.weight, fusion.bias, fusion.group_weight, fusion.group_bias, None
    if fusion.rate is not None and fusion.memory is not None:
        mean, second = fusion.memory.mean, fusion.memory.second
    return Record(parameters, (mean, second, fusion.rate), family, options, [fusion.eps])


def gathered(
    x: Tensor,
    parameters: Slots,
    constants: Slots,
    family: str,
    options: list[int],
    numbers: list[float],
) -> Fusion:
    """The description again: the same map, but no buffer is changed by what is made of it."""
    chosen = Options(*options)
    weight, bias, third, fourth, fifth = parameters
    mean, second, signal = constants
    eps = numbers[0]
    if family.startswith("pool"):
        ramps = None
        if chosen.source:
            assert mean is not None and second is not None and signal is not None
            # the kernel notes what it corrected towards; a graph does that beside the operator
            noted = torch.empty_like(mean), torch.empty_like(second)
            ramps = Ramps(*numbers[1:8], mean, second, signal, *noted)
        return Pool(family[5:], eps, chosen.groups, weight, bias, None, ramps)
    given = None if mean is None or second is None else (mean, second)
    if family == "gate":
        assert fourth is not None
        return Gate(
            eps,
            LOOKS_AT[chosen.looks_at],
            weight,
            bias,
            third,
            fourth,
            fifth,
            given,
            signal,
            numbers[1],
            keeps_gates=bool(chosen.keeps),
        )
    if family == "mix":
        assert third is not None and fourth is not None
        positions = x[0, 0].numel()
        unbias = positions / (positions - chosen.less)
        return Mix(eps, unbias, weight, bias, third, fourth, given)
    if chosen.source < 2 or given is None:
        return Channel(eps, chosen.groups, weight, bias, third, fourth, given)
    return Channel(
        eps, chosen.groups, weight, bias, third, fourth, None, _copies(*given), rate=signal
    )


def outlined(
    x: Tensor,
    tables: Tensor,
    parameters: Slots,
    family: str,
    options: list[int],
    numbers: list[float],
) -> Fusion:
    """The description as far as gradients need it: of the constants, only that they were there."""
    source = options[2]
    if family == "channel":  # constants, wherever they came from
        options = [*options[:2], min(source, 1), *options[3:]]
    there = tables[:1] if source else None
    signal = there if source == 2 else None
    return gathered(x, parameters, (there, there, signal), family, options, numbers)


def _copies(mean: Tensor, second: Tensor) -> Memory:
    """Running statistics that may be updated on the way, and are forgotten."""
    counts = mean.new_zeros(3, dtype=torch.int64)
    arrivals = counts[2:].view(torch.int32)[:1]
    return Memory(mean.clone(), second.clone(), counts[0], counts[1], arrivals, 0.0, 1.0)


class Sizes(NamedTuple):
    """How much a family writes, and where: all of it numbers that may be symbols."""

    rows: Any  # of a table: samples, or one
    period: Any  # entries of the map's scale
    begin: Any  # of the statistics, in the tables
    tables: Any
    gradients: Any  # of the coefficients: constant and slope, then those of the parameters


def sizes(family: str, options: list[int], samples: Any, channels: Any) -> Sizes:
    whole, groups, source, _, keeps, _ = options
    rows = 1 if whole else samples
    if family.startswith("pool"):
        pools = rows if family == "pool-sample" else 1
        period = pools * channels
        tables = 2 * period + 2 * pools * groups + (2 * channels if source else 0)
        return Sizes(rows, period, 2 * period, tables, 4 * period)
    period = rows * channels
    if family == "mix":
        tables = 4 * period + 2 * rows + 2 * channels
        return Sizes(rows, period, 4 * period, tables, 2 * period + 2 * channels + 6 + 6 * rows)
    tables = 4 * period + 4 * channels
    if family == "channel":
        return Sizes(rows, period, 4 * period, tables, 2 * period + 4 * channels)
    tables = tables + keeps * period + (1 if source == 2 else 0)
    return Sizes(rows, period, 4 * period, tables, 2 * period + 5 * channels)


def written(tables: Tensor, fusion: Fusion, begin: int, channels: int) -> Tensor:
    """Tables without anything that nobody wrote: the same input must give the same output."""
    if isinstance(fusion, Gate) and (fusion.score is None or fusion.given is None):
        return tables[:-1]  # no score, so no decision
    if isinstance(fusion, Mix) and fusion.mean_weight.shape[0] == 2:
        tables[begin : begin + 2 * channels].zero_()  # no part of the batch, so no statistics
    return tables


def layout_of(x: Tensor, options: list[int]) -> Batch | Channels:
    return Batch.of(x) if options[0] else Channels.of(x)


def whole_storage(found: Slots, parameters: Slots, x: Tensor) -> Tensor:
    """What the gradients of parameters are parts of, so that a graph can cut them out for nothing.

    Operators must not give two tensors that share memory. Empty if there are no parameters.
    """
    if all(parameter is None for parameter in parameters):
        return x.new_empty(0, dtype=torch.float32)
    part = next(part for part in found if part is not None)
    size = part.untyped_storage().nbytes() // part.element_size()
    return part.as_strided((size,), (1,), 0)


def cut(
    found: Tensor, family: str, parameters: Slots, needs: Any, period: Any, channels: Any
) -> list[Tensor | None]:
    """The gradients of the five parameters: one row of C each, after constant and slope of dx.

    Those of sample pools were summed and stand alone; mixtures have shares of three at the end.
    """
    begin = 0 if family == "pool-sample" else 2 * period
    cuts: list[Tensor | None] = [None] * 5
    for slot, (parameter, need) in enumerate(zip(parameters, needs, strict=True)):
        if parameter is None or not need:
            continue
        at = begin + slot * channels
        if family == "mix" and slot > 1:
            at = begin + 2 * channels + 3 * (slot - 2)
        part = found[at : at + parameter.shape[0]]  # of a row for groups, the rest means nothing
        cuts[slot] = part if part.dtype == parameter.dtype else part.to(parameter.dtype)
    return cuts
