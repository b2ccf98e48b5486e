"""Where to train: how many workers, and the device of each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from normkit.errors import OptionError

TOGETHER = 4  # runs for a GPU: the most that normkit.lab.train puts side by side


@dataclass(frozen=True)
class Place:
    """The device of one worker, and how many runs of one setting it is given at once.

    How many of them it trains side by side, normkit.lab.train decides.
    """

    device: str = "cpu"
    together: int = 1


def places(workers: int | None = None, device: str | None = None) -> list[Place]:
    """One worker for each core of a CPU or for each GPU, unless told otherwise.

    >>> places(workers=2, device="cpu")
    [Place(device='cpu', together=1), Place(device='cpu', together=1)]
    """
    if workers is not None and workers < 1:
        raise OptionError(f"workers got {workers}, expected 1 or more.")
    devices = _devices(device)
    many = workers or (cores() if devices == ["cpu"] else len(devices))
    return [_place(devices[i % len(devices)]) for i in range(many)]


def _place(device: str) -> Place:
    return Place(device, TOGETHER if device.startswith("cuda") else 1)


def _devices(device: str | None) -> list[str]:
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    every = [f"cuda:{i}" for i in range(there)]
    if device is None:
        return every or ["cpu"]
    try:
        asked = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"device got {device!r}. Try cpu, cuda or cuda:0.") from error
    if asked.type != "cuda":
        try:
            torch.zeros(1, device=asked).item()
        except (RuntimeError, NotImplementedError) as error:  # not of this machine, or "meta"
            raise OptionError(
                f"device got {device!r}, which cannot train here. Try cpu."
            ) from error
        return [device]
    if not every or (asked.index or 0) >= there:
        raise OptionError(
            f"device got {device!r}, and torch sees {there} CUDA devices here. Try cpu."
        )
    return every if asked.index is None else [device]


def cores() -> int:
    """CPU cores that this process may use: of its affinity, and of its container's share."""
    try:
        found = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        found = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(found, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        return found
