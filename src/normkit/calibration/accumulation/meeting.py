"""The forward of a step: micro-batches side by side, which meet at every norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normkit.calibration.accumulation.sharing import Shared
from normkit.calibration.accumulation.tables import bounds_of, joined, rows
from normkit.calibration.side_by_side import RunHandle
from normkit.core.moments import Moments
from normkit.core.statistics import LayerState, MapResult

Log = Callable[[Shared, Moments, list[int], LayerState], None]


class Meeting:
    """What one micro-batch shares with the others in the forward.

    The run that arrives last joins the moments of all and lets the norm compute its tables from
    them, once: running statistics are updated once a step. Autograd sees one graph over all
    micro-batches, so that its backward adds up what each of them sends into the statistics.
    """

    def __init__(self, run: RunHandle) -> None:
        self.run = run
        self.times: Counter[str] = Counter()
        self.log: Log | None = None  # what a block keeps of it

    def exchange(self, norm: Shared, x: Tensor, own: Moments, state: LayerState) -> MapResult:
        layer = norm.layer

        def combine(parts: list[Any]) -> list[MapResult]:
            table = joined([moments for _, moments in parts])
            sizes = [moments.mean.shape[0] for _, moments in parts]
            first = _Sized(torch.cat([samples for samples, _ in parts]), sum(sizes))
            seen: LayerState = layer.observe(first, table, state)  # type: ignore[arg-type]
            if self.log is not None:
                self.log(norm, table, sizes, seen)
            result = layer.compute(table, seen)
            layer.write(result.update)
            result = result._replace(update=None)
            return [rows(result, *bound, sum(sizes)) for bound in bounds_of(sizes)]

        samples = x.detach()[: layer.observed_samples()]
        found: MapResult = self.run.meet(self.place("norm", norm.path), (samples, own), combine)
        return found

    def place(self, what: str, path: str) -> tuple[str, str, int]:
        """The name of a meeting: the same for all micro-batches, and of this one only."""
        self.times[f"{what} {path}"] += 1
        return what, path, self.times[f"{what} {path}"]


class _Sized:
    """The first samples of a batch, which says how many it has in all."""

    def __init__(self, first: Tensor, size: int) -> None:
        self.first, self.shape, self.device = first, (size, *first.shape[1:]), first.device

    def __getitem__(self, part: Any) -> Tensor:
        return self.first[part]
