"""Seconds of training, on a GPU too, without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Adds up what passes between ``start`` and ``stop``; ``read`` waits and gives the sum."""

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self.device, self.seconds = device, seconds
        self.running = False
        self._from: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        self._from, self.running = self._now(), True

    def stop(self) -> None:
        if self.running:
            self._spans.append((self._from, self._now()))
            self.running = False

    def read(self) -> float:
        """Seconds until the last ``stop``."""
        for start, end in self._spans:
            if self.device.type == "cuda":
                end.synchronize()
                self.seconds += start.elapsed_time(end) / 1000
            else:
                self.seconds += end - start
        self._spans = []
        return self.seconds

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
