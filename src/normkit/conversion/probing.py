"""Inputs to measure a model with: the given one, or guesses from what the model is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit.inspection import call_model

SEED = 0
QUICK = 128  # pixels a side that most models take, whatever they were trained with
CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
# sizes to try by the number of spatial axes: small ones are quick, but some models insist
SIZES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((256,), (64,), (1024,), (16_000,)),
    2: ((64, 64), (224, 224), (32, 32), (28, 28), (299, 299), (256, 256), (512, 512)),
    3: ((16, 64, 64), (8, 112, 112), (16, 16, 16), (32, 32, 32), (16, 224, 224)),
}


@dataclass(frozen=True, eq=False)
class Probe:
    """An input and how to name it; without an input, why there is none."""

    example: Any
    text: str
    given: bool = False

    def run(self, model: nn.Module) -> Any:
        """What the model returns for the input."""
        return call_model(model, self.example)


def probes(model: nn.Module, example: Any = None) -> Iterator[Probe]:
    """The given input, or guesses in the order in which to try them; none on the meta device."""
    if example is False:
        yield Probe(None, "example=False was given")
        return
    tensors = [*model.parameters(), *model.buffers()]
    if any(isinstance(t, nn.UninitializedParameter | nn.UninitializedBuffer) for t in tensors):
        yield Probe(None, "the model has lazy layers")
        return
    if any(t.is_meta for t in tensors):
        yield Probe(None, "the model is on the meta device")
        return
    if example is not None:
        yield Probe(example, f"the given input {_shapes(example)}", given=True)
        return
    like = next((t for t in tensors if t.is_floating_point()), torch.empty(0, device="cpu"))
    seen = set()
    for shape in _guesses(model):
        if shape not in seen:
            seen.add(shape)
            yield Probe(_noise(shape, like), f"random numbers {shape}")
    entry = next(iter(_entries(model)), None)
    if isinstance(entry, nn.Embedding):
        tokens = torch.arange(32, device=like.device).remainder(entry.num_embeddings)
        yield Probe(tokens.reshape(2, 16), "tokens (2, 16)")


def _guesses(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Shapes of an input with two samples, the likeliest first."""
    for holder in ("pretrained_cfg", "default_cfg"):  # what timm's models know about themselves
        known = getattr(model, holder, None)
        size = known.get("input_size") if isinstance(known, Mapping) else None
        if isinstance(size, tuple | list):
            channels, *sides = size
            yield (2, channels, *(min(side, QUICK) for side in sides))
            yield (2, *size)
    for entry in _entries(model):
        for kind, axes in CONVOLUTIONS.items():
            if isinstance(entry, kind):
                yield from ((2, entry.in_channels, *size) for size in SIZES[axes])
                return
        if isinstance(entry, nn.Linear):
            yield (2, entry.in_features)
            yield (2, 16, entry.in_features)
            return
        channels = getattr(entry, "num_features", None) or getattr(entry, "channels", None)
        if isinstance(channels, int):
            yield from ((2, channels, *SIZES[axes][0]) for axes in (2, 1, 3))
            yield (2, channels)


def _entries(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that may be the first to see the input, in the order of registration."""
    for module in model.modules():
        known = (*CONVOLUTIONS, nn.Linear, nn.Embedding)
        if isinstance(module, known) or hasattr(module, "running_mean"):
            yield module


def _noise(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The same numbers every time, without a trace in torch's own random state."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    drawn = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
    return drawn.to(device=like.device, dtype=like.dtype)


def _shapes(example: Any) -> str:
    if isinstance(example, Tensor):
        return str(tuple(example.shape))
    values = example.values() if isinstance(example, Mapping) else example
    if isinstance(example, Mapping | tuple | list):
        return ", ".join(_shapes(v) for v in values)
    return type(example).__name__
