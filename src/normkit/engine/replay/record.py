"""Records what a step of a layer launches, so that the next one need not work it out again.

The Python functions of a family decide on kernels, grids and tables; ``launch`` and the functions
that allocate tell an active ``Recording`` about each. A tensor that a kernel touches must be one of
the inputs or allocated meanwhile, and so must what is returned, or lie in it: then the list of
launches is all there was, and C++ can go through it alone (replay.cpp). A step in which torch
computed something in between is not replayed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from normkit.core.statistics import LayerState, Repetition
from normkit.engine import dispatch, remaking
from normkit.engine.coefficients import as_it_was
from normkit.engine.replay.build import extension

PLANS = 16  # of a layer: more shapes than that are not worth recording
GRADIENT = -2  # in place of a slot: the incoming gradient itself

_transforms, _tracing = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state
_modes = torch._C._len_torch_dispatch_stack
_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_backward = torch._C._current_graph_task_id
_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # not where torch was built without CUDA
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class _Active(threading.local):
    recording: Recording | None = None


active = _Active()


class Unrecordable(Exception):
    """Something was computed that a list of launches does not contain."""


class Recording:
    """The launches inside a ``with`` block."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        self.inputs = len(inputs)
        self.slots = {id(t): slot for slot, t in enumerate(inputs) if t is not None}
        self.x = inputs[0]
        self.kept: list[Any] = [*inputs]  # alive, so that no id is given out twice
        self.kept_at: list[Any] = [*inputs]  # by slot
        self.allocations: list[tuple[bool, int, torch.dtype]] = []
        self.storages = {
            t.untyped_storage().data_ptr(): slot for slot, t in enumerate(inputs) if t is not None
        }
        self.launches: list[dict[str, Any]] = []
        # another step may have two tensors where this one has x twice, or the residual
        own = [id(t) for t in inputs if t is not None]
        twice = any(own.count(id(t)) > 1 for t in inputs[:2] if t is not None)
        self.obstacle = "a tensor is given in two places" if twice else ""

    def __enter__(self) -> Recording:
        active.recording = self
        return self

    def __exit__(self, *error: object) -> None:
        active.recording = None

    def allocated(self, tensor: Tensor, *, like_x: bool) -> None:
        slot = self.inputs + len(self.allocations)
        self.slots[id(tensor)] = slot
        self.storages[tensor.untyped_storage().data_ptr()] = slot
        self.kept_at.append(tensor)
        self.allocations.append((like_x, tensor.numel(), tensor.dtype))

    def launched(self, launch: Any, tensors: Sequence[Tensor | None]) -> None:
        places = [self.place(t) for t in tensors]
        if None in places:
            self.obstacle = self.obstacle or "a kernel reads what torch has computed"
        else:
            self.launches.append({"launch": launch, "slots": places, "tensors": list(tensors)})

    def place(self, tensor: Tensor | None) -> tuple[int, int] | None:
        """The slot of a tensor, and how many of its entries before those of the tensor."""
        if tensor is None:
            return -1, 0
        slot = self.slots.get(id(tensor))
        if slot is not None:
            return slot, 0
        slot = self.storages.get(tensor.untyped_storage().data_ptr())
        if slot is None:
            return None
        return slot, tensor.storage_offset() - self.kept_at[slot].storage_offset()

    def same(self, given: Sequence[Tensor | None], saved: Sequence[Tensor | None]) -> None:
        """The same tensors as other objects, as autograd gives them back."""
        for one, other in zip(given, saved, strict=True):
            if one is not None and other is not None:
                self.slots[id(one)] = self.slots[id(other)]
                self.kept.append(one)

    def slot(self, tensor: Tensor) -> int:
        """Where a tensor lies that was allocated or given."""
        found = self.slots.get(id(tensor))
        if found is None:  # another object for the same memory?
            found = self.storages.get(tensor.untyped_storage().data_ptr())
            kept = None if found is None else self.kept_at[found]
            if kept is not None and (kept.dtype, kept.shape) != (tensor.dtype, tensor.shape):
                found = None
        if found is None:
            raise Unrecordable("a result is none of the tensors that kernels have written")
        return found

    def part(self, tensor: Tensor | None) -> tuple[int, int, int]:
        """A flat part of something allocated: slot, offset, size."""
        if tensor is None:
            return -1, 0, 0
        slot = self.storages.get(tensor.untyped_storage().data_ptr())
        if slot is None or not tensor.is_contiguous() or tensor.dtype != torch.float32:
            raise Unrecordable("a gradient is no part of a table that kernels have written")
        return slot, int(tensor.storage_offset()), tensor.numel()

    def program(self) -> dict[str, Any]:
        """For C++; nothing is kept of the tensors."""
        if self.obstacle:
            raise Unrecordable(self.obstacle)
        launches = [
            {**step["launch"].started(step["tensors"]), "slots": step["slots"]}
            for step in self.launches
        ]
        return {"allocations": self.allocations, "launches": launches}


