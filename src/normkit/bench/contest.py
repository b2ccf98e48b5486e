"""A layer against its competitors: first that they compute the same, then what each costs."""

from __future__ import annotations

import copy
import math
import warnings

import torch
from torch import Tensor, nn

import normkit
from normkit.bench import measure
from normkit.bench.records import (
    BASELINE,
    NORMKIT,
    NORMKIT_COMPILED,
    PLAIN,
    PLAIN_COMPILED,
    Cell,
    Row,
    Setting,
    tensors,
)
from normkit.bench.straightforward import plain
from normkit.errors import NormkitError
from normkit.layers.base import Normalizer


class Compiler:
    """torch.compile, which remembers why it could not."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._absent = False

    def __call__(self, module: nn.Module, name: str, setting: Setting) -> nn.Module | None:
        """The module compiled as one graph and run once, or None."""
        if self._absent:
            return None
        compiled = copy.deepcopy(module)
        compiled.compile(fullgraph=True, dynamic=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of inductor about its own future
                measure.training_step(compiled, *tensors(setting))()
        except Exception as problem:  # dynamo, inductor and the C++ compiler each have their own
            self._absent = _is_compiler_missing(problem)
            what = "no working C++ compiler" if self._absent else f"{name} on {setting}"
            self.reasons.append(f"Not compiled, {what}: {_first_line(problem)}")
            return None
        return compiled


def _is_compiler_missing(problem: Exception) -> bool:
    return "CxxCompiler" in repr(problem) or "No working C++ compiler" in str(problem)


def _first_line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[0] if lines else type(problem).__name__


def make(name: str, setting: Setting) -> Normalizer:
    """A layer of the catalog in training mode; parameters stay float32, as under autocast."""
    entry = normkit.catalog.ENTRIES[name]
    layer: Normalizer = entry(setting.shape[1], device=setting.device)
    return layer


def tolerance(dtype: torch.dtype) -> float:
    """What rounding may do: a thousand roundings of float32 statistics, or one of the output."""
    return max(torch.finfo(dtype).eps, 1000 * torch.finfo(torch.float32).eps)


def disagreement(name: str, setting: Setting) -> dict[str, float]:
    """The relative error of y and dx between a layer and its straightforward version.

    Parameters are moved off their start, where many terms are zero or one.
    """
    layer = make(name, setting)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=drawn).to(p))
    x, dy = tensors(setting)
    theirs = measure.training_step(plain(layer), x, dy)()
    ours = measure.training_step(layer, x, dy)()
    return {what: _error(a, b) for what, a, b in zip(("y", "dx"), ours, theirs, strict=False)}


def _error(ours: Tensor, theirs: Tensor) -> float:
    difference = torch.linalg.vector_norm(ours.detach().double() - theirs.detach().double())
    return (difference / torch.linalg.vector_norm(theirs.detach().double())).item()


def refused(name: str, setting: Setting) -> str:
    """Why a layer does not take this shape, or ''."""
    try:
        make(name, setting)(tensors(setting)[0])
    except NormkitError as problem:
        return str(problem)
    return ""


def row(name: str, setting: Setting, repeats: int, compiler: Compiler | None) -> Row:
    """Measure a layer and its competitors."""
    layer = make(name, setting)
    channels = setting.shape[1]
    groups = math.gcd(32, channels)
    modules: dict[str, nn.Module | None] = {
        NORMKIT: layer,
        BASELINE: nn.BatchNorm2d(channels, device=setting.device),
        # its kernels want parameters of the input's type
        f"nn.GroupNorm({groups})": nn.GroupNorm(
            groups, channels, device=setting.device, dtype=setting.dtype
        ),
        PLAIN: plain(layer),
    }
    if compiler is not None:
        # dynamo keeps eight versions of a function, and all layers share their forward
        torch._dynamo.reset()
        modules[PLAIN_COMPILED] = compiler(plain(layer), f"{PLAIN} {name}", setting)
        modules[NORMKIT_COMPILED] = compiler(layer, name, setting)
    found = {title: module for title, module in modules.items() if module is not None}
    cells = cost(list(found.values()), setting, repeats)
    return Row(name, layer.card.family, dict(zip(found, cells, strict=True)))


def cost(modules: list[nn.Module], setting: Setting, repeats: int) -> list[Cell]:
    """What a training step of each module costs."""
    x, dy = tensors(setting)
    device = setting.device
    steps = [measure.training_step(module, x, dy) for module in modules]
    times = measure.seconds(steps, repeats, device)
    saved = [measure.saved_bytes(module, x) / setting.input_bytes for module in modules]
    cells = [Cell(*both) for both in zip(times, saved, strict=True)]
    if device.type == "cuda":
        graphs = [measure.replayed(step) for step in steps]
        captured = [graph for graph in graphs if graph is not None]
        replays = iter(measure.seconds(captured, repeats, device))
        for cell, step, graph in zip(cells, steps, graphs, strict=True):
            cell.replay_seconds = None if graph is None else next(replays)
            cell.peak_bytes = measure.peak_bytes(step)
            cell.kernels = measure.kernels(step)
    return cells
