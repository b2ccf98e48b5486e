"""What shared statistics cost a training step, and what that becomes with more processes.

    python -m benchmarks.synchronised step               # two processes of this machine, gloo
    torchrun --nproc-per-node 8 -m benchmarks.synchronised step --device cuda  # NCCL
    python -m benchmarks.synchronised layer --device cuda  # a layer by itself
    python -m benchmarks.synchronised forecast --step-ms 43 --latency-us 5 --bandwidth 25

``step``: a ResNet-18 with DistributedDataParallel, its norms synchronised and not, in turn
(A B B A), so that whatever else the machine does slows both alike; printed is the median of the
ratios with a 95 % interval by the bootstrap. ``layer``: the host and kernel time that a
synchronised layer adds, with an all-reduce in a group of one. ``forecast``: the formula of
docs/distributed.md.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

import normkit as nk
from normkit.core.processes import Processes, total

WIDTHS = (64, 128, 256, 512)
# channels of the norms of a ResNet-50: the stem, then three a block and one a shortcut
BLOCKS = ((3, 64), (4, 128), (6, 256), (3, 512))
RESNET50 = [64, *(c for n, w in BLOCKS for c in [w, w, 4 * w] * n), *(4 * w for _, w in BLOCKS)]
PROCESSES = (2, 4, 8, 16, 64, 256, 1024)
MESSAGES = (1, 1_000, 100_000)  # numbers of float32
RESAMPLES = 2000


class Residual(nn.Module):
    """Two 3×3 convolutions with norms, added to a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nk.BN(after), nk.BN(after)
        self.shortcut = nn.Sequential()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nk.BN(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet18(classes: int = 1000) -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nk.BN(64), nn.ReLU()]
    parts.append(nn.MaxPool2d(3, 2, 1))
    before = 64
    for width in WIDTHS:
        for i in range(2):
            parts.append(Residual(before, width, 2 if i == 0 and width > 64 else 1))
            before = width
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


# -------------------------------------------------------------------- a step


def measure_step(options: argparse.Namespace) -> None:
    """On every process; the first one prints."""
    rank = distributed.get_rank()
    device = _device(options.device, rank)
    torch.manual_seed(0)
    shape = (options.batch, 3, options.size, options.size)
    x, y = torch.randn(shape, device=device), torch.randint(1000, shape[:1], device=device)
    steps = [_step(_trained(shares, device), x, y) for shares in (False, True)]
    for step in steps:
        for _ in range(3):
            step()
    ratios: list[float] = []
    seconds: list[list[float]] = [[], []]
    for _ in range(options.turns):
        times = [_seconds(steps[which], device) for which in (0, 1, 1, 0)]
        ratios.append((times[1] + times[2]) / (times[0] + times[3]))
        seconds[0] += [times[0], times[3]]
        seconds[1] += [times[1], times[2]]
    latencies = {count: _all_reduce_time(count, device) for count in MESSAGES}
    if rank == 0:
        low, high = _interval(ratios)
        local, shared = (statistics.median(s) * 1e3 for s in seconds)
        world, backend = distributed.get_world_size(), distributed.get_backend()
        print(f"ResNet-18, {shape}, {world} processes, {backend}, {options.turns} turns")
        print(f"local step {local:.1f} ms, synchronised {shared:.1f} ms")
        print(f"ratio {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")
        for count, t in latencies.items():
            print(f"all-reduce of {count:,} numbers: {t * 1e6:.0f} µs")