class RecordedStep:
    """A step of a layer while it is recorded: its forward, then its backward."""

    def __init__(self, layer: Any, activation: str) -> None:
        self.layer = weakref.ref(layer)
        self.then = as_it_was(layer)
        self.activation = activation
        self.training = layer.training
        self.options = layer.__dict__.get("_options_set", 0)
        self.remade = remaking.active()
        self.plan: dict[str, Any] = {}

    def inputs(
        self, x: Tensor, residual: Tensor | None, parameters: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """In the order of slots: x, residual, parameters, buffers."""
        layer: Any = self.layer()
        kept = {name: b for name, b in layer._buffers.items() if b is not None}
        buffers = {id(b) for b in kept.values()}
        own = [p for p in parameters if p is not None and id(p) not in buffers]
        names = [name for p in own for name, mine in layer._parameters.items() if mine is p]
        self.plan.update(
            parameters=names,
            buffers=list(kept),
            tensors=[*own, *kept.values()],
            training=self.training,
            activation=self.activation,
            needs_x=x.requires_grad,
            needs_residual=residual is not None and residual.requires_grad,
            residual=None if residual is None else residual.new_empty(0),
        )
        return [x, residual, *own, *kept.values()]

    def has(self, name: str) -> bool:
        """Whether a parameter of this name was given."""
        return name in self.plan["parameters"]

    def owns(self, parameters: Sequence[Tensor | None]) -> list[bool]:
        """Which of these are parameters of the layer, and not buffers."""
        own = {id(t) for t in self.plan["tensors"][: len(self.plan["parameters"])]}
        return [p is not None and id(p) in own for p in parameters]

    def forward_alone(
        self, recording: Recording, x: Tensor, y: Tensor, *, nothing_learned: bool
    ) -> None:
        """A forward after which no backward comes: because nothing gets a gradient, whatever the
        mode, or because the mode is one without. Nothing of the record is left to be done."""
        layer, module, plan = self.layer(), extension(wanted=False), self.plan
        if layer is None or module is None:
            return
        if layer.training and layer.map_reads_state():
            return  # what a checkpoint repeats starts from what the first forward has left for it
        if self.with_forward(recording, y, y) is None:
            return
        plan["learned"] = False
        plan["serves"] = 1 if nothing_learned else 2
        plan.update(backward={"allocations": [], "launches": []}, dx=-1, dresidual=-1)
        plan["gradients"] = [(-1, 0, 0)] * len(plan["parameters"])
        self._add(layer, module, x, None)

    def repetition(self) -> Repetition:
        """How the layer's map is made once more, on tables."""
        names = self.plan["parameters"]
        state = LayerState(self.training, dict(self.then._buffers), True)
        return Repetition(self.then, state, dict(zip(names, self.plan["tensors"], strict=False)))

    def with_forward(
        self,
        recording: Recording,
        y: Tensor,
        tables: Tensor,
        keeps_y: bool = False,
        remake: Sequence[Recording | None] = (),
    ) -> RecordedStep | None:
        """Itself, or None if the forward cannot be replayed. With ``keeps_y`` the backward has y in
        the residual's slot. ``remake`` is one entry where the last launch does more than make y:
        how it is made again of x, residual and tables, in this order; None: that is not known, and
        a step that asks is recorded anew."""
        plan = self.plan
        own = len(plan["parameters"]) + len(plan["buffers"]) == len(plan["tensors"])
        try:
            if not own:
                raise Unrecordable("there is more to it than the layer's own tensors")
            plan["forward"], plan["keeps_y"] = recording.program(), keeps_y
            plan["y"], plan["tables"] = recording.slot(y), recording.slot(tables)
            for again in remake:
                plan["remake"] = None if again is None else again.program()
        except Unrecordable as obstacle:
            self.give_up(str(obstacle))
            return None
        return self

    def finish(
        self,
        recording: Recording,
        x: Tensor,
        grad: Tensor,
        dx: Tensor | None,
        dresidual: Tensor | None,
        gradients: Sequence[Tensor | None],
        again: Callable[..., Any],
        *,
        keeps_x: bool = True,
        learned: bool | None = None,
    ) -> None:
        """The backward is known too: from now on such a step is replayed.

        ``gradients`` are those of the parameters that there are. Without ``keeps_x`` the backward
        does without x, which here is only like it. ``learned`` says whether parameters had a
        gradient, if one without, or with, is another step.
        """
        layer, module, plan = self.layer(), extension(wanted=False), self.plan
        if layer is None or module is None:
            return
        try:
            plan["backward"] = recording.program()
            plan["dx"] = -1 if dx is None else recording.slot(dx)
            plan["dresidual"] = -1 if dresidual is None else recording.slot(dresidual)
            if dresidual is grad:
                plan["dresidual"] = GRADIENT
            plan["gradients"] = [recording.part(d) for d in gradients]
        except Unrecordable as obstacle:
            self.give_up(str(obstacle))
            return
        plan["keeps_x"] = keeps_x
        if learned is not None:
            plan["learned"] = learned
        self._add(layer, module, x, again)

    def _add(self, layer: Any, module: Any, x: Tensor, again: Callable[..., Any] | None) -> None:
        own = layer.__dict__
        if own.get("_options_set", 0) != self.options:
            return  # the step was of options that the layer had then
        if self.remade and not self._can_be_remade():
            own["_not_remade"] = True
            own["_record_obstacle"] = "its output is made again, by more than the last launch"
            return
        replays = layer.__dict__.get("_replays")
        if replays is None:
            replays = layer.__dict__["_replays"] = module.Replays()
        replays.add(x, {**self.plan, "again": again})
        layer.__dict__.pop("_record_obstacle", None)

    def _can_be_remade(self) -> bool:
        """Whether the last launch of the forward alone makes y: see Remake in replay.cpp."""
        plan = self.plan
        if "remake" in plan:
            return plan["remake"] is not None
        known = -1, 0, 1, plan["tables"], plan["y"]
        return all(slot in known for slot, _ in plan["forward"]["launches"][-1]["slots"])

    def give_up(self, obstacle: str) -> None:
        layer = self.layer()
        if layer is not None:
            layer.__dict__["_unrecorded"] = layer.__dict__.get("_unrecorded", 0) + 1
            layer.__dict__["_record_obstacle"] = obstacle  # for nk.why


def step_record(layer: Any, x: Tensor, activation: str) -> RecordedStep | None:
    """For a step that is worth recording: one that can be replayed, of a layer with few shapes."""
    replays = layer.__dict__.get("_replays")
    most = PLANS if torch.is_grad_enabled() else PLANS // 2  # so that there is room for training
    if replays is not None and len(replays) >= most:
        return None
    if layer.__dict__.get("_unrecorded", 0) >= PLANS or not may_replay(x):
        return None
    if remaking.active() and layer.__dict__.get("_not_remade"):
        return None
    if extension(wanted=x.is_cuda) is None:
        return None
    return RecordedStep(layer, activation)


def may_replay(x: Any) -> bool:
    """Whether nobody looks into this forward, and none repeats it: what Python has to ask."""
    return (
        type(x) is Tensor
        and _backward() == -1
        and ((hooks := _hooks(True)) is None or remaking.are_ours(hooks))
        and not _modes()
        and not _transforms()
        and _tracing() is None
        and forward_ad._current_level < 0
        and dispatch.forced() != "torch"
        and (not x.is_cuda or x.get_device() == _device())
    )


def current_stream(x: Tensor) -> int:
    """Of a tensor's device, as a number; 0 where there is none."""
    return int(_stream(x.get_device())) if x.is_cuda else 0
