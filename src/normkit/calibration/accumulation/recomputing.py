"""Blocks that keep nothing but their inputs, and are computed again in the backward.

The statistics a norm uses depend on all micro-batches, so the gradient of a block does too: with
s₁, …, s_d the tables of moments at the d calls of norms in a block, f their values as the
micro-batches give them, and L what comes after,

    λ_c = Σ_i ∂/∂s_c ( L_i + Σ_{m>c} ⟨λ_m, f_m,i⟩ )        i over the micro-batches

is the full gradient of s_c: what flows into the block above it and into the later tables of the
block. It needs the λ of later calls only. So they are found from the last call to the first, with
one micro-batch in memory at a time, and a last pass takes the gradients of ⟨dy, y⟩ + Σ ⟨λ, f⟩.
That is d + 1 forwards of the block for each micro-batch, and about half as many backwards.

Leaving the λ out, as a second pass with fixed statistics does, is no approximation: on a
ResNet-18 the gradients are then wrong by more than their own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normkit.calibration.accumulation.records import Part, Record
from normkit.calibration.accumulation.replaying import Replay
from normkit.errors import OptionError


class _Block(torch.autograd.Function):
    """A block with all micro-batches as its inputs and outputs."""

    @staticmethod
    def forward(ctx: Any, record: Record, anchor: Tensor, *inputs: Tensor) -> Any:
        ctx.record = record
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        outputs = [tensor for i in sorted(record.outputs) for tensor in record.outputs[i]]
        record.outputs.clear()
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        record: Record = ctx.record
        needed = ctx.needs_input_grad[2:]
        counts = [part.tensors for part in _parts(record)]
        inputs = _split(list(ctx.saved_tensors), counts)
        wanted = _split(list(needed), counts)
        each = len(grads) // len(record.parts)
        outer = _split(list(grads), [each] * len(record.parts))
        found = solved(record, inputs, wanted, outer)
        return None, None, *found


def solved(
    record: Record,
    inputs: list[list[Tensor]],
    wanted: list[list[bool]],
    outer: list[list[Tensor | None]],
) -> list[Tensor | None]:
    """The gradients of all inputs; those of the parameters go where autograd puts them."""
    flows: dict[int, tuple[Tensor, Tensor]] = {}
    for target in reversed(range(len(record.calls))):
        table = record.calls[target].table
        total = torch.zeros_like(table.mean), torch.zeros_like(table.var)
        for i, given in enumerate(inputs):
            replay = Replay(record, i, target)
            outputs = replay.run([t.detach() for t in given])
            assert replay.leaf is not None
            sources, weights = _sources(replay, outputs, outer[i], flows, after=target)
            if sources:
                new = torch.autograd.grad(sources, replay.leaf, weights, allow_unused=True)
                for sum_of, part in zip(total, new, strict=True):
                    if part is not None:
                        sum_of += part
        flows[target] = total
    found: list[Tensor | None] = []
    for i, given in enumerate(inputs):
        fresh = [t.detach().requires_grad_(w) for t, w in zip(given, wanted[i], strict=True)]
        replay = Replay(record, i)
        outputs = replay.run(fresh)
        sources, weights = _sources(replay, outputs, outer[i], flows, after=-1)
        if sources:
            torch.autograd.backward(sources, weights)
        found += [t.grad for t in fresh]
    return found


def _sources(
    replay: Replay,
    outputs: list[Tensor],
    outer: list[Tensor | None],
    flows: dict[int, tuple[Tensor, Tensor]],
    after: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """What gradients enter by: the outputs, and the micro-batch's own rows of later tables."""
    pairs = list(zip(outputs, outer, strict=True))
    for position, (mean, var) in flows.items():
        if position > after:
            own = replay.own[position]
            start, stop = replay.record.calls[position].bounds[replay.index]
            pairs += [(own.mean, mean[start:stop]), (own.var, var[start:stop])]
    used = [(t, g) for t, g in pairs if g is not None and t.requires_grad]
    return [t for t, _ in used], [g for _, g in used]


def join(record: Record) -> list[list[Tensor]]:
    """The outputs of the block for each micro-batch, tied to its inputs in one graph."""
    inputs = [tensor for part in _parts(record) for tensor in part.inputs]
    sizes = [len(record.outputs[i]) for i in sorted(record.outputs)]
    if len(set(sizes)) > 1:
        raise OptionError(f"{record.path} gives some micro-batches more outputs than others.")
    # parameters are no inputs of the function, so something has to ask for a gradient
    anchor = torch.empty(0, requires_grad=True)
    outputs = list(_Block.apply(record, anchor, *inputs))
    for part in _parts(record):
        part.forget()
    return _split(outputs, sizes)


def _parts(record: Record) -> list[Part]:
    return [record.parts[i] for i in sorted(record.parts)]


def _split(found: list[Any], sizes: Sequence[int]) -> list[list[Any]]:
    cut, start = [], 0
    for size in sizes:
        cut.append(found[start : start + size])
        start += size
    return cut
