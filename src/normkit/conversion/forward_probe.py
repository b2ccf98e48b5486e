"""An input to run a model with, given or guessed, and how far apart two outputs are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from normkit.core.precision import deterministic_cudnn
from normkit.errors import OptionError
from normkit.inspection import call_model
from normkit.inspection.batches import ModelCall, tensors_in

SEED = 0
QUICK = 128  # pixels a side that most models take, whatever they were trained with
CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
# sizes to try by the number of spatial axes: small ones are quick, but some models insist
SIZES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((256,), (64,), (1024,), (16_000,)),
    2: ((64, 64), (224, 224), (32, 32), (28, 28), (299, 299), (256, 256), (512, 512)),
    3: ((16, 64, 64), (8, 112, 112), (16, 16, 16), (32, 32, 32), (16, 224, 224)),
}
# Relative to the largest number of the output. What is summed in another order differs by a few
# units in the last place, and a deep model makes some hundred of them out of that.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}


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
        check_example(example)
        yield Probe(example, f"the given input {_shapes(example)}", given=True)
        return
    like = next((t for t in tensors if t.is_floating_point()), torch.empty(0, device="cpu"))
    for shape in dict.fromkeys(_guesses(model)):
        yield Probe(noise(shape, like), f"random numbers {shape}")
    entry = next(iter(_entries(model)), None)
    if isinstance(entry, nn.Embedding):
        tokens = torch.arange(32, device=like.device).remainder(entry.num_embeddings)
        yield Probe(tokens.reshape(2, 16), "tokens (2, 16)")


def check_example(example: Any) -> None:
    """An error that names the argument, if nothing could be measured with it."""
    if isinstance(example, tuple | list) and example and all(type(n) is int for n in example):
        sizes = ", ".join(map(str, example))
        raise OptionError(
            f"example= got {example!r}, which looks like a shape. Expected an input of the model. "
            f"Try example=torch.randn({sizes})."
        )
    if isinstance(example, tuple | list | Mapping) and not example:
        raise OptionError(
            f"example= is an empty {type(example).__name__}. Expected an input of the model, as a "
            "list of images for a detector."
        )
    for tensor in tensors_in(example):
        if tensor.is_floating_point() and not tensor.is_meta:
            bad = int(tensor.isnan().sum())
            if bad:
                raise OptionError(
                    f"example= holds NaN: {bad:,} of the {tensor.numel():,} numbers of its tensor "
                    f"{tuple(tensor.shape)}. Expected an input as the model gets it."
                )


def not_finite(model: nn.Module) -> str | None:
    """The path of the first parameter or buffer that holds infinities or NaN; masks of attention
    are minus infinity on purpose."""
    for path, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point() and not tensor.is_meta:
            mask = tensor.isneginf() if not isinstance(tensor, nn.Parameter) else False
            if not bool((tensor.isfinite() | mask).all()):
                return path
    return None


def noise(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The same numbers every time, without a trace in torch's own random state."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    numbers = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
    return numbers.to(device=like.device, dtype=like.dtype)


def _guesses(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Shapes of an input with two samples, the likeliest first."""
    for holder in ("pretrained_cfg", "default_cfg"):  # what timm's models say about themselves
        config = getattr(model, holder, None)
        size = config.get("input_size") if isinstance(config, Mapping) else None
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
    kinds = (*CONVOLUTIONS, nn.Linear, nn.Embedding)
    for module in model.modules():
        if isinstance(module, kinds) or hasattr(module, "running_mean"):
            yield module


def _shapes(example: Any) -> str:
    if isinstance(example, Tensor):
        return str(tuple(example.shape))
    if isinstance(example, ModelCall):
        return _shapes(example.batch)
    values = example.values() if isinstance(example, Mapping) else example
    if isinstance(example, Mapping | tuple | list):
        return ", ".join(_shapes(v) for v in values)
    return type(example).__name__


@contextmanager
def full_precision(*models: nn.Module) -> Iterator[None]:
    """float32 products in float32, not TF32, and one algorithm: for models on a CUDA device.

    With ten bits of mantissa a last digit that differs becomes a difference of 1e-3.
    """
    tensors = (t for m in models for t in chain(m.parameters(), m.buffers()))
    if not any(t.is_cuda for t in tensors):
        yield
        return
    cudnn: Any = torch.backends.cudnn
    products: list[Any] = [cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul]
    precisions = [product.fp32_precision for product in products]
    try:
        for product in products:
            product.fp32_precision = "ieee"
        with deterministic_cudnn():
            yield
    finally:
        for product, precision in zip(products, precisions, strict=True):
            product.fp32_precision = precision


# -------------------------------------------------------------------- comparing outputs


def difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """max |after − before| / max |before| of the tensor where it is largest.

    Infinite if the shapes differ, as of a detector that finds another number of boxes, or if
    numbers are finite on one side only.
    """
    if [t.shape for t in before] != [t.shape for t in after]:
        return math.inf
    return max((_difference(a, b) for a, b in zip(before, after, strict=True)), default=0.0)


def _difference(before: Tensor, after: Tensor) -> float:
    wide = torch.promote_types(before.dtype, torch.float32)
    a, b = before.detach().to(wide), after.detach().to(wide)
    alike = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(alike, 0, (b - a).abs()).nan_to_num(nan=math.inf, posinf=math.inf).amax()
    scale = torch.where(a.isfinite(), a, 0).abs().amax()
    return float(gap / torch.where(scale > 0, scale, 1))


def rounding(dtype: torch.dtype) -> float:
    """The relative difference up to which two results of a type count as equal but for rounding."""
    return ROUNDING.get(dtype) or 4 * torch.finfo(dtype).eps


def leaves(output: Any) -> list[Tensor]:
    """The tensors with real numbers in whatever a model returns."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() and output.numel() else []
    if isinstance(output, Mapping):
        return [t for value in output.values() for t in leaves(value)]
    if isinstance(output, tuple | list):
        return [t for value in output for t in leaves(value)]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [t for f in dataclasses.fields(output) for t in leaves(getattr(output, f.name))]
    return []
