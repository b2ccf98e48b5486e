"""Calling a step through buffers that stay in place, so that it can be replayed from a record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Action = Callable[[], None]
# makes of an action one that does the same without Python, or says why that cannot be
Capture = Callable[[Action], Action | str]
WARM_UP = 3  # calls before the record: libraries set themselves up, memory is laid out


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
            found = capture(lambda: self.function(*self.buffers))
        if isinstance(found, str):
            self.obstacle = found
        else:
            self.replay = found


def called(action: Action) -> Action:
    """In the place of a record where there is none to be had, and with the same warm-up."""
    for _ in range(WARM_UP):
        action()
    return action


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
