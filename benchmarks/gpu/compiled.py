"""Networks under torch.compile: each in a process of its own, all compiled at the same time.

A process builds its network, compiles it, says when it is ready, and then runs steps when it is
told to: compiling takes as long as the slowest network, and steps are measured alone, in turns.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.gpu import networks
from benchmarks.gpu.networks import Case

VARIANTS = ("torch-bn", "bn-fused", "gn-fused", "bcn-fused")
CASE = Case("resnet50", 224, 256, VARIANTS)
THREADS = "4"  # of Inductor, in each process
# The host begins a compiled step long before the GPU does; a training does not wait for that, since
# nothing is waited for between its steps. In turns of two steps it was a part of what was measured.
TURN_SECONDS = 0.5


class CompiledNetworks:
    """The processes, from when they are started to when they are measured."""

    def __init__(self, case: Case, device: torch.device) -> None:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", THREADS)
        spawn = multiprocessing.get_context("spawn")
        self.case = case
        self.ends: dict[str, Connection] = {}
        self.processes = []
        for variant in case.variants:
            here, there = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(case, variant, device.type, there))
            process.start()
            there.close()  # so that a process that dies is noticed
            self.ends[variant] = here
            self.processes.append(process)

    def wait(self, seconds: float, log: Callable[[str], None]) -> list[dict[str, Any]]:
        """A row for each network, with its peak or why it could not be compiled."""
        rows, deadline = [], time.perf_counter() + seconds
        for variant in self.case.variants:
            row: dict[str, Any] = {"variant": variant}
            end = self.ends[variant]
            try:
                ready = end.poll(max(0.0, deadline - time.perf_counter()))
                row |= end.recv() if ready else {"error": f"not compiled {seconds:.0f} s later"}
            except EOFError:
                row["error"] = "its process has ended"
            if "error" in row:
                log(f"compiled {variant}: {row['error']}")
                self.ends.pop(variant).close()
            rows.append(row)
        self._end(self.late())  # those are not to disturb the others
        return rows

    def measure(
        self, turns: int, seconds: float, log: Callable[[str], None]
    ) -> list[dict[str, Any]]:
        """In turns, those that are compiled within so many seconds from now."""
        rows = self.wait(seconds, log)
        timers = {variant: _asker(end) for variant, end in self.ends.items()}
        networks.add_ratios(rows, networks.in_turns(timers, turns, TURN_SECONDS), self.case.batch)
        return rows

    def late(self) -> list[Any]:
        """Processes that nobody waits for any more."""
        pairs = zip(self.case.variants, self.processes, strict=False)
        return [process for variant, process in pairs if variant not in self.ends]

    def close(self) -> None:
        for end in self.ends.values():
            end.close()
        self._end(self.processes)

    @staticmethod
    def _end(processes: list[Any]) -> None:
        for process in processes:
            process.join(0.5)
            if process.is_alive():
                process.terminate()
                process.join()


def _asker(end: Connection) -> Callable[[int], float]:
    def seconds(count: int) -> float:
        end.send(count)
        return end.recv()

    return seconds


def _serve(case: Case, variant: str, kind: str, end: Connection) -> None:
    """Compile, then time as many steps as are asked for, until nobody asks any more."""
    device = torch.device(kind)
    try:
        model = networks.build(case, variant)
        model.compile()
        step, gib = networks.settled(model, case, device)
        host = {"host_seconds": networks.host_seconds(step)} if kind == "cuda" else {}
        timer = networks.timer(step, device)
    except Exception as problem:  # of dynamo, of inductor, of a compiler
        end.send({"error": networks.first_line(problem)})
        return
    if kind == "cuda":
        torch.cuda.empty_cache()  # others are measured before
    end.send({"gib": gib, **host})
    try:
        while True:
            end.send(timer(end.recv()))
    except (EOFError, OSError):
        pass
