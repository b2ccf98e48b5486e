"""How long a training step of a layer takes: for `normkit bench` and the tables of benchmarks/."""

from __future__ import annotations

import copy
import ctypes
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from normkit.core.messages import first_line
from normkit.engine.replay.build import build_extension, library, reason
from normkit.errors import NormkitError

Step = Callable[[], Any]

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STEPS = 20  # on a GPU, steps between two events: one step is too short for their resolution
LEAST_SECONDS = 0.005  # on a CPU, steps are repeated until they take as long as this


@dataclass(frozen=True)
class InputSpec:
    """One input to measure with."""

    shape: tuple[int, ...]
    format: str
    dtype: torch.dtype
    device: torch.device

    @property
    def input_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"{sizes} · {self.format} · {str(self.dtype).removeprefix('torch.')}"


@lru_cache(maxsize=1)
def tensors(spec: InputSpec) -> tuple[Tensor, Tensor]:
    """An input and the gradient of its output, the same in every run.

    The mean of one makes samples similar, as activations are: ubn then keeps to its batch
    statistics, which cost more than the running ones it would settle on with unlike samples.
    """
    drawn = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(spec.shape, generator=drawn) + mean for mean in (1.0, 0.0))
    x, dy = (t.to(spec.device, spec.dtype).to(memory_format=FORMATS[spec.format]) for t in (x, dy))
    return x.requires_grad_(), dy


def keep_memory() -> bool:
    """Let malloc keep what is freed instead of giving it back to the system; False where it cannot.

    Pages fresh from the system cost more than a normalizer does, and who pays for them depends
    on who ran before: without this, equal layers differ by a factor of two.
    """
    no_mapping, no_trimming = (-4, 0), (-1, 2**31 - 1)  # M_MMAP_MAX, M_TRIM_THRESHOLD of malloc.h
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return all(set_option(*option) == 1 for option in (no_mapping, no_trimming))


def extension() -> str:
    """Builds the C++ part of layers if it is not there, and says whether they use it.

    By themselves they build it beside their first steps, for the next process.
    """
    try:
        if not library().exists():
            print("Building the C++ part of layers, once: half a minute.", file=sys.stderr)
        build_extension()
    except (NormkitError, OSError, RuntimeError):  # of a cache that is not ours, for example
        return f"missing: {reason()}"
    return "used"


def training_step(module: nn.Module, x: Tensor, dy: Tensor) -> Step:
    """Forward, and backward to the input and all parameters that are trained."""
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]

    def step() -> tuple[Tensor, ...]:
        y = module(x)
        return (y, *torch.autograd.grad(y, wanted, dy, allow_unused=True))

    return step


def seconds(steps: Sequence[Step], repeats: int, device: torch.device) -> list[float]:
    """Median seconds of each step. They take turns, so that a busy machine slows all alike."""
    timed = _events if device.type == "cuda" else _clock
    for step in steps:  # caches, allocators and clocks warm up
        step()
        step()
    counts = [STEPS if device.type == "cuda" else _enough(step) for step in steps]
    measured: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, count, times in zip(steps, counts, measured, strict=True):
            times.append(timed(step, count))
    return [statistics.median(times) for times in measured]


def _enough(step: Step) -> int:
    return max(1, int(LEAST_SECONDS / _clock(step, 1)))


def _clock(step: Step, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count


def _events(step: Step, count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / count


class Compiler:
    """torch.compile, which remembers why it could not."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._absent = False

    def __call__(self, module: nn.Module, name: str, spec: InputSpec) -> nn.Module | None:
        """The module compiled as one graph and run once, or None."""
        if self._absent:
            return None
        compiled = copy.deepcopy(module)
        compiled.compile(fullgraph=True, dynamic=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of inductor about its own future
                training_step(compiled, *tensors(spec))()
        except Exception as problem:  # dynamo, inductor and the C++ compiler each have their own
            self._absent = _is_compiler_missing(problem)
            what = "no working C++ compiler" if self._absent else f"{name} on {spec}"
            self.reasons.append(f"Not compiled, {what}: {first_line(problem)}")
            return None
        return compiled


def _is_compiler_missing(problem: Exception) -> bool:
    return "CxxCompiler" in repr(problem) or "No working C++ compiler" in str(problem)
