"""What is remembered of a block that is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from normkit.calibration.accumulation.sharing import Shared
from normkit.calibration.accumulation.tables import bounds_of
from normkit.calibration.side_by_side import RandomState, ThreadState
from normkit.core.moments import Moments
from normkit.core.statistics import LayerState

Forward = Any
_INPUT = object()  # where a tensor was


def _stands_for_tensor(leaf: Any) -> bool:
    return leaf is _INPUT or isinstance(leaf, Tensor)


@dataclass
class Call:
    """One call of a norm in a block: the moments of all micro-batches, and the state it saw."""

    norm: Shared
    table: Moments
    bounds: list[tuple[int, int]]  # of the rows of each micro-batch
    state: LayerState


@dataclass
class Part:
    """One micro-batch at a block: its arguments, and all that repeating the forward needs."""

    leaves: list[Any]
    spec: TreeSpec
    random: RandomState
    around: ThreadState

    @property
    def inputs(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def tensors(self) -> int:
        """How many of the leaves are tensors, or were."""
        return sum(_stands_for_tensor(leaf) for leaf in self.leaves)

    def forget(self) -> None:
        """Let go of the inputs: autograd keeps them, perhaps in the host's memory."""
        self.leaves = [_INPUT if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, with other tensors in the place of the inputs."""
        left = iter(tensors)
        return tree_unflatten(
            [next(left) if _stands_for_tensor(leaf) else leaf for leaf in self.leaves], self.spec
        )


@dataclass
class Record:
    """One passage of all micro-batches through a block."""

    path: str
    forward: Forward
    calls: list[Call] = field(default_factory=list)
    parts: dict[int, Part] = field(default_factory=dict)
    outputs: dict[int, list[Tensor]] = field(default_factory=dict)

    def log(self, norm: Shared, table: Moments, sizes: list[int], state: LayerState) -> None:
        fixed = Moments(table.mean.detach(), table.var.detach(), table.count)
        self.calls.append(Call(norm, fixed, bounds_of(sizes), state.copied()))
