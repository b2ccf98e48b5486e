"""Statistics that a layer keeps between batches: what a forward starts from, and what it adds.

A normalizer is a pure function: from the moments of a batch and the ``LayerState`` before it to a
``MapResult``, the map and the new statistics. It changes nothing. The base class writes the new
statistics into the buffers, in one place, which cannot be poisoned or counted twice. So a forward
can be computed again from the state it saw, by whoever needs it: activation checkpointing, the
backward of a backward, statistics shared between micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.core.moments import Coefficients, Moments
from normkit.core.processes import Processes


class LayerState:
    """What a forward starts from: the mode and the statistics of the layer, which it only reads."""

    __slots__ = ("again", "domain", "observed", "processes", "statistics", "training")

    def __init__(
        self,
        training: bool,
        statistics: Mapping[str, Tensor | None],
        again: bool = False,
        observed: Mapping[str, Any] | None = None,
        processes: Processes | None = None,
        domain: Any = None,
    ) -> None:
        self.training = training
        self.statistics = statistics
        self.again = again  # a forward that is repeated: its statistics have been counted
        self.observed = observed or {}  # what a layer has seen of its input beside the moments
        self.processes = processes  # with which the statistics of the batch are shared
        self.domain = domain  # whose statistics these are, of a layer that keeps several sets

    def __getitem__(self, name: str) -> Tensor:
        """A statistic by the name of its buffer.

        A copy where autograd may keep it: buffers change in place, and no graph may meet that.
        """
        table = self.statistics[name]
        assert table is not None, name
        # torch.jit.trace runs once with gradients and once without, and compares the graphs
        may_be_kept = torch.is_grad_enabled() and torch._C._get_tracing_state() is None
        return table.clone() if may_be_kept else table

    def knows(self, name: str) -> bool:
        """Whether the layer keeps this statistic."""
        return self.statistics.get(name) is not None

    def copied(self) -> LayerState:
        """The same for a forward that repeats this one later, when the buffers have changed."""
        with torch.no_grad():
            copies = {name: t if t is None else t.clone() for name, t in self.statistics.items()}
        return LayerState(self.training, copies, True, self.observed, self.processes, self.domain)

    def seeing(self, **observed: Any) -> LayerState:
        """The same with what a layer has seen of its input."""
        seen = {**self.observed, **observed}
        return LayerState(
            self.training, self.statistics, self.again, seen, self.processes, self.domain
        )

    def alone(self) -> LayerState:
        """The same without other processes, for whoever looks at a layer in this one."""
        return LayerState(
            self.training, self.statistics, self.again, self.observed, domain=self.domain
        )


class StateUpdate(NamedTuple):
    """New statistics, for the base class to write."""

    values: Mapping[str, Tensor]
    """What buffers become, by name."""
    finite: Tensor | None = None
    """A boolean on the device: whether the batch counts, or else as not finite. None: neither."""
    counted: Tensor | None = None
    """Whether there was a batch at all; None for yes."""
    domain: int | None = None
    """Whose statistics they are; None for all that a layer keeps: then, of a layer with domains,
    values, ``finite`` and ``counted`` have a row for each."""

    def with_values(self, values: Mapping[str, Tensor]) -> StateUpdate:
        return self._replace(values={**self.values, **values})


class MapResult(NamedTuple):
    """What a layer makes of the moments of a batch and of its state."""

    map: Coefficients
    update: StateUpdate | None = None
    gate: Tensor | None = None
    """(N, C): the factor of each sample that is in the map, for layers that need it once more."""


class Seen(NamedTuple):
    """What a kernel saw of a state that may have changed since: it leaves that with its tables."""

    statistics: Mapping[str, Tensor] = {}
    observed: Mapping[str, Any] = {}
    fixed: bool = False
    """Whether these statistics made the map, and not those of the batch."""


class Repetition(NamedTuple):
    """How a layer makes its map once more, on tables, for the backward of a backward."""

    layer: Any
    state: LayerState
    parameters: Mapping[str, Tensor | None]
    """Those of the layer as they were: inside of functional_call they are others than now."""

    def result(
        self,
        moments: Moments,
        given: Iterable[Tensor | None],
        saved: Iterable[Tensor | None],
        seen: Seen,
    ) -> MapResult:
        """The layer's own function, of the parameters that autograd saved for those given."""
        before = self.state
        state = LayerState(
            before.training and not seen.fixed,
            {**before.statistics, **seen.statistics},
            True,
            {**before.observed, **seen.observed},
            domain=before.domain,
        )
        pairs = [(g, s) for g, s in zip(given, saved, strict=True) if g is not None]
        then = {name: s for name, p in self.parameters.items() for g, s in pairs if p is g}
        assert len(then) == len(pairs)
        kept = self.layer._parameters
        now = {name: kept[name] for name in then}
        kept.update(then)
        try:
            result: MapResult = self.layer.compute(moments, state)
        finally:
            kept.update(now)
        return result


def all_finite(tables: Iterable[Tensor]) -> Tensor:
    """One boolean on the tables' device: no host synchronisation."""
    return torch.isfinite(torch.cat([table.detach().flatten() for table in tables])).all()


def blended(old: Tensor, new: Tensor, weight: float | Tensor, where: Tensor) -> Tensor:
    """(1 − weight)·old + weight·new where the condition holds, else the old value.

    ``weight`` is the weight of the new value, as in torch.nn.
    """
    new = new.detach().to(old.dtype).reshape(old.shape)
    return torch.where(where, torch.lerp(old, new, weight), old)
