"""Workers as tasks of SLURM job arrays, submitted by submitit.

A task trains one run and ends. It tells of it in a file beside the store, its mailbox, and looks
there for the file that asks it to stop; so the folder of the store has to be on a disk that the
nodes share. A task that hits its time limit, or is preempted, is lost like any other worker: its
run goes on from its checkpoint in the next task.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from normkit.errors import OptionError
from normkit.lab.store.owner import Owner, is_alive
from normkit.lab.sweep.messages import Finished, Job, JobTracker, Message, Progressed
from normkit.lab.sweep.worker import TRAINER, JobRunner
from normkit.models import require

CLUSTER = "slurm"  # submitit's name; its "local" runs the tasks as processes of this machine
MOST_TASKS = 1000  # at once, where nobody says how many
CPUS_A_GPU = 8  # to decode images
HOURS = 4  # of a task; the variable SBATCH_TIMELIMIT says otherwise
TELL_EVERY = 10.0  # seconds between two messages in the middle of an epoch
LOOK_EVERY = 2.0  # seconds between two looks for a request to stop
PAUSE = 0.2  # seconds between two looks into the mailboxes


class SlurmEngine:
    """An engine of array tasks. What was handed out since the last look becomes one array."""

    def __init__(
        self,
        workers: int | None,
        device: str | None,
        most: int,
        owner: Owner,
        trainer: str = TRAINER,
        gpus: int = 1,
    ) -> None:
        self._submitit = require("submitit", "slurm", "--engine slurm")
        if workers is not None and workers < 1:
            raise OptionError(f"workers got {workers}, expected 1 or more.")
        self._size = min(workers or MOST_TASKS, most)
        self._trainer, self._device = trainer, device
        self._folder, self._name = owner.folder, owner.name
        try:
            self._executor = self._submitit.AutoExecutor(self._logs(owner.name), cluster=CLUSTER)
        except (RuntimeError, ValueError) as error:
            raise OptionError(
                f"SLURM cannot be reached: {str(error).strip().rstrip('.')}. Try --engine local, "
                "or a login node of the cluster."
            ) from error
        on_gpus = (device or "").startswith("cuda")
        self._executor.update_parameters(
            name="normkit",
            timeout_min=60 * HOURS,
            cpus_per_task=CPUS_A_GPU * gpus if on_gpus else gpus,
            gpus_per_node=gpus if on_gpus else 0,
            slurm_array_parallelism=self._size,
        )
        self._waiting: list[ArrayTask] = []  # to be submitted
        self._tasks: list[ArrayTask] = []
        self._earlier = self._end_orphans()

    def size(self) -> int:
        return self._size

    def room(self) -> int:
        # results of a launcher that was killed come first: they need not be trained again
        return int(not self._earlier and len(self._tasks) + len(self._waiting) < self._size)

    def start(self, jobs: Sequence[Job]) -> None:
        self._waiting.append(ArrayTask(self._folder, self._name, jobs))

    def poll(self, seconds: float) -> list[Message]:
        if self._earlier:
            messages, self._earlier = self._earlier, []
            return messages
        self._submit()
        until = time.monotonic() + seconds
        while True:
            messages = []
            for task in list(self._tasks):
                messages += task.read()
                if not task.jobs:
                    self._tasks.remove(task)
                    task.mailbox.unlink(missing_ok=True)
            if messages or time.monotonic() >= until:
                return messages
            time.sleep(PAUSE)

    def stop(self) -> None:
        self._stop_file().touch()

    def close(self) -> None:
        for task in self._tasks:
            with suppress(Exception):  # whatever a command of the cluster says about its end
                task.job.cancel(check=False)
            task.mailbox.unlink(missing_ok=True)
        for task in self._tasks:
            until = time.monotonic() + LOOK_EVERY
            while CLUSTER == "local" and not task.job.done() and time.monotonic() < until:
                time.sleep(PAUSE)
        self._tasks.clear()
        self._waiting.clear()
        self._stop_file().unlink(missing_ok=True)
        self._list_file(self._name).unlink(missing_ok=True)
        shutil.rmtree(self._logs(self._name), ignore_errors=True)

    def _submit(self) -> None:
        """One array of all that waits; its numbers are written down before anything else."""
        if not self._waiting:
            return
        given = (self._trainer, self._device, self._stop_file())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with self._executor.batch():
                for task in self._waiting:
                    task.job = self._executor.submit(work, task.given, task.mailbox, *given)
        self._tasks += self._waiting
        self._waiting = []
        rows = [(task.job.job_id, str(task.mailbox)) for task in self._tasks]
        self._list_file(self._name).write_text(json.dumps(rows), encoding="utf-8")

    def _end_orphans(self) -> list[Message]:
        """End the tasks of launchers that were killed; the results that they have left."""
        results: list[Message] = []
        for file in self._folder.glob("*.tasks"):
            if file.stem == self._name or is_alive(self._folder, file.stem):
                continue
            with suppress(OSError, ValueError):
                for number, mailbox in json.loads(file.read_text(encoding="utf-8")):
                    with suppress(Exception):
                        self._executor.job_class(self._logs(file.stem), number).cancel(check=False)
                    sent = Mailbox(Path(mailbox)).read()
                    results += [each for each in sent if isinstance(each, Finished)]
                    Path(mailbox).unlink(missing_ok=True)
            file.unlink(missing_ok=True)
            shutil.rmtree(self._logs(file.stem), ignore_errors=True)
        return results

    def _logs(self, owner: str) -> Path:
        return self._folder / f"{owner}.slurm"

    def _list_file(self, owner: str) -> Path:
        return self._folder / f"{owner}.tasks"

    def _stop_file(self) -> Path:
        return self._folder / f"{self._name}.stop"


class ArrayTask(JobTracker):
    """A task, its runs, and the mailbox in which it tells of them."""

    def __init__(self, folder: Path, owner: str, jobs: Sequence[Job]) -> None:
        super().__init__()
        self.assign(jobs)
        self.given = list(jobs)
        # the run's id is in the name, by which a store tidies up
        self.mailbox = folder / f"{jobs[0].run.id}-{secrets.token_hex(4)}.mail"
        self.box = Mailbox(self.mailbox)
        self.job: Any = None

    def read(self) -> list[Message]:
        ended = self.job.done()  # before the mailbox, into which it writes last
        messages = self.box.read()
        self.ready = self.ready or self.mailbox.exists()
        for message in messages:
            self.note(message)
        if ended and self.jobs:
            messages += self.lost(self._death())
            self.jobs.clear()
        return messages

    def _death(self) -> str:
        """Its state, and the last line that it has written."""
        with suppress(Exception):
            lines = [line.strip() for line in (self.job.stderr() or "").splitlines()]
            last = next((line for line in reversed(lines) if line), "")[:300]
            state = str(self.job.state).lower()
            return f"task {self.job.job_id} ended ({state})" + (f": {last}" if last else "")
        return f"task {self.job.job_id} ended"


class Mailbox:
    """Messages in a file, with one writer and one reader, who may see half of the last one."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0

    def send(self, message: Message) -> None:
        content = pickle.dumps(message)
        with self.path.open("ab") as file:
            file.write(len(content).to_bytes(8, "big") + content)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Message]:
        messages = []
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.at)
            while len(head := file.read(8)) == 8:
                content = file.read(size := int.from_bytes(head, "big"))
                if len(content) < size:
                    break
                messages.append(pickle.loads(content))
                self.at = file.tell()
        return messages


def work(
    jobs: Sequence[Job], mailbox: Path, trainer: str, device: str | None, stop_file: Path
) -> None:
    """What a task does, on some node."""
    warnings.simplefilter("ignore")
    mailbox.touch()
    torch.set_num_threads(1)  # as a local worker
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    box, told = Mailbox(mailbox), -TELL_EVERY

    def send(message: Message) -> None:
        nonlocal told
        now = time.monotonic()
        if isinstance(message, Progressed) and message.record is None:
            if now - told < TELL_EVERY:
                return
            told = now
        box.send(message)

    JobRunner(trainer, device, send, _stops(stop_file)).run(jobs)


def _stops(file: Path) -> Callable[[], bool]:
    """Whether the file is there: asked after every step, looked for now and then."""
    looked, stopping = -LOOK_EVERY, False

    def stop() -> bool:
        nonlocal looked, stopping
        now = time.monotonic()
        if now - looked >= LOOK_EVERY:
            looked, stopping = now, file.exists()
        return stopping

    return stop
