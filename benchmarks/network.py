"""Images a second of a ResNet-50 in training, with each normalizer in the place of its norms."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit
from benchmarks.layers import BASELINE, NetworkSpeed
from benchmarks.straightforward import plain
from normkit.layers.base import Normalizer

SIZE = 224
CLASSES = 1000
WARM_UP = 5
STEPS = 12

Step = Callable[[], None]
Norm = Callable[[int], nn.Module]


def speeds(
    layers: list[str], batch: int, device: torch.device, *, compiled: bool, written_plainly: bool
) -> Iterator[NetworkSpeed]:
    """Measure one network after the other: cuDNN's batch norm first, as the baseline."""
    yield _speed(BASELINE, _network(nn.BatchNorm2d), batch, device)
    if compiled:
        yield _speed(f"{BASELINE}, compiled", _compiled(), batch, device)
    yield _speed("nn.GroupNorm(32)", _network(lambda c: nn.GroupNorm(32, c)), batch, device)
    yield _speed("bn, all weights by ws", _standardized(), batch, device)
    for name in layers:
        entry = normkit.catalog.ENTRIES[name]
        yield _speed(name, _network(entry), batch, device)
        yield _speed(f"{name}, fused", normkit.fuse(_network(entry)), batch, device)
        if written_plainly:
            yield _speed(f"{name}, straightforward", _network(_plainly(entry)), batch, device)


def _compiled() -> nn.Module:
    network = _network(nn.BatchNorm2d)
    network.compile()
    return network


def _standardized() -> nn.Module:
    network = _network(normkit.BN)
    normkit.standardize(network)
    return network


def _plainly(entry: type[Normalizer]) -> Norm:
    return lambda channels: plain(entry(channels))


def _network(norm: Norm) -> nn.Module:
    torch.manual_seed(0)
    return ResNet50(norm)


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with norms, added to a shortcut; the stride is the middle's."""

    def __init__(self, before: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        after = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(before, width, 1, bias=False), norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = norm(width)
        self.conv3, self.bn3 = nn.Conv2d(width, after, 1, bias=False), norm(after)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride > 1 or before != after:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), norm(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet50(nn.Module):
    """He et al. 2016, with the stride in the 3×3 convolutions, as torchvision builds it."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), norm(64)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)
        stages, before = [], 64
        for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(blocks):
                stages.append(Bottleneck(before, width, stride if i == 0 else 1, norm))
                before = 4 * width
        self.blocks = nn.Sequential(*stages)
        self.fc = nn.Linear(before, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.blocks(x).mean((2, 3)))


def _speed(name: str, network: nn.Module, batch: int, device: torch.device) -> NetworkSpeed:
    """Mixed precision, channels_last, SGD with momentum: as people train it."""
    try:
        network = network.to(device).to(memory_format=torch.channels_last)
        step = _training_step(network, batch, device)
        for _ in range(WARM_UP):
            step()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated(device)
        return NetworkSpeed(name, batch * STEPS / seconds, peak)
    except torch.OutOfMemoryError:
        return NetworkSpeed(name, None, None)
    finally:
        network = step = None  # type: ignore[assignment]
        gc.collect()  # graphs refer to themselves
        torch.cuda.empty_cache()


def _training_step(network: nn.Module, batch: int, device: torch.device) -> Step:
    images = torch.randn(batch, 3, SIZE, SIZE, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, CLASSES, (batch,), device=device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()

    return step
