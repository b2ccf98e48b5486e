"""Several runs of one model, side by side, that wait for each other at chosen places.

The runs are threads of which exactly one moves at a time; the turn passes on only where a run
waits or ends. So the order of everything is the same every time, modules that all runs share see
one call after the other, and what a run does between two meetings is not interrupted. Each run
has random numbers of its own.

Every run must come to the same meetings in the same order. A model whose way depends on the
values of its input may not; that is an error, not a deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.errors import OptionError

_here = threading.local()

Combine = Callable[[list[Any]], Sequence[Any]]
PARTED = (
    "The batches took different ways through the model, so their statistics cannot be shared: its "
    "forward depends on the values or shapes of its input, or leaves out layers at random."
)


class Abandoned(BaseException):
    """Another run has failed, so this one cannot go on."""


def current_run() -> RunHandle | None:
    """The run that the code at hand is part of."""
    return getattr(_here, "run", None)


class RunHandle:
    """One of the runs, as the code in it sees it."""

    def __init__(self, group: RunGroup, index: int) -> None:
        self.group, self.index = group, index

    def meet(self, key: Any, what: Any, combine: Combine) -> Any:
        """Wait until all runs are here; ``combine`` makes from their parts one result for each.

        The run that comes last calls it, once. ``key`` names the place.
        """
        return self.group._meet(self.index, key, what, combine)


class RunGroup:
    """The runs, and whose turn it is."""

    def __init__(
        self, jobs: Sequence[Callable[[], Any]], seeds: Sequence[int], parted: str = PARTED
    ) -> None:
        self.parted = parted  # what to say to runs that do not meet
        self.jobs, self.size = list(jobs), len(jobs)
        self.results: list[Any] = [None] * self.size
        self.ended = [False] * self.size
        self.turn = 0
        self.error: BaseException | None = None
        self.arrived: dict[int, tuple[Any, Any]] = {}
        self.given: dict[int, Any] = {}
        self.changed = threading.Condition()
        self.random = [RandomState.seeded(seed) for seed in seeds]

    def run(self) -> list[Any]:
        """Run all jobs to their ends; the first error of one of them ends all, and is raised."""
        around = ThreadState.here()
        threads = [
            threading.Thread(target=self._live, args=(i, around), daemon=True, name=f"run {i}")
            for i in range(self.size)
        ]
        outside = RandomState.here()
        try:
            for thread in threads:
                thread.start()
            with self.changed:
                self.changed.wait_for(lambda: all(self.ended))
        except BaseException as error:  # an interrupt of the caller: nobody may stay behind
            self._fail(error)
            raise
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            outside.restore()
        if self.error is not None:
            raise self.error
        return self.results

    # ---------------------------------------------------------------- inside the threads

    def _live(self, index: int, around: ThreadState) -> None:
        _here.run = RunHandle(self, index)
        try:
            self._wait(index, lambda: True)
            with around.again():
                self.results[index] = self.jobs[index]()
        except Abandoned:
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            with self.changed:
                self.ended[index] = True
                if self.error is None and self.arrived:
                    self._part_ways(index)
                self._pass_on(index)

    def _meet(self, index: int, key: Any, what: Any, combine: Combine) -> Any:
        with self.changed:
            self.arrived[index] = (key, what)
            keys = {k for k, _ in self.arrived.values()}
            if len(keys) > 1 or any(self.ended):
                self._part_ways(index)
        if self.error is not None:
            raise Abandoned
        if len(self.arrived) == self.size:
            results = combine([self.arrived[i][1] for i in range(self.size)])
            self.arrived.clear()
            self.given = dict(enumerate(results))
        else:
            self.random[index] = RandomState.here()
            with self.changed:
                self._pass_on(index)
            self._wait(index, lambda: index in self.given)
        return self.given.pop(index)

    def _wait(self, index: int, ready: Callable[[], bool]) -> None:
        """Wait for the turn, and for what the run waits for."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.error is not None or (self.turn == index and ready())
            )
        if self.error is not None:
            raise Abandoned
        self.random[index].restore()

    def _pass_on(self, index: int) -> None:
        """Give the turn to the next run that can move; the caller holds the lock."""
        for step in range(1, self.size + 1):
            other = (index + step) % self.size
            if not self.ended[other] and other not in self.arrived:
                self.turn = other
                break
        self.changed.notify_all()

    def _part_ways(self, index: int) -> None:
        """The runs have not met; the caller holds the lock."""
        if self.error is None:
            self.error = OptionError(self.parted)
        self.changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self.changed:
            if self.error is None:
                self.error = error
            self.changed.notify_all()


def run_side_by_side(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of jobs that run side by side; ``current_run().meet`` is where they wait."""
    seeds = torch.randint(1 << 62, (len(jobs),)).tolist()
    return RunGroup(jobs, seeds).run()


@dataclass(frozen=True)
class ThreadState:
    """What torch keeps per thread: autocast, gradient mode, the current CUDA stream."""

    gradients: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype, bool], ...]
    stream: Any

    @classmethod
    def here(cls) -> ThreadState:
        cached = torch.is_autocast_cache_enabled()
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), cached)
                for d in devices
            ),
            torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
        )

    @contextmanager
    def again(self, gradients: bool | None = None, cache: bool = True) -> Iterator[None]:
        """Be there again; with another gradient mode, if wanted.

        Autocast remembers weights that it has narrowed, in older torch also those narrowed without
        a gradient (pytorch#158232): where the gradient mode changes, it must not.
        """
        with ExitStack() as stack:
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for device, enabled, dtype, cached in self.autocast:
                stack.enter_context(
                    torch.autocast(device, dtype, enabled, cache_enabled=cached and cache)
                )
            wanted = self.gradients if gradients is None else gradients
            stack.enter_context(torch.set_grad_enabled(wanted))
            yield


@dataclass(frozen=True, eq=False)
class RandomState:
    """The states of torch's random number generators, or a seed for them."""

    cpu: Tensor | None
    cuda: tuple[Tensor, ...]
    seed: int | None = None

    @classmethod
    def here(cls) -> RandomState:
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        return cls(torch.get_rng_state(), cuda)

    @classmethod
    def seeded(cls, seed: int) -> RandomState:
        return cls(None, (), seed)

    def restore(self) -> None:
        if self.seed is not None:
            torch.manual_seed(self.seed)
            return
        assert self.cpu is not None
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))

    @contextmanager
    def again(self) -> Iterator[None]:
        """These random numbers inside, the ones from before outside."""
        outside = RandomState.here()
        try:
            self.restore()
            yield
        finally:
            outside.restore()
