"""What a family of layers gives the fused autograd function: its two launches of coefficients."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from normkit.core.layout import Batch, Channels
from normkit.core.statistics import Seen
from normkit.engine.triton.passes import Parts

ChannelLayout = Batch | Channels


class FamilyTables(NamedTuple):
    """What one launch makes of the moments."""

    tables: Tensor  # begins with the map: scale, shift, center, ``period`` entries each
    period: int
    statistics: int  # where mean and second of the batch begin
    gates: Tensor | None


class Family(Protocol):
    """A module with these functions; ``fusion`` is the description of its kind."""

    def coefficients(
        self, x: Tensor, parts: Parts, fusion: Any, layout: ChannelLayout
    ) -> FamilyTables:
        """The map and all that goes with it, from the parts of the moments."""

    def gradients(
        self,
        x: Tensor,
        parts: Parts,
        fusion: Any,
        layout: ChannelLayout,
        tables: Tensor,
        grad_gates: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """From the parts of the sums: a tensor that begins with constant and slope of dx, and the
        gradients of the parameters."""

    def seen(self, fusion: Any, tables: Tensor, rows: int, channels: int) -> Seen:
        """What the map was made of beside the batch, for the backward of a backward."""
