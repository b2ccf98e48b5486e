"""How a run is computed on a device: recorded or not, how many side by side, how exactly.

The only place where this is decided; ``python -m benchmarks.training_loop`` measures its reasons.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from normkit.core.cudnn import one_algorithm
from normkit.lab.experiment import Setting

# Images times positions of one step up to which a GPU has room for further runs beside it. The
# kernels of such steps are too small to fill it; larger ones only take turns. Measured on an H200
# with a ResNet-18 on 32×32 images, batch 128, bf16, in seconds an epoch and run: 1.24 alone, 0.91
# with two, 0.80 with four. (from the largest steps to the smallest: positions, runs)
ROOM = ((128 * 32 * 32, 4),)


def is_recorded(device: torch.device, loader: Any) -> tuple[bool, str]:
    """Whether steps are recorded as a CUDA graph and replayed, and if not, why.

    A small network takes the host longer to launch than the GPU to compute; a replay is one launch.
    Image files are decoded by the host in the meantime, and their networks are large: recording
    them gains nothing and holds on to memory.
    """
    if device.type != "cuda":
        return False, f"there are no CUDA graphs on {device.type}"
    if not hasattr(loader, "gather"):
        return False, "the images come from files"
    return True, ""


def side_by_side(setting: Setting, shape: tuple[int, int, int], device: torch.device | str) -> int:
    """How many runs of a setting to train at once in one process.

    >>> side_by_side(Setting(), (1, 8, 8), "cpu")
    1
    """
    if torch.device(device).type != "cuda":
        return 1  # cores are filled by processes
    positions = setting.train.batch * shape[1] * shape[2]
    if not positions:  # the whole training set
        return 1
    return next((runs for limit, runs in reversed(ROOM) if positions <= limit), 1)


def repeatable(wanted: bool = True) -> AbstractContextManager[None]:
    """cuDNN computes the same numbers every time, as revisiting BN has it too.

    Without that a resumed run would differ from an undisturbed one. If it is not wanted, cuDNN
    takes what is fastest.
    """
    return one_algorithm(wanted)
