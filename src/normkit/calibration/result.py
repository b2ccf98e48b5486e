"""What a calibration did, and the way back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normkit.calibration.statistics import Statistics
from normkit.core.messages import aligned, counted
from normkit.layers.domains import OfDomains

PLAIN = ("what", "mode", "images", "batches", "until", "sure", "kept", "why_not", "left")
SHOWN = 40  # layers in a printed table; the worst are shown if there are more


class BufferSnapshot:
    """Copies of all buffers of some modules, to be put back bit for bit.

    Of a layer with statistics of several domains, those of the domain in use.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = [
            (buffer, buffer.detach().clone())
            for module in modules
            for buffer in _buffers(module).values()
            if buffer is not None
        ]

    def restore(self) -> None:
        """Put the values back into the same memory."""
        with torch.no_grad():
            for buffer, value in self.kept:
                buffer.copy_(value)


def _buffers(module: nn.Module) -> dict[str, Tensor | None]:
    return module.kept() if isinstance(module, OfDomains) else module._buffers


@dataclass(frozen=True, eq=False)
class LayerChange:
    """How the statistics of one norm have changed, and how sure the new ones are."""

    path: str
    kind: str
    values: int  # behind each channel; the least, where channels differ
    before: tuple[Tensor, Tensor]  # mean and variance, float64
    after: tuple[Tensor, Tensor]
    errors: Tensor | None = None  # per channel, relative: see StandardErrors.relative
    eps: float = 0.0

    @property
    def mean_shift(self) -> float:
        """The largest move of a mean, in standard deviations of the new statistics."""
        scale = (self.after[1] + self.eps).clamp(min=torch.finfo(torch.float64).tiny).sqrt()
        return ((self.after[0] - self.before[0]).abs() / scale).max().item()

    @property
    def std_ratio(self) -> float:
        """The factor by which a standard deviation has changed most: 2 for twice or for half."""
        old, new = (t[1].clamp(min=0) + self.eps for t in (self.before, self.after))
        tiny = torch.finfo(torch.float64).tiny
        ratio = (new.clamp(min=tiny) / old.clamp(min=tiny)).sqrt()
        return torch.maximum(ratio, 1 / ratio).max().item()

    @property
    def error(self) -> float | None:
        """The largest relative standard error of a channel."""
        return None if self.errors is None else self.errors.max().item()


@dataclass(eq=False)
class Calibration:
    """Statistics have been put into a model. ``print`` it; ``undo()`` puts the old ones back.

    ``statistics`` are the new ones as (count, mean, M2), to be saved, merged or used elsewhere.
    """

    model: nn.Module
    layers: tuple[LayerChange, ...]
    statistics: Statistics
    before: BufferSnapshot = field(repr=False)
    what: str = "calibrated"
    images: int = 0
    batches: int = 0
    mode: str = ""
    until: float | None = None
    sure: bool | None = None  # whether the bound was met; None without one
    left: dict[str, str] = field(default_factory=dict)  # norms left alone, and why
    unsettled: tuple[str, ...] = ()  # norms that run several times and found no rest
    metric: tuple[float, float] | None = None  # before and after
    kept: bool = True
    why_not: str = ""

    def undo(self) -> None:
        """Put the old statistics back, bit for bit. What was trained since then stays."""
        self.before.restore()
        self.kept = False
        self.why_not = self.why_not or "undone"

    def uncertain(self, bound: float) -> dict[str, list[int]]:
        """The channels whose standard error is above a bound, by the path of their norm."""
        above = {
            layer.path: torch.nonzero(layer.errors > bound).flatten().tolist()
            for layer in self.layers
            if layer.errors is not None
        }
        return {path: channels for path, channels in above.items() if channels}

    def to_dict(self) -> dict[str, Any]:
        """The facts, in values that JSON can hold."""
        return {
            **{name: getattr(self, name) for name in PLAIN},
            "metric": None if self.metric is None else list(self.metric),
            "unsettled": list(self.unsettled),
            "layers": [
                {
                    "path": layer.path,
                    "kind": layer.kind,
                    "values": layer.values,
                    "mean_shift": layer.mean_shift,
                    "std_ratio": layer.std_ratio,
                    "standard_error": layer.error,
                }
                for layer in self.layers
            ],
        }

    def __str__(self) -> str:
        lines = [self._head(), *self._notes(), "", *_table(self.layers)]
        return "\n".join(lines)

    def _head(self) -> str:
        name = type(self.model).__name__
        seen = f" from {counted(self.images, 'image')} in {counted(self.batches, 'batch')}"
        measured = seen if self.images else ""
        way = f", {self.mode}" if self.mode else ""
        return f"{name}: {counted(len(self.layers), 'norm')} {self.what}{measured}{way}"

    def _notes(self) -> list[str]:
        notes = []
        if not self.kept:
            notes.append(f"The old statistics are back: {self.why_not}.")
        if self.metric is not None:
            notes.append(f"metric: {self.metric[0]:.6g} before, {self.metric[1]:.6g} after")
        if self.until is not None:
            worst = max(layer.error or 0.0 for layer in self.layers)
            met = f"met after {self.images} images" if self.sure else "not met"
            notes.append(f"standard errors ≤ {self.until:g}: {met}, the largest is {worst:.2g}")
        notes += [
            f"not settled: {path} runs several times in one forward, and its statistics keep moving"
            for path in self.unsettled
        ]
        notes += [f"left alone: {path} ({why})" for path, why in self.left.items()]
        return notes


def _table(layers: Sequence[LayerChange]) -> list[str]:
    """A line a norm; of many norms those that have changed most, in the order of the model."""
    chosen = set(sorted(layers, key=lambda one: -(one.mean_shift + one.std_ratio))[:SHOWN])
    rows = [("layer", "kind", "values", "mean moved", "std changed", "std. error")]
    for one in layers:
        if one in chosen:
            error = "" if one.error is None else f"{one.error:.2g}"
            moved, ratio = f"{one.mean_shift:.2g} σ", f"×{one.std_ratio:.3g}"
            path = one.path or "(the model)"
            rows.append((path, one.kind, f"{one.values:,}", moved, ratio, error))
    lines = aligned(rows, right=range(2, 6))
    if len(chosen) < len(layers):
        lines.append(f"({len(layers) - len(chosen)} norms that changed less are not shown)")
    return lines
