"""A micro-batch that goes through a block once more, in the backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from normkit.calibration.accumulation.records import Record
from normkit.calibration.accumulation.sharing import Shared, belonging_to
from normkit.calibration.accumulation.tables import rows
from normkit.core.moments import Moments
from normkit.core.statistics import LayerState, MapResult
from normkit.errors import OptionError


class Replay:
    """A micro-batch in the backward: it meets nobody, the record knows what they said.

    ``target`` is the call whose table is to have a gradient; the graph begins there.
    """

    def __init__(self, record: Record, index: int, target: int = -1) -> None:
        self.record, self.index, self.target = record, index, target
        self.own: list[Moments] = []
        self.leaf: tuple[Tensor, Tensor] | None = None

    def exchange(self, norm: Shared, x: Tensor, own: Moments, state: LayerState) -> MapResult:
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
        found: MapResult = rows(result, *call.bounds[self.index], table.mean.shape[0])
        return found

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of the block; with a target the graph begins there, else at the inputs."""
        part = self.record.parts[self.index]
        args, kwargs = part.arguments(inputs)
        with (
            belonging_to(self),
            part.random.again(),
            part.around.again(gradients=self.target < 0, cache=False),
        ):
            found = tree_flatten(self.record.forward(*args, **kwargs))[0]
        return [leaf for leaf in found if isinstance(leaf, Tensor)]
