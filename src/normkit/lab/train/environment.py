"""On what a run was trained: versions, device and ways of computing."""

from __future__ import annotations

import platform

import torch

import normkit


def environment(device: torch.device) -> dict[str, str]:
    """For the record of a result."""
    found = {
        "normkit": normkit.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device_name(device),
    }
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
    else:
        found["threads"] = str(torch.get_num_threads())
    return found


def device_name(device: torch.device) -> str:
    """The product, not its number: runs on two equal GPUs are comparable."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        return f"CPU, {torch.backends.cpu.get_cpu_capability()}"
    return device.type
