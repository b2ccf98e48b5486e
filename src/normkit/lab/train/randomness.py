"""Random numbers of a run's own, such as dropout draws, whoever else draws in the same process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Randomness:
    """What torch's generators give while a run is at work. Nothing here waits for a device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.host = torch.Generator().manual_seed(seed).get_state()
        self.device: torch.Generator | None = None
        self._usual: torch.Generator | None = None
        if device.type == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            self._usual = torch.cuda.default_generators[index]
            self.device = self._usual.clone_state()
            self.device.manual_seed(seed)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Inside, torch draws the run's numbers; outside it goes on as if none had been drawn."""
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self.host)
        others = self._lend()
        try:
            yield
        finally:
            if self._usual is not None and others is not None:
                self._usual.graphsafe_set_state(others)
            self.host = torch.default_generator.get_state()
            torch.default_generator.set_state(before)

    @contextmanager
    def again(self) -> Iterator[None]:
        """What is drawn inside, by the run that is at work, will be drawn again afterwards."""
        host = torch.default_generator.get_state()
        device = None if self.device is None else self.device.get_state()
        try:
            yield
        finally:
            torch.default_generator.set_state(host)
            if self.device is not None and device is not None:
                self.device.set_state(device)

    def state(self) -> list[Tensor]:
        """Between two pieces of work."""
        return [self.host] if self.device is None else [self.host, self.device.get_state()]

    def load(self, state: list[Tensor]) -> None:
        self.host = state[0]
        if self.device is not None:
            self.device.set_state(state[1])

    def _lend(self) -> torch.Generator | None:
        """Let the GPU's usual generator draw from the run's state; gives back whose it was.

        The state itself is exchanged, not its value: a CUDA graph reads its random numbers from
        the state with which it was recorded, and runs at the same time must not share one.
        """
        if self._usual is None or self.device is None:
            return None
        before = self._usual.graphsafe_get_state()
        self._usual.graphsafe_set_state(self.device)
        return before
