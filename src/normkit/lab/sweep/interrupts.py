"""Ctrl-C, and the polite kill of a batch system: first a request, then an order."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While it is open, the first signal is noted only; the second is a KeyboardInterrupt.

    So a signal never comes in the middle of a write. Outside the main thread, where Python
    allows no handlers, nothing is noted and signals mean what they meant.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for each in SIGNALS:
                self._before[each] = signal.signal(each, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
