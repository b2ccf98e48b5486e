"""The launcher: it hands out what the store lacks, and keeps what comes back."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from normkit.errors import UnknownName, nearest
from normkit.lab.experiment import Experiment, Run
from normkit.lab.provenance import with_provenance
from normkit.lab.results import Epoch, Result
from normkit.lab.store import DONE, FAILED, DiskFull, Owner, Store, StoreError
from normkit.lab.store.owner import describe_owner, remove_dead_owners
from normkit.lab.sweep.local import LocalEngine, Start, spawn, worker_slots
from normkit.lab.sweep.messages import (
    Engine,
    Failed,
    Finished,
    Job,
    Message,
    Progressed,
    Stopped,
    SweepError,
    WorkerLost,
)
from normkit.lab.sweep.progress import ProgressListener, SweepPlan, queue, run_labels
from normkit.lab.sweep.worker import TRAINER, disk_full_cause

ENGINES = ("local", "ray", "slurm")
TRIES = 3  # a run whose worker is lost is tried again so often before it counts as failed
STARTS = 5  # workers in a row that do not even start
TICK = 0.5  # seconds between two looks at the clock, and at other launchers
RECORD_EVERY = 2.0  # seconds between two writes of the epochs of unfinished runs
GRACE = 30.0  # seconds for workers to write their checkpoints when they are asked to stop
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(
    experiments: Experiment | Sequence[Experiment],
    store: Store,
    *,
    workers: int | None = None,
    device: str | None = None,
    together: int | None = None,
    seconds: float | None = None,
    engine: str = "local",
    progress: ProgressListener | None = None,
    trainer: str = TRAINER,
    start: Start = spawn,
) -> list[Result]:
    """Train the runs that the store lacks; the results of all that are done, in order.

    Those of several experiments are one queue for the same workers. ``together`` is how many runs
    of one setting a worker on a GPU may have at once. After ``seconds`` runs are stopped as by an
    interrupt, and what is done is returned.

    Runs that could not be trained are missing in the list, and ``store.status()`` says why. The
    same call again goes on where this one ended, however it ended, and tries them again.
    ``trainer`` names a module with the functions of normkit.lab.train, and ``start`` is how a
    worker process is started; both are there for tests.
    """
    if engine not in ENGINES:
        raise UnknownName(f"engine got {engine!r}. {nearest(engine, ENGINES)}")
    until = None if seconds is None else time.monotonic() + seconds
    several = (experiments,) if isinstance(experiments, Experiment) else tuple(experiments)
    runs = queue(several)
    gpus = max((run.setting.train.gpus for run in runs.values()), default=1)
    slots = worker_slots(workers, device, gpus, together) if engine == "local" else []
    listener = progress or ProgressListener()
    store.add(runs.values())
    store.retry(runs)
    done = frozenset(run for run, each in store.status(runs).items() if each.state == DONE)
    store.tidy(done)  # where a launcher was killed right after it had written a result
    missing = len(runs) - len(done)
    if not missing:
        return list(store.results(runs).values())
    remove_dead_owners(store.folder)
    owner = Owner(store.folder)
    try:
        if engine == "local":
            chosen: Engine = LocalEngine(slots[:missing], owner.lock, trainer, start)
        elif engine == "ray":
            from normkit.lab.sweep.ray_engine import RayEngine  # Ray is asked for inside

            chosen = RayEngine(workers, device, missing, trainer, gpus)
        else:
            from normkit.lab.sweep.slurm_engine import SlurmEngine

            chosen = SlurmEngine(workers, device, missing, owner, trainer, gpus)
        listener.begin(SweepPlan(run_labels(*several), done, chosen.size()))
        _sweep(Launcher(runs, store, owner, chosen, listener, until))
    except OSError as error:
        if disk_full_cause(error):
            raise DiskFull(
                f"There is no room on a disk: {error}. Nothing is lost. Try to make room, "
                "then the same command again."
            ) from error
        raise
    finally:
        owner.close()
        listener.end()
    return list(store.results(runs).values())


def _sweep(launcher: Launcher) -> None:
    try:
        with Interrupts() as interrupts:
            launcher.sweep(interrupts)
    finally:
        launcher.engine.close()
        with suppress(StoreError):  # if it cannot be written: the lock goes anyway
            launcher.store.release(launcher.owner)


class Interrupts:
    """Ctrl-C, and the polite kill of a batch system: first a request, then an order.

    While it is open, the first signal is noted only; the second is a KeyboardInterrupt. So a
    signal never comes in the middle of a write. Outside the main thread, where Python allows no
    handlers, nothing is noted and signals mean what they meant.
    """

    def __init__(self) -> None:
        self.requested = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for each in SIGNALS:
                self._handlers[each] = signal.signal(each, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for each, handler in self._handlers.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


class Launcher:
    """One sweep over some runs of a store."""

    def __init__(
        self,
        runs: Mapping[str, Run],
        store: Store,
        owner: Owner,
        engine: Engine,
        listener: ProgressListener,
        until: float | None = None,  # by time.monotonic()
    ) -> None:
        self.runs, self.store, self.owner = runs, store, owner
        self.until = until
        self.engine, self.listener = engine, listener
        self.active: set[str] = set()
        self.alone: set[str] = set()  # to be trained without others at their side
        self.losses: Counter[str] = Counter()  # since a run last came further than ever before
        self.reached: dict[str, float] = {}
        self.failed_starts = 0  # workers in a row that did not start
        self.epochs: list[tuple[str, Epoch]] = []  # not written yet
        self.written = time.monotonic()
        self.waits = False
        self.disk_full: DiskFull | None = None

    def sweep(self, interrupts: Interrupts) -> None:
        """Until every run is done or failed, here or by another launcher, or the time is over."""
        until: float | None = None
        while True:
            late = self.until is not None and time.monotonic() >= self.until
            if until is None and (interrupts.requested or self.disk_full or late):
                until = time.monotonic() + GRACE
                self.engine.stop()
                if self.active and not self.disk_full:
                    self.listener.say("Stopping: the runs write their checkpoints.")
            if until is None:
                self._hand_out()
            if not self.active and (until is not None or not self._others()):
                break
            if until is not None and time.monotonic() > until:
                break
            for message in self.engine.poll(TICK):
                self._handle(message)
            if self.epochs and time.monotonic() - self.written > RECORD_EVERY:
                self._record_epochs()
        if self.disk_full:
            raise self.disk_full
        if interrupts.requested:
            self.listener.say("Stopped. The same command goes on from here.")
            raise KeyboardInterrupt
        if until is not None:
            self.listener.say("The time is over. The same command goes on from here.")

    def _record_epochs(self) -> None:
        """What the store has not heard of runs that are not done."""
        self.store.record_epochs([each for each in self.epochs if each[0] in self.active])
        self.epochs.clear()
        self.written = time.monotonic()

    def _hand_out(self) -> None:
        while (room := self.engine.room()) and (jobs := self._claim(room)):
            self.engine.start(jobs)
            for job in jobs:
                self.active.add(job.run.id)
                self.listener.started(job.run.id)

    def _claim(self, room: int) -> list[Job]:
        """Up to so many runs of one setting, and not more than a worker's share of what is left."""
        free = [run for run in self.runs if run not in self.active]
        first = self.store.claim(self.owner, free)
        claimed = [] if first is None else [first]
        if first is not None and first not in self.alone and room > 1:
            setting = self.runs[first].setting
            others = [
                run
                for run in free
                if run != first and run not in self.alone and self.runs[run].setting == setting
            ]
            states = self.store.status(self.runs).values()
            left = sum(each.state not in (DONE, FAILED) for each in states)
            share = math.ceil(left / self.engine.size())
            while len(claimed) < min(room, share):
                run = self.store.claim(self.owner, others)
                if run is None:
                    break
                claimed.append(run)
        for run in claimed:
            self.store.tidy([run], keep_checkpoints=True)  # of a worker killed while it wrote
        return [Job(self.runs[run], self.store.checkpoint(run)) for run in claimed]

    def _others(self) -> bool:
        """Whether there are runs that another launcher has, or gave back just now."""
        states = self.store.status(self.runs).values()
        owners = sorted({each.owner for each in states if each.owner})
        if owners and not self.waits:
            names = " and ".join(map(describe_owner, owners))
            self.listener.say(f"The last runs are being trained by {names}. Waiting for them.")
        self.waits = bool(owners)
        return any(each.state not in (DONE, FAILED) for each in states)

    def _handle(self, message: Message) -> None:
        if isinstance(message, WorkerLost):
            self.active.discard(message.run)
            self._lost(message)
            return
        self.failed_starts = 0
        if isinstance(message, Progressed):
            if message.epochs > self.reached.get(message.run, 0.0):
                self.reached[message.run] = message.epochs
                if message.record is not None:
                    self.losses.pop(message.run, None)
            if message.record is not None:
                self.epochs.append((message.run, message.record))
            self.listener.progressed(message)
        elif isinstance(message, Finished):
            self.store.finish(with_provenance(message.result, self.runs[message.result.run]))
            self.active.discard(message.result.run)
            self.listener.finished(message.result)
        elif isinstance(message, Stopped):
            if self.epochs:
                self._record_epochs()  # status shows how far a run is that has been left
            self.active.discard(message.run)
            self.store.release(self.owner, [message.run])
        else:
            self.active.discard(message.run)
            self._failed(message)

    def _lost(self, lost: WorkerLost) -> None:
        if not lost.ready:  # not the run's fault
            self.store.release(self.owner, [lost.run])
            self.failed_starts += 1
            if self.failed_starts > STARTS:
                raise SweepError(f"Worker processes do not start: {lost.reason}.")
            return
        self.losses[lost.run] += 1
        if lost.shared:
            self.alone.add(lost.run)
        if self.losses[lost.run] > TRIES:
            times = f"lost its worker {self.losses[lost.run]} times without progress"
            self._give_up(lost.run, f"{times}: {lost.reason}", lost.log)
        else:
            self.store.release(self.owner, [lost.run])
            self.listener.say(f"{lost.reason}; its run goes on from its checkpoint.")

    def _failed(self, failed: Failed) -> None:
        if failed.disk_full:
            self.store.release(self.owner, [failed.run])
            self.disk_full = DiskFull(
                f"{self.store.folder} could not be written: {failed.reason}. Nothing is lost. "
                "Try to make room on that disk, then the same command again."
            )
        elif failed.shared:
            self.alone.add(failed.run)
            self.store.release(self.owner, [failed.run])
        else:
            self._give_up(failed.run, failed.reason, failed.log)

    def _give_up(self, run: str, reason: str, log: str = "") -> None:
        self.store.fail(run, reason, log)
        self.listener.failed(run, reason)
