"""A process that goes on from this one, without the seconds that starting Python and torch takes.

For tests of what processes do with each other, where a test of the same file has one of the usual
kind. A GPU rules it out: what has been there cannot be forked.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

import torch

CAN_FORK = hasattr(os, "fork") and not torch.cuda.is_available()


class Forked:
    """A function in a process of its own, which as a ``subprocess.Popen`` can be written to, asked
    and killed."""

    def __init__(self, function: Callable[[], object]) -> None:
        heard, spoken = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:  # nothing of it may come back to the test
                os.close(spoken)
                os.dup2(heard, 0)
                sys.stdin = os.fdopen(0)
                function()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(heard)
        self.stdin = os.fdopen(spoken, "wb")

    def poll(self) -> int | None:
        return self._ended(os.WNOHANG)

    def wait(self) -> int:
        code = self._ended(0)
        assert code is not None
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _ended(self, how: int) -> int | None:
        if self.returncode is None:
            number, status = os.waitpid(self.pid, how)
            if number:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode
