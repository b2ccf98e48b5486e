"""The forward of a step: micro-batches side by side, which meet at every norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normkit.calibration.accumulation.sharing import Compute, Shared
from normkit.calibration.accumulation.tables import bounds_of, joined, rows
from normkit.calibration.side_by_side import RunHandle
from normkit.core.moments import Moments

Log = Callable[[Shared, Moments, list[int]], None]


class Meeting:
    """What one micro-batch shares with the others in the forward.

    The run that arrives last joins the moments of all and lets the norm compute its tables from
    them, once: running statistics are updated once a step. Autograd sees one graph over all
    micro-batches, so that its backward adds up what each of them sends into the statistics.
    """

    def __init__(self, run: RunHandle) -> None:
        self.run = run
        self.times: Counter[str] = Counter()
        self.log: Callable[[Shared, Moments, list[int]], None] | None = (
            None  # what a block keeps of it
        )

    def exchange(self, norm: Shared, own: Moments, compute: Compute) -> Any:
        def combine(parts: list[Any]) -> list[Any]:
            table = joined(parts)
            sizes = [part.mean.shape[0] for part in parts]
            found = compute(table)
            if self.log is not None:
                self.log(norm, table, sizes)
            return [rows(found, *bound, sum(sizes)) for bound in bounds_of(sizes)]

        return self.run.meet(self.place("norm", norm.path), own, combine)

    def observe(self, norm: Shared, x: Tensor, own: Moments) -> None:
        layer: Any = norm.layer
        limit = layer.reading["max_samples"]

        def combine(parts: list[Any]) -> list[None]:
            table = joined([moments for _, moments in parts])
            samples = torch.cat([x for x, _ in parts])[:limit]
            type(layer).observe(layer, _Sized(samples, table.mean.shape[0]), table)
            return [None] * len(parts)

        first = x.detach()[:limit]
        self.run.meet(self.place("samples", norm.path), (first, own), combine)

    def place(self, what: str, path: str) -> tuple[str, str, int]:
        """The name of a meeting: the same for all micro-batches, and of this one only."""
        self.times[f"{what} {path}"] += 1
        return what, path, self.times[f"{what} {path}"]


class _Sized:
    """The first samples of a batch, which says how many it has in all."""

    def __init__(self, first: Tensor, size: int) -> None:
        self.first, self.shape = first, (size, *first.shape[1:])

    def __getitem__(self, part: slice) -> Tensor:
        return self.first[part]
