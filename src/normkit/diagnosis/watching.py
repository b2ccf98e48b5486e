"""What is collected about one norm while batches pass it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit.core.moments import Moments
from normkit.diagnosis.activations import bounds_of, closes
from normkit.diagnosis.gating import gates_of
from normkit.diagnosis.measures import (
    condensation,
    condensation_matrix,
    gate_saturation,
    saturated_channels,
    share_beyond,
)
from normkit.diagnosis.measures.shift import wide
from normkit.diagnosis.standardizing import standardized
from normkit.inspection import Site
from normkit.inspection.keepers import table_of
from normkit.inspection.keeping import reader_of
from normkit.inspection.tally import Pooling

LIMIT = 6.0  # standard deviations


class Share:
    """A share of values over several calls, without waiting for the device."""

    def __init__(self) -> None:
        self.sum: Tensor | float = 0.0
        self.of = 0

    def add(self, share: Tensor, values: int) -> None:
        self.sum = self.sum + wide(share) * values
        self.of += values


class Watch:
    """Statistics of what one norm gets and gives, over all batches and calls."""

    def __init__(
        self, site: Site, act: nn.Module | str | None, wanted: frozenset[str], samples: int
    ) -> None:
        self.site, self.act, self.wanted, self.samples = site, act, wanted, samples
        self.norm = site.norm
        self.reader = reader_of(self.norm, site.kind)
        self.kept = None if self.reader is None else self.reader.read()
        self.calls = 0
        self.channels = Pooling()  # mean and variance of each channel of the input
        self.expected = Pooling()  # the same in the form the norm keeps
        self.beyond, self.gates = Share(), Share()
        self.condensation: Tensor | None = None
        self.matrix: Tensor | None = None
        self.highest: Tensor | None = None  # of each channel after the activation
        self.at_bounds: Tensor | None = None  # channels that have been nowhere else

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The input of one call."""
        x = measurable(args, kwargs)
        if x is not None:
            self.take(x, table_of(x, self.site.channel_axis))

    def take(self, x: Tensor, table: Moments) -> None:
        """An input and its moments, of each sample and channel."""
        self.calls += 1
        self.channels.add(table.pooled(samples=None))
        if self.reader is not None:
            self.expected.add(self.reader.pooled(table, x))
        if "beyond_6" in self.wanted:
            found = standardized(self.site, x, table, batch=self.norm.training)
            if found is not None:
                self.beyond.add(share_beyond(found, LIMIT), found.numel())
        if "gate_saturation" in self.wanted:
            gates = gates_of(self.norm, table)
            if gates is not None:
                self.gates.add(gate_saturation(gates), gates.numel())
        if "condensation" in self.wanted and self.condensation is None:
            self.condensation = condensation(x, self.samples)
        if "condensation_matrix" in self.wanted and self.matrix is None:
            self.matrix = condensation_matrix(x, self.samples).cpu()

    def after(self, y: Tensor) -> None:
        """The output of the activation after the norm."""
        act = self.act
        if act is None or y.dim() < 2 or y.numel() == 0:
            return
        values = y.detach().movedim(self.site.channel_axis, -1).flatten(0, -2)
        if closes(act):
            highest = values.amax(0)
            self.highest = highest if self.highest is None else torch.maximum(self.highest, highest)
        bounds = bounds_of(act)
        if None not in bounds:
            at = saturated_channels(values, bounds)
            self.at_bounds = at if self.at_bounds is None else self.at_bounds & at


def measurable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The input among the arguments of a norm; None if it is none that has statistics."""
    x = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
    if x is None or not x.is_floating_point() or x.dim() < 2 or x.numel() == 0:
        return None
    return x.detach()
