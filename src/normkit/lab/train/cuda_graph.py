"""Steps as CUDA graphs, recorded once and replayed; and how many runs share a GPU.

The only place where this is decided; ``python -m benchmarks.training_loop`` measures its reasons.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normkit.core.messages import first_line
from normkit.lab.experiment import Setting

if TYPE_CHECKING:
    from normkit.lab.tasks import Task

Action = Callable[[], None]
# makes of an action one that does the same without Python, or says why that cannot be
Capture = Callable[[Action], Action | str]
WARM_UP = 3  # calls before the record: libraries set themselves up, memory is laid out

# Images times positions of one step up to which a GPU has room for further runs beside it. The
# kernels of such steps are too small to fill it; larger ones only take turns. Measured on an H200
# with a ResNet-18 on 32×32 images, batch 128, bf16, in seconds an epoch and run: 1.24 alone, 0.91
# with two, 0.80 with four.
ROOM, BESIDE = 128 * 32 * 32, 4


def is_recorded(device: torch.device, loader: Any, task: Task | None = None) -> tuple[bool, str]:
    """Whether steps are recorded as a CUDA graph and replayed, and if not, why.

    A small network takes the host longer to launch than the GPU to compute; a replay is one launch.
    Image files are decoded by the host in the meantime, and their networks are large: recording
    them gains nothing and holds on to memory.
    """
    if device.type != "cuda":
        return False, f"there are no CUDA graphs on {device.type}"
    if not hasattr(loader, "gather"):
        return False, "the images come from files"
    if task is not None and not (task.recordable and task.batch_values):
        return False, f"steps of {type(task).__name__} are not said to be recordable"
    return True, ""


def side_by_side(setting: Setting, shape: tuple[int, ...], device: torch.device | str) -> int:
    """How many runs of a setting to train at once in one process.

    >>> side_by_side(Setting(), (1, 8, 8), "cpu")
    1
    """
    if torch.device(device).type != "cuda" or setting.train.gpus > 1:
        return 1  # cores are filled by processes
    positions = setting.train.batch * math.prod(shape[1:])
    return BESIDE if 0 < positions <= ROOM else 1  # 0: the whole training set


class Recorded:
    """A function of tensors that is called directly, or replayed for inputs of one shape.

    ``capture`` makes the record at the first call with a batch of ``size``; None never does. The
    calls that this takes are taken back: ``kept`` lists every tensor that the function changes.
    Batches of another size, such as the last of an epoch, are called directly.
    """

    def __init__(
        self,
        function: Callable[..., None],
        size: int,
        kept: Callable[[], Iterable[Tensor]],
        capture: Capture | None = None,
    ) -> None:
        self.function, self.size, self.kept, self.capture = function, size, kept, capture
        self.buffers: list[Tensor] = []
        self.replay: Action | None = None
        self.obstacle = ""

    def __call__(self, *given: Tensor) -> None:
        if self.capture is not None and self._fits(given):
            self._record(given)
        if self.replay is None or not self._fits(given):
            self.function(*given)
            return
        for buffer, tensor in zip(self.buffers, given, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        self.replay()

    def _fits(self, given: tuple[Tensor, ...]) -> bool:
        return not given or given[0].shape[0] == self.size

    def _record(self, given: tuple[Tensor, ...]) -> None:
        assert self.capture is not None
        capture, self.capture = self.capture, None
        self.buffers = [tensor.clone() for tensor in given]
        with restored(self.kept()):
            replay = capture(lambda: self.function(*self.buffers))
        if isinstance(replay, str):
            self.obstacle = replay
        else:
            self.replay = replay


@contextmanager
def restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Tensors are afterwards what they were, in the same memory."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


def capture(action: Action, stream: torch.cuda.Stream) -> Action | str:
    """Replay of an action that was recorded on a stream; what keeps it from that, as a text.

    The only code of training that needs a GPU to be tested.

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
            return f"a step waits for the GPU: {first_line(error)}"
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
