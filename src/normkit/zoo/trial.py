"""One model, converted to each target in turn, checked, and brought back."""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from normkit import models
from normkit.conversion.plan import plan_conversion
from normkit.errors import NormkitError
from normkit.inspection import Survey, survey
from normkit.zoo import checks, running
from normkit.zoo.accounts import unaccounted
from normkit.zoo.building import with_quick_values, without_values
from normkit.zoo.report import Outcome, Report, Task
from normkit.zoo.snapshot import Snapshot
from normkit.zoo.usage import Usage, wear_in

TOLD = 5  # failures of one target; more are alike


def attempt(task: Task) -> Report:
    """Try a model; whatever goes wrong is in the report."""
    start = time.process_time()
    report = Report()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers that were trained before an undo
            _Trial(task, report).run()
    except Exception as error:
        report.failures.append(said(error))
    report.seconds = round(time.process_time() - start, 2)
    return report


class _Trial:
    """A model that is converted and brought back, again and again."""

    def __init__(self, task: Task, report: Report) -> None:
        self.task, self.report = task, report
        self._start()
        report.norms = len(self.found)
        report.failures += checks.overlooked(self.model, self.found)

    def _start(self) -> None:
        runs = self.task.runs and self._has_work()
        self.model = build(self.task.reference, runs)
        self.found: Survey = survey(self.model)
        self.usage: Usage | None = None
        self.model.train()
        if runs:
            wear_in(self.found)
            self.usage = Usage(self.model)
            self.report.input = running.shape(self.usage.example)
        else:  # modes and frozen parameters have to survive
            for site in self.found.sites[::3]:
                site.module.eval().requires_grad_(False)

    def _has_work(self) -> bool:
        """Whether there is anything to convert: else a model would be run for nothing."""
        try:
            model = build(self.task.reference, runs=False)
        except NormkitError:  # some constructors compute with tensors, which need values
            return True
        if checks.batch_norms(model):
            return True
        return any(plan_conversion(model, target).count() for target in self.task.targets)

    def run(self) -> None:
        for target in self.task.targets:
            outcome = self.report.outcomes[target] = Outcome()
            outcome.failures += self._failures(target, outcome)
            if outcome.failures:  # nobody knows what state the model is in
                self._start()

    def _failures(self, target: str, outcome: Outcome) -> list[str]:
        found: list[str] = []
        try:
            for failure in self._convert(target, outcome):
                found.append(failure)
                if len(found) == TOLD:
                    return [*found, "…"]
        except Exception as error:
            found.append(said(error))
        return found

    def _convert(self, target: str, outcome: Outcome) -> Iterator[str]:
        """There and back; everything that is wrong on the way."""
        before = Snapshot(self.model)
        plan = plan_conversion(self.model, target)
        yield from (f"planning changed the model: {d}" for d in before.differences())
        yield from checks.unplanned(plan, self.found)
        outcome.converted, outcome.kept = plan.count(), plan.count("keep")
        outcome.exact = plan.exact and plan.count() > 0
        outcome.skipped = dict(Counter(s.reason for s in plan.steps if s.action == "skip"))
        if self.usage is not None:
            self.usage.before(plan)
        plan.apply(False if self.usage is None else self.usage.probe)
        yield from checks.misplaced(before, self.found, plan, target)
        yield from unaccounted(self.model, self.found, plan.steps, target)
        if self.usage is not None and plan.count():
            yield from self.usage.failures(target, plan, outcome)
        converted = {p for s in plan.steps if s.action == "convert" for p in s.paths or (s.path,)}
        plan.undo()
        moved: frozenset[str] = frozenset()
        if self.usage is not None:  # in training mode what was left in the model went on
            names = [name for name, _ in self.model.named_buffers(remove_duplicate=False)]
            moved = frozenset(n for n in names if not checks.is_inside(n, converted))
        yield from (f"undo: {d}" for d in before.differences(moved))
        if self.usage is not None and moved:
            self.usage.output = None


def build(reference: str, runs: bool) -> nn.Module:
    """A model with values or on the meta device."""
    torch.manual_seed(0)
    options = running.options(reference)
    with with_quick_values() if runs else without_values():
        return models.build(reference, **options)


def said(error: BaseException) -> str:
    """An error and where it comes from, on one line."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"
