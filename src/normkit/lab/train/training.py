"""One run in the making: epochs, steps, evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from normkit.lab.experiment import Run
from normkit.lab.results import Epoch, Result
from normkit.lab.train.accounts import settle
from normkit.lab.train.choosing import is_recorded
from normkit.lab.train.clock import Clock
from normkit.lab.train.divergence import diverged_at
from normkit.lab.train.evaluating import Score, batch_size
from normkit.lab.train.feeding import Feed, Form
from normkit.lab.train.leaving import result_of
from normkit.lab.train.machine import Machine
from normkit.lab.train.place import Place
from normkit.lab.train.plan import Plan
from normkit.lab.train.progress import Progress
from normkit.lab.train.recording import Capture
from normkit.lab.train.resuming import load_state, state_of
from normkit.lab.train.selecting import check_selection, is_evaluated
from normkit.lab.train.watching import Watcher
from normkit.lab.variants import make

LOOK = {"cpu": 50}  # steps after which the losses are looked at, not only after an epoch
LOOK_ELSEWHERE = 1000  # where a look waits for the device


class Training:
    """A run: ``step()`` does the next piece of work, until it is ``finished``.

    Several can take turns in one process. ``capture`` records steps: "auto" does as ``choosing``
    says, None never does. ``beside`` is how many runs take turns, for the record.
    """

    def __init__(
        self,
        run: Run,
        sets: Any,
        *,
        device: torch.device | str = "cpu",
        model: nn.Module | None = None,
        capture: Capture | str | None = "auto",
        beside: int = 1,
    ) -> None:
        self.run, self.sets, self.train, self.beside = run, sets, run.setting.train, beside
        seed, mixup = run.torch_seed(), run.setting.data.mixup
        check_selection(self.train, sets.validation is not None)
        self.plan = Plan.of(self.train, len(sets.train))
        self.place = Place(device, seed)
        self.form = Form(self.place.device, self.train.precision, self.train.channels_last)
        self.feed = Feed(
            sets.train, self.plan, self.form, seed=seed, classes=sets.classes, mixup=mixup
        )
        wanted, self.why_direct = is_recorded(self.place.device, sets.train)
        if isinstance(capture, str):
            capture = self.place.capture if wanted else None
        with self.place.here():
            model = model or make(run.setting, sets.classes, sets.shape, seed)
            recorder = None if capture is None else self.place.rewinding(capture)
            self.machine = Machine(model, self.train, self.plan, self.feed, recorder)
        self.watcher = Watcher(self.machine, sets, run.setting.watch, self.form)
        self.clock = Clock(self.place.device)
        self.epoch, self.at = 0, 0  # epochs that are complete; steps of the next one
        self.records: list[Epoch] = []
        self.note = ""  # what diverged, and when
        self._work = self._pieces()

    # ---------------------------------------------------------------- what a caller does

    @property
    def finished(self) -> bool:
        return bool(self.note) or self.epoch >= self.train.epochs

    def step(self) -> bool:
        """A step of the optimizer, a batch of an evaluation, or the end of an epoch.

        False if there was nothing left to do. Only the end of an epoch waits for the device.
        """
        with self.place.here():
            return next(self._work, False)

    def until_epoch_ends(self) -> bool:
        """All pieces of an epoch; False if there was nothing left to do."""
        before = self.epoch
        while self.epoch == before:
            if not self.step():
                return False
        return True

    def progress(self, record: Epoch | None = None) -> Progress:
        known = [e.train_loss for e in self.records if e.train_loss is not None]
        reached = self.epoch + self.at / self.plan.steps
        last = known[-1] if known else None
        return Progress(self.run.id, reached, self.train.epochs, last, record)

    def result(self) -> Result:
        """What the run leaves behind. It has to be finished."""
        return result_of(self)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on with the same numbers. Between two calls of ``step``."""
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. A state of another run or machine is refused."""
        load_state(self, state)
        self._work = self._pieces()

    # ---------------------------------------------------------------- the work, piece by piece

    def _pieces(self) -> Iterator[bool]:
        if not self.records and not self.at and self.watcher.due(0):
            self.records.append(Epoch(0, measures=self.watcher.measure(0)))
            yield True
        while not self.finished:
            yield from self._train()
            if self.note:
                return
            scores = self._scores()
            for name, score in scores.items():
                yield from self._evaluate(name, score)
            self._end_epoch(scores)
            yield True

    def _train(self) -> Iterator[bool]:
        machine, steps = self.machine, self.plan.steps
        machine.modes.train()
        if not self.at:
            machine.history.restart()
        look = LOOK.get(self.place.device.type, LOOK_ELSEWHERE)
        batches = self.feed.batches(self.epoch, self.at * self.plan.accumulate)
        self.clock.start()
        for step in self.plan.in_steps(batches):
            machine.step(step, self.epoch * steps + self.at)
            self.at += 1
            if self.at % look == 0 and self.at < steps and self._is_lost(self._losses()):
                return
            yield True
        self.clock.stop()

    def _scores(self) -> dict[str, Score]:
        if not is_evaluated(self.train, self.epoch + 1):
            return {}
        names = ("test",) if self.sets.validation is None else ("validation", "test")
        return {name: Score(self.place.device, self.sets.classes) for name in names}

    def _evaluate(self, name: str, score: Score) -> Iterator[bool]:
        self.machine.modes.evaluate()
        for images, labels in getattr(self.sets, name).batches(batch_size(self.sets.shape)):
            labels = labels.to(self.place.device, non_blocking=True)
            score.add(self.machine.forward, self.form(images), labels, self.train.precision)
            yield True

    def _end_epoch(self, scores: dict[str, Score]) -> None:
        found = settle(self.machine.history, scores)
        if self._is_lost(found.losses):
            return
        self.epoch, self.at = self.epoch + 1, 0
        measures = self.watcher.measure(self.epoch) if self.watcher.due(self.epoch) else {}
        self.records.append(
            Epoch(
                epoch=self.epoch,
                lr=self.machine.rates.base_rate(self.epoch * self.plan.steps - 1),
                train_loss=found.mean_loss(self.plan),
                train_accuracy=sum(found.right) / self.plan.samples,
                seconds=self.clock.read(),
                measures=measures,
                **found.evaluated,
            )
        )

    def _losses(self) -> list[float]:
        return self.machine.history.rows[: self.at * self.plan.accumulate, 0].tolist()

    def _is_lost(self, losses: list[float]) -> bool:
        batch = diverged_at(losses, self.train.precision)
        if batch is None:
            return False
        self.clock.stop()
        step = self.epoch * self.plan.steps + batch // self.plan.accumulate + 1
        self.note = (
            f"The loss was not finite from step {step} on, in epoch {self.epoch + 1} "
            f"of {self.train.epochs}."
        )
        return True
