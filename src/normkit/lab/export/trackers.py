"""Sweeps as they go on, for programs that show them: TensorBoard, MLflow, Weights & Biases.

    normkit lab run my.toml --track tensorboard --track mlflow

A run is a run there, under its name, with its settings, a value for each epoch and its outcome at
the end. All is sent by a thread of its own: a server that is slow or gone delays no training, and
what cannot be sent is told once.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from normkit.core.optional_dependencies import require
from normkit.errors import UnknownName, nearest
from normkit.lab.experiment import Experiment
from normkit.lab.report.curves import mean_number
from normkit.lab.report.differences import setting_words
from normkit.lab.results import DONE, Epoch, Result
from normkit.lab.sweep.messages import Progressed
from normkit.lab.sweep.progress import ProgressListener, SweepPlan, run_labels

PARTS = ("train", "validation", "test")
WAIT = 60.0  # seconds for what is left to send when a sweep has ended
MLFLOW_STATES = {"stopped": "KILLED", "failed": "FAILED"}
LONGEST_PARAMETER = 250  # letters that MLflow has kept in all of its versions


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker shows it."""

    id: str
    name: str
    experiment: str
    parameters: Mapping[str, str]


class Tracker(Protocol):
    """What is needed of a program that shows runs."""

    def begin(self, run: TrackedRun) -> None:
        """A run is begun, or goes on."""

    def log(self, run: TrackedRun, epoch: int, values: Mapping[str, float]) -> None:
        """Values after an epoch."""

    def end(self, run: TrackedRun, outcome: str, values: Mapping[str, float]) -> None:
        """A run has ended: done, diverged, collapsed, failed, or stopped in the middle."""


