"""Every layer at one shape and memory format: time by CUDA-graph replay, memory, kernels.

All layers take turns with torch's. Whoever has the straightforward versions measured has them
compared, too: a layer that computes something else is not measured but listed.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benchmarks import layers, step_cost
from benchmarks.gpu.networks import first_line
from benchmarks.straightforward import plain
from normkit import timing
from normkit.layers.base import Normalizer
from normkit.timing import InputSpec, tensors

TORCH = ("nn.BatchNorm2d", "nn.GroupNorm(32)")


def prepare(names: list[str], spec: InputSpec) -> None:
    """Have the kernels compiled, which are kept on disk."""
    x, dy = tensors(spec)
    for name in names:
        if not layers.refused(name, spec):
            timing.training_step(layers.make(name, spec), x, dy)()


def measure(names: list[str], spec: InputSpec, repeats: int, written: Sequence[str]) -> list[Any]:
    """A row a layer; those ``written`` straightforwardly as well are compared with it."""
    x, dy = tensors(spec)
    rows: list[dict[str, Any]] = []
    modules: list[nn.Module] = []
    for name in [*TORCH, *names]:
        row: dict[str, Any] = {"layer": name}
        rows.append(row)
        try:
            module = _torch(name, spec) or layers.make(name, spec)
            timing.training_step(module, x, dy)()
            if written:
                row["difference"] = layers.disagreement(name, spec) if name in written else {}
        except Exception as problem:  # of a layer that refuses, of Triton, of the device
            row["error"] = first_line(problem)
            continue
        if not all(d <= layers.tolerance(spec.dtype) for d in row.get("difference", {}).values()):
            row["error"] = "differs from its straightforward version"
            continue
        modules.append(module)
    measured = [row for row in rows if "error" not in row]
    for row, module in zip(measured, modules, strict=True):
        row["saved_per_input_byte"] = step_cost.saved_bytes(module, x) / spec.input_bytes
    _time(measured, modules, spec, repeats, "")
    for row, layer in zip(measured, modules, strict=True):
        if row["layer"] in written and isinstance(layer, Normalizer):
            _time([row], [plain(layer)], spec, 1, "straightforward_")  # alone: it needs much memory
            _free(spec.device)
    return rows


def _torch(name: str, spec: InputSpec) -> nn.Module | None:
    channels = spec.shape[1]
    if name == TORCH[0]:
        return nn.BatchNorm2d(channels, device=spec.device)
    if name == TORCH[1]:  # its kernels want parameters of the input's type
        groups = 32 if channels % 32 == 0 else 1
        return nn.GroupNorm(groups, channels, device=spec.device, dtype=spec.dtype)
    return None


def _time(
    rows: list[dict[str, Any]], modules: list[nn.Module], spec: InputSpec, repeats: int, kind: str
) -> None:
    x, dy = tensors(spec)
    steps = [timing.training_step(module, x, dy) for module in modules]
    for row, seconds in zip(rows, timing.seconds(steps, repeats, spec.device), strict=True):
        row[f"{kind}seconds"] = seconds
    if spec.device.type != "cuda":
        return
    for row, step in zip(rows, steps, strict=True):
        row[f"{kind}peak_bytes"] = step_cost.peak_bytes(step)
        row[f"{kind}kernels"] = step_cost.kernels(step) if "difference" in row else None
    graphs = [step_cost.replayed(step) for step in steps]
    kept = [(row, graph) for row, graph in zip(rows, graphs, strict=True) if graph is not None]
    replays = timing.seconds([graph for _, graph in kept], repeats, spec.device)
    for (row, _), seconds in zip(kept, replays, strict=True):
        row[f"{kind}replay_seconds"] = seconds


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