def _trained(shares: bool, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = resnet18().to(device)
    return nn.parallel.DistributedDataParallel(nk.sync(model) if shares else model)


def _step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def _seconds(step: Callable[[], Any], device: torch.device) -> float:
    distributed.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _all_reduce_time(count: int, device: torch.device) -> float:
    table, everyone = torch.ones(count, device=device), Processes.of(distributed.group.WORLD)
    for _ in range(5):
        total(table, everyone)
    return statistics.median(_seconds(lambda: total(table, everyone), device) for _ in range(50))


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


# -------------------------------------------------------------------- a layer by itself


def measure_layer(options: argparse.Namespace) -> None:
    """Forward and backward of a layer, alone and with an all-reduce among one process."""
    device = _device(options.device, 0)
    everyone = Processes.of(distributed.group.WORLD)
    pretended = Processes(everyone.name, 2, 0)  # so that the layer takes the way of several
    print("layer  shape  local µs  synchronised µs  more µs")
    for shape in ((32, 64, 16, 16), (32, 256, 14, 14), (32, 512, 2, 2)):
        times = []
        for processes in (None, pretended):
            layer: Any = nk.make(options.layer, shape[1]).to(device)
            layer.synchronise(processes)
            x = torch.randn(shape, device=device, requires_grad=True)
            grad = torch.randn(shape, device=device)

            def step(layer: nn.Module = layer, x: Tensor = x, grad: Tensor = grad) -> None:
                layer(x).backward(grad)

            for _ in range(10):
                step()
            times.append(statistics.median(_seconds(step, device) for _ in range(100)) * 1e6)
        text = "×".join(map(str, shape))
        print(f"{options.layer}  {text}  {times[0]:.0f}  {times[1]:.0f}  {times[1] - times[0]:.0f}")


# -------------------------------------------------------------------- many processes


def volume(channels: Sequence[int]) -> tuple[int, int]:
    """Bytes that one process hands to the all-reduces of a step, forward and backward."""
    return sum(8 * (2 * c + 1) for c in channels), sum(4 * 2 * c for c in channels)


def all_reduce_seconds(size: float, processes: int, latency: float, bandwidth: float) -> float:
    """By a tree, up and down: its depth in messages, and the bytes over a link both ways."""
    depth = math.ceil(math.log2(processes))
    return 2 * depth * latency + 2 * size * (processes - 1) / processes / bandwidth


def forecast(options: argparse.Namespace) -> None:
    channels = RESNET50 if options.channels is None else options.channels
    latency, bandwidth = options.latency_us * 1e-6, options.bandwidth * 1e9
    forward, backward = volume(channels)
    print(
        f"{len(channels)} norms, {sum(channels):,} channels: {forward / 1e3:.0f} kB forward and "
        f"{backward / 1e3:.0f} kB backward, {2 * len(channels)} all-reduces a step"
    )
    print("processes  added ms  efficiency")
    for processes in PROCESSES:
        added = 2 * len(channels) * all_reduce_seconds(0, processes, latency, bandwidth)
        added += all_reduce_seconds(forward + backward, processes, 0, bandwidth)
        added += len(channels) * options.layer_us * 1e-6
        share = options.step_ms / (options.step_ms + added * 1e3)
        print(f"{processes:9}  {added * 1e3:8.2f}  {share:10.1%}")


# -------------------------------------------------------------------- starting


def _device(name: str, rank: int) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    return device


def _joined(
    rank: int, world: int, file: str, work: Callable[[Any], None], options: argparse.Namespace
) -> None:
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    backend = "gloo" if options.device == "cpu" else "nccl"
    if "RANK" in os.environ:  # by torchrun
        distributed.init_process_group(backend)
    else:
        distributed.init_process_group(
            backend, init_method=f"file://{file}", rank=rank, world_size=world
        )
    try:
        work(options)
    finally:
        distributed.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.what == "forecast":
        forecast(options)
        return 0
    work = measure_step if options.what == "step" else measure_layer
    world = options.processes if options.what == "step" else 1
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "store")
        if world == 1 or "RANK" in os.environ:
            _joined(0, 1, file, work, options)
            return 0
        arguments_of = (world, file, work, options)
        torch.multiprocessing.spawn(_joined, args=arguments_of, nprocs=world)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.synchronised")
    parser.add_argument("what", choices=("step", "layer", "forecast"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process, on a CPU")
    parser.add_argument("--batch", type=int, default=32, help="images of each process")
    parser.add_argument("--size", type=int, default=64, help="of the images, in pixels")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--layer", default="bn", help="a name of the catalog")
    parser.add_argument("--step-ms", type=float, default=43.0, help="a step without sharing")
    parser.add_argument("--latency-us", type=float, default=5.0, help="of one message")
    parser.add_argument("--bandwidth", type=float, default=25.0, help="of a link, in GB/s")
    parser.add_argument("--layer-us", type=float, default=0.0, help="added by each layer itself")
    parser.add_argument("--channels", type=int, nargs="+", help="of each norm; a ResNet-50's")
    return parser


if __name__ == "__main__":
    sys.exit(main())