class TensorBoardTracker:
    """Event files, a folder a run: tensorboard --logdir FOLDER shows them."""

    def __init__(self, target: str) -> None:
        require("tensorboard", "tensorboard", "--track tensorboard")
        self.writer = require("torch.utils.tensorboard", "tensorboard", "--track tensorboard")
        self.folder = Path(target or "results/tensorboard")
        self.open: dict[str, Any] = {}

    def begin(self, run: TrackedRun) -> None:
        folder = self.folder / _file_name(run.experiment) / f"{_file_name(run.name)} {run.id[:8]}"
        self.open[run.id] = writer = self.writer.SummaryWriter(str(folder), flush_secs=5)
        rows = "".join(f"| {key} | {value} |\n" for key, value in run.parameters.items())
        writer.add_text("setting", f"| key | value |\n|---|---|\n{rows}", 0)

    def log(self, run: TrackedRun, epoch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.open[run.id].add_scalar(name, value, epoch)
        self.open[run.id].flush()

    def end(self, run: TrackedRun, outcome: str, values: Mapping[str, float]) -> None:
        if (writer := self.open.pop(run.id, None)) is None:
            return
        writer.add_text("outcome", outcome, 0)
        for name, value in values.items():
            writer.add_scalar(name, value, 0)
        writer.close()


class MLflowTracker:
    """Runs of an MLflow experiment, on the server or in the folder that MLflow is set to use."""

    def __init__(self, target: str) -> None:
        mlflow = require("mlflow", "mlflow", "--track mlflow")
        self.client = mlflow.MlflowClient(tracking_uri=target or None)
        self.runs: dict[str, str] = {}  # theirs by ours

    def begin(self, run: TrackedRun) -> None:
        known = self.client.get_experiment_by_name(run.experiment)
        place = known.experiment_id if known else self.client.create_experiment(run.experiment)
        found = self.client.search_runs([place], f"tags.normkit_run = '{run.id}'", max_results=1)
        if found:  # it goes on
            self.runs[run.id] = found[0].info.run_id
            self.client.update_run(self.runs[run.id], status="RUNNING")
            return
        tags = {"normkit_run": run.id, "mlflow.runName": run.name}
        self.runs[run.id] = self.client.create_run(place, tags=tags).info.run_id
        for key, value in run.parameters.items():
            self.client.log_param(self.runs[run.id], key, value[:LONGEST_PARAMETER])

    def log(self, run: TrackedRun, epoch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.client.log_metric(self.runs[run.id], name, value, step=epoch)

    def end(self, run: TrackedRun, outcome: str, values: Mapping[str, float]) -> None:
        if (theirs := self.runs.pop(run.id, None)) is None:
            return
        for name, value in values.items():
            self.client.log_metric(theirs, name, value)
        self.client.set_tag(theirs, "outcome", outcome)
        self.client.set_terminated(theirs, status=MLFLOW_STATES.get(outcome, "FINISHED"))


class WandbTracker:
    """Runs of a Weights & Biases project; WANDB_MODE=offline keeps them in a folder."""

    def __init__(self, target: str) -> None:
        self.wandb = require("wandb", "wandb", "--track wandb")
        self.project = target
        self.runs: dict[str, Any] = {}
        self.last: dict[str, int] = {}

    def begin(self, run: TrackedRun) -> None:
        self.runs[run.id] = self.wandb.init(
            project=self.project or run.experiment,
            id=run.id,
            name=run.name,
            config=dict(run.parameters),
            resume="allow",
            reinit="create_new",  # several at once
        )

    def log(self, run: TrackedRun, epoch: int, values: Mapping[str, float]) -> None:
        if epoch >= self.last.get(run.id, -1):  # they take steps in order only
            self.runs[run.id].log(dict(values), step=epoch)
            self.last[run.id] = epoch

    def end(self, run: TrackedRun, outcome: str, values: Mapping[str, float]) -> None:
        if (theirs := self.runs.pop(run.id, None)) is None:
            return
        theirs.summary.update({"outcome": outcome, **values})
        theirs.finish(exit_code=int(outcome == "failed"))


TRACKERS: dict[str, Callable[[str], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MLflowTracker,
    "wandb": WandbTracker,
}


def make_tracker(text: str) -> Tracker:
    """A tracker by its name, or "name=where": a folder, an address, a project."""
    name, _, target = text.partition("=")
    if name not in TRACKERS:
        raise UnknownName(f"--track got {name!r}. {nearest(name, TRACKERS)}")
    return TRACKERS[name](target)


class TrackedProgress(ProgressListener):
    """Tells trackers what happens, beside whoever else listens."""

    def __init__(
        self, experiment: Experiment, names: list[str], listener: ProgressListener
    ) -> None:
        self.listener, self.metric = listener, experiment.metric
        self.trackers = {name: make_tracker(name) for name in names}
        labels = run_labels(experiment)
        self.runs = {
            run.id: TrackedRun(
                run.id,
                str(labels[run.id]),
                experiment.name,
                {**setting_words(run.content()["setting"]), "seed": str(run.seed)},
            )
            for run in experiment.runs()
        }
        self.begun: dict[str, set[int]] = {}  # epochs that were sent, of runs that go on
        self.work: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self.problems: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._send, daemon=True)

    # ---------------------------------------------------------------- what the launcher says

    def begin(self, plan: SweepPlan) -> None:
        self.listener.begin(plan)
        self.thread.start()

    def started(self, run: str) -> None:
        self.listener.started(run)
        if run not in self.begun:
            self.begun[run] = set()
            self.work.put(lambda tracker: tracker.begin(self.runs[run]))

    def progressed(self, progress: Progressed) -> None:
        self.listener.progressed(progress)
        if progress.record is not None:
            self._log(progress.run, progress.record)
        self._tell()

    def finished(self, result: Result) -> None:
        self.listener.finished(result)
        for epoch in result.epochs:  # those before a checkpoint from which it went on, too
            if epoch.epoch not in self.begun.get(result.run, ()):
                self._log(result.run, epoch)
        outcome, score = result.outcome(self.metric), result.score(self.metric)
        final = {} if score is None or outcome != DONE else {f"final/{self.metric}": score}
        self._end(result.run, outcome, final)

    def failed(self, run: str, reason: str) -> None:
        self.listener.failed(run, reason)
        self._end(run, "failed", {})

    def say(self, text: str) -> None:
        self.listener.say(text)

    def end(self) -> None:
        if self.thread.is_alive():
            for run in list(self.begun):
                self._end(run, "stopped", {})
            self.work.put(None)
            self.thread.join(WAIT)
            self._tell()
            if self.thread.is_alive():
                self.say(f"Trackers have not taken all values within {WAIT:.0f} s.")
        self.listener.end()

    # ---------------------------------------------------------------- what trackers are told

    def _log(self, run: str, epoch: Epoch) -> None:
        values = epoch_values(epoch)
        self.begun.setdefault(run, set()).add(epoch.epoch)
        self.work.put(lambda tracker: tracker.log(self.runs[run], epoch.epoch, values))

    def _end(self, run: str, outcome: str, values: Mapping[str, float]) -> None:
        if self.begun.pop(run, None) is not None:
            self.work.put(lambda tracker: tracker.end(self.runs[run], outcome, values))

    def _tell(self) -> None:
        while not self.problems.empty():
            self.listener.say(self.problems.get())

    def _send(self) -> None:
        while (task := self.work.get()) is not None:
            for name, tracker in list(self.trackers.items()):
                try:
                    task(tracker)
                except Exception as error:  # of their servers and files; training goes on
                    del self.trackers[name]
                    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                    self.problems.put(f"--track {name} has ended: {reason}. The sweep goes on.")


def epoch_values(epoch: Epoch) -> dict[str, float]:
    """The numbers of an epoch by name: test/accuracy, watch/condensation, lr."""
    values: dict[str, float | None] = {}
    for field in dataclasses.fields(epoch):
        value = getattr(epoch, field.name)
        if field.name == "measures":
            values |= {f"watch/{key}": mean_number(each) for key, each in value.items()}
        elif field.name == "metrics":
            values |= {_grouped(key): mean_number(each) for key, each in value.items()}
        elif field.name not in ("epoch", "units"):
            values[_grouped(field.name)] = mean_number(value)
    return {name: value for name, value in values.items() if value is not None}


def _grouped(name: str) -> str:
    """test_accuracy as test/accuracy."""
    part, _, rest = name.partition("_")
    return f"{part}/{rest}" if part in PARTS and rest else name


def _file_name(text: str) -> str:
    """A name that can be a folder."""
    return re.sub(rf"[{re.escape(os.sep)}\0:*?\"<>|]+", "_", text)[:100] or "_"
