"""A sweep as it goes on: bars on a terminal, lines of text elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from normkit.commands.output import console
from normkit.core.optional_dependencies import require
from normkit.errors import MissingExtra
from normkit.lab.results import DONE, Epoch, Result
from normkit.lab.sweep import ProgressLines, ProgressListener, RunLabel, SweepPlan
from normkit.lab.sweep.messages import Progressed
from normkit.lab.sweep.progress import TimeLeft, duration_text, outcome

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

WIDTH = 24  # of a bar


def progress_listener() -> ProgressListener:
    """What suits the place where the command runs."""
    try:
        screen = console(stderr=True)
    except MissingExtra:
        return ProgressLines()
    return Bars(screen) if screen.is_terminal else ProgressLines()


class Bars(ProgressListener):
    """One bar for the sweep, and one for each run that is being trained."""

    def __init__(self, screen: Console) -> None:
        self.screen = screen
        self.runs: dict[str, TaskID] = {}
        self.heard: set[str] = set()  # runs that have reported a whole epoch
        self.began = False

    def begin(self, plan: SweepPlan) -> None:
        self.plan, self.time, self.since = plan, TimeLeft(plan), time.monotonic()
        self.ended = set(plan.done)
        self.progress = _progress(self.screen)
        self.all = self.progress.add_task("", total=len(plan.labels), text="")
        self.progress.start()
        self.began = True
        self._show()

    def started(self, run: str) -> None:
        entry = self.plan.labels[run]
        self.time.started(run)
        self.runs[run] = self.progress.add_task(
            _plain(str(entry)), total=entry.epochs, text="starting"
        )

    def progressed(self, progress: Progressed) -> None:
        self.time.progressed(progress)
        if progress.run in self.runs:
            self.progress.update(self.runs[progress.run], completed=progress.epochs)
            if progress.record is not None:
                self.heard.add(progress.run)
                self.progress.update(
                    self.runs[progress.run],
                    text=_last_epoch(progress.record, self.plan.labels[progress.run]),
                )
            elif progress.run not in self.heard:  # its first epoch here may take hours
                text = f"in epoch {int(progress.epochs) + 1}"
                self.progress.update(self.runs[progress.run], text=text)
        self._show()

    def finished(self, result: Result) -> None:
        label = self.plan.labels[result.run]
        if result.outcome(label.metric) != DONE:
            self.say(f"{label}: {outcome(result, label.metric, label.percent)}")
        self._over(result.run)

    def failed(self, run: str, reason: str) -> None:
        self.say(f"{self.plan.labels[run]} failed: {reason}")
        self._over(run)

    def say(self, text: str) -> None:
        self.screen.print(text, markup=False, soft_wrap=True)

    def end(self) -> None:
        if not self.began:
            return
        for run in list(self.runs):
            self._close(run)
        self.progress.stop()

    def _over(self, run: str) -> None:
        self.ended.add(run)
        self.time.over(run)
        self._close(run)
        self._show()

    def _close(self, run: str) -> None:
        if run in self.runs:
            self.progress.remove_task(self.runs.pop(run))

    def _show(self) -> None:
        seconds = self.time.seconds()
        left = "" if seconds is None else f", about {duration_text(seconds)} left"
        # by epochs, so that the bar moves while long runs go on
        epochs = {run: float(entry.epochs) for run, entry in self.plan.labels.items()}
        self.progress.update(
            self.all,
            description=f"{len(self.ended)} of {len(epochs)} runs",
            total=sum(epochs.values()),
            completed=sum(epochs.values()) - sum(self.time.left.values()),
            text=f"{duration_text(time.monotonic() - self.since)}{left}",
        )


def _progress(screen: Console) -> Progress:
    rich = require("rich.progress", "cli", "The lab")
    progress: Progress = rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(WIDTH),
        rich.TextColumn("{task.fields[text]}"),
        console=screen,
        transient=True,
    )
    return progress


def _plain(text: str) -> str:
    """A name as it was typed, in a column that reads markup."""
    escaped: str = require("rich.markup", "cli", "The lab").escape(text)
    return escaped


def _last_epoch(record: Epoch, label: RunLabel) -> str:
    """The last epoch in a few words."""
    parts = [f"epoch {record.epoch}"]
    if record.train_loss is not None:
        parts.append(f"loss {record.train_loss:.3f}")
    if (value := record.value(label.metric)) is not None:
        parts.append(f"test {value:.1%}" if label.percent else f"test {value:.3f}")
    return ", ".join(parts)
