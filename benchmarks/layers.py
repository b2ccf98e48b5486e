"""A layer against its competitors: first that they compute the same, then what each costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import normkit
from benchmarks import step_cost
from benchmarks.straightforward import plain
from normkit import timing
from normkit.errors import NormkitError
from normkit.layers.base import Normalizer
from normkit.timing import Compiler, InputSpec, tensors

LIMIT = 1.5  # times nn.BatchNorm2d: what a layer of the family may cost
RESTLESS = 1.5  # a busy machine: one and the same layer takes that much longer now and then

NORMKIT = "normkit"
BASELINE = "nn.BatchNorm2d"
PLAIN = "straightforward"
PLAIN_COMPILED = "straightforward, compiled"
NORMKIT_COMPILED = "normkit, compiled"


@dataclass
class StepCost:
    """What a training step of one contestant cost. None: not measured on this device."""

    seconds: float
    saved_per_input_byte: float
    replay_seconds: float | None = None
    peak_bytes: int | None = None
    kernels: int | None = None


@dataclass
class LayerRow:
    """A layer and its competitors, measured in turns."""

    layer: str
    family: bool
    cells: dict[str, StepCost] = field(default_factory=dict)
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """The layer's time over that of nn.BatchNorm2d."""
        if NORMKIT not in self.cells:
            return None
        return self.cells[NORMKIT].seconds / self.cells[BASELINE].seconds


@dataclass
class LayerTable:
    """All layers at one spec. ``floor`` is the time of eight passes over memory, on a GPU."""

    spec: InputSpec
    rows: list[LayerRow] = field(default_factory=list)
    floor: float | None = None

    @property
    def unrest(self) -> float:
        """How much longer nn.BatchNorm2d took beside one layer than beside another."""
        times = [row.cells[BASELINE].seconds for row in self.rows if row.cells]
        return max(times) / min(times) if times else 1.0

    @property
    def contestants(self) -> list[str]:
        """The columns, in the order in which they first appear."""
        return list(dict.fromkeys(name for row in self.rows for name in row.cells))


@dataclass
class BenchmarkRun:
    """Everything that is printed and written."""

    environment: dict[str, str | int | float]
    tables: list[LayerTable] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    command: str = ""

    def summary(self) -> str:
        """How many family layers stay within the limit in every setting, and which do not."""
        worst: dict[str, float] = {}
        for table in self.tables:
            for row in table.rows:
                if row.family and row.ratio is not None:
                    worst[row.layer] = max(worst.get(row.layer, 0.0), row.ratio)
        above = sorted((n for n, r in worst.items() if r > LIMIT), key=lambda n: -worst[n])
        text = (
            f"{len(worst) - len(above)} of {len(worst)} family layers are within {LIMIT}x of "
            f"{BASELINE} in every setting."
        )
        if above:
            text += " Above: " + ", ".join(f"{name} {worst[name]:.2f}x" for name in above) + "."
        return text


def make(name: str, spec: InputSpec) -> Normalizer:
    """A layer of the catalog in training mode; parameters stay float32, as under autocast."""
    entry = normkit.catalog.ENTRIES[name]
    layer: Normalizer = entry(spec.shape[1], device=spec.device)
    return layer


def tolerance(dtype: torch.dtype) -> float:
    """What rounding may do: a thousand roundings of float32 statistics, or one of the output."""
    return max(torch.finfo(dtype).eps, 1000 * torch.finfo(torch.float32).eps)


def disagreement(name: str, spec: InputSpec) -> dict[str, float]:
    """The relative error of y and dx between a layer and its straightforward version.

    Parameters are moved off their start, where many terms are zero or one.
    """
    layer = make(name, spec)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=drawn).to(p))
    x, dy = tensors(spec)
    theirs = timing.training_step(plain(layer), x, dy)()
    ours = timing.training_step(layer, x, dy)()
    return {what: _error(a, b) for what, a, b in zip(("y", "dx"), ours, theirs, strict=False)}


def _error(ours: Tensor, theirs: Tensor) -> float:
    difference = torch.linalg.vector_norm(ours.detach().double() - theirs.detach().double())
    return (difference / torch.linalg.vector_norm(theirs.detach().double())).item()


def refused(name: str, spec: InputSpec) -> str:
    """Why a layer does not take this shape, or ''."""
    try:
        make(name, spec)(tensors(spec)[0])
    except NormkitError as problem:
        return str(problem)
    return ""


def measure(name: str, spec: InputSpec, repeats: int, compiler: Compiler | None) -> LayerRow:
    """Measure a layer and its competitors."""
    layer = make(name, spec)
    channels = spec.shape[1]
    groups = math.gcd(32, channels)
    modules: dict[str, nn.Module | None] = {
        NORMKIT: layer,
        BASELINE: nn.BatchNorm2d(channels, device=spec.device),
        # its kernels want parameters of the input's type
        f"nn.GroupNorm({groups})": nn.GroupNorm(
            groups, channels, device=spec.device, dtype=spec.dtype
        ),
        PLAIN: plain(layer),
    }
    if compiler is not None:
        # dynamo keeps eight versions of a function, and all layers share their forward
        torch._dynamo.reset()
        modules[PLAIN_COMPILED] = compiler(plain(layer), f"{PLAIN} {name}", spec)
        modules[NORMKIT_COMPILED] = compiler(layer, name, spec)
    contestants = {title: module for title, module in modules.items() if module is not None}
    cells = cost(list(contestants.values()), spec, repeats)
    return LayerRow(name, layer.card.family, dict(zip(contestants, cells, strict=True)))


def cost(modules: list[nn.Module], spec: InputSpec, repeats: int) -> list[StepCost]:
    """What a training step of each module costs."""
    x, dy = tensors(spec)
    device = spec.device
    steps = [timing.training_step(module, x, dy) for module in modules]
    times = timing.seconds(steps, repeats, device)
    saved = [step_cost.saved_bytes(module, x) / spec.input_bytes for module in modules]
    cells = [StepCost(*both) for both in zip(times, saved, strict=True)]
    if device.type == "cuda":
        graphs = [step_cost.replayed(step) for step in steps]
        captured = [graph for graph in graphs if graph is not None]
        replays = iter(timing.seconds(captured, repeats, device))
        for cell, step, graph in zip(cells, steps, graphs, strict=True):
            cell.replay_seconds = None if graph is None else next(replays)
            cell.peak_bytes = step_cost.peak_bytes(step)
            cell.kernels = step_cost.kernels(step)
    return cells
