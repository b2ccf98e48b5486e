"""Kernels of all parts, compiled by many processes at a time before anything is measured.

What processes call stands here and not in __main__, which a process that is spawned cannot import.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch

import normkit as nk
from benchmarks.gpu import parts
from benchmarks.gpu.networks import first_line
from benchmarks.gpu.parts import Job, Machine
from normkit.engine.replay.build import SWITCH


def prepare(
    jobs: list[Job],
    machine: Machine,
    processes: int,
    seconds: float,
    log: Callable[[str], None],
) -> None:
    """Compile the kernels of all parts, many processes at a time; jobs that are left, for want of
    seconds, stay in the list. Those that fail are compiled when they are measured."""
    spawn = multiprocessing.get_context("spawn")
    end = time.perf_counter() + seconds
    for _ in range(2):  # once more if a process dies, which ends them all
        pool = ProcessPoolExecutor(processes, spawn, initializer=_alone)
        built = pool.submit(nk.build_extension)  # the C++ part, for the process that measures
        waiting = {pool.submit(_prepared, job, machine): job for job in jobs}
        try:
            for future in as_completed(waiting, max(0.0, end - time.perf_counter())):
                _noted(future, waiting[future], jobs, log)
        except TimeoutError:
            for future in waiting:
                future.cancel()
        late = not all(future.done() for future in waiting)
        alive = list((pool._processes or {}).values())
        pool.shutdown(wait=not late, cancel_futures=True)
        for process in alive if late else ():  # one that compiles on would disturb what is measured
            process.kill()
        if built.done() and not built.cancelled() and built.exception() is not None:
            log(f"no C++ part: {built.exception()}")
        if not jobs or time.perf_counter() > end:
            break
        log(f"a process has died, {len(jobs)} jobs are left")
    if jobs:
        log(f"no time to prepare {', '.join(dict.fromkeys(part for part, _ in jobs))}")


def _noted(future: Future[float], job: Job, jobs: list[Job], log: Callable[[str], None]) -> None:
    problem = future.exception()
    if isinstance(problem, BrokenProcessPool):
        return
    jobs.remove(job)
    part, which = job
    what = f"in {future.result():.0f} s" if problem is None else f"not, {problem}"
    log(f"prepared: {part} {which[0]} {what}")


def _alone() -> None:
    torch.set_num_threads(1)
    os.environ[SWITCH] = "0"  # not one compiler of C++ in each process
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # nor sixteen of Inductor's


def _prepared(job: Job, machine: Machine, attempts: int = 4) -> float:
    start = time.perf_counter()
    while True:
        try:
            parts.prepare(job, machine)
            return time.perf_counter() - start
        except torch.OutOfMemoryError as problem:  # of so many at a time
            attempts -= 1
            if not attempts:
                raise RuntimeError(first_line(problem)) from None
        except Exception as problem:
            raise RuntimeError(first_line(problem)) from None  # others cannot be sent
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        time.sleep(5)
