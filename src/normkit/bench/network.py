"""Images a second of a ResNet-50 in training, with each normalizer in the place of its norms."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

import normkit
from normkit.bench.records import BASELINE, Speed
from normkit.bench.straightforward import plain
from normkit.layers.base import Normalizer

SIZE = 224
CLASSES = 1000
WARM_UP = 5
STEPS = 12

Step = Callable[[], None]


def speeds(
    layers: list[str], batch: int, device: torch.device, *, compiled: bool, written_plainly: bool
) -> Iterator[Speed]:
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


def _plainly(entry: type[Normalizer]) -> Callable[[int], nn.Module]:
    return lambda channels: plain(entry(channels))


def _network(norm: Callable[[int], nn.Module]) -> nn.Module:
    from torchvision.models import resnet50  # not needed for anything else here

    torch.manual_seed(0)
    network: nn.Module = resnet50(norm_layer=norm)
    return network


def _speed(name: str, network: nn.Module, batch: int, device: torch.device) -> Speed:
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
        return Speed(name, batch * STEPS / seconds, peak)
    except torch.OutOfMemoryError:
        return Speed(name, None, None)
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
