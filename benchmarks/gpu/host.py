"""What the host pays for a step of one small layer: forward and backward, in a chain of them.

The kernels of so small a layer are done long before the host has started the next ones, so the time
of the chain is the host's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import normkit as nk
from benchmarks.gpu import networks
from normkit.timing import training_step

LENGTH = 40
SHAPE = (8, 64, 8, 8)
TORCH: dict[str, Callable[[int], nn.Module]] = {
    "nn.BatchNorm2d": nn.BatchNorm2d,
    "nn.GroupNorm(32)": lambda c: nn.GroupNorm(32, c),
}


def chain(name: str, length: int = LENGTH) -> nn.Module:
    channels = SHAPE[1]
    make = TORCH.get(name)
    return nn.Sequential(
        *(make(channels) if make else nk.make(name, channels) for _ in range(length))
    )


def measure(
    names: list[str], device: torch.device, turns: int, length: int = LENGTH
) -> list[dict[str, Any]]:
    """Microseconds of each, in turns."""
    x = torch.randn(SHAPE, device=device).to(memory_format=torch.channels_last).requires_grad_()
    rows: list[dict[str, Any]] = []
    timers = {}
    for name in [*TORCH, *names]:
        row: dict[str, Any] = {"layer": name}
        rows.append(row)
        try:
            step = training_step(chain(name, length).to(device), x, torch.randn_like(x))
            for _ in range(networks.SETTLING):
                step()
        except Exception as problem:
            row["error"] = networks.first_line(problem)
            continue
        timers[name] = networks.timer(step, device)
    times = networks.in_turns(timers, turns)
    for row in rows:
        if found := times.get(row["layer"]):
            row["microseconds"] = 1e6 * statistics.median(found.own) / length
            row["uncertainty"] = networks.uncertainty(found.own)
            row["ratio"] = 1 / statistics.median(found.ratios)
    return rows
