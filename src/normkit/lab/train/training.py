"""One run in the making: epochs, steps, evaluation, and the result it leaves behind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normkit.inspection import undisturbed
from normkit.lab.data.sampling import stream
from normkit.lab.experiment import Run
from normkit.lab.experiment.rules import NATIVE_OPTIMIZERS
from normkit.lab.formats import ImageFormat
from normkit.lab.models.variant import build_variant
from normkit.lab.own_code import source_place
from normkit.lab.results import DIVERGED, DONE, Epoch, Result
from normkit.lab.tasks import Evaluation, Task, make_task
from normkit.lab.tasks.base import TaskError
from normkit.lab.tasks.criteria import shown_loss
from normkit.lab.tasks.drawing import encoded
from normkit.lab.train.batches import EpochPlan
from normkit.lab.train.checkpoint import load_state, state_of
from normkit.lab.train.cuda_graph import Capture, is_recorded
from normkit.lab.train.device import Clock, RunDevice, environment
from normkit.lab.train.evaluate import (
    check_selection,
    is_evaluated,
    is_out_of_patience,
    selected,
)
from normkit.lab.train.share import BatchShare
from normkit.lab.train.step import Trainer, explained
from normkit.lab.train.watch import EpochMeasures

LOOK_EVERY = {"cpu": 50}  # steps after which the losses are looked at, not only after an epoch
END = object()  # of an iterator
FIRST_SEED = 1  # whose pictures are kept
LOOK_ELSEWHERE = 1000  # where a look waits for the device
# fp16 overflows now and then, and its scaler leaves such steps out: only a row of them counts
PATIENCE = {"fp16": 20}


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    run: str  # id
    epochs: float  # trained so far; 2.5: in the middle of the third
    of: int
    loss: float | None = None  # of the last epoch that is complete
    record: Epoch | None = None  # of an epoch that has just ended


class Training:
    """A run: ``step()`` does the next piece of work, until it is ``finished``.

    Several can take turns in one process. ``capture`` records steps: "auto" does as
    ``cuda_graph`` says, None never does. ``beside`` is how many runs take turns, for the record.
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
        share: BatchShare | None = None,
    ) -> None:
        self.run, self.sets, self.train, self.beside = run, sets, run.setting.train, beside
        seed = run.torch_seed()
        check_selection(self.train, sets.validation is not None)
        own_batch = getattr(sets.train, "batch_size", None)
        self.plan = EpochPlan.of(self.train, len(sets.train), own_batch)
        self.run_device = RunDevice(device, seed)
        self.device = self.run_device.device
        self.task = make_task(run.setting)
        format = ImageFormat(self.device, self.train.precision, self.train.channels_last)
        with self.run_device.on_stream():  # the steps read what a task puts on the device
            self.task.attach(run.setting, sets, format, seed)
        wanted, self.why_direct = is_recorded(self.device, sets.train, self.task)
        if share is not None:
            wanted, self.why_direct = False, "several processes agree on every step"
        if wanted and self.train.optimizer not in NATIVE_OPTIMIZERS:
            wanted, self.why_direct = False, f"{self.train.optimizer} is not the lab's optimizer"
        if isinstance(capture, str):
            capture = self.run_device.capture if wanted else None
        with self.run_device.here():
            model = model or build_variant(run.setting, sets.classes, sets.shape, seed, self.task)
            recorder = None if capture is None else self.run_device.rewinding(capture)
            self.trainer = Trainer(model, self.train, self.plan, self.task, recorder, share)
        self.measures = EpochMeasures(self.trainer, sets, run.setting.watch)
        self.clock = Clock(self.device)
        self.epoch, self.at = 0, 0  # epochs that are complete; steps of the next one
        self.records: list[Epoch] = []
        self.note = ""  # what diverged, and when
        self._work = self._pieces()

    # ---------------------------------------------------------------- what a caller does

    @property
    def finished(self) -> bool:
        return bool(self.note) or self.epoch >= self.train.epochs or self._stopped()

    def _stopped(self) -> bool:
        """Whether the validation score has not become better for long enough."""
        done = [record for record in self.records if record.epoch]
        return is_out_of_patience(self.train, done, *main_metric(self.task))

    def step(self) -> bool:
        """A step of the optimizer, a batch of an evaluation, or the end of an epoch.

        False if there was nothing left to do. Only the end of an epoch waits for the device.
        """
        with self.run_device.here():
            return next(self._work, False)

    def progress(self, record: Epoch | None = None) -> Progress:
        losses = [e.train_loss for e in self.records if e.train_loss is not None]
        reached = self.epoch + self.at / self.plan.steps
        last = losses[-1] if losses else None
        return Progress(self.run.id, reached, self.train.epochs, last, record)

    def result(self) -> Result:
        """What the run leaves behind. It has to be finished."""
        seconds, trained = self.clock.read(), self.epoch * self.plan.samples
        model, peak = self.trainer.model, self.run_device.peak_memory()
        recorded = "yes"
        if not self.trainer.is_recorded:
            reason = self.trainer.obstacle or self.why_direct or "it was not wanted"
            recorded = f"no: {reason}"
        chosen = () if self.note else selected(self.train, self.records, *main_metric(self.task))
        counting = [each for each in self.records if each.epoch in chosen]
        result = Result(
            run=self.run.id,
            status=DIVERGED if self.note else DONE,
            selected=chosen,
            epochs=tuple(self.records),
            seconds=seconds,
            parameters=sum(p.numel() for p in model.parameters()),
            # what others use at its side cannot be told apart
            peak_memory=None if peak is None else peak // self.beside,
            images_per_second=trained / seconds if trained and seconds > 0 else None,
            environment={
                **environment(self.device),
                "recorded": recorded,
                "side by side": str(self.beside),
                **({"processes": str(self.train.gpus)} if self.train.gpus > 1 else {}),
            },
            note=self.note or " ".join(filter(None, (self._early(), _left_out(model)))),
            classes=self.sets.classes,
            test_samples=len(self.sets.test),
            collapsed=self.task.collapsed(counting),
            pictures=self._pictures(),
            texts={} if self.note else dict(self.task.texts(model)),
        )
        # of outputs that are all the same, a correlation is NaN by right
        told = [each for each in self.records if not is_constant(each)]
        if not self.note and (nan := self._nan_metrics(told)):
            raise TaskError(
                f"{' and '.join(nan)} was NaN in every evaluation, and the loss was finite: that "
                "is an error of the metric, and no divergence."
            )
        return result

    def _early(self) -> str:
        if self.epoch >= self.train.epochs or self.note:
            return ""
        return (
            f"Stopped after epoch {self.epoch} of {self.train.epochs}: the validation score had "
            f"not become better for {self.train.stop_after} epochs."
        )

    def _pictures(self) -> tuple[dict[str, str], ...]:
        """Of the trained model, for the report: of the first seed alone, they take room."""
        if self.note or self.run.seed != FIRST_SEED:
            return ()
        with self.run_device.here(), undisturbed(self.trainer.model), torch.no_grad():
            self.trainer.modes.evaluate()
            with explained(self.task, "pictures"):
                drawn = self.task.pictures(self.trainer.model)
                # on the run's stream to the end: another would read what is not drawn yet
                return tuple({"caption": text, "png": encoded(image)} for text, image in drawn)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on with the same numbers. Between two calls of ``step``."""
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. A state of another run or machine is refused."""
        load_state(self, state)
        self._work = self._pieces()

    # ---------------------------------------------------------------- the work, piece by piece

    def _pieces(self) -> Iterator[bool]:
        if not self.records and not self.at and self.measures.due(0):
            self.records.append(Epoch(0, measures=self.measures.measure(0)))
            yield True
        while not self.finished:
            yield from self._train()
            if self.note:
                return
            evaluations: dict[str, Evaluation] = {}
            if is_evaluated(self.train, self.epoch + 1):
                names = ("test",) if self.sets.validation is None else ("validation", "test")
                evaluations = {name: self._evaluation(name) for name in names}
            for name, evaluation in evaluations.items():
                yield from self._evaluate(name, evaluation)
            self._end_epoch(evaluations)
            yield True

    def _train(self) -> Iterator[bool]:
        trainer, steps = self.trainer, self.plan.steps
        trainer.modes.train()
        if not self.at:
            trainer.history.restart()
        look_every = LOOK_EVERY.get(self.device.type, LOOK_ELSEWHERE)
        batches = self.task.batches(self.plan, self.epoch, self.at * self.plan.accumulate)
        self.clock.start()
        for step in self.plan.in_steps(batches):
            trainer.step(step, self.epoch * steps + self.at)
            self.at += 1
            if self.at % look_every == 0 and self.at < steps:
                losses = trainer.losses(self.at * self.plan.accumulate)
                if self._is_lost(losses):
                    return
            yield True
        self.clock.stop()

    def _evaluation(self, name: str) -> Evaluation:
        with explained(self.task, "evaluation"):
            evaluation = self.task.evaluation(name)
        missing = [each for each in ("add", "values") if not hasattr(evaluation, each)]
        if missing:
            kind = type(self.task)
            raise TaskError(
                f"{kind.__name__}.evaluation{source_place(kind.evaluation)} gave "
                f"{shown_loss(evaluation)}, without {' and '.join(missing)}. Expected an object "
                "with add(model, batch) and values(), such as a normkit.lab.tasks.Evaluation."
            )
        return evaluation

    def _evaluate(self, name: str, evaluation: Evaluation) -> Iterator[bool]:
        self.trainer.modes.evaluate()  # averaged weights are always in eval mode
        random = self.run_device.random
        numbers = random.fresh(stream("evaluation", self.task.seed, self.epoch, name))
        batches = iter(self.task.evaluation_batches(name))
        while True:
            with random.apart(numbers), torch.no_grad(), explained(self.task, "evaluation"):
                batch = next(batches, END)
                if batch is END:
                    return
                evaluation.add(self.trainer.judged, batch)
            yield True

    def _end_epoch(self, evaluations: dict[str, Evaluation]) -> None:
        history, sizes = self.trainer.epoch_rows()
        alone = self.trainer.process is None
        if self._is_lost(history["loss"] if alone else self.trainer.losses(self.plan.batches)):
            return
        values: dict[str, Any] = {}
        with explained(self.task, "evaluation"):
            found = {"train": self.task.epoch_values(history, sizes)}
            found |= {part: evaluation.values() for part, evaluation in evaluations.items()}
        self._check_metrics(found)
        for part, numbers in found.items():
            values |= {f"{part}_{name}": value for name, value in numbers.items()}
        self.epoch, self.at = self.epoch + 1, 0
        measured = self.measures.measure(self.epoch) if self.measures.due(self.epoch) else {}
        self.records.append(
            Epoch.of(
                values,
                epoch=self.epoch,
                lr=self.trainer.rates.base_rate(self.epoch * self.plan.steps - 1),
                seconds=self.clock.read(),
                measures=measured,
            )
        )

    def try_out(self) -> list[str]:
        """One step and one batch of an evaluation, to see whether the task can do both.

        What is returned are cautions: a metric may be NaN for a handful of samples.
        """
        self.step()
        loss = self.trainer.losses(1)[0]
        if not math.isfinite(loss) and self.train.precision not in PATIENCE:
            raise TaskError(
                f"the loss{self.task.loss_place()} of the first step is {loss}, expected a finite "
                "number. Try it on an output of the untrained model."
            )
        evaluation = self._evaluation("test")
        with self.run_device.here():
            next(self._evaluate("test", evaluation), None)
            with explained(self.task, "evaluation"):
                values = evaluation.values()
            self._check_metrics({"test": values})
        first = Epoch.of({f"test_{name}": value for name, value in values.items()}, epoch=1)
        return [
            f"{metric} is NaN on a batch of the test set, with a finite loss. A run of which every "
            "evaluation is NaN fails."
            for metric in self._nan_metrics([first])
        ]

    def _nan_metrics(self, epochs: Sequence[Epoch]) -> list[str]:
        """The author's metrics that were never a number, though the network's answers were."""
        kind = type(self.task)
        places = dict.fromkeys(self.task.metrics, source_place(kind.evaluation))
        chosen = {each.name: source_place(each.kind) for each in self.task.own_metrics}
        names = [name for name, place in (places | chosen).items() if place or name in chosen]
        losses = [loss for each in epochs if (loss := each.value("loss")) is not None]
        state = self.trainer.model.state_dict().values()
        if not all(map(math.isfinite, losses)) or not all(t.isfinite().all() for t in state):
            return []
        found = []
        for name in names:
            values = [value for each in epochs if (value := each.value(name)) is not None]
            if values and all(map(math.isnan, values)):
                found.append(f"metric {name}{(places | chosen)[name]}")
        return found

    def _check_metrics(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        name, _ = main_metric(self.task)
        for part in ("validation", "test"):
            if part not in found:
                continue
            values, kind = found[part], type(self.task)
            where = f"{kind.__name__}.evaluation{source_place(kind.evaluation)}"
            if not isinstance(values, Mapping):
                raise TaskError(
                    f"{where}: values() gave {shown_loss(values)}, expected numbers by name, such "
                    f"as {{{name!r}: 0.5}}."
                )
            if name not in values:
                raise TaskError(
                    f"{where} gave {', '.join(values) or 'nothing'}, and not {name!r}, its first "
                    "metric."
                )

    def _is_lost(self, losses: list[float]) -> bool:
        batch = diverged_at(losses, self.train.precision)
        if batch is None:
            return False
        self.clock.stop()
        step = self.epoch * self.plan.steps + batch // self.plan.accumulate + 1
        self.note = (
            f"The loss was not finite from step {step} on, in epoch {self.epoch + 1} "
            f"of {self.train.epochs}{self.task.loss_place()}."
        )
        return True


def main_metric(task: Task) -> tuple[str, bool]:
    """The name of a task's score, and whether more of it is better."""
    name = next(iter(task.metrics))
    return name, task.metrics[name].higher_is_better


def is_constant(epoch: Epoch) -> bool:
    """Whether the network had one answer to all of the test set."""
    return epoch.test_one_class == 1 or bool(epoch.metrics.get("test_constant"))


def diverged_at(losses: Sequence[float], precision: str = "float32") -> int | None:
    """The batch from which on the loss was not finite; None if it is not over.

    >>> diverged_at([2.3, math.nan, math.nan]), diverged_at([2.3, math.inf, 2.2], "fp16")
    (1, None)
    """
    patience, row = PATIENCE.get(precision, 1), 0
    for number, loss in enumerate(losses):
        row = 0 if math.isfinite(loss) else row + 1
        if row >= patience:
            return number - row + 1
    return None


def _left_out(model: nn.Module) -> str:
    """A remark about batches that norms have kept out of their running statistics."""
    buffers = dict(model.named_buffers())
    counts = [int(buffers[name]) for name in buffers if name.endswith("nonfinite_batches")]
    most = max(counts, default=0)
    return f"{most} batches had statistics that are not finite." if most else ""
