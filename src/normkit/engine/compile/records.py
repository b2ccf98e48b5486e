"""A description of coefficients as the arguments of an operator, and back.

An operator takes tensors, numbers and strings, no records. So every description is spread over
the same slots: five parameters, which get gradients; two given statistics, which get none; a few
whole numbers and eps. What changes a buffer is not among them: see normkit::remember.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.core.fusion import Channel, Fusion, Gate, Mix, Pool, Squash, Traced, graph_family
from normkit.core.layout import Batch, Channels

FAMILIES = ("pool-sample", "pool-batch", "gate", "channel", "mix")
LOOKS_AT = ("nothing", "normalized", "input")

# of the schemas: the slots, in the order of OperatorRecord
SLOTS = ", ".join(f"Tensor? {name}" for name in ("weight", "bias", "third", "fourth", "fifth"))
KIND = "str family, int[] options, float eps"
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

Slots = tuple[Tensor | None, ...]


class Options(NamedTuple):
    """The whole numbers of a record."""

    whole: int  # whether a cell is a channel of the whole batch
    groups: int = 1
    given: int = 0  # whether statistics are given
    looks_at: int = 0  # of gates
    less: int = 0  # of mixtures: variances are times L/(L − less), L the positions


class OperatorRecord(NamedTuple):
    """The arguments of an operator, less x."""

    parameters: Slots  # five
    given: Slots  # two
    family: str
    options: list[int]
    eps: float


def spread(fusion: Fusion, whole: bool) -> OperatorRecord | None:
    """The record of a description; None if it has no place in a graph."""
    family = graph_family(fusion)
    if family is None or isinstance(fusion, Traced | Squash):
        return None
    given = getattr(fusion, "given", None)
    options = Options(int(whole), getattr(fusion, "groups", 1), int(given is not None))
    if isinstance(fusion, Gate):
        options = options._replace(looks_at=LOOKS_AT.index(fusion.looks_at))
    if isinstance(fusion, Mix):
        # the factor depends on the size: as a number it would tie the graph to this one
        options = options._replace(less=int(fusion.unbias != 1.0))
    parameters = (*fusion.parameters, None, None, None)[:5]
    return OperatorRecord(parameters, given or (None, None), family, list(options), fusion.eps)


def gathered(
    x: Tensor, parameters: Slots, given: Slots, family: str, options: list[int], eps: float
) -> Fusion:
    """The description again: the same map, but nothing to remember."""
    _, groups, _, looks_at, less = options
    weight, bias, third, fourth, fifth = parameters
    mean, second = given
    constants = None if mean is None or second is None else (mean, second)
    if family == "gate":
        assert fourth is not None
        seen = LOOKS_AT[looks_at]
        return Gate(eps, seen, weight, bias, third, fourth, fifth, constants)
    if family == "channel":
        return Channel(eps, groups, weight, bias, third, fourth, constants)
    if family == "mix":
        assert third is not None and fourth is not None
        positions = x[0, 0].numel()
        unbias = positions / (positions - less)
        return Mix(eps, unbias, weight, bias, third, fourth, constants)
    return Pool(family.removeprefix("pool-"), eps, groups, weight, bias)


def outlined(x: Tensor, tables: Tensor, parameters: Slots, *kind: Any) -> Fusion:
    """The description as far as gradients need it: of given statistics, only that there were."""
    there = tables if kind[1][2] else None
    return gathered(x, parameters, (there, there), *kind)


def layout_of(x: Tensor, options: list[int]) -> Batch | Channels:
    return Batch.of(x) if options[0] else Channels.of(x)


# ---------------------------------------------------------------- what the families write


class Sizes(NamedTuple):
    """How much a family writes, and where: numbers that may be symbols."""

    period: Any  # entries of the map's scale
    begin: Any  # of the statistics, in the tables
    tables: Any
    gradients: Any  # constant and slope of dx, then those of the parameters


def sizes(x: Tensor, family: str, options: list[int]) -> Sizes:
    samples, channels = x.shape[:2]
    whole, groups = options[:2]
    rows = 1 if whole else samples
    period = rows * channels
    if family == "pool-batch":
        return Sizes(channels, 3 * channels, 3 * channels + 2 * groups, 4 * channels)
    if family == "pool-sample":
        return Sizes(period, 3 * period, 3 * period + 2 * rows * groups, 4 * period)
    if family == "mix":
        gradients = 2 * period + 2 * channels + 6 + 6 * rows
        return Sizes(period, 5 * period, 5 * period + 2 * channels + 2 * rows, gradients)
    parameters = 5 if family == "gate" else 4
    tables = 5 * period + 4 * channels
    return Sizes(period, 5 * period, tables, 2 * period + parameters * channels)


def written(tables: Tensor, fusion: Fusion, begin: int, channels: int) -> Tensor:
    """Tables without anything that nobody wrote: the same input must give the same output."""
    if isinstance(fusion, Gate):
        return tables[:-1]  # whether a score decided for the batch; there is none
    if isinstance(fusion, Mix) and fusion.mean_weight.shape[0] == 2:
        tables[begin : begin + 2 * channels].zero_()  # no part of the batch, so no statistics
    return tables


def gradient_size(x: Tensor, parameters: Slots, family: str, options: list[int]) -> Any:
    """The size of the tensor that holds the gradients of the parameters."""
    if all(parameter is None for parameter in parameters):
        return 0
    if family == "pool-sample":  # summed over the samples
        return 2 * x.shape[1]
    return sizes(x, family, options).gradients


def whole_storage(found: Slots, parameters: Slots, x: Tensor, family: str) -> Tensor:
    """The tensor of which the gradients of the parameters are parts, for a graph to cut up.

    Operators must not give two tensors that share memory. Of sample pools it is these alone, also
    where a single sample has left them behind constant and slope of dx.
    """
    if all(parameter is None for parameter in parameters):
        return x.new_empty(0, dtype=torch.float32)
    part = next(part for part in found if part is not None)
    if family == "pool-sample":
        rows = part.as_strided((2 * x.shape[1],), (1,), part.storage_offset())
        return rows.clone() if part.storage_offset() else rows
    size = part.untyped_storage().nbytes() // part.element_size()
    return part.as_strided((size,), (1,), 0)


def cut(
    found: Tensor, family: str, parameters: Slots, needs: Any, sizes: Sizes, channels: Any
) -> Any:
    """The gradients of the five parameters: one row of C each, after constant and slope of dx.

    Those of sample pools stand alone; mixtures have two shares of three after the first two.
    """
    begin = 0 if family == "pool-sample" else 2 * sizes.period
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
