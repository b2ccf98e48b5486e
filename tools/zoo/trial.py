"""One model, converted to each target in turn, checked, run and brought back."""

from __future__ import annotations

import copy
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normkit.conversion import Plan, plan_conversion
from normkit.errors import NormkitError
from normkit.inspection import Survey, survey
from tools.zoo import checks, models
from tools.zoo.results import Outcome, Report, Task

SHOWN = 5  # failures of one target; more are alike
LIMIT = 1e-5  # relative, in eval mode, for what is said to be exact
LIMIT_WIDE = 1e-9  # the same in double precision


def attempt(task: Task) -> Report:
    """Try a model; whatever goes wrong is in the report."""
    start = time.process_time()
    report = Report()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers that were trained before an undo
            _ModelTrial(task, report).run()
    except Exception as error:
        report.failures.append(error_line(error))
    report.seconds = round(time.process_time() - start, 2)
    return report


class _ModelTrial:
    """A model that is converted and brought back, again and again."""

    def __init__(self, task: Task, report: Report) -> None:
        self.task, self.report = task, report
        self._start()
        report.norms = len(self.survey)
        report.failures += checks.overlooked(self.model, self.survey)

    def _start(self) -> None:
        runs = self.task.runs and self._has_work()
        self.model = models.build(self.task.reference, runs)
        self.survey: Survey = survey(self.model)
        self.runs: ModelRuns | None = None
        self.model.train()
        if runs:
            randomize_affine(self.survey)
            self.runs = ModelRuns(self.model)
            self.report.input = models.shape_of(self.runs.example)
        else:  # modes and frozen parameters have to survive
            for site in self.survey.sites[::3]:
                site.module.eval().requires_grad_(False)

    def _has_work(self) -> bool:
        """Whether there is anything to convert: else a model would be run for nothing."""
        try:
            model = models.build(self.task.reference, with_values=False)
        except NormkitError:  # some constructors compute with tensors, which need values
            return True
        if models.count_batch_norms(model):
            return True
        return any(plan_conversion(model, target).count() for target in self.task.targets)

    def run(self) -> None:
        for target in self.task.targets:
            outcome = self.report.outcomes[target] = Outcome()
            outcome.failures += self._failures(target, outcome)
            if outcome.failures:  # nobody knows what state the model is in
                self._start()

    def _failures(self, target: str, outcome: Outcome) -> list[str]:
        failures: list[str] = []
        try:
            for failure in self._convert(target, outcome):
                failures.append(failure)
                if len(failures) == SHOWN:
                    return [*failures, "…"]
        except Exception as error:
            failures.append(error_line(error))
        return failures

    def _convert(self, target: str, outcome: Outcome) -> Iterator[str]:
        """There and back; everything that is wrong on the way."""
        before = checks.ModelSnapshot(self.model)
        plan = plan_conversion(self.model, target)
        yield from (f"planning changed the model: {d}" for d in before.differences())
        yield from checks.unplanned(plan, self.survey)
        outcome.converted, outcome.kept = plan.count(), plan.count("keep")
        outcome.exact = plan.exact and plan.count() > 0
        outcome.skipped = dict(Counter(s.reason for s in plan.steps if s.action == "skip"))
        if self.runs is not None:
            self.runs.before(plan)
        plan.apply(False if self.runs is None else self.runs.probe)
        yield from checks.misplaced(before, self.survey, plan, target)
        yield from checks.unaccounted(self.model, self.survey, plan.steps)
        if self.runs is not None and plan.count():
            yield from self.runs.failures(target, plan, outcome)
        converted = {p for s in plan.steps if s.action == "convert" for p in s.paths or (s.path,)}
        plan.undo()
        moved: frozenset[str] = frozenset()
        if self.runs is not None:  # in training mode what was left in the model went on
            names = [name for name, _ in self.model.named_buffers(remove_duplicate=False)]
            moved = frozenset(n for n in names if not checks.is_inside(n, converted))
        yield from (f"undo: {d}" for d in before.differences(moved))
        if self.runs is not None and moved:
            self.runs.output = None


def error_line(error: BaseException) -> str:
    """An error and where it comes from, on one line."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"


class ModelRuns:
    """A model that is run before and after each conversion, and what it gave before."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.example, self.first = models.smallest_input(model)
        self.output: list[Tensor] | None = None

    @property
    def probe(self) -> tuple[Any, ...]:
        """What the model takes in eval mode: detectors get no targets."""
        return self.example[:1]

    def before(self, plan: Plan) -> None:
        """Take the output in eval mode, if it is not known and will be needed."""
        if self.output is None and self._compares(plan):
            self.output = models.evaluate(self.model, self.example)
            self.model.train()

    def _compares(self, plan: Plan) -> bool:
        # the certificate has the difference too, except for detectors: boxes leap, features do not
        return plan.exact or models.is_detector(self.model)

    def failures(self, target: str, plan: Plan, outcome: Outcome) -> Iterator[str]:
        """Run the converted model, and compare."""
        certificate = plan.certificate
        assert certificate is not None
        outcome.difference = certificate.difference
        if self._compares(plan):
            assert self.output is not None
            output = models.evaluate(self.model, self.example)
            outcome.difference = models.difference(self.output, output)
        if plan.exact and not certificate.layers_exact and not certificate.unreached:
            yield f"the certificate contradicts the plan: {certificate.verdict}"
        if plan.exact:
            yield from self._inexact(target, plan, outcome)
        now = models.train_once(self.model, self.example)
        if self.first.finite and not now.finite:
            yield "the loss or a gradient is not finite"
        for name in sorted(self._successors(plan) - now.names):
            yield f"{name} gets no gradient"

    def _inexact(self, target: str, plan: Plan, outcome: Outcome) -> Iterator[str]:
        """Whether the output is another one, though that was not to be.

        A deep model can turn rounding errors into more than is allowed. With double precision,
        which has a billionth of them, that is told from an error of our own.
        """
        assert outcome.difference is not None
        if not outcome.difference <= LIMIT:
            plan.undo()
            outcome.wide = self._difference_in_double(target)
            plan.apply(False)
            if not outcome.wide <= LIMIT_WIDE:
                yield f"said to be exact, but the output differs by {outcome.difference:.1e}"

    def _difference_in_double(self, target: str) -> float:
        x = self.example[0]
        wide = ([t.double() for t in x] if isinstance(x, list) else x.double(),)
        model = copy.deepcopy(self.model).double()
        before = models.evaluate(model, wide)
        plan_conversion(model, target).apply(False)
        return models.difference(before, models.evaluate(model, wide))

    def _successors(self, plan: Plan) -> set[str]:
        """The parameters that got a gradient before, and those that took their places."""
        got = self.first.names
        expected = {name for name, _ in self.model.named_parameters() if name in got}
        for step in plan.steps:
            if step.action == "convert" and any(n.startswith(f"{step.path}.") for n in got):
                new = self.model.get_submodule(step.path).named_parameters(step.path)
                expected |= {name for name, parameter in new if parameter.requires_grad}
        return expected


@torch.no_grad()
def randomize_affine(surveyed: Survey) -> None:
    """Scales and shifts as training leaves them.

    At their usual start, 1 and 0, a loss of them would not show; and a last scale of 0, as some
    residual blocks have, hides the whole block.
    """
    for site in surveyed:
        for name, parameter in site.module.named_parameters():
            if name.endswith("weight") and parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.uniform_(-0.1, 0.1)
