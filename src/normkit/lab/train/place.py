"""Where a run is trained: its device, its stream on it, and its random numbers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from normkit.lab.train import cuda_graph
from normkit.lab.train.randomness import Randomness
from normkit.lab.train.recording import Action, Capture


class Place:
    """Keeps runs apart that take turns in one process."""

    def __init__(self, device: torch.device | str, seed: int) -> None:
        self.device = torch.device(device)
        self.random = Randomness(seed, self.device)
        self.stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            gc.collect()  # of earlier runs: records refer to themselves
            self.stream = torch.cuda.Stream(self.device)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))  # for the data
            torch.cuda.reset_peak_memory_stats(self.device)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, everything is the run's own."""
        with self.on_stream(), self.random.own():
            yield

    def on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def wait(self) -> None:
        """Until the device has done all that it was told."""
        if self.stream is not None:
            self.stream.synchronize()

    def capture(self, action: Action) -> Action | str:
        """A record of an action, if this is a GPU."""
        if self.stream is None:
            return f"there are no CUDA graphs on {self.device.type}"
        return cuda_graph.capture(action, self.stream)

    def rewinding(self, capture: Capture) -> Capture:
        """Random numbers that are drawn for a record are drawn again afterwards."""

        def rewound(action: Action) -> Action | str:
            with self.random.again():
                return capture(action)

        return rewound

    def peak_memory(self) -> int | None:
        """Bytes at most since the place was made, of all runs together."""
        return None if self.stream is None else torch.cuda.max_memory_allocated(self.device)
