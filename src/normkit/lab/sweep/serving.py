"""What a worker does with its jobs, wherever it is: in a process of this machine or on Ray's."""

from __future__ import annotations

import errno
import importlib
import os
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from normkit.errors import NormkitError
from normkit.lab import data as data_sets
from normkit.lab.experiment import Data
from normkit.lab.sweep.messages import Broke, Done, Job, Left, Message, Told

if TYPE_CHECKING:
    from normkit.lab.results import Result
    from normkit.lab.train.progress import Progress

TRAINER = "normkit.lab.train"
SETS = 2  # data sets that a worker keeps in memory
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Send = Callable[[Message], None]


class Server:
    """Trains jobs with a module that has the functions of normkit.lab.train."""

    def __init__(self, trainer: str, device: str, send: Send, stop: Callable[[], bool]) -> None:
        self.trainer: ModuleType = importlib.import_module(trainer)
        self.device, self.send, self.stop = device, send, stop
        self.sets: OrderedDict[Data, Any] = OrderedDict()
        self.done: set[str] = set()  # of the runs that are being trained

    def serve(self, jobs: Sequence[Job]) -> bool:
        """Train jobs of one setting; False if an error came up, whatever it left behind."""
        waiting = list(jobs)
        while waiting:
            if self.stop():
                for job in waiting:
                    self.send(Left(job.run.id))
                return True
            group = waiting[:1]
            self.done.clear()
            try:
                group = waiting[: self._together(waiting)]
                self._train(group)
            except Exception as error:
                full = no_room(error)
                for job in group:
                    if job.run.id not in self.done:
                        shared, said = len(group) > 1, reason(full or error)
                        self.send(Broke(job.run.id, said, full is not None, shared))
                for job in waiting[len(group) :]:
                    self.send(Left(job.run.id))
                return False
            del waiting[: len(group)]
        return True

    def _together(self, jobs: Sequence[Job]) -> int:
        """How many of these runs to train side by side."""
        if len(jobs) == 1:
            return 1
        setting = jobs[0].run.setting
        shape = self._load(setting.data).shape
        return max(1, self.trainer.side_by_side(setting, shape, self.device))

    def _train(self, jobs: Sequence[Job]) -> None:
        given = {
            "device": self.device,
            "sets": self._load(jobs[0].run.setting.data),
            "tell": self._tell,
            "stop": self.stop,
        }
        if len(jobs) == 1:
            result = self.trainer.train(jobs[0].run, checkpoint=jobs[0].checkpoint, **given)
            if result is not None:
                self._done(result)
        else:
            checkpoints = [job.checkpoint for job in jobs]
            self.trainer.train_together(
                [job.run for job in jobs], checkpoints=checkpoints, done=self._done, **given
            )
        for job in jobs:
            if job.run.id not in self.done:
                self.send(Left(job.run.id))

    def _done(self, result: Result) -> None:
        """Told at once: what happens to the runs beside it can no longer lose it."""
        self.done.add(result.run)
        self.send(Done(result))

    def _tell(self, progress: Progress) -> None:
        self.send(Told(progress.run, progress.epochs, progress.record))

    def _load(self, data: Data) -> Any:
        """A data set, which the next runs will need too."""
        if data not in self.sets:
            while len(self.sets) >= SETS:
                self.sets.popitem(last=False)
            load = getattr(self.trainer, "load", data_sets.load)
            self.sets[data] = load(data, self.device)
        self.sets.move_to_end(data)
        return self.sets[data]


def reason(error: BaseException) -> str:
    """An error in one line, with its place unless it was raised to be read."""
    said = " ".join(str(error).split())[:1000]
    if isinstance(error, NormkitError):
        return said
    places = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(places[-1].filename)}:{places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {said}{where}"


def no_room(error: BaseException | None) -> BaseException | None:
    """The error which says that a disk is full: this one, or one that it came from."""
    seen: list[BaseException] = []
    while error is not None:
        seen.append(error)
        error = error.__cause__ or error.__context__
    for each in seen:
        if isinstance(each, OSError) and each.errno in FULL:
            return each
    # torch's own writer knows no error numbers
    return next((each for each in seen if "PytorchStreamWriter" in str(each)), None)
