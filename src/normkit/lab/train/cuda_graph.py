"""A step as a CUDA graph: the only code of training that needs a GPU to be tested."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from normkit.lab.train.recording import WARM_UP, Action


def capture(action: Action, stream: torch.cuda.Stream) -> Action | str:
    """Replay of an action that was recorded on a stream; what keeps it from that, as a text.

    Everything happens on the run's own stream: kernels of other runs that train beside it then
    share no workspace with the record.
    """
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            action()
        # a failed capture leaves the random generator unusable, so what would fail is found before
        try:
            with waiting_is_an_error():
                action()
        except RuntimeError as error:
            return f"a step waits for the GPU: {str(error).strip().splitlines()[0]}"
        graph = torch.cuda.CUDAGraph()
        # other threads, such as one that pins memory for a loader, go on
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            action()
    return graph.replay


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Whatever makes the host wait for the GPU raises inside."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it does not find everything, says torch
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
