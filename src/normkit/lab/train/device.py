"""Where a run is trained: its device and stream, random numbers, clock and versions."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from normkit.lab.provenance import software
from normkit.lab.train.cuda_graph import Action, Capture, capture


class RunDevice:
    """A device for one run: keeps runs apart that take turns in one process."""

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
        return capture(action, self.stream)

    def rewinding(self, capture: Capture) -> Capture:
        """Random numbers that are drawn for a record are drawn again afterwards."""

        def rewound(action: Action) -> Action | str:
            with self.random.again():
                return capture(action)

        return rewound

    def peak_memory(self) -> int | None:
        """Bytes at most since it was made, of all runs together."""
        return None if self.stream is None else torch.cuda.max_memory_allocated(self.device)


class Randomness:
    """Random numbers of a run's own, such as dropout draws, whoever else draws in the process.

    Nothing here waits for a device.
    """

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
        others: torch.Generator | None = None
        if self._usual is not None and self.device is not None:
            # The state itself is exchanged, not its value: a CUDA graph reads its random numbers
            # from the state with which it was recorded, and runs must not share one.
            others = self._usual.graphsafe_get_state()
            self._usual.graphsafe_set_state(self.device)
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

    def fresh(self, seed: int) -> list[Tensor]:
        """A state with numbers for another purpose, for ``apart``."""
        host = torch.Generator().manual_seed(seed).get_state()
        if self.device is None:
            return [host]
        other = torch.Generator(self.device.device).manual_seed(seed)
        return [host, other.get_state()]

    @contextmanager
    def apart(self, numbers: list[Tensor]) -> Iterator[None]:
        """Inside, a run that is at work draws from ``numbers``, and its own stay where they were.

        Evaluation may draw, too: an attack its start, few-shot learning its episodes. Where a run
        is interrupted then makes no difference, and variants are judged by the same draws.
        """
        with self.again():
            torch.default_generator.set_state(numbers[0])
            if self.device is not None:
                self.device.set_state(numbers[1])
            try:
                yield
            finally:
                numbers[0] = torch.default_generator.get_state()
                if self.device is not None:
                    numbers[1] = self.device.get_state()

    def state(self) -> list[Tensor]:
        """Between two pieces of work."""
        return [self.host] if self.device is None else [self.host, self.device.get_state()]

    def load(self, state: list[Tensor]) -> None:
        self.host = state[0]
        if self.device is not None:
            self.device.set_state(state[1])


class Clock:
    """Seconds of training, on a GPU too, without waiting for it.

    Adds up what passes between ``start`` and ``stop``; ``read`` waits and gives the sum.
    """

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


def scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """What keeps gradients in fp16 from vanishing; nothing else needs it."""
    if precision != "fp16":
        return None
    grad_scaler = torch.amp.GradScaler(device.type)
    grad_scaler.scale(torch.zeros((), device=device))  # makes its tensors, before any record
    return grad_scaler


def environment(device: torch.device) -> dict[str, str]:
    """On what a run was trained: versions, device and ways of computing."""
    facts = {
        **software(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device_name(device),
    }
    if device.type == "cuda":
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())
    else:
        facts["threads"] = str(torch.get_num_threads())
    return facts


def device_name(device: torch.device) -> str:
    """The product, not its number: runs on two equal GPUs are comparable."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        return f"CPU, {torch.backends.cpu.get_cpu_capability()}"
    return device.type
