"""Forwards that activation checkpointing repeats in the backward: they see the state of the first.

Some maps depend on what batches change: that of batch renormalization on the running statistics,
that of ubn on its score. When such a layer is called twice before one backward, the second call has
changed what the first one saw, and its repetition would compute another function. So a forward that
may be repeated leaves its state with the checkpoint around it, and the repeated one takes it from
there: the n-th call of a layer inside a checkpoint what the n-th has left.

Which checkpoint is around a call is read from the stack of calls. torch.utils.checkpoint keeps one
object for each checkpointed call that the first forward and the repeated one have in common: the
``ctx`` of an autograd function (reentrant; so do other libraries that checkpoint by a function), or
a frame that the hooks of saved tensors hold. States are attributes of that object: torch drops it
when the graph is gone, and they go with it. Checkpoints may be inside each other: then a repeated
forward leaves its state with the inner one again.

A forward without gradients may be the first half of a checkpoint; one with gradients only if there
are hooks for saved tensors. Otherwise nothing is looked for and nothing is kept.

A compiled graph cannot know when it will run. So there it asks when it runs, by two operators:
``normkit::first_time`` and ``normkit::as_first_seen``. The result of the latter is never computed
again by a graph that checkpoints parts of itself: torch keeps what an operator with effects gave.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from types import FrameType, GeneratorType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.autograd import graph
from torch.autograd.function import BackwardCFunction
from torch.fx import traceback
from torch.utils import checkpoint

Kept = TypeVar("Kept")

_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_STATES = "_normkit_states"
_BACKWARD = graph._engine_run_backward.__code__


def is_recomputation() -> bool:
    """Whether this forward repeats one: activation checkpointing computes it again in a backward.

    Its statistics have entered the buffers the first time. A forward that a hook starts inside a
    backward is one of its own.
    """
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return False
    return any(repeats for _, repeats in _checkpoints())


def in_graph() -> bool:
    """Whether a graph is being made that runs in this process; programs for export stay plain."""
    # the flag, and not is_exporting(): in torch 2.11 every graph takes that for True
    return torch.compiler.is_compiling() and not torch.compiler._is_exporting_flag


def as_first_seen(owner: Hashable, now: Callable[[], Kept]) -> Kept | None:
    """What ``owner`` saw in the forward that this one repeats; or what it sees now, kept for one
    that may repeat this. None if nothing was kept and nothing has to be."""
    again = is_recomputation()
    if not again and torch.is_grad_enabled() and _hooks(True) is None:
        return None
    seen, around = None, []
    for holder, repeats in _checkpoints():
        states = getattr(holder, _STATES, None)
        if states is None:
            states = _States()
            setattr(holder, _STATES, states)
        if repeats:
            seen = states.next(owner)
            break
        around.append(states)
    if around and seen is None:
        seen = now()
    for states in around:
        states.append(owner, seen)
    return seen


class _States:
    """What the calls inside one checkpoint saw, by owner and in the order of the calls."""

    def __init__(self) -> None:
        self.kept: dict[Hashable, list[Any]] = {}
        self.backward = -1
        self.turn: dict[Hashable, int] = {}

    def append(self, owner: Hashable, seen: Any) -> None:
        self.kept.setdefault(owner, []).append(seen)

    def next(self, owner: Hashable) -> Any:
        backward = torch._C._current_graph_task_id()
        if backward != self.backward:  # with retain_graph there may be several
            self.backward, self.turn = backward, {}
        turn = self.turn.get(owner, 0)
        self.turn[owner] = turn + 1
        kept = self.kept.get(owner, ())
        return kept[turn] if turn < len(kept) else None


def _checkpoints() -> Iterator[tuple[object, bool]]:
    """The checkpoints around this call, from inside out, and whether each repeats its forward.

    As far as the nearest backward: what started that is not around the call, but before it.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _BACKWARD:
        code = frame.f_code
        if code.co_varnames[:1] == ("ctx",):
            ctx = frame.f_locals.get("ctx")
            if isinstance(ctx, BackwardCFunction):
                yield ctx, code.co_name == "backward"
        elif code.co_filename == checkpoint.__file__:
            for value in list(frame.f_locals.values()):
                if isinstance(value, checkpoint._CheckpointFrame):  # it unpacks a saved tensor
                    yield value, True
                elif isinstance(value, GeneratorType) and value.gi_frame is not None:
                    for inner in list(value.gi_frame.f_locals.values()):
                        if isinstance(inner, checkpoint._CheckpointFrame):
                            yield inner, False
        frame = frame.f_back


# ---------------------------------------------------------------- operators of graphs

torch.library.define("normkit::first_time", "(Device device) -> Tensor")
torch.library.define("normkit::as_first_seen", "(Tensor[] statistics) -> Tensor[]")


@torch.library.impl("normkit::first_time", "CompositeExplicitAutograd")
def _first_time(device: torch.device) -> Tensor:
    """Whether the graph does not run inside a backward: a boolean on the device."""
    return torch.full((), not is_recomputation(), device=device)


@torch.library.impl("normkit::as_first_seen", "CompositeExplicitAutograd")
def _as_first_seen(statistics: list[Tensor]) -> list[Tensor]:
    """Copies of buffers, of one layer: as they are, or as the forward saw that this one repeats."""

    def copies() -> list[Tensor]:
        return [t.clone() for t in statistics]

    # a graph has no module to ask, but the buffers themselves
    seen = as_first_seen(statistics[0].data_ptr(), copies)
    return copies() if seen is None else [t.clone() for t in seen]


torch.library.register_fake(
    "normkit::first_time", lambda device: torch.empty((), dtype=torch.bool, device=device)
)
torch.library.register_fake(
    "normkit::as_first_seen", lambda statistics: [torch.empty_like(t) for t in statistics]
)
_register_effectful_op(torch.ops.normkit.as_first_seen.default, _EffectType.ORDERED)


@torch.library.impl("normkit::as_first_seen", "Autograd")
def _saved(statistics: list[Tensor]) -> list[Tensor]:
    """Marked to be kept, where a graph checkpoints a part of itself: there torch marks every node
    to be computed again, and torch 2.11 takes that literally for operators with effects as well."""
    meta: dict[str, Any] = traceback.current_meta
    marked = meta.get("recompute")
    if marked is not None:
        meta["recompute"] = checkpoint.CheckpointPolicy.MUST_SAVE
    try:
        with torch._C._AutoDispatchBelowAutograd():
            result: list[Tensor] = torch.ops.normkit.as_first_seen(statistics)
            return result
    finally:
        if marked is not None:
            meta["recompute"] = marked
