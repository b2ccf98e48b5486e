"""What torch keeps per thread, and its random numbers: to be found again elsewhere or later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Surroundings:
    """Autocast, gradient mode and the current CUDA stream of the thread that made it."""

    gradients: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype, bool], ...]
    stream: Any

    @classmethod
    def here(cls) -> Surroundings:
        cached = torch.is_autocast_cache_enabled()
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), cached)
                for d in _devices()
            ),
            torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
        )

    @contextmanager
    def again(self, gradients: bool | None = None, cache: bool = True) -> Iterator[None]:
        """Be there again; with another gradient mode, if wanted.

        Autocast remembers weights that it has narrowed, in older torch also those narrowed without
        a gradient (pytorch#158232): where the gradient mode changes, it must not.
        """
        with ExitStack() as stack:
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for device, enabled, dtype, cached in self.autocast:
                stack.enter_context(
                    torch.autocast(device, dtype, enabled, cache_enabled=cached and cache)
                )
            wanted = self.gradients if gradients is None else gradients
            stack.enter_context(torch.set_grad_enabled(wanted))
            yield


@dataclass(frozen=True, eq=False)
class RandomState:
    """The states of torch's random number generators, or a seed for them."""

    cpu: Tensor | None
    cuda: tuple[Tensor, ...]
    seed: int | None = None

    @classmethod
    def here(cls) -> RandomState:
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        return cls(torch.get_rng_state(), cuda)

    @classmethod
    def seeded(cls, seed: int) -> RandomState:
        return cls(None, (), seed)

    def restore(self) -> None:
        if self.seed is not None:
            torch.manual_seed(self.seed)
            return
        assert self.cpu is not None
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))

    @contextmanager
    def again(self) -> Iterator[None]:
        """These random numbers inside, the ones from before outside."""
        outside = RandomState.here()
        try:
            self.restore()
            yield
        finally:
            outside.restore()


def _devices() -> tuple[str, ...]:
    return DEVICES if torch.cuda.is_available() else DEVICES[:1]
