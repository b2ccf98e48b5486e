"""What an option costs a training step on a CPU, to a part in a hundred: fuse, observe; and what
layers cost against nn.BatchNorm2d: in a network, or alone in several sizes and both formats.

    python -m benchmarks.paired_cost network --norm bn,gn,bcn --batch 8
    python -m benchmarks.paired_cost layers --norm bn,gn,bcn
    python -m benchmarks.paired_cost fuse
    python -m benchmarks.paired_cost observe --model native:resnet20 --size 32 --batch 32

Two copies of one network, with the option and without, are trained in turn: A B B A, one short
block of steps each, by CPU time of the process. So whatever else a machine does slows both alike,
and the ratio (B + B) / (A + A) of each turn can be averaged: printed is its median over many turns,
with a 95 % interval by the bootstrap. Wall clocks could not show a part in a hundred.

What ``observe`` costs at ``every=100`` is put together from two such figures, each large enough to
be seen: steps that are all measured (``every=1``), and the two hooks that run in the others, by
themselves on a network that does nothing.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import normkit as nk
from normkit.diagnosis.observe.observer import EVERY
from normkit.errors import NormkitError
from normkit.lab.experiment import Model
from normkit.lab.models import build

Step = Callable[[], object]
BLOCK_SECONDS = 0.02  # long against the clock's resolution and short against what others do
RESAMPLES = 2000
NEVER = 1 << 60
SIZES = ((4, 8, 4, 4), (8, 64, 8, 8), (32, 64, 32, 32))
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class CostRatio(NamedTuple):
    """CPU time with the option against without, and where its median lies with 95 %."""

    ratio: float
    low: float
    high: float
    seconds: float  # of one step without it

    def __str__(self) -> str:
        return f"{self.ratio:.4f} (95 % {self.low:.4f} to {self.high:.4f})"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    network = f"{options.model} at {options.batch}×3×{options.size}×{options.size}, "
    print("" if options.option == "layers" else network, end="")
    print(f"{options.norm}, {options.threads} thread(s), ", end="")
    print(f"{options.turns} turns, torch {torch.__version__}")
    try:
        OPTIONS[options.option](options)
    except NormkitError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paired_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("option", choices=tuple(OPTIONS))
    add("--model", default="native:resnet20", help="native:, torchvision: or timm: (%(default)s)")
    add(
        "--norm",
        default="bn",
        help="what its norms become; torch: they stay (%(default)s); several, with commas, for "
        "network and layers",
    )
    add("--batch", type=int, default=32)
    add("--size", type=int, default=32, help="of the square images (%(default)s)")
    add("--turns", type=int, default=100, help="A B B A, so often (%(default)s)")
    add("--threads", type=int, default=1)
    return parser


def _fuse(options: argparse.Namespace) -> None:
    for in_place in (True, False):
        plain = _network(options)
        for module in plain.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = in_place
        fused = nk.fuse(copy.deepcopy(plain), example=False)
        written = "in place" if in_place else "out of place"
        for mode in ("train", "eval"):
            cost = paired(_step(plain, options, mode), _step(fused, options, mode), options.turns)
            print(f"fused against ReLUs {written}, {mode}: {cost}", flush=True)


def _network_cost(options: argparse.Namespace) -> None:
    for norm in options.norm.split(","):
        plain, ours = (
            _network(argparse.Namespace(**{**vars(options), "norm": each}))
            for each in ("torch", norm)
        )
        for mode in ("train", "eval"):
            cost = paired(_step(plain, options, mode), _step(ours, options, mode), options.turns)
            print(f"{norm} against nn.BatchNorm2d, {mode}: {cost}", flush=True)


def _layers(options: argparse.Namespace) -> None:
    """A step of one layer, its own call of backward included."""
    for size in SIZES:
        for name, memory in FORMATS.items():
            ratios = []
            for norm in options.norm.split(","):
                theirs, ours = nn.BatchNorm2d(size[1]), nk.make(norm, size[1])
                a, b = (_layer_step(layer, size, memory) for layer in (theirs, ours))
                cost = paired(a, b, options.turns)
                ratios.append(f"{norm} {cost.ratio:.2f}")
            shape = "×".join(map(str, size))
            print(f"{shape} {name}, × nn.BatchNorm2d: {', '.join(ratios)}", flush=True)


def _layer_step(layer: nn.Module, size: tuple[int, ...], memory: torch.memory_format) -> Step:
    drawn = torch.Generator().manual_seed(1)
    x, grad = (
        torch.randn(size, generator=drawn).to(memory_format=memory).requires_grad_(learns)
        for learns in (True, False)
    )
    return lambda: layer(x).backward(grad)


def _observe(options: argparse.Namespace) -> None:
    network = _network(options)
    twin = copy.deepcopy(network)
    with nk.observe(twin, every=1):
        measured = paired(_step(network, options), _step(twin, options), options.turns)
    print(f"observed against not, every step measured: {measured}", flush=True)
    hooks = hook_seconds(options.turns)
    print(f"hooks of a step that is not measured: {1e6 * hooks[0]:.1f} µs", end=" ")
    print(f"(95 % {1e6 * hooks[1]:.1f} to {1e6 * hooks[2]:.1f}) of {1e3 * measured.seconds:.1f} ms")
    part, low, high = cost_of_observing(measured, hooks, EVERY)
    print(f"so at every={EVERY}: {part:+.2%} (95 % {low:+.2%} to {high:+.2%})")


def hook_seconds(turns: int) -> tuple[float, float, float]:
    """What the hooks of ``observe`` take where nothing is measured, and its 95 % interval."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nk.BN(1)

        def forward(self, x: object) -> object:
            return x

    plain, observed = Idle(), Idle()
    with nk.observe(observed, every=NEVER):
        cost = paired(partial(plain, None), partial(observed, None), turns)
    low, middle, high = (cost.seconds * (r - 1) for r in (cost.low, cost.ratio, cost.high))
    return middle, low, high


