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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from normkit.calibration.accumulation.sharing import (
    FullBatch,
    SharedNorm,
    bounds_of,
    current_exchange,
    exchanging_through,
    rows,
)
from normkit.core.moments import Moments
from normkit.core.statistics import LayerState, MapResult
from normkit.errors import NothingToDo, OptionError
from normkit.inspection import Survey
from normkit.inspection.run import replaced_forward
from normkit.inspection.side_by_side import RandomState, ThreadState

_INPUT = object()  # where a tensor was


def chosen_blocks(
    model: nn.Module, survey: Survey, recompute: bool | str | Sequence[str]
) -> dict[str, nn.Module]:
    """The modules to compute again, by path: the blocks of the survey, or those of given paths.

    Only modules that hold norms but are none; of modules inside each other the outermost.
    """
    if recompute is False:
        return {}
    if recompute is True:
        paths = list(survey.blocks)
    else:
        wanted = [recompute] if isinstance(recompute, str) else list(recompute)
        paths = [p for p, _ in model.named_modules() if any(fnmatchcase(p, w) for w in wanted)]
        if not paths:
            raise NothingToDo(f"recompute={recompute!r} fits no module of the model.")
    norms = {id(m) for site in survey for m in site.module.modules()}
    chosen: dict[str, nn.Module] = {}
    for path in sorted(paths, key=lambda p: p.count(".")):
        module = model.get_submodule(path)
        holds = any(id(m) in norms for m in module.modules() if m is not module)
        inside = any(path.startswith(f"{other}.") or other == "" for other in chosen)
        if holds and not inside and id(module) not in norms:
            chosen[path] = module
    return chosen


# -------------------------------------------------------------------- what is kept of a block


@dataclass
class NormCall:
    """One call of a norm in a block: the moments of all micro-batches, and the state it saw."""

    norm: SharedNorm
    table: Moments
    bounds: list[tuple[int, int]]  # of the rows of each micro-batch
    state: LayerState


