"""What a training step costs besides its time: memory, kernels, and its replay as a CUDA graph."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import lru_cache

import torch
from torch import Tensor, nn

from normkit.timing import Step, seconds


def replayed(step: Step) -> Step | None:
    """The step as a CUDA graph, whose replay costs GPU time only; None where it cannot be one."""
    torch.cuda.empty_cache()  # graphs have memory of their own: leave them some
    # a failed capture leaves the random generator unusable, so what would fail is found before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it does not find everything, says torch
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError:  # the step waits for the GPU somewhere
        return None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    aside = _capture_stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # capture wants a warm-up on its own stream
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        step()
    return graph.replay


@lru_cache(maxsize=1)
def _capture_stream() -> torch.cuda.Stream:
    """One for all: memory is kept for each stream alone."""
    return torch.cuda.Stream()


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes that a forward keeps alive for its backward, each storage once, parameters left out.

    The input counts where it is kept: a batch norm that keeps its input alone has one input's.
    """
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}
    alive = []  # until all is counted: a freed address could be given out again

    def note(t: Tensor) -> None:  # no backward follows, and returning t would keep its graph alive
        alive.append(t.detach())
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda _: x):
        module(x)
    return sum(kept.values())


def peak_bytes(step: Step) -> int:
    """Most GPU memory in use during a step, beyond what was there before."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kernels(step: Step) -> int | None:
    """How many kernels a step launches on the GPU; None where the profiler is not available."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    count = None
    with suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as record:
            step()
            torch.cuda.synchronize()
        count = sum(
            event.device_type == DeviceType.CUDA and not event.name.startswith(("Mem", "gpu_"))
            for event in record.events() or ()
        )
    return count


def copy_rate(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes a second, read plus written, of a large copy on the GPU."""
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (taken,) = seconds([lambda: target.copy_(source)], 5, device)
    return 2 * size / taken