def cost_of_observing(
    measured: CostRatio, hooks: tuple[float, float, float], every: int
) -> tuple[float, float, float]:
    """The part by which every so many steps observed take longer.

    Ends of intervals are added, which gives one wider than 95 %.
    """
    ratios = (measured.ratio, measured.low, measured.high)
    middle, low, high = (
        (ratio - 1) / every + hook / measured.seconds
        for ratio, hook in zip(ratios, hooks, strict=True)
    )
    return middle, low, high


def paired(
    a: Step, b: Step, turns: int, clock: Callable[[], float] = time.process_time
) -> CostRatio:
    """What b costs against a."""
    for step in (a, b):
        step()
        step()
    start = clock()
    a()
    count = max(1, int(BLOCK_SECONDS / max(clock() - start, 1e-9)))
    ratios, plain = [], []
    for turn in range(turns):
        first, second = (a, b) if turn % 2 else (b, a)  # nobody is always first
        spent = {id(a): 0.0, id(b): 0.0}
        for step in (first, second, second, first):
            start = clock()
            for _ in range(count):
                step()
            spent[id(step)] += clock() - start
        ratios.append(spent[id(b)] / spent[id(a)])
        plain.append(spent[id(a)] / (2 * count))
    return CostRatio(statistics.median(ratios), *_interval(ratios), statistics.median(plain))


def _interval(ratios: list[float]) -> tuple[float, float]:
    """Where the median lies with 95 %: percentiles of medians of samples drawn again."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


def _network(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    network = build(Model(options.model), 10, (3, options.size, options.size))
    if options.norm != "torch":
        nk.convert(network, options.norm, example=False)
    return network


def _step(network: nn.Module, options: argparse.Namespace, mode: str = "train") -> Step:
    """A step of SGD, or a forward in eval mode without gradients."""
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(options.batch, 3, options.size, options.size, generator=drawn)
    y = torch.randint(10, (options.batch,), generator=drawn)
    if mode == "eval":

        @torch.no_grad()
        def forward() -> object:
            return network.eval()(x)

        return forward
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network.train()(x), y).backward()
        optimizer.step()

    return step


OPTIONS = {"fuse": _fuse, "observe": _observe, "network": _network_cost, "layers": _layers}


if __name__ == "__main__":
    sys.exit(main())
