"""The launcher: it hands out what the store lacks, and keeps what comes back."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping

from normkit.errors import NormkitError
from normkit.lab.experiment import Run
from normkit.lab.results import Epoch
from normkit.lab.store import DONE, FAILED, DiskFull, Owner, Store
from normkit.lab.store.owner import spoken
from normkit.lab.sweep.engine import Engine
from normkit.lab.sweep.interrupts import Interrupts
from normkit.lab.sweep.messages import Broke, Done, Job, Left, Lost, Message, Told
from normkit.lab.sweep.watcher import Watcher

TIMES = 3  # a run whose worker is lost is tried again so often before it counts as failed
STARTS = 5  # workers in a row that do not even come up
TICK = 0.5  # seconds between two looks at the clock, and at other launchers
LIVE = 2.0  # seconds between two writes of what unfinished runs told
GRACE = 30.0  # seconds for workers to write their checkpoints when they are asked to stop


class SweepError(NormkitError):
    """A sweep that cannot go on. What is done is kept."""


class Launcher:
    """One sweep over some runs of a store."""

    def __init__(
        self,
        runs: Mapping[str, Run],
        store: Store,
        owner: Owner,
        engine: Engine,
        watcher: Watcher,
    ) -> None:
        self.runs, self.store, self.owner = runs, store, owner
        self.engine, self.watcher = engine, watcher
        self.active: set[str] = set()
        self.alone: set[str] = set()  # to be trained without others at their side
        self.losses: Counter[str] = Counter()  # since a run last came further than ever before
        self.reached: dict[str, float] = {}
        self.unborn = 0  # workers in a row that did not come up
        self.told: list[tuple[str, Epoch]] = []
        self.written = time.monotonic()
        self.waits = False
        self.trouble: DiskFull | None = None

    def sweep(self, interrupts: Interrupts) -> None:
        """Until every run is done or failed, here or by another launcher."""
        until: float | None = None
        while True:
            if until is None and (interrupts.came or self.trouble):
                until = time.monotonic() + GRACE
                self.engine.stop()
                if self.active and not self.trouble:
                    self.watcher.say("Stopping: the runs write their checkpoints.")
            if until is None:
                self._hand_out()
            if not self.active and (until is not None or not self._others()):
                break
            if until is not None and time.monotonic() > until:
                break
            for message in self.engine.poll(TICK):
                self._take(message)
            if self.told and time.monotonic() - self.written > LIVE:
                self._write_live()
        if self.trouble:
            raise self.trouble
        if interrupts.came:
            self.watcher.say("Stopped. The same command goes on from here.")
            raise KeyboardInterrupt

    def _hand_out(self) -> None:
        while (room := self.engine.room()) and (jobs := self._claim(room)):
            self.engine.start(jobs)
            for job in jobs:
                self.active.add(job.run.id)
                self.watcher.started(job.run.id)

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
            share = math.ceil(self._left() / self.engine.size())
            while len(claimed) < min(room, share):
                run = self.store.claim(self.owner, others)
                if run is None:
                    break
                claimed.append(run)
        for run in claimed:
            self.store.tidy([run], keep_checkpoints=True)  # of a worker killed while it wrote
        return [Job(self.runs[run], self.store.checkpoint(run)) for run in claimed]

    def _left(self) -> int:
        states = self.store.status(self.runs).values()
        return sum(each.state not in (DONE, FAILED) for each in states)

    def _others(self) -> bool:
        """Whether there are runs that another launcher has, or gave back just now."""
        states = self.store.status(self.runs).values()
        owners = sorted({each.owner for each in states if each.owner})
        if owners and not self.waits:
            names = " and ".join(map(spoken, owners))
            self.watcher.say(f"The last runs are being trained by {names}. Waiting for them.")
        self.waits = bool(owners)
        return any(each.state not in (DONE, FAILED) for each in states)

    def _take(self, message: Message) -> None:
        if isinstance(message, Lost):
            self.active.discard(message.run)
            self._lost(message)
            return
        self.unborn = 0
        if isinstance(message, Told):
            self._note(message)
        elif isinstance(message, Done):
            self.store.finish(message.result)
            self.active.discard(message.result.run)
            self.watcher.finished(message.result)
        elif isinstance(message, Left):
            self.active.discard(message.run)
            self.store.release(self.owner, [message.run])
        else:
            self.active.discard(message.run)
            self._broke(message)

    def _note(self, told: Told) -> None:
        if told.epochs > self.reached.get(told.run, 0.0):
            self.reached[told.run] = told.epochs
            if told.record is not None:
                self.losses.pop(told.run, None)
        if told.record is not None:
            self.told.append((told.run, told.record))
        self.watcher.told(told)

    def _write_live(self) -> None:
        self.store.live([(run, epoch) for run, epoch in self.told if run in self.active])
        self.told.clear()
        self.written = time.monotonic()

    def _lost(self, lost: Lost) -> None:
        if not lost.awake:  # not the run's fault
            self.store.release(self.owner, [lost.run])
            self.unborn += 1
            if self.unborn > STARTS:
                raise SweepError(f"Worker processes do not come up: {lost.reason}.")
            return
        self.losses[lost.run] += 1
        if lost.shared:
            self.alone.add(lost.run)
        if self.losses[lost.run] > TIMES:
            self._fail(lost.run, f"lost {self.losses[lost.run]} times at one place: {lost.reason}")
        else:
            self.store.release(self.owner, [lost.run])
            self.watcher.say(f"{lost.reason}; its run goes on from its checkpoint.")

    def _broke(self, broke: Broke) -> None:
        if broke.disk_full:
            self.store.release(self.owner, [broke.run])
            self.trouble = DiskFull(
                f"{self.store.folder} could not be written: {broke.reason}. Nothing is lost. "
                "Try to make room on that disk, then the same command again."
            )
        elif broke.shared:
            self.alone.add(broke.run)
            self.store.release(self.owner, [broke.run])
        else:
            self._fail(broke.run, broke.reason)

    def _fail(self, run: str, reason: str) -> None:
        self.store.fail(run, reason)
        self.watcher.failed(run, reason)
