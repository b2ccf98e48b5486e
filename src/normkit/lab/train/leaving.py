"""The result of a run that has come to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from normkit.lab.results import DIVERGED, DONE, Result
from normkit.lab.train.environment import environment
from normkit.lab.train.selecting import selected

if TYPE_CHECKING:
    from normkit.lab.train.training import Training


def result_of(training: Training) -> Result:
    """What is stored of a training."""
    seconds, trained = training.clock.read(), training.epoch * training.plan.samples
    model, peak = training.machine.model, training.place.peak_memory()
    lost = training.note
    return Result(
        run=training.run.id,
        status=DIVERGED if lost else DONE,
        selected=() if lost else selected(training.train, training.records),
        epochs=tuple(training.records),
        seconds=seconds,
        parameters=sum(p.numel() for p in model.parameters()),
        # what others use at its side cannot be told apart
        peak_memory=None if peak is None else peak // training.beside,
        images_per_second=trained / seconds if trained and seconds > 0 else None,
        environment={
            **environment(training.place.device),
            "recorded": recorded(training),
            "side by side": str(training.beside),
        },
        note=lost or left_out(model),
    )


def recorded(training: Training) -> str:
    """Whether the steps were replayed from a record, and if not, why."""
    if training.machine.is_recorded:
        return "yes"
    return f"no: {training.machine.obstacle or training.why_direct or 'it was not wanted'}"


def left_out(model: nn.Module) -> str:
    """A remark about batches that norms have kept out of their running statistics."""
    named = dict(model.named_buffers())
    counts = [int(named[name]) for name in named if name.endswith("nonfinite_batches")]
    most = max(counts, default=0)
    return f"{most} batches had statistics that are not finite." if most else ""