@dataclass
class BlockInput:
    """One micro-batch at a block: its arguments, and all that repeating the forward needs."""

    leaves: list[Any]
    spec: TreeSpec
    random: RandomState
    thread: ThreadState

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def count(self) -> int:
        """How many of the leaves are tensors, or were."""
        return sum(leaf is _INPUT or isinstance(leaf, Tensor) for leaf in self.leaves)

    def forget(self) -> None:
        """Let go of the tensors: autograd keeps them, perhaps in the host's memory."""
        self.leaves = [_INPUT if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, with other tensors where they were."""
        left = iter(tensors)
        leaves = [
            next(left) if leaf is _INPUT or isinstance(leaf, Tensor) else leaf
            for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.spec)


@dataclass
class BlockRecord:
    """One passage of all micro-batches through a block."""

    path: str
    forward: Callable[..., Any]
    calls: list[NormCall] = field(default_factory=list)
    inputs: dict[int, BlockInput] = field(default_factory=dict)
    outputs: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def parts(self) -> list[BlockInput]:
        """The micro-batches in their order."""
        return [self.inputs[i] for i in sorted(self.inputs)]

    def log(self, norm: SharedNorm, table: Moments, sizes: list[int], state: LayerState) -> None:
        fixed = Moments(table.mean.detach(), table.var.detach(), table.count)
        self.calls.append(NormCall(norm, fixed, bounds_of(sizes), state.copied()))


# -------------------------------------------------------------------- forward


@contextmanager
def recording(path: str, module: nn.Module, records: dict[Any, BlockRecord]) -> Iterator[None]:
    """A block that keeps its inputs only, for the time of the context."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        batch = current_exchange()
        # without a gradient nothing is kept anyway; in a block inside another one all is recorded
        if not isinstance(batch, FullBatch) or batch.log or not torch.is_grad_enabled():
            return own(*args, **kwargs)
        key = batch.key("block", path)
        record = records.setdefault(key, BlockRecord(path, own))
        return _recorded(record, batch, args, kwargs, key, lambda: records.pop(key))

    with replaced_forward(module, forward):
        yield


def _recorded(
    record: BlockRecord,
    batch: FullBatch,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    key: Any,
    done: Callable[[], Any],
) -> Any:
    """One micro-batch through a block."""
    leaves, spec = tree_flatten((args, kwargs))
    given = BlockInput(leaves, spec, RandomState.here(), ThreadState.here())
    record.inputs[batch.run.index] = given
    versions = [t._version for t in given.tensors]
    batch.log = record.log
    try:
        with given.thread.again(gradients=False, cache=False):
            outputs = record.forward(*args, **kwargs)
    finally:
        batch.log = None
    if versions != [t._version for t in given.tensors]:
        raise OptionError(
            f"{record.path} changes its input in place, so it cannot be computed again. "
            "Try recompute=False, or the paths of other modules."
        )
    flat, shape = tree_flatten(outputs)
    record.outputs[batch.run.index] = [leaf for leaf in flat if isinstance(leaf, Tensor)]

    def tie(_: Any) -> list[list[Tensor]]:
        done()
        return _tied(record)

    tied = iter(batch.run.meet(key, None, tie))
    return tree_unflatten([next(tied) if isinstance(x, Tensor) else x for x in flat], shape)


def _tied(record: BlockRecord) -> list[list[Tensor]]:
    """The outputs of the block for each micro-batch, tied to its inputs in one graph."""
    sizes = [len(record.outputs[i]) for i in sorted(record.outputs)]
    if len(set(sizes)) > 1:
        raise OptionError(f"{record.path} gives some micro-batches more outputs than others.")
    # parameters are no inputs of the function, so something has to ask for a gradient
    anchor = torch.empty(0, requires_grad=True)
    inputs = [tensor for part in record.parts for tensor in part.tensors]
    outputs = list(_Block.apply(record, anchor, *inputs))
    for part in record.parts:
        part.forget()
    return _split(outputs, sizes)


# -------------------------------------------------------------------- backward


class _Block(torch.autograd.Function):
    """A block with all micro-batches as its inputs and outputs."""

    @staticmethod
    def forward(ctx: Any, record: BlockRecord, anchor: Tensor, *inputs: Tensor) -> Any:
        ctx.record = record
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        outputs = [tensor for i in sorted(record.outputs) for tensor in record.outputs[i]]
        record.outputs.clear()
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        record: BlockRecord = ctx.record
        counts = [part.count for part in record.parts]
        inputs = _split(list(ctx.saved_tensors), counts)
        wanted = _split(list(ctx.needs_input_grad[2:]), counts)
        each = len(grads) // len(counts)
        outer = _split(list(grads), [each] * len(counts))
        return None, None, *_gradients(record, inputs, wanted, outer)


def _gradients(
    record: BlockRecord,
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
            sources, weights = replay.sources(outputs, outer[i], flows, after=target)
            if sources:
                new = torch.autograd.grad(sources, replay.leaf, weights, allow_unused=True)
                for sum_of, part in zip(total, new, strict=True):
                    if part is not None:
                        sum_of += part
        flows[target] = total
    gradients: list[Tensor | None] = []
    for i, given in enumerate(inputs):
        fresh = [t.detach().requires_grad_(w) for t, w in zip(given, wanted[i], strict=True)]
        replay = Replay(record, i)
        sources, weights = replay.sources(replay.run(fresh), outer[i], flows, after=-1)
        if sources:
            torch.autograd.backward(sources, weights)
        gradients += [t.grad for t in fresh]
    return gradients


class Replay:
    """A micro-batch that goes through a block once more, with what the record has of the others.

    ``target`` is the call whose table is to have a gradient; the graph begins there.
    """

    def __init__(self, record: BlockRecord, index: int, target: int = -1) -> None:
        self.record, self.index, self.target = record, index, target
        self.own: list[Moments] = []
        self.leaf: tuple[Tensor, Tensor] | None = None

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of the block; with a target the graph begins there, else at the inputs."""
        given = self.record.inputs[self.index]
        args, kwargs = given.arguments(inputs)
        with (
            exchanging_through(self),
            given.random.again(),
            given.thread.again(gradients=self.target < 0, cache=False),
        ):
            leaves = tree_flatten(self.record.forward(*args, **kwargs))[0]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def exchange(self, norm: SharedNorm, x: Tensor, own: Moments, state: LayerState) -> MapResult:
        position = len(self.own)
        calls = self.record.calls
        if position >= len(calls) or calls[position].norm is not norm:
            raise OptionError(
                f"{self.record.path} calls its norms in another order when it is computed again "
                f"(at {norm.path}). Try recompute=False."
            )
        call = calls[position]
        self.own.append(own)
        table = call.table
        if position == self.target:
            torch.set_grad_enabled(True)
            self.leaf = table.mean.clone().requires_grad_(), table.var.clone().requires_grad_()
            table = Moments(*self.leaf, table.count)
        result = norm.layer.compute(table, call.state)._replace(update=None)
        mine: MapResult = rows(result, *call.bounds[self.index], table.mean.shape[0])
        return mine

    def sources(
        self,
        outputs: list[Tensor],
        outer: list[Tensor | None],
        flows: dict[int, tuple[Tensor, Tensor]],
        after: int,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What gradients enter by: the outputs, and the micro-batch's own rows of later tables."""
        pairs = list(zip(outputs, outer, strict=True))
        for position, (mean, var) in flows.items():
            if position > after:
                own = self.own[position]
                start, stop = self.record.calls[position].bounds[self.index]
                pairs += [(own.mean, mean[start:stop]), (own.var, var[start:stop])]
        used = [(t, g) for t, g in pairs if g is not None and t.requires_grad]
        return [t for t, _ in used], [g for _, g in used]


def _split(values: list[Any], sizes: Sequence[int]) -> list[list[Any]]:
    return [values[start:stop] for start, stop in bounds_of(sizes)]
