"""What a family of layers gives the fused autograd function: its two launches of coefficients."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from normkit.core.layout import Batch, Channels
from normkit.core.moments import Coefficients, Moments
from normkit.engine.triton_backend import Parts

ChannelLayout = Batch | Channels


class Mapped(NamedTuple):
    """What one launch makes of the moments."""

    map: Tensor  # scale and shift, tables (2, period)
    statistics: Tensor  # of the batch: mean and second, then what the family keeps
    gates: Tensor | None
    kept: tuple[Tensor, ...]  # what the way back needs beside them


class Family(Protocol):
    """A module with these functions; ``fusion`` is the description of its kind."""

    def parameters(self, fusion: Any) -> tuple[Tensor | None, ...]:
        """The tensors that get a gradient."""

    def mapped(self, x: Tensor, parts: Parts, fusion: Any, layout: ChannelLayout) -> Mapped:
        """The map, from the parts of the moments."""

    def gradients(
        self,
        x: Tensor,
        parts: Parts,
        fusion: Any,
        layout: ChannelLayout,
        found: Mapped,
        grad_gates: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """From the parts of the sums: constant and slope of dx, (2, period), and the gradients
        of the parameters."""

    def expression(
        self,
        fusion: Any,
        moments: Moments,
        parameters: tuple[Tensor | None, ...],
        found: Mapped,
    ) -> tuple[Coefficients, Tensor | None]:
        """The map and the gates as expressions on tables, for the backward of a backward."""
